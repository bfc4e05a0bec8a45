"""A small model with data, and its weights after any number of steps on one device."""

import contextlib
import functools
import math

import keras
import numpy as np

import distributary as dist
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
    model.compile(momentum(), "mse", metrics=["mae"], **kwargs)
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


class AtBatch(keras.callbacks.Callback):
    """Calls `action` with the model once, at the end of one batch."""

    def __init__(self, batch, action):
        super().__init__()
        self.batch, self.action = batch, action

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.batch = None
            self.action(self.model)


def assert_equal_weights(got, expected, **tolerance):
    got, expected = (w if isinstance(w, list) else w.get_weights() for w in (got, expected))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, **(tolerance or CLOSE))


def assert_equal_logs(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], **CLOSE, err_msg=name)


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def builder(make_model, make_optimizer=momentum, **kwargs):
    """Returns a function that makes a model and compiles it, for the fixture `train`."""

    def build():
        model = make_model()
        model.compile(make_optimizer(), **{"loss": "mse", **kwargs})
        return model

    return build


def descend(optimizer, variables, loss_of):
    """Takes a step down the gradient of what `loss_of` returns, and returns that."""
    with dist.GradientTape() as tape:
        loss = loss_of()
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss


def transformer(vocabulary, width, num_classes, num_blocks=1):
    """A model without biases in its attention, and with names for rules."""
    ids = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width, name="embedding")(ids)
    for i in range(num_blocks):
        attention = keras.layers.MultiHeadAttention(
            2, width // 2, use_bias=False, name=f"attention_{i}"
        )
        x = keras.layers.LayerNormalization()(x + attention(x, x))
        up = keras.layers.Dense(2 * width, "gelu", name=f"up_{i}")(x)
        x = x + keras.layers.Dense(width, name=f"down_{i}")(up)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(ids, keras.layers.Dense(num_classes, name="head")(x))


def assert_in_parts(variables, num_replicas, min_bytes=0):
    """Every device holds, of every variable of so many bytes, one part of a dim."""
    divided = 0
    for variable in variables:
        array = variable._value
        whole = math.prod(variable.shape)
        if whole * array.dtype.itemsize >= min_bytes:
            divided += 1
            parts = [whole // n * -(-n // num_replicas) for n in variable.shape]
            sizes = {shard.data.size for shard in array.addressable_shards}
            assert sizes == {min(parts, default=1)}, variable.path
    assert divided >= 2


def assert_goes_on_in(others, model, build, fit, folder):
    """What a model has saved, models of other strategies load, and train on as it does.

    `fit` trains a model and returns its weights.
    """

    def slots(model):
        return [variable.numpy() for variable in model.optimizer.variables]

    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    saved = dist.checkpoint.Checkpoint(model=model).save(folder / "checkpoint")
    expected, state = model.get_weights(), slots(model)
    later = fit(model)
    for strategy in others:
        keras.backend.clear_session(free_memory=False)
        with strategy.scope():
            loaded, other = keras.models.load_model(folder / "model.keras"), build()
        other.optimizer.build(other.trainable_variables)
        other.load_weights(folder / "model.weights.h5")
        assert_equal_weights(other, expected, rtol=0)
        for step in ("loaded", "restored"):
            if step == "restored":
                fit(loaded)
                dist.checkpoint.Checkpoint(model=loaded).restore(saved)
            assert_equal_weights(loaded, expected, rtol=0)
            assert_equal_weights(slots(loaded), state, rtol=0)
        # Seeds of dropout are restored, too, which a file of Keras does not have.
        assert_equal_weights(fit(loaded), later, rtol=1e-3, atol=1e-5)


def python(code, **environ):
    """What a process of its own prints that runs `code`."""
    result = run_python("-c", code, environ=environ)
    assert result.returncode == 0, result.stderr
    return result.stdout
