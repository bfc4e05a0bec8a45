"""Callbacks that change and end a training, and a log of it."""

import csv

import numpy as np

import distributary.compat.tensorflow as tf

random = np.random.default_rng(0)
x = random.normal(size=(60, 5)).astype(np.float32)
y = (x @ random.normal(size=(5, 1)) + 0.1 * random.normal(size=(60, 1))).astype(np.float32)

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((5,)),
            tf.keras.layers.Dense(6, activation="relu", kernel_constraint="max_norm"),
            tf.keras.layers.Dense(1),
        ]
    )
    model.set_weights([random.normal(0, 0.4, w.shape) for w in model.get_weights()])
    model.compile(
        optimizer=tf.keras.optimizers.SGD(0.3, nesterov=True, momentum=0.8, clipnorm=1.0),
        loss=tf.keras.losses.Huber(),
        metrics=["mae", tf.keras.metrics.RootMeanSquaredError(name="rmse")],
    )


class PrintLR(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rate = float(tf.keras.backend.get_value(self.model.optimizer.learning_rate))
        print("epoch %d: rate %.4f" % (epoch + 1, rate))


def decay(epoch, rate):
    return rate if epoch < 2 else rate * 0.5


ended = []
callbacks = [
    tf.keras.callbacks.LearningRateScheduler(decay),
    tf.keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
    tf.keras.callbacks.ReduceLROnPlateau("val_mae", factor=0.1, patience=1, min_lr=1e-5),
    tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ended.append(epoch)),
    tf.keras.callbacks.CSVLogger("log.csv"),
    tf.keras.callbacks.TerminateOnNaN(),
    PrintLR(),
]
train = tf.data.Dataset.from_tensor_slices((x[:45], y[:45])).batch(15)
val = tf.data.Dataset.from_tensor_slices((x[45:], y[45:])).batch(15)
history = model.fit(train, validation_data=val, epochs=8, callbacks=callbacks, verbose=0)
for name in sorted(history.history):
    print(name, ["%.4f" % value for value in history.history[name]])
print("ended", ended)
with open("log.csv") as file:
    rows = list(csv.DictReader(file))
print(len(rows), sorted(rows[0]))
print("%.4f" % float(model.evaluate(val, verbose=0)[0]))
