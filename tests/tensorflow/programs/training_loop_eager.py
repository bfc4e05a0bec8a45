"""Loops without a strategy, as in Keras' guide to writing a training loop with TensorFlow."""

import numpy as np

import distributary.compat.tensorflow as tf
from distributary.compat.tensorflow import keras

random = np.random.default_rng(0)
x_train = random.normal(size=(96, 12)).astype("float32")
y_train = random.integers(0, 4, 96)
x_val, y_val = x_train[-32:], y_train[-32:]
x_train, y_train = x_train[:-32], y_train[:-32]
batch_size = 16
train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(batch_size)
val_dataset = tf.data.Dataset.from_tensor_slices((x_val, y_val)).batch(batch_size)


class ActivityRegularization(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(1e-2 * tf.reduce_sum(inputs))
        return inputs


def get_model():
    inputs = keras.Input(shape=(12,), name="digits")
    x = keras.layers.Dense(8, activation="relu", name="dense_1")(inputs)
    x = ActivityRegularization()(x)
    outputs = keras.layers.Dense(4, name="predictions")(x)
    model = keras.Model(inputs=inputs, outputs=outputs)
    values = np.random.default_rng(1)
    model.set_weights([values.normal(0, 0.3, w.shape) for w in model.get_weights()])
    return model


model = get_model()
optimizer = keras.optimizers.SGD(learning_rate=0.05)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
train_acc_metric = keras.metrics.SparseCategoricalAccuracy()
val_acc_metric = keras.metrics.SparseCategoricalAccuracy()

# Eagerly, and with a function.
for epoch in range(2):
    for step, (x_batch_train, y_batch_train) in enumerate(train_dataset):
        with tf.GradientTape() as tape:
            logits = model(x_batch_train, training=True)
            loss_value = loss_fn(y_batch_train, logits)
            loss_value += sum(model.losses)
        grads = tape.gradient(loss_value, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights))
        train_acc_metric.update_state(y_batch_train, logits)
        if step % 2 == 0:
            print("Training loss at step %d: %.4f" % (step, float(loss_value)))
    train_acc = train_acc_metric.result()
    print("Training acc over epoch: %.4f" % (float(train_acc),))
    train_acc_metric.reset_state()
    for x_batch_val, y_batch_val in val_dataset:
        val_logits = model(x_batch_val, training=False)
        val_acc_metric.update_state(y_batch_val, val_logits)
    print("Validation acc: %.4f" % (float(val_acc_metric.result()),))
    val_acc_metric.reset_state()


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss_value = loss_fn(y, logits)
        loss_value += sum(model.losses)
    grads = tape.gradient(loss_value, model.trainable_weights)
    optimizer.apply_gradients(zip(grads, model.trainable_weights))
    train_acc_metric.update_state(y, logits)
    return loss_value


for step, (x_batch_train, y_batch_train) in enumerate(train_dataset):
    print("compiled", float(train_step(x_batch_train, y_batch_train)))

# Gradients of plain variables.
w = tf.Variable(np.float32([[1.0, -2.0], [0.5, 3.0]]), name="w")
b = tf.Variable(tf.zeros(2, dtype=tf.float32), name="b")
x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
with tf.GradientTape(persistent=True) as tape:
    y = x @ w + b
    loss = tf.reduce_mean(y**2)
[dl_dw, dl_db] = tape.gradient(loss, [w, b])
print("dl_dw", dl_dw.numpy().ravel(), "dl_db", dl_db.numpy())
print("dl_dy", tape.gradient(loss, {"y": y})["y"].numpy().ravel())
del tape
x = tf.constant(3.0)
with tf.GradientTape() as tape:
    tape.watch(x)
    y = x**2
print("watched", tape.gradient(y, x).numpy())
x = tf.Variable(1.0)
with tf.GradientTape() as outer:
    with tf.GradientTape() as inner:
        y = x * x * x
    dy_dx = inner.gradient(y, x)
d2y_dx2 = outer.gradient(dy_dx, x)
print("second", dy_dx.numpy(), d2y_dx2.numpy())
x = tf.Variable([2.0, 3.0])
with tf.GradientTape() as tape:
    if x[0] > x[1]:
        y = x[0] * 2
    else:
        y = x[1] ** 2
print("branch", tape.gradient(y, x).numpy())
with tf.GradientTape() as tape:
    y = tf.constant(2.0)
print("unconnected", tape.gradient(y, x))
x = tf.linspace(-1.0, 1.0, 5)
with tf.GradientTape() as tape:
    tape.watch(x)
    y = tf.nn.sigmoid(x)
print("elementwise", tape.gradient(y, x).numpy())
with tf.GradientTape() as tape:
    tape.watch(x)
    y = tf.stack([x, x**2], axis=1)
print("jacobian", tf.reduce_sum(tape.jacobian(y, x)).numpy())
