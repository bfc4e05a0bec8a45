"""Models whose layers compute in half precision, in every way in which they are used."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist

kl = keras.layers
_RANDOM = np.random.default_rng(0)


def _draw(*shape):
    return _RANDOM.normal(size=shape).astype(np.float32)


class _OnItself(kl.Layer):
    """A layer of attention, whose inputs are all one."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def build(self, shape):
        self.layer.build(shape, shape)

    def call(self, x):
        return self.layer(x, x)


_ROWS, _SEQUENCES = _draw(4, 6), _draw(4, 5, 6)
_TOKENS = np.arange(20, dtype=np.int32).reshape(4, 5) % 7
_KINDS = {
    "rows": (
        _ROWS,
        lambda: [
            kl.Dense(3, "tanh"),
            kl.PReLU("ones"),
            kl.Normalization(mean=1.0, variance=4.0),
            kl.Dropout(0.0),
            kl.GaussianNoise(1e-9),
        ],
    ),
    "sequences": (
        _SEQUENCES,
        lambda: [
            kl.Conv1D(3, 2),
            kl.LayerNormalization(),
            kl.LSTM(3),
            kl.TimeDistributed(kl.Dense(3)),
            _OnItself(kl.MultiHeadAttention(2, 3)),
        ],
    ),
    # Of a replica's rows: equal to those of one device for one replica.
    "statistics": (_SEQUENCES, lambda: [kl.BatchNormalization()]),
    "tokens": (_TOKENS, lambda: [kl.Embedding(7, 3), kl.ReversibleEmbedding(7, 3)]),
}
_Y = _draw(4, 2)
_ROUNDING = {"mixed_float16": 5e-3, "mixed_bfloat16": 4e-2}
_loss_of = keras.losses.MeanSquaredError()


def _built(kind, policy, strategy=None):
    x, layers = _KINDS[kind]
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(1)
    make = strategy.scope() if strategy else jax.default_device(jax.devices()[0])
    with make:
        inputs = keras.Input(x.shape[1:], dtype=x.dtype.name)
        outputs = kl.Concatenate()([kl.Flatten()(layer(inputs)) for layer in layers()])
        model = keras.Model(inputs, kl.Dense(2)(outputs))
        model.compile(keras.optimizers.SGD(0.01), "mse", auto_scale_loss=False)
    return model


@functools.cache
def _alone(kind, policy):
    """Outputs and gradients of plain Keras on the whole batch."""
    model, x = _built(kind, policy), _KINDS[kind][0]
    others = [v.value for v in model.non_trainable_variables]

    def loss_of(trainable):
        outputs, _ = model.stateless_call(trainable, others, x, training=True)
        return _loss_of(_Y, outputs), outputs

    before = [v.value for v in model.trainable_variables]
    (_, outputs), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(before)
    return model, np.asarray(outputs, np.float32), gradients


def _assert_close(got, expected, policy):
    got, expected = (
        np.concatenate([np.ravel(np.asarray(leaf, np.float32)) for leaf in jax.tree.leaves(nest)])
        for nest in (got, expected)
    )
    scale = np.max(np.abs(expected))
    np.testing.assert_allclose(got, expected, rtol=0, atol=_ROUNDING[policy] * scale)


@pytest.mark.parametrize(
    ("kind", "num_replicas", "policy"),
    [
        ("statistics", 1, "mixed_float16"),
        ("rows", 2, "mixed_float16"),
        ("sequences", 2, "mixed_bfloat16"),
        ("tokens", 2, "mixed_bfloat16"),
    ],
)
def test_own_loops_have_the_outputs_and_gradients_of_one_device(
    kind, num_replicas, policy, strategy_of, quick_initializers
):
    strategy = strategy_of(num_replicas)
    alone, expected_outputs, expected = _alone(kind, policy)
    model = _built(kind, policy, strategy)
    context = dist.get_replica_context

    def step(x, y):
        loss_of = lambda: _loss_of(y, model(x, training=True))
        with dist.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = _loss_of(y, outputs)
        of_tape = tape.gradient(loss, model.trainable_variables)
        of_function = dist.value_and_grad(loss_of, model.trainable_variables)()[1]
        model.optimizer.apply_gradients(zip(of_tape, model.trainable_variables, strict=True))
        return context().all_gather(outputs, 0), context().all_reduce("sum", [of_tape, of_function])

    batch = next(iter(strategy.experimental_distribute_dataset([(_KINDS[kind][0], _Y)])))
    outputs, gradients = strategy.run(step, args=batch)
    own = lambda value: strategy.experimental_local_results(value)[0]

    _assert_close(own(outputs), expected_outputs, policy)
    for of_one in gradients:
        own_gradients = [own(gradient) for gradient in of_one]
        assert {gradient.dtype for gradient in own_gradients} == {np.dtype(np.float32)}
        _assert_close(own_gradients, expected, policy)
    changes = [
        variable.numpy() - before.numpy()
        for variable, before in zip(
            model.trainable_variables, alone.trainable_variables, strict=True
        )
    ]
    _assert_close(changes, [-0.01 * gradient for gradient in expected], policy)


def test_functions_and_eager_tapes_have_the_numbers_of_one_device(quick_initializers):
    kind, policy = "tokens", "mixed_bfloat16"
    alone, _, expected = _alone(kind, policy)
    model, x = _built(kind, policy), _KINDS[kind][0]

    outputs = dist.function(model)(x)
    with dist.GradientTape() as tape:
        loss = _loss_of(_Y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)

    _assert_close(outputs, alone(x), policy)
    assert {gradient.dtype for gradient in gradients} == {np.dtype(np.float32)}
    _assert_close(gradients, expected, policy)


def test_fit_evaluate_and_predict_have_the_numbers_of_one_device(strategy, quick_initializers):
    kind, policy = "rows", "mixed_float16"
    x = _KINDS[kind][0]
    alone, model = _built(kind, policy), _built(kind, policy, strategy)

    for each in (alone, model):
        each.fit(x, _Y, batch_size=4, epochs=2, shuffle=False, verbose=0)

    expected, got = (each.evaluate(x, _Y, verbose=0) for each in (alone, model))
    _assert_close(got, expected, policy)
    _assert_close(model.predict(x, verbose=0), alone.predict(x, verbose=0), policy)


@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_bfloat16"])
def test_one_layer_in_half_precision_whose_first_read_is_in_the_step(dtype, strategy):
    with strategy.scope():
        layers = [kl.Dense(3, dtype=dtype), kl.Dense(2)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.Adam(0.1)

    def step(x):
        with dist.GradientTape() as tape:
            loss = jnp.mean(model(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    strategy.run(step, args=(_ROWS,))

    stored = "bfloat16" if dtype == "bfloat16" else "float32"
    kinds = [v.numpy().dtype.name for v in model.trainable_variables]
    assert kinds == [stored] * 2 + ["float32"] * 2
    assert all(np.all(np.isfinite(np.float32(v.numpy()))) for v in model.variables)
