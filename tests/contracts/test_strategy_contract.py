"""What holds for every strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist

MEAN = dist.VariableAggregation.MEAN
SUM = dist.VariableAggregation.SUM
ON_READ = dist.VariableSynchronization.ON_READ


def _context():
    return dist.get_replica_context()


def test_the_strategy_is_current_in_its_scope_and_calls_a_step_once_for_all_replicas(strategy):
    before, calls = dist.get_strategy(), []

    def step(x):
        calls.append((_context().strategy, _context().num_replicas_in_sync))
        return x + _context().replica_id_in_sync_group

    with strategy.scope() as entered:
        assert entered is dist.get_strategy() is strategy
    ids = strategy.run(step, (10,))

    assert dist.get_strategy() is before
    assert calls == [(strategy, strategy.num_replicas_in_sync)]
    components = strategy.experimental_local_results(ids)
    assert [int(i) for i in components] == list(range(10, 10 + strategy.num_replicas_in_sync))


def test_run_reduces_to_the_same_as_numpy(strategy):
    num_replicas = strategy.num_replicas_in_sync
    rows = np.random.default_rng(0).normal(size=(num_replicas, 3)).astype(np.float32)
    value = strategy.experimental_distribute_values_from_function(
        lambda context: rows[context.replica_id_in_sync_group]
    )

    def step(x):
        context = _context()
        return (
            context.all_reduce("sum", x),
            context.all_reduce("mean", {"x": x})["x"],
            context.all_gather(x, axis=0),
            context.merge_call(lambda s, y: s.reduce("mean", y, axis=None), (x,)),
        )

    results = strategy.run(step, (value,))
    outside = strategy.reduce("sum", strategy.run(lambda x: x * 1, (value,)), axis=None)

    expected = (rows.sum(0), rows.mean(0), rows.reshape(-1), rows.mean(0))
    for result, should_be in zip(results, expected, strict=True):
        for component in strategy.experimental_local_results(result):
            np.testing.assert_allclose(component, should_be, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outside, rows.sum(0), rtol=1e-5, atol=1e-6)


def test_variables_are_read_and_assigned_everywhere(strategy):
    num_replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        mirrored = dist.Variable([1.0, 2.0], aggregation=MEAN, name="w")
        total = dist.Variable(0.0, aggregation=SUM, synchronization=ON_READ)

    def step(x):
        mirrored.assign_add(x + _context().replica_id_in_sync_group)
        total.assign_add(jnp.float32(1.0))
        return mirrored.value()

    results = strategy.run(step, (jnp.ones(2),))
    dist.function(lambda: strategy.run(step, (jnp.ones(2),)))()
    with strategy.scope():
        mirrored.assign_add([10.0, 10.0])
    mirrored.assign_sub([5.0, 5.0])
    strategy.extended.update(mirrored, lambda v, x: v.assign_add(x), ([0.5, 0.5],))

    increment = 1 + (num_replicas - 1) / 2
    first = strategy.experimental_local_results(results)[-1]
    np.testing.assert_allclose(first, np.array([1, 2]) + increment)
    np.testing.assert_allclose(mirrored.numpy(), np.array([1, 2]) + 2 * increment + 5.5)
    assert total.numpy() == 2 * num_replicas
    assert mirrored.name == "w:0"
    assert mirrored.distribute_strategy is strategy
    assert strategy.extended.variable_created_in_scope(mirrored)


def test_a_variable_lies_on_its_devices_and_does_not_change_if_a_step_fails(strategy):
    with strategy.scope():
        v = dist.Variable(jax.device_put(np.ones(2, np.float32), jax.devices()[0]))

    def step():
        v.assign([2.0, 2.0])
        raise KeyError("fails")

    with pytest.raises(KeyError, match="fails"):
        strategy.run(step)
    np.testing.assert_array_equal(v.numpy(), [1, 1])
    assert strategy.run(lambda: v.assign([3.0, 3.0], read_value=False)) is None
    np.testing.assert_array_equal(v.numpy(), [3, 3])

    num_devices = strategy.num_replicas_in_sync * strategy.extended.num_logical_devices
    if isinstance(strategy, dist.CentralStorageStrategy):
        num_devices = 1
    assert len(v.value().devices()) == num_devices
    assert v.device == strategy.extended.variable_device()


def _dataset():
    random = np.random.default_rng(0)
    x = random.normal(size=(5, 16, 3)).astype(np.float32)
    return [{"x": batch, "y": batch @ np.array([1, -2, 3], np.float32)} for batch in x]


def _trained(strategy):
    """Weights and losses of linear regression with momentum, three epochs."""
    with strategy.scope():
        w = dist.Variable(jnp.zeros(3))
        momentum = dist.Variable(jnp.zeros(3), trainable=False)
        steps_done = dist.Variable(0, aggregation=dist.VariableAggregation.ONLY_FIRST_REPLICA)
        loss_sum = dist.Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def step(batch):
        def loss_of(weights):
            return ((batch["x"] @ weights - batch["y"]) ** 2).sum() / 16

        loss, gradient = jax.value_and_grad(loss_of)(w.value())
        gradient = _context().all_reduce("sum", gradient)
        momentum.assign(0.9 * momentum + gradient)
        w.assign_sub(0.05 * momentum.value())
        steps_done.assign_add(1)
        loss_sum.assign_add(loss)
        return loss

    def train_step(batch):
        return strategy.reduce("sum", strategy.run(step, (batch,)), axis=None)

    losses = []
    for call in (train_step, dist.function(train_step), train_step):
        for batch in strategy.experimental_distribute_dataset(_dataset()):
            losses.append(float(call(batch)))
    assert steps_done.numpy() == len(losses) == 15
    np.testing.assert_allclose(loss_sum.numpy(), np.sum(losses), rtol=1e-5)
    return w.numpy(), losses


@pytest.fixture(scope="module")
def trained_by_hand():
    """The same training in NumPy."""
    w, momentum, losses = np.zeros(3), np.zeros(3), []
    for _ in range(3):
        for batch in _dataset():
            error = batch["x"].astype(np.float64) @ w - batch["y"]
            losses.append((error**2).mean())
            momentum = 0.9 * momentum + 2 * batch["x"].T @ error / 16
            w = w - 0.05 * momentum
    return w, losses


def test_training_equals_training_by_hand(strategy, trained_by_hand):
    weights, losses = _trained(strategy)

    expected_weights, expected_losses = trained_by_hand
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-4)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
