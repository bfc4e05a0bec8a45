"""Losses that relate rows: what `fit` and `evaluate` say of them, and those of the global batch."""

import logging
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers as kl, ops

import distributary as dist
from distributary.errors import DistributaryWarning

_RANDOM = np.random.default_rng(0)
_X = _RANDOM.normal(size=(13, 6)).astype(np.float32)
_Y = _RANDOM.normal(size=(13, 3)).astype(np.float32)
_LABELS = np.eye(3, dtype=np.float32)[_RANDOM.integers(0, 3, 13)]


def in_batch_softmax(y, p):
    logits = ops.matmul(p[:, :3], ops.transpose(p[:, 3:]))
    labels = ops.eye(ops.shape(logits)[0])
    return keras.losses.categorical_crossentropy(labels, logits, from_logits=True)


def load_balance(y, p):
    gates = ops.softmax(p)
    share = ops.mean(ops.one_hot(ops.argmax(gates, -1), 6), 0)
    return ops.sum(share * ops.mean(gates, 0))


def covariance(y, p):
    z = p - ops.mean(p, 0)
    return ops.sum((ops.matmul(ops.transpose(z), z) / ops.shape(z)[0]) ** 2)


def _model(loss=None, units=6, layers=(), **options):
    given = [kl.Dense(8, "tanh"), *layers, kl.Dense(units)]
    model = keras.Sequential([keras.Input((6,)), *given], name="towers")
    model.compile(keras.optimizers.SGD(0.05), loss, **options)
    return model


def _warnings_of(strategy, build, x=_X[:8], y=_Y[:8], methods=("fit",), batch_size=8):
    with strategy.scope():
        model = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for method in methods:
            getattr(model, method)(x, y, batch_size=batch_size, verbose=0)
    return [str(w.message) for w in caught if issubclass(w.category, DistributaryWarning)]


@pytest.mark.parametrize("method", ["fit", "evaluate"])
@pytest.mark.parametrize("loss", [in_batch_softmax, load_balance], ids=lambda loss: loss.__name__)
def test_the_warning_names_model_loss_and_line(loss, method, strategy_of):
    first = loss.__code__.co_firstlineno

    (found,) = _warnings_of(strategy_of(2), lambda: _model(loss), methods=[method])

    assert found.startswith("towers: the loss relates rows of the batch to each other, by ")
    assert f"in compile_loss/{loss.__name__} at {__file__}:" in found
    line = int(found.split(f"{__file__}:")[1].split(" ")[0])
    assert first < line <= first + 3


def test_a_model_is_warned_of_once(strategy_of):
    found = _warnings_of(
        strategy_of(2), lambda: _model(covariance), methods=["evaluate", "fit", "evaluate"]
    )

    assert len(found) == 1


def test_what_one_replica_computes_says_nothing(strategy_of):
    assert _warnings_of(strategy_of(1), lambda: _model(covariance)) == []
    assert _warnings_of(strategy_of(4), lambda: _model(covariance), _X[:3], _Y[:3]) == []


def test_the_parts_of_an_uneven_batch_are_looked_at(strategy_of):
    assert len(_warnings_of(strategy_of(2), lambda: _model(covariance), _X[:7], _Y[:7])) == 1


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: dist.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"]),
        lambda: dist.MirroredStrategy(["CPU:0", "CPU:1"], experimental_shard_optimizer_state=True),
    ],
    ids=["central storage", "sharded state"],
)
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_other_ways_to_run_a_step_are_looked_at(strategy, method):
    assert len(_warnings_of(strategy(), lambda: _model(covariance), methods=[method])) == 1
    assert _warnings_of(strategy(), lambda: _model("mse", units=3), methods=[method]) == []


def test_several_steps_in_one_program_are_looked_at(strategy_of):
    def build(loss, **options):
        return lambda: _model(loss, steps_per_execution=2, **options)

    assert len(_warnings_of(strategy_of(2), build(covariance), batch_size=4)) == 1
    assert _warnings_of(strategy_of(2), build("mse", units=3), batch_size=4) == []


class _Balanced(kl.Layer):
    def call(self, x):
        gates = ops.mean(ops.softmax(x), 0)
        self.add_loss(ops.sum(gates * ops.log(gates)))
        return x


def test_a_loss_that_a_layer_adds_is_named_by_the_layer(strategy_of):
    def build():
        return _model("mse", 3, [_Balanced(name="router")])

    (found,) = _warnings_of(strategy_of(2), build)

    assert "in router at " in found


class _OwnStep(keras.Sequential):
    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data

        def loss_of(trainable):
            p, _ = self.stateless_call(trainable, non_trainable, x, training=True)
            return self.own_loss(y, p), jnp.mean(p @ p.T)  # which is only reported

        (loss, spread), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
        gradients = [g / jnp.maximum(norm, 1e3) for g in gradients]
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss, "spread": spread}, (trainable, non_trainable, optimizer, metrics)


def _own_step(loss):
    model = _OwnStep([keras.Input((6,)), kl.Dense(6)])
    model.own_loss = loss
    model.compile(keras.optimizers.SGD(0.05))
    return model


class _Adding(kl.Layer):
    def __init__(self, loss_of):
        super().__init__()
        self._loss_of = loss_of

    def call(self, x):
        self.add_loss(self._loss_of(x))
        return x


def _added(x):
    return 0.1 * ops.sum(x**2)


@pytest.mark.parametrize("method", ["fit", "evaluate"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: _model("mse", units=3, layers=[_Adding(_added)]),
        lambda: _model(lambda y, p: _added(y - p), units=3),
    ],
    ids=["of a layer", "of a function"],
)
def test_a_loss_that_is_a_sum_over_rows_is_warned_of(build, method, strategy_of):
    line = _added.__code__.co_firstlineno + 1

    found = _warnings_of(strategy_of(2), build, methods=(method, method))

    assert len(found) == 1
    assert found[0].startswith("towers: a loss is a sum over rows of the batch, by reduce_sum in ")
    assert f" at {__file__}:{line} " in found[0]
    assert "about 1/2 of the sum on one device" in found[0]
    assert "distributary.global_batch_loss" in found[0]
    assert _warnings_of(strategy_of(1), build, methods=(method,)) == []


# The parts of these are right as they are, also on the uneven last batch.
_PARTS = {
    "a mean": lambda: _Adding(lambda x: ops.mean(x**2)),
    "a sum of squares per row": lambda: _Adding(lambda x: ops.mean(ops.sum(x**2, -1))),
    "a divided sum": lambda: _Adding(lambda x: ops.sum(x**2) / ops.shape(x)[0]),
    "a sum of every replica": lambda: _Adding(dist.global_batch_loss(_added)),
    "activity": lambda: kl.ActivityRegularization(l1=0.01, l2=0.1),
    "a regularized output": lambda: kl.Dense(8, activity_regularizer="l2"),
    "a regularized kernel": lambda: kl.Dense(
        8, kernel_regularizer=keras.regularizers.L1L2(0.01, 0.1)
    ),
}


@pytest.mark.filterwarnings("ignore:.*do not divide by 3 replicas")
@pytest.mark.parametrize(("num_replicas", "reduction"), [(3, "sum_over_batch_size"), (2, "sum")])
@pytest.mark.parametrize("layer", _PARTS)
def test_losses_of_layers_are_those_of_one_device(
    layer, num_replicas, reduction, train_twice, assert_same_training
):
    def build():
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        return _model(loss, units=3, layers=[_PARTS[layer]()])

    alone, distributed = train_twice(
        build, _X, _Y, num_replicas=num_replicas, epochs=2, batch_size=8
    )

    assert_same_training(alone, distributed)


def test_a_sum_that_is_scaled_by_the_number_of_replicas_says_nothing(strategy_of):
    def scaled(x):
        context = dist.get_replica_context()
        return _added(x) * (1 if context is None else context.num_replicas_in_sync)

    build = lambda: _model("mse", units=3, layers=[_Adding(scaled)])

    assert _warnings_of(strategy_of(2), build, methods=("fit", "evaluate")) == []


def test_an_own_train_step_is_looked_at(strategy_of):
    square = lambda y, p: jnp.mean((y - p[:, :3]) ** 2)

    assert len(_warnings_of(strategy_of(2), lambda: _own_step(covariance))) == 1
    assert _warnings_of(strategy_of(2), lambda: _own_step(square)) == []


@pytest.mark.parametrize("synchronized", [False, True])
def test_batch_normalization_is_no_relation(synchronized, strategy_of, caplog):
    norm = lambda: kl.BatchNormalization(synchronized=synchronized, name="norm")
    images = _RANDOM.normal(size=(8, 6, 6, 2)).astype(np.float32)

    def build():
        layers = [kl.Conv2D(4, 3, padding="same"), norm(), kl.ReLU(), kl.Conv2D(4, 3), norm()]
        for i, layer in enumerate(layers):
            layer.name = f"layer_{i}"
        inputs = keras.Input((6, 6, 2))
        x = inputs
        for layer in layers:
            x = layer(x)
        model = keras.Model(inputs, kl.Dense(3)(kl.GlobalAveragePooling2D()(x)))
        model.compile("sgd", "mse")
        return model

    with caplog.at_level(logging.WARNING, "distributary"):
        found = _warnings_of(strategy_of(2), build, images, methods=["fit", "evaluate"])

    assert found == []
    told = [r.getMessage() for r in caplog.records if "batch normalization uses" in r.getMessage()]
    assert len(told) == (0 if synchronized else 1)


# Losses of the global batch


# Batches of 13 rows are uneven, of 8 and 5 rows even and uneven.
@pytest.mark.filterwarnings("ignore:towers. batches of 13 examples do not divide")
@pytest.mark.parametrize(
    ("loss", "num_replicas", "batch_size"),
    [
        (in_batch_softmax, 2, 8),
        (in_batch_softmax, 4, 13),
        (load_balance, 4, 13),
        (keras.losses.Dice(), 4, 13),
        (keras.losses.Tversky(), 2, 13),
    ],
    ids=lambda value: str(getattr(value, "name", getattr(value, "__name__", value))),
)
def test_fit_and_evaluate_are_those_of_one_device(
    loss, num_replicas, batch_size, train_twice, assert_same_training
):
    of_labels = isinstance(loss, keras.losses.Loss)
    y = _LABELS if of_labels else _Y

    def build():
        model = _model(None, 3 if of_labels else 6, [kl.Softmax()] if of_labels else [])
        model.compile(keras.optimizers.SGD(0.05), dist.global_batch_loss(loss))
        return model

    alone, distributed = train_twice(
        build, _X, y, num_replicas=num_replicas, batch_size=batch_size, epochs=2
    )

    assert_same_training(alone, distributed)
    expected, actual = (
        trained.model.evaluate(_X, y, batch_size=batch_size, verbose=0)
        for trained in (alone, distributed)
    )
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_weights_of_examples_belong_to_their_rows(train_twice, assert_same_training):
    weights = _RANDOM.uniform(0.2, 2.0, 13).astype(np.float32)

    alone, distributed = train_twice(
        lambda: _model(dist.global_batch_loss(in_batch_softmax)), _X, _Y, sample_weight=weights
    )

    assert_same_training(alone, distributed)


def test_an_own_train_step_may_use_the_global_batch(strategy_of, train_twice, assert_same_training):
    alone, distributed = train_twice(
        lambda: _own_step(dist.global_batch_loss(covariance)), _X[:8], _Y[:8]
    )

    assert alone.history.pop("spread") != distributed.history.pop("spread")
    assert_same_training(alone, distributed, unchanged=("bias",))


class _GloballyBalanced(kl.Layer):
    def call(self, x):
        self.add_loss(dist.global_batch_loss(lambda x: load_balance(None, x))(x))
        return x


def test_a_layer_may_add_a_loss_of_the_global_batch(train_twice, assert_same_training):
    alone, distributed = train_twice(
        lambda: _model("mse", 3, [kl.Dense(6), _GloballyBalanced()]), _X, _Y
    )

    assert_same_training(alone, distributed)


class _Softmax(keras.losses.Loss):
    def call(self, y, p):
        return dist.global_batch_loss(in_batch_softmax)(y, p)


def test_losses_of_keras_in_a_custom_loop_are_parts_of_the_global_loss(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        model = _model()
    alone = keras.models.clone_model(model)
    alone.set_weights(model.get_weights())
    loss_of = _Softmax()

    def step(x, y):
        with dist.GradientTape() as tape:
            loss = loss_of(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = [
        strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
        for batch in strategy.experimental_distribute_dataset([(_X[:8], _Y[:8]), (_X[8:], _Y[8:])])
    ]

    alone.compile(keras.optimizers.SGD(0.05), in_batch_softmax)
    expected = [alone.train_on_batch(_X[:8], _Y[:8]), alone.train_on_batch(_X[8:], _Y[8:])]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for own, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


def test_a_model_with_such_a_loss_is_saved_and_loaded(strategy_of, tmp_path):
    loss = dist.global_batch_loss(in_batch_softmax)
    with strategy_of(2).scope():
        model = _model(loss)
    model.fit(_X[:8], _Y[:8], batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")

    loaded = keras.models.load_model(
        tmp_path / "model.keras", custom_objects={"in_batch_softmax": in_batch_softmax}
    )

    expected = model.evaluate(_X, _Y, batch_size=8, verbose=0)
    np.testing.assert_allclose(
        loaded.evaluate(_X, _Y, batch_size=8, verbose=0), expected, rtol=1e-5
    )
