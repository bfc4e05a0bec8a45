"""Flax NNX in steps of a strategy, against NNX alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distributary as dist

nnx = pytest.importorskip("flax.nnx")

X = np.random.default_rng(0).normal(size=(16, 3)).astype("f")
Y = X.sum(axis=1, keepdims=True)


class Network(nnx.Module):
    def __init__(self, rate, norm=False):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.output = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        x = self.hidden(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.output(self.dropout(nnx.relu(x)))


def _objects(*args):
    model = Network(*args)
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def _loss_and_gradients(model, x, y):
    return nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)


def _alone(*args):
    @nnx.jit
    def step(model, optimizer):
        loss, gradients = _loss_and_gradients(model, X, Y)
        optimizer.update(model, gradients)
        return loss

    model, optimizer = _objects(*args)
    return [step(model, optimizer) for _ in range(4)], model


def _trained(strategy, *args):
    with strategy.scope():
        state = dist.nnx.State(*_objects(*args))

    def step(x, y):
        with state.merged() as (model, optimizer):
            loss, gradients = _loss_and_gradients(model, x, y)
            gradients = dist.get_replica_context().all_reduce("MEAN", gradients)
            optimizer.update(model, gradients)
        return loss

    batches = strategy.experimental_distribute_dataset([(X, Y)] * 4)
    losses = [strategy.run(step, args=batch) for batch in batches]
    with state.merged() as (model, _):
        return [strategy.reduce("MEAN", loss, axis=None) for loss in losses], model, state


def _assert_same(found, expected, tolerance):
    jax.tree.map(
        lambda found, value: np.testing.assert_allclose(
            found, value, rtol=tolerance, atol=tolerance
        ),
        nnx.state(found, nnx.Param, nnx.BatchStat),
        nnx.state(expected, nnx.Param, nnx.BatchStat),
    )


@pytest.mark.parametrize(
    ("num_replicas", "args", "tolerance"), [(1, (0.5, True), 0), (2, (0.0,), 1e-5)]
)
def test_replicas_train_as_nnx_alone(num_replicas, args, tolerance, strategy_of):
    expected, expected_model = _alone(*args)

    losses, model, _ = _trained(strategy_of(num_replicas), *args)

    np.testing.assert_allclose(losses, expected, rtol=tolerance)
    _assert_same(model, expected_model, tolerance)


def test_replicas_draw_their_own_numbers_anew_in_each_step(strategy):
    with strategy.scope():
        state = dist.nnx.State(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))

    def step():
        with state.merged() as dropout:
            return dropout(jnp.ones(64))

    masks = [strategy.experimental_local_results(strategy.run(step)) for _ in range(2)]

    different = {tuple(np.asarray(mask).tolist()) for of_step in masks for mask in of_step}
    assert len(different) == 4


def test_batch_statistics_are_the_mean_over_replicas(strategy):
    with strategy.scope():
        state = dist.nnx.State(nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0)))

    def step(x):
        with state.merged() as norm:
            norm(x)

    for batch in strategy.experimental_distribute_dataset([X]):
        strategy.run(step, args=(batch,))

    parts = X.reshape(2, 8, 3)
    with state.merged() as norm:
        np.testing.assert_allclose(norm.mean[...], parts.mean((0, 1)) / 2, atol=1e-6)
        np.testing.assert_allclose(norm.var[...], 0.5 + parts.var(1).mean(0) / 2, atol=1e-6)


def test_gradients_that_are_not_summed_are_refused(strategy):
    with strategy.scope():
        state = dist.nnx.State(*_objects(0.0))

    def step(x, y):
        with state.merged() as (model, optimizer):
            optimizer.update(model, _loss_and_gradients(model, x, y)[1])

    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    with pytest.raises(
        dist.errors.ReplicaDivergenceError, match=r"'0/hidden/bias' is mirrored.*test_nnx\.py"
    ):
        strategy.run(step, args=batch)


def test_a_checkpoint_goes_on_where_it_was_saved(strategy, tmp_path):
    _, expected, _ = _trained(strategy, 0.5, True)
    _, _, state = _trained(strategy, 0.5, True)
    path = dist.checkpoint.Checkpoint(state=state.variables).save(str(tmp_path / "saved"))
    with strategy.scope():
        other = dist.nnx.State(*_objects(0.9, True))

    dist.checkpoint.Checkpoint(state=other.variables).restore(path)

    with other.merged() as (model, _):
        _assert_same(model, expected, 0)
