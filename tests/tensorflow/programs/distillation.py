"""A student learns from its teacher, as in keras.io's example of knowledge distillation."""

import numpy as np

import distributary.compat.tensorflow as tf
from distributary.compat.tensorflow import keras
from distributary.compat.tensorflow.keras import layers


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super(Distiller, self).__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3
    ):
        super(Distiller, self).compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature
        self.loss_tracker = keras.metrics.Mean(name="distill_loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="acc")

    @property
    def metrics(self):
        return [self.loss_tracker, self.accuracy]

    def train_step(self, data):
        x, y = data
        teacher_predictions = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            student_predictions = self.student(x, training=True)
            student_loss = self.student_loss_fn(y, student_predictions)
            distillation_loss = (
                self.distillation_loss_fn(
                    tf.nn.softmax(teacher_predictions / self.temperature, axis=1),
                    tf.nn.softmax(student_predictions / self.temperature, axis=1),
                )
                * self.temperature**2
            )
            loss = self.alpha * student_loss + (1 - self.alpha) * distillation_loss
        trainable_vars = self.student.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply_gradients(zip(gradients, trainable_vars))
        self.loss_tracker.update_state(loss)
        self.accuracy.update_state(y, student_predictions)
        results = {m.name: m.result() for m in self.metrics}
        results.update({"student_loss": student_loss})
        return results

    def test_step(self, data):
        x, y = data
        y_prediction = self.student(x, training=False)
        student_loss = self.student_loss_fn(y, y_prediction)
        self.accuracy.update_state(y, y_prediction)
        results = {m.name: m.result() for m in self.metrics}
        results.update({"student_loss": student_loss})
        return results

    def call(self, x):
        return self.student(x)


def convolutional(name, filters):
    return keras.Sequential(
        [
            keras.Input(shape=(8, 8, 1)),
            layers.Conv2D(filters, (3, 3), strides=(2, 2), padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.MaxPooling2D(pool_size=(2, 2), strides=(1, 1), padding="same"),
            layers.Flatten(),
            layers.Dense(4),
        ],
        name=name,
    )


random = np.random.default_rng(0)
x_train = random.integers(0, 255, (48, 8, 8)).astype("float32") / 255.0
x_train = np.reshape(x_train, (-1, 8, 8, 1))
y_train = random.integers(0, 4, 48)


def scratch(model):
    values = np.random.default_rng(2)
    model.set_weights([values.normal(0, 0.2, w.shape) for w in model.get_weights()])
    return model


strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    teacher = scratch(convolutional("teacher", 6))
    student = scratch(convolutional("student", 3))
    student_scratch = keras.models.clone_model(student)
    student_scratch.set_weights(student.get_weights())
    teacher.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
history = teacher.fit(x_train, y_train, epochs=2, batch_size=16, shuffle=False, verbose=0)
print("teacher", ["%.4f" % loss for loss in history.history["loss"]])
teacher.trainable = False

with strategy.scope():
    distiller = Distiller(student=student, teacher=teacher)
    distiller.compile(
        optimizer=keras.optimizers.Adam(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.1,
        temperature=10,
    )
history = distiller.fit(x_train, y_train, epochs=3, batch_size=16, shuffle=False, verbose=0)
for name in ("acc", "distill_loss"):
    print(name, ["%.4f" % value for value in history.history[name]])
results = distiller.evaluate(x_train, y_train, verbose=0, return_dict=True)
print("evaluated", "%.4f" % results["acc"], sorted(results))
print("untouched %.4f" % np.abs(student_scratch.get_weights()[0]).sum())
print("teacher is frozen", teacher.trainable_variables == [], len(teacher.variables))
