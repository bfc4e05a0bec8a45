"""Other threads use a model while `fit` trains it."""

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

from distributary.errors import ContextError
from tests.keras_bridge.small import assert_equal_logs, compiled, data, fit, model, python

_BESIDE_FIT = """
import threading
import keras
import numpy as np
import distributary as dist

dist.config.set_logical_cpu_devices(2)
x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
with dist.MirroredStrategy().scope():
    dense = [keras.layers.Dense(32, "relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((8,)), *dense, keras.layers.Dense(1)])
    # Without a learning rate, all steps replace the weights by equal ones.
    model.compile(keras.optimizers.SGD(0.0, momentum=0.9), "mse")
model.fit(x, x[:, :1], verbose=0)

def weights():
    return np.concatenate([weight.ravel() for weight in model.get_weights()])

def assigned():
    model.set_weights(model.get_weights())
    return weights()

reads = {
    "get_weights": weights,
    "set_weights": assigned,
    "value": lambda: np.array([float(v.value.sum()) for v in model.trainable_variables]),
    "call": lambda: np.asarray(model(x)),
    "predict": lambda: model.predict(x, verbose=0),
    "predict_on_batch": lambda: model.predict_on_batch(x),
}
expected = {name: read() for name, read in reads.items()}
ended = threading.Event()

class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = ended.is_set()

def look():
    try:
        for name, read in reads.items():
            for _ in range(200 if name == "get_weights" else 4):
                np.testing.assert_allclose(read(), expected[name], 1e-5, 1e-6, err_msg=name)
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

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            with ThreadPoolExecutor(1) as pool:
                self.result = pool.submit(self._call, self.model).result()


def test_calls_that_share_the_metrics_are_refused_in_another_thread(strategy_of):
    def call_all(model):
        for name in ("evaluate", "fit", "train_on_batch", "test_on_batch"):
            told = rf"small\.{name} was called while small\.fit runs in another thread"
            with pytest.raises(ContextError, match=told):
                getattr(model, name)(*data())
        return True

    callback, trained = _InThread(call_all), model(strategy_of(2))

    history = fit(trained, callbacks=[callback])

    assert callback.result
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
