"""The guide of keras.io for several devices: a model is made or restored, trained, evaluated."""

import os

import numpy as np

import distributary.compat.tensorflow as tf
from distributary.compat.tensorflow import keras

random = np.random.default_rng(0)


def get_compiled_model():
    inputs = keras.Input(shape=(12,))
    x = keras.layers.Dense(16, activation="relu")(inputs)
    x = keras.layers.Dense(8, activation="relu")(x)
    outputs = keras.layers.Dense(10)(x)
    model = keras.Model(inputs, outputs)
    weights = np.random.default_rng(1)
    model.set_weights([weights.normal(0, 0.3, w.shape) for w in model.get_weights()])
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def get_dataset():
    batch_size = 16
    x = random.normal(size=(104, 12)).astype("float32")
    y = random.integers(0, 10, 104)
    train = tf.data.Dataset.from_tensor_slices((x[:70], y[:70])).batch(batch_size)
    val = tf.data.Dataset.from_tensor_slices((x[70:90], y[70:90])).batch(batch_size)
    test = tf.data.Dataset.from_tensor_slices((x[90:], y[90:])).batch(batch_size)
    return train, val, test


checkpoint_dir = "./ckpt"
if not os.path.exists(checkpoint_dir):
    os.makedirs(checkpoint_dir, exist_ok=True)  # several workers may


def make_or_restore_model():
    checkpoints = [checkpoint_dir + "/" + name for name in os.listdir(checkpoint_dir)]
    if checkpoints:
        latest_checkpoint = max(checkpoints, key=os.path.getctime)
        print("Restoring from", os.path.basename(latest_checkpoint))
        return keras.models.load_model(latest_checkpoint)
    print("Creating a new model")
    return get_compiled_model()


def run_training(epochs=1):
    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = make_or_restore_model()
        callbacks = [
            keras.callbacks.ModelCheckpoint(
                filepath=checkpoint_dir + "/ckpt-{epoch}.keras", save_freq="epoch"
            )
        ]
    train, val, test = datasets
    history = model.fit(train, epochs=epochs, callbacks=callbacks, validation_data=val, verbose=0)
    print({name: np.round(values, 4).tolist() for name, values in sorted(history.history.items())})
    results = model.evaluate(test, verbose=0)
    print(["%.4f" % value for value in results], model.predict(test, verbose=0).shape)


datasets = get_dataset()
run_training(epochs=1)
run_training(epochs=1)
