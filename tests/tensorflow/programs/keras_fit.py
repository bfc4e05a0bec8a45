"""`fit` on several devices, with callbacks, as in TensorFlow's tutorial of distributed Keras."""

import os
import tempfile

import numpy as np

import distributary.compat.tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
print("Number of devices: {}".format(strategy.num_replicas_in_sync))

BUFFER_SIZE = 64
BATCH_SIZE = 16
random = np.random.default_rng(0)
images = random.integers(0, 256, (64, 8, 8, 1)).astype(np.uint8)
labels = (images.mean(axis=(1, 2, 3)) > 127).astype(np.int64)


def scale(image, label):
    image = tf.cast(image, tf.float32)
    image /= 255
    return image, label


train_dataset = (
    tf.data.Dataset.from_tensor_slices((images, labels)).map(scale).cache().batch(BATCH_SIZE)
)
eval_dataset = tf.data.Dataset.from_tensor_slices((images, labels)).map(scale).batch(BATCH_SIZE)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(4, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(8, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.set_weights([random.normal(0, 0.1, w.shape) for w in model.get_weights()])
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(learning_rate=0.001),
        metrics=["accuracy"],
    )

folder = tempfile.mkdtemp()
checkpoint_prefix = os.path.join(folder, "ckpt_{epoch}.weights.h5")


def decay(epoch):
    if epoch < 1:
        return 1e-2
    elif epoch >= 1 and epoch < 2:
        return 1e-3
    else:
        return 1e-4


class PrintLR(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rate = tf.keras.backend.get_value(self.model.optimizer.learning_rate)
        print("rate of epoch {}: {:.6f}".format(epoch + 1, rate))


callbacks = [
    tf.keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix, save_weights_only=True),
    tf.keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]
history = model.fit(train_dataset, epochs=3, callbacks=callbacks, verbose=0)
print("losses", history.history["loss"])
model.load_weights(os.path.join(folder, "ckpt_3.weights.h5"))
eval_loss, eval_accuracy = model.evaluate(eval_dataset, verbose=0)
print("eval", eval_loss, eval_accuracy)

path = os.path.join(folder, "my_model.keras")
model.save(path)
with strategy.scope():
    replicated = tf.keras.models.load_model(path)
    eval_loss, _ = replicated.evaluate(eval_dataset, verbose=0)
print("loaded", eval_loss)
unreplicated = tf.keras.models.load_model(path)
print("predicted", unreplicated.predict(eval_dataset, verbose=0)[0, :3])
