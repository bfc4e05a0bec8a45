"""Variables of one's own of which every device holds a part, also those with the state of optax."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distributary as dist

_RANDOM = np.random.default_rng(2)
_X = _RANDOM.normal(size=(22, 40)).astype(np.float32)  # with batches of 8, the last one is uneven
_WEIGHTS = {
    "inner": _RANDOM.normal(size=(40, 17), scale=0.1).astype(np.float32),
    "outer": _RANDOM.normal(size=(17, 40), scale=0.1).astype(np.float32),
    "bias": np.zeros(40, np.float32),
}


def _strategy(num_replicas):
    devices = [f"CPU:{i}" for i in range(num_replicas)]
    return dist.MirroredStrategy(devices, experimental_shard_parameters=True)


def _loss(weights, x):
    predicted = jnp.tanh(x @ weights["inner"]) @ weights["outer"] + weights["bias"]
    return jnp.sum((predicted - x) ** 2) / 8


def test_optax_takes_the_steps_of_one_device():
    optimizer, num_replicas = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01)), 3
    strategy, batches = _strategy(num_replicas), [_X[:8], _X[8:16], _X[16:]]
    with strategy.scope():
        variables = jax.tree.map(dist.Variable, (_WEIGHTS, optimizer.init(_WEIGHTS)))

    def step(x):
        weights, state = jax.tree.map(lambda v: v.value(), variables)
        gradients = jax.grad(_loss)(weights, x)
        gradients = dist.get_replica_context().all_reduce("SUM", gradients)
        updates, state = optimizer.update(gradients, state, weights)
        after = optax.apply_updates(weights, updates), state
        jax.tree.map(lambda v, value: v.assign(value), variables, after)

    for batch in strategy.experimental_distribute_dataset(batches):
        strategy.run(step, args=(batch,))

    weights, state = _WEIGHTS, optimizer.init(_WEIGHTS)
    for x in batches:
        updates, state = optimizer.update(jax.grad(_loss)(weights, x), state, weights)
        weights = optax.apply_updates(weights, updates)
    pairs = zip(jax.tree.leaves(variables), jax.tree.leaves((weights, state)), strict=True)
    num_divided = 0
    for variable, expected in pairs:
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-4, atol=1e-6)
        if expected.nbytes >= 1024:
            num_divided += 1
            assert not variable.sharding.is_fully_replicated
            part = variable.sharding.shard_shape((42, 42))
            assert np.prod(part) * num_replicas == 42 * 42
        else:
            assert variable.sharding.is_fully_replicated
    assert num_divided >= 4


def test_a_variable_is_read_and_assigned_as_a_whole():
    strategy, start = _strategy(3), _WEIGHTS["inner"]
    with strategy.scope():
        variable = dist.Variable(start)
    copied = copy.deepcopy(variable)
    before = variable.value()

    variable.assign_add(np.ones_like(start))
    variable.scatter_sub(dist.IndexedSlices(np.full((1, 17), 3, np.float32), np.array([39])))

    expected = start + 1
    expected[39] -= 3
    for value in (variable.numpy(), variable * 1, *(v.numpy() for v in variable.values)):
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    for value in (before, copied.numpy()):
        np.testing.assert_array_equal(value, start)
    variable.assign(start)
    np.testing.assert_array_equal(variable.value(), start)
    assert not variable.sharding.is_fully_replicated
    assert not copied.sharding.is_fully_replicated


def test_an_algorithm_for_gradients_in_parts_is_refused_by_its_type():
    with pytest.raises(ValueError, match="cross_device_ops is a NcclAllReduce, but with"):
        dist.MirroredStrategy(
            ["CPU:0", "CPU:1"], dist.NcclAllReduce(), experimental_shard_optimizer_state=True
        )


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_replicas_assign_what_their_aggregation_says(aggregation):
    strategy = _strategy(2)
    with strategy.scope():
        variable = dist.Variable(
            jnp.zeros((16, 16)), aggregation=dist.VariableAggregation[aggregation]
        )

    def step():
        replica = dist.get_replica_context().replica_id_in_sync_group
        variable.assign_add(jnp.full((16, 16), 1.0 + replica))

    strategy.run(step)

    expected = {"SUM": 3.0, "MEAN": 1.5, "ONLY_FIRST_REPLICA": 1.0}[aggregation]
    np.testing.assert_array_equal(variable.numpy(), np.full((16, 16), expected))


def test_a_value_read_while_another_thread_runs_steps_is_of_one_step():
    strategy = _strategy(2)
    with strategy.scope():
        variable = dist.Variable(np.zeros(300, np.float32))
    is_over = threading.Event()

    def read_on():
        seen = []
        while not is_over.is_set():
            seen.append(variable.numpy())
        return seen

    def step():
        variable.assign_add(np.ones(300, np.float32))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_on)
        try:
            for _ in range(1000):
                strategy.run(step)
        finally:
            is_over.set()

    seen = [set(value) for value in reading.result()]
    assert len(seen) > 1
    assert {len(values) for values in seen} == {1}


def test_a_step_on_an_uneven_batch_returns_whole_values_of_each_replica():
    strategy, y = _strategy(2), np.arange(95, dtype=np.float32).reshape(19, 5)
    with strategy.scope():
        variable = dist.Variable(np.arange(300, dtype=np.float32))

    def step(y):
        gradient = dist.grad(lambda: jnp.sum((variable.value()[:5] - y) ** 2), variable)()
        total = dist.get_replica_context().all_reduce("SUM", gradient)
        return variable.value(), gradient, total, variable.value()[: y.shape[0]]

    (batch,) = strategy.experimental_distribute_dataset([y])
    results = strategy.run(step, args=(batch,))

    parts = y[:10], y[10:]
    expected = [np.pad(np.sum(2 * (np.arange(5) - part), 0), (0, 295)) for part in parts]
    whole = np.arange(300, dtype=np.float32)
    for result, values in zip(
        results,
        ([whole] * 2, expected, [sum(expected)] * 2, [whole[:10], whole[:9]]),
        strict=True,
    ):
        own = strategy.experimental_local_results(result)
        assert len(own) == 2
        for value, wanted in zip(own, values, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-6)


def test_only_floats_with_one_value_are_in_parts_and_restored_so(tmp_path):
    with _strategy(4).scope():
        numbers = dist.Variable(jnp.zeros(1024, jnp.int32))
        summed = dist.Variable(
            np.ones((40, 17), np.float32),
            synchronization=dist.VariableSynchronization.ON_READ,
            aggregation=dist.VariableAggregation.SUM,
        )
        whole = dist.Variable(np.zeros((40, 17), np.float32))
    path = dist.checkpoint.Checkpoint(v=summed).save(tmp_path / "summed")

    dist.checkpoint.Checkpoint(v=whole).restore(path)

    assert numbers.sharding.is_fully_replicated
    assert not whole.sharding.is_fully_replicated
    for value in (summed, whole):
        np.testing.assert_array_equal(value.numpy(), np.full((40, 17), 4.0))


def test_a_function_of_the_whole_program_trains_parts():
    strategy = _strategy(2)
    with strategy.scope():
        variable = dist.Variable(_WEIGHTS["inner"])

    def step(x):
        gradient = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(variable.value())
        variable.assign_sub(0.01 * dist.get_replica_context().all_reduce("SUM", gradient))

    @dist.function
    def steps(x):
        for _ in range(2):
            strategy.run(step, args=(x,))
        return variable.value().sum()

    total = steps(jnp.asarray(_X[:4]))

    expected = _WEIGHTS["inner"]
    for _ in range(2):
        expected = expected - 0.04 * _X[:4].T @ (_X[:4] @ expected)
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-3, atol=1e-3)
    assert not variable.sharding.is_fully_replicated


_IDS = _RANDOM.integers(0, 4096, (3, 16, 2)).astype(np.int32)
_IDS[:, ::4, 0] = 7  # examples of several replicas have it
_IDS[:, 0] = 5000, -9000  # no rows of the table
_AIMS = _RANDOM.normal(size=(3, 16, 2, 11)).astype(np.float32)


def _table_after(table, mode, momentum):
    """Returns the table after three steps, by NumPy."""
    table, change = table.astype(np.float64), np.zeros(table.shape)
    for ids, aims in zip(_IDS, _AIMS, strict=True):
        known = np.clip(ids, 0, len(table) - 1)
        is_there = (ids == known) | (mode == "clip")
        error = (table[known] - aims[..., : table.shape[1]]) * is_there[..., None]
        gradient = np.zeros(table.shape)
        np.add.at(gradient, known, 2 / 16 * error)
        change = momentum * change + gradient
        table = table - 0.1 * change
    return table


@pytest.mark.parametrize(
    ("shape", "mode", "momentum"),
    [((4096, 8), "clip", 0.9), ((4097, 11), "fill", 0), ((4097, 8), "fill", 0.9)],
    ids=["rows", "padded rows", "columns"],
)
def test_only_rows_of_a_table_travel(shape, mode, momentum):
    strategy, initial = _strategy(4), _RANDOM.normal(size=shape).astype(np.float32)
    with strategy.scope():
        table, change = dist.Variable(initial), dist.Variable(np.zeros(shape, np.float32))

    def step(ids, aims):
        def loss():
            # A negative id counts from the end, unless it is out of range even so.
            found = jnp.take(table.value(), ids, axis=0, mode=mode)
            return jnp.sum(jnp.nan_to_num(found - aims[..., : shape[1]]) ** 2) / 16

        gradient = dist.get_replica_context().all_reduce("SUM", dist.grad(loss, table)())
        change.assign(momentum * change.value() + gradient)
        table.assign_sub(0.1 * change.value())

    for batch in strategy.experimental_distribute_dataset(list(zip(_IDS, _AIMS, strict=True))):
        strategy.run(step, args=batch)

    np.testing.assert_allclose(table.numpy(), _table_after(initial, mode, momentum), atol=1e-5)
    found = strategy.step_statistics
    assert 0 < found.collective_bytes / found.num_runs < initial.nbytes / 8


_TABLE = _RANDOM.normal(size=(4096, 10), scale=10).astype(np.float32)
_BYTES = _RANDOM.integers(0, 256, (16, 2)).astype(np.uint8)
_MANY = np.full((16, 40), 7, np.int32)  # so many terms that narrow floats do not count them
# Lookups of `table` by `ids`, whose sum over the examples is the loss.
_LOOKUPS = {
    "in half precision": (_MANY, lambda t, ids: t.astype(jnp.bfloat16)[ids].astype(jnp.float32)),
    "rounded": (_IDS[0], lambda t, ids: t.astype(jnp.bfloat16).astype(jnp.float32)[ids]),
    "ids of bytes": (_BYTES, lambda t, ids: jnp.take(t, ids, axis=0)),
    "ids past the end": (_BYTES * np.int32(20), lambda t, ids: t[ids]),
    "some rows": (_BYTES, lambda t, ids: t[10:300][ids]),
    "some columns": (_BYTES, lambda t, ids: t[:, 2:][ids]),
    "twice": (_BYTES, lambda t, ids: t[ids] * jnp.take(t, ids[:, ::-1] + 3, axis=0)),
    "every second row": (_BYTES, lambda t, ids: t[::2][ids]),
}


@pytest.mark.parametrize("name", _LOOKUPS)
def test_lookups_of_every_kind_are_those_of_a_whole_table(name):
    ids, lookup = _LOOKUPS[name]

    def after_a_step(strategy):
        with strategy.scope():
            table, gradient = dist.Variable(_TABLE), dist.Variable(np.zeros_like(_TABLE))

        def step(ids):
            def loss():
                return jnp.sum(lookup(table.value(), ids)) / 16

            value, own = dist.value_and_grad(loss, table)()
            total, own = dist.get_replica_context().all_reduce("SUM", (value, own))
            gradient.assign(2 * own)
            table.assign_sub(0.1 * own)
            return total

        (batch,) = strategy.experimental_distribute_dataset([(ids,)])
        (total, *_) = strategy.experimental_local_results(strategy.run(step, args=batch))
        return np.asarray(total), table.numpy(), gradient.numpy()

    reference = dist.OneDeviceStrategy("CPU:0")
    if name == "in half precision":  # one device adds all of its terms in this dtype
        reference = dist.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    for value, expected in zip(after_a_step(_strategy(4)), after_a_step(reference), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
