"""Other threads use a model while `fit` trains it."""

import threading

import keras
import numpy as np
import pytest

from distributary.errors import ContextError
from tests.keras_bridge.small import assert_equal_logs, compiled, data, fit, model, python

# Without a learning rate, all steps replace the weights by equal ones.
_BESIDE_FIT = """
import os, sys, threading
os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import distributary as dist

dist.config.set_logical_cpu_devices(2)
strategy = dist.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
with strategy.scope():
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(32, "relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((8,)), *dense, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0, momentum=0.9), "mse")
model.fit(x, x[:, :1], verbose=0)

def weights(model):
    return np.concatenate([weight.ravel() for weight in model.get_weights()])

def assigned(model):
    model.set_weights(model.get_weights())
    return weights(model)

reads = {
    "get_weights": weights,
    "set_weights": assigned,
    "value": lambda model: np.array([float(v.value.sum()) for v in model.trainable_variables]),
    "call": lambda model: np.asarray(model(x)),
    "predict": lambda model: model.predict(x, verbose=0),
    "predict_on_batch": lambda model: model.predict_on_batch(x),
}
expected = {name: read(model) for name, read in reads.items()}
ended = threading.Event()

class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = ended.is_set()

def look():
    try:
        for name, read in reads.items():
            for _ in range(200 if name == "get_weights" else 4):
                np.testing.assert_allclose(read(model), expected[name], 1e-5, 1e-6, err_msg=name)
        print("all read")
    finally:
        ended.set()

thread = threading.Thread(target=look)
thread.start()
model.fit(x, x[:, :1], batch_size=4, epochs=10**6, verbose=0, callbacks=[Stop()])
thread.join()
"""


def test_reads_beside_fit_get_the_values_of_one_moment():
    assert "all read" in python(_BESIDE_FIT)


class _InThread(keras.callbacks.Callback):
    """Calls a function of the model in another thread, after the first step, and waits for it."""

    def __init__(self, call):
        super().__init__()
        self._call = call
        self.result = self.error = None

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            thread = threading.Thread(target=self._run)
            thread.start()
            thread.join()

    def _run(self):
        try:
            self.result = self._call(self.model)
        except ContextError as error:
            self.error = error


@pytest.mark.parametrize("name", ["evaluate", "fit", "train_on_batch", "test_on_batch"])
def test_calls_that_share_the_metrics_are_refused_in_another_thread(name, strategy_of):
    callback = _InThread(lambda model: getattr(model, name)(*data()))
    trained = model(strategy_of(2))

    history = fit(trained, callbacks=[callback])

    assert f"small.{name} was called while small.fit runs in another thread" in str(callback.error)
    assert_equal_logs(history.history, fit(model()).history)
    trained.evaluate(*data(), verbose=0)  # possible again


def test_predict_in_another_thread_uses_the_weights_of_the_moment(strategy_of):
    x, _ = data()

    def predicted(model):
        other = compiled(keras.models.clone_model(model))
        other.set_weights(model.get_weights())
        return model.predict(x, verbose=0), other.predict(x, verbose=0)

    callback = _InThread(predicted)
    fit(model(strategy_of(2)), callbacks=[callback])

    np.testing.assert_allclose(*callback.result, rtol=1e-4, atol=1e-5)
