"""`fit` sees the whole batch: its numbers are those of one device."""

import logging

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.compat import tensorflow as tf

X = np.random.default_rng(0).normal(size=(22, 6, 6, 2)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(22, 3)).astype(np.float32)


def _model(cls=keras.Model, layers=(), **options):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 6, 2))
    x = inputs
    for layer in layers:
        x = layer()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    model = cls(inputs, keras.layers.Dense(3)(x))
    model.compile(options.pop("optimizer", "adam"), options.pop("loss", "mse"), **options)
    return model


def _losses(model, epochs=2):
    return model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def _both(strategy, run):
    """Returns what `run` returns without a strategy, and under one."""
    with strategy.scope():
        ours = run()
    return run(), ours


class _Divides(keras.Model):
    """A step for TensorFlow, with a loss divided by the number of replicas."""

    def train_step(self, data):
        x, y = data

        def loss():
            errors = keras.ops.mean(keras.ops.square(self(x, training=True) - y), axis=-1)
            return tf.nn.compute_average_loss(errors)

        value, gradients = dist.value_and_grad(loss, self.trainable_variables)()
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:  # Keras shows it
            metric.update_state(value / dist.get_strategy().num_replicas_in_sync)
        return {"loss": value}


def test_a_step_for_tensorflow_is_right_and_says_once_what_it_sees(strategy_of, caplog):
    def train():
        model = _model(_Divides)
        return _losses(model) + _losses(model)

    with caplog.at_level(logging.WARNING):
        expected, got = _both(strategy_of(3), train)

    np.testing.assert_allclose(got, expected, rtol=2e-5)
    (told,) = [text for text in caplog.messages if "whole batch" in text]
    assert "num_replicas_in_sync is 1" in told


def test_a_cut_and_padded_array_that_the_partitioner_cannot_divide():
    strategy = dist.MirroredStrategy(["cpu:0", "cpu:1"], experimental_shard_parameters=True)

    def loss(y, p):
        padded = jax.lax.pad(p, jnp.float32(0.5), [(-1, 2, 1), (0, 0, 0)])
        return jnp.square(y - padded[: y.shape[0]])

    def train():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(3), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((72,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), loss)
        x = X.reshape(22, -1)
        return model.fit(x, Y, batch_size=7, epochs=2, shuffle=False, verbose=0).history["loss"]

    expected, got = _both(strategy, train)

    np.testing.assert_allclose(got, expected, rtol=2e-5)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_a_layer_that_cannot_be_compiled_trains_as_in_keras(steps_per_execution, strategy_of):
    options = {
        "layers": [lambda: keras.layers.RandomCrop(4, 4, seed=0)],
        "steps_per_execution": steps_per_execution,
    }

    expected, got = _both(strategy_of(2), lambda: _losses(_model(**options), epochs=1))

    np.testing.assert_allclose(got, expected, rtol=2e-5)


class _Outputs(keras.Model):
    def train_step(self, state, data):
        out, others = self.stateless_call(state[0], state[1], data[0], training=True)
        return {"out": out}, (state[0], others, state[2], state[3])


@pytest.mark.parametrize(
    ("num_rows", "shape", "axis"), [(2, (8,), -1), (9, (5, 5, 4), -1), (7, (4, 5, 5), 1)]
)
def test_statistics_of_replicas_are_an_option(num_rows, shape, axis, strategy_of):
    strategy = strategy_of(3)
    strategy.extended.experimental_batch_statistics_of_replicas = True
    x = np.random.default_rng(0).normal(1, 3, size=(num_rows, *shape)).astype(np.float32)
    with strategy.scope():
        layer = keras.layers.BatchNormalization(axis=axis)
        inputs = keras.Input(shape)
        model = _Outputs(inputs, layer(inputs))
        model.compile("sgd", "mse")

    got = model.train_on_batch(x, x, return_dict=True)["out"]

    each = -(-num_rows // 3)
    axes = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    parts = [x[i : i + each] for i in range(0, num_rows, each)]
    means = [part.mean(axes, keepdims=True) for part in parts]
    deviations = [np.sqrt(part.var(axes, keepdims=True) + layer.epsilon) for part in parts]
    expected = [(p - m) / d for p, m, d in zip(parts, means, deviations, strict=True)]
    np.testing.assert_allclose(got, np.concatenate(expected), atol=2e-5)
    moving = sum(m.ravel() * len(p) for m, p in zip(means, parts, strict=True)) / num_rows
    np.testing.assert_allclose(layer.moving_mean, 0.01 * moving, atol=1e-6)


def test_statistics_of_replicas_refuse_what_they_cannot_do(strategy):
    strategy.extended.experimental_batch_statistics_of_replicas = True
    with strategy.scope():
        model = _model(layers=[lambda: keras.layers.BatchNormalization(renorm=True)])

    with pytest.raises(dist.errors.UnsupportedError, match="without renorm"):
        _losses(model)


def _with_adapters(model):
    model.layers[1].enable_lora(2)
    model.layers[1].lora_kernel_b.assign(np.full((2, 3), 0.3))


_CHANGES = {
    "adapters": _with_adapters,
    "layer": lambda model: model.add(keras.layers.Dense(3)),
    "quantized": lambda model: model.layers[1].quantize("int8"),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_a_model_that_has_changed_is_compiled_again(change, strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    model.predict(X, verbose=0)
    model.evaluate(X, Y, verbose=0)

    _CHANGES[change](model)

    expected = np.array(model(X))
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=1e-5, atol=1e-6)
    error = np.mean((expected - Y) ** 2)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), error, rtol=1e-5)


def _table_and_dropout():
    layers = [
        keras.layers.Embedding(4097, 8),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((1,), dtype="int32"), *layers])
    model.compile(keras.optimizers.Adam(0.02, global_clipnorm=1.0), "mse")
    return model


@pytest.mark.parametrize("option", ["enable_checks", "check_tracer_leaks"])
def test_checks_of_jax_find_nothing(option, strategy_of):
    ids = np.arange(7, dtype=np.int32)[:, None]
    with strategy_of(3).scope():
        model = _table_and_dropout()

    jax.config.update(f"jax_{option}", True)
    try:
        (loss,) = model.fit(ids, ids * 1.0, verbose=0).history["loss"]
    finally:
        jax.config.update(f"jax_{option}", False)

    assert np.isfinite(loss)


def test_a_nan_is_found_where_rows_do_not_divide(strategy_of):
    rows = -np.ones((8, 6), np.float32)
    with strategy_of(3).scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Lambda(keras.ops.log), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log"):
        model.fit(rows, rows[:, :1], verbose=0)
