"""A small model with data, and its weights after any number of steps on one device."""

import contextlib
import functools

import keras
import numpy as np

from tests.interpreters import run_python

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def data(rows=16):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 3)).astype(np.float32)
    return x, np.sin(x.sum(1, keepdims=True)).astype(np.float32)


def layers():
    return [keras.Input((3,)), keras.layers.Dense(1, "tanh")]


def build(kind=keras.Sequential):
    keras.utils.set_random_seed(0)
    if kind is keras.Sequential:
        return keras.Sequential(layers(), name="small")
    inputs, dense = layers()
    return kind(inputs, dense(inputs), name="small")


def compiled(model, **kwargs):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], **kwargs)
    return model


def model(strategy=None, kind=keras.Sequential, **kwargs):
    with strategy.scope() if strategy else contextlib.nullcontext():
        return compiled(build(kind), **kwargs)


def fit(model, *xy, **kwargs):
    """Four steps per epoch, unless told otherwise."""
    kwargs = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, **kwargs}
    return model.fit(*(xy or data()), **kwargs)


@functools.cache
def _step_by_step():
    return model(), []


def weights_after(num_steps):
    """Weights of one device after some steps of the first epochs of `fit`."""
    x, y = data()
    model, weights = _step_by_step()
    if not weights:
        weights.append(model.get_weights())
    while len(weights) <= num_steps:
        start = (len(weights) - 1) * 4 % len(x)
        model.train_on_batch(x[start : start + 4], y[start : start + 4])
        weights.append(model.get_weights())
    return weights[num_steps]


def assert_equal_weights(got, expected, **tolerance):
    got, expected = (w if isinstance(w, list) else w.get_weights() for w in (got, expected))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, **(tolerance or CLOSE))


def assert_equal_logs(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], **CLOSE, err_msg=name)


def python(code, **environ):
    """What a process of its own prints that runs `code`."""
    result = run_python("-c", code, environ=environ)
    assert result.returncode == 0, result.stderr
    return result.stdout
