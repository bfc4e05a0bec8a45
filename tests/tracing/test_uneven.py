"""Batches that do not divide by the number of replicas: exact, whatever the step does."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distributary as dist
from distributary.errors import ReplicaDivergenceError, ReplicaMismatchError, UnsupportedError

SUM, MEAN = dist.VariableAggregation.SUM, dist.VariableAggregation.MEAN
ON_READ = dist.VariableSynchronization.ON_READ


def _all_reduce(op, value):
    return dist.get_replica_context().all_reduce(op, value)


def _all_gather(value, axis=0):
    return dist.get_replica_context().all_gather(value, axis)


def _replica_id():
    return dist.get_replica_context().replica_id_in_sync_group


@pytest.fixture
def run(strategy_of):
    """Calls a step with parts of the given sizes, rows counted from 1; a result per replica."""

    def call(step, sizes, strategy=None):
        strategy = strategy or strategy_of(len(sizes))
        parts, start = [], 1
        for size in sizes:
            parts.append(np.arange(start, start + size, dtype=np.float32))
            start += size
        result = strategy.run(step, (dist.PerReplica(parts),))
        return strategy.experimental_local_results(result)

    return call


# A whole training step against a model in NumPy


class _Model:
    """A linear model with everything a step does, under one strategy."""

    def __init__(self, num_replicas):
        self.num_replicas = num_replicas
        self.strategy = dist.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
        with self.strategy.scope():
            self.weights = dist.Variable(jnp.zeros(2))
            self.moving_mean = dist.Variable(jnp.zeros(2), trainable=False, aggregation=MEAN)
            self.total = dist.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
            self.count = dist.Variable(0, synchronization=ON_READ, aggregation=SUM)

    def step(self, x, y, global_batch_size):
        with dist.GradientTape() as tape:
            prediction = x @ self.weights.value()
            loss = jnp.sum((prediction - y) ** 2) / global_batch_size
            mean = jnp.sum(x, 0) / max(x.shape[0], 1)
            self.moving_mean.assign(0.9 * self.moving_mean + 0.1 * mean)
        gradient = tape.gradient(loss, self.weights)
        self.weights.assign_sub(0.1 * _all_reduce("SUM", gradient))
        self.total.assign_add(jnp.sum(y))
        self.count.assign_add(x.shape[0])
        return loss, prediction, _all_gather(prediction)


_model = functools.cache(_Model)


def _parts(rows, num_replicas):
    small, larger = divmod(len(rows), num_replicas)
    starts = [i * small + min(i, larger) for i in range(num_replicas + 1)]
    return [rows[a:b] for a, b in itertools.pairwise(starts)]


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(
    num_rows=st.integers(0, 9), num_replicas=st.integers(1, 4), seed=st.integers(0, 99)
)
def test_a_training_step_equals_a_model_of_the_same_split(num_rows, num_replicas, seed):
    model = _model(num_replicas)
    random = np.random.default_rng(seed)
    x = random.normal(size=(num_rows, 2)).astype(np.float32)
    y = random.normal(size=num_rows).astype(np.float32)
    weights = random.normal(size=2).astype(np.float32)
    model.weights.assign(weights)
    for variable in (model.moving_mean, model.total, model.count):
        variable.assign(np.zeros_like(variable.numpy()))
    (batch,) = model.strategy.experimental_distribute_dataset([(x, y)])

    loss, prediction, gathered = model.strategy.run(model.step, (*batch, float(max(num_rows, 1))))

    expected = x @ weights
    error = expected - y
    means = [part.sum(0) / max(len(part), 1) for part in _parts(x, num_replicas)]
    gradient = 2 * x.T @ error / max(num_rows, 1)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(model.strategy.reduce("SUM", loss, None), (error**2).sum() / max(num_rows, 1))
    close(model.strategy.gather(prediction, 0), expected)
    for copy in model.strategy.experimental_local_results(gathered):
        close(copy, expected)
    close(model.weights.numpy(), weights - 0.1 * gradient)
    close(model.moving_mean.numpy(), 0.1 * np.mean(means, 0))
    close(model.total.numpy(), y.sum())
    assert model.count.numpy() == num_rows


# Number of rows and of the replica


def _number_of_rows(x):
    number = x.shape[0]
    return (
        _all_reduce("SUM", number),
        _all_reduce("MEAN", number),
        _all_reduce("SUM", jnp.asarray(number)),
        _all_reduce("SUM", np.float32(number)),
        _all_gather(np.array([number])),
    )


def _replica_id_everywhere(x):
    def in_scan(carry, _):
        return carry + _replica_id(), _replica_id()

    return (
        *(_replica_id(), lax.axis_index("replica")),
        lax.scan(in_scan, 0, None, length=2),
        lax.fori_loop(0, 3, lambda i, a: a + _replica_id(), 0),
        lax.cond(_replica_id() > 0, lambda: 10, lambda: 20),
        jax.jit(lambda: _replica_id() + 100)(),
    )


def _mean_of_large_numbers(x):
    return _all_reduce("MEAN", 3e38 + 0 * x.sum())


def _nested_jit(x):
    total = jax.jit(_sum_of_all)
    return jax.jit(lambda x: (total(x) + total(2 * x), _all_gather(x)))(x)


def _scan_with_a_varying_carry(x):
    def body(carry, _):
        carry = carry + _sum_of_all(x) + _replica_id()
        return carry, carry

    return lax.scan(body, 0.0, None, length=2)


def _loops_conditions_and_branches(x):
    add = lambda state: (state[0] + 1, state[1] + _sum_of_all(x))
    small = lambda total: _all_reduce("SUM", total) < 50.0
    return (
        lax.while_loop(lambda state: state[1] < 20.0, add, (0, 0.0)),
        lax.while_loop(small, lambda total: total * 2.0, jnp.sum(x)),
        lax.cond(_sum_of_all(x) > 5.0, lambda: _all_reduce("MEAN", jnp.max(x)), lambda: 0.0),
    )


def _lax_collectives(x):
    total = jnp.sum(x)
    part = lax.psum_scatter(jnp.stack([total, 10 * total]), "replica", tiled=True)
    return (
        *(lax.pmax(total, "replica"), lax.pmin(total, "replica")),
        *(lax.all_gather(total, "replica"), part),
    )


# Rows 1, 2, 3 on replica 0 and 4 on replica 1; the results of replica i.
_STEPS = {
    _number_of_rows: lambda i: (4, 2, 4, 4, [3, 1]),
    _replica_id_everywhere: lambda i: (i, i, (2 * i, [i, i]), 3 * i, 10 if i else 20, 100 + i),
    _mean_of_large_numbers: lambda i: np.float32(3e38),
    _nested_jit: lambda i: (30, [1, 2, 3, 4]),
    _scan_with_a_varying_carry: lambda i: (20 + 2 * i, [10 + i, 20 + 2 * i]),
    _loops_conditions_and_branches: lambda i: ((2, 20), [48, 32][i], 3.5),
    _lax_collectives: lambda i: (6, 4, [6, 4], [[10], [100]][i]),
}


def test_numbers_of_rows_and_replicas_and_collectives_in_control_flow(run):
    results = run(lambda x: [step(x) for step in _STEPS], (3, 1))

    for i, result in enumerate(results):
        for (step, expected), found in zip(_STEPS.items(), result, strict=True):
            leaf = lambda x: not isinstance(x, tuple)
            wanted = jax.tree.leaves(expected(i), is_leaf=leaf)
            for one, other in zip(jax.tree.leaves(found), wanted, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=step.__name__)


def test_one_jitted_function_serves_even_and_uneven_batches(strategy_of):
    total = jax.jit(lambda x: _all_reduce("SUM", jnp.sum(x)) + _all_reduce("SUM", x.shape[0]))
    strategies = {n: strategy_of(n) for n in (1, 2, 3)}
    for num_replicas, size in [(2, 4), (2, 3), (3, 3), (1, 3), (3, 4), (2, 5), (2, 4)]:
        strategy = strategies[num_replicas]
        (batch,) = strategy.experimental_distribute_dataset([np.ones(size, np.float32)])

        result = strategy.run(lambda x: total(x), (batch,))

        assert strategy.experimental_local_results(result) == (2.0 * size,) * num_replicas


def test_inside_checkpoint_under_a_tape_with_arguments_of_every_kind(strategy, variable):
    v, rows = variable(2.0), np.array([1.0, 2.0, 3.0], np.float32)
    uneven, even = dist.PerReplica([rows[:2], rows[2:]]), dist.PerReplica([10.0, 20.0])

    def step(x, nest, shared, scale):
        with dist.GradientTape() as tape:
            loss = jax.checkpoint(lambda x: _all_reduce("SUM", jnp.sum(jnp.sin(x * v))))(x)
        return _all_reduce("MEAN", tape.gradient(loss, v)), nest["even"] + shared * scale

    args = uneven, {"even": even}, jnp.float32(100.0)
    gradients, own = strategy.run(step, args, {"scale": 2.0})

    expected = (rows * np.cos(2.0 * rows)).sum()
    np.testing.assert_allclose(gradients.values, [expected] * 2, rtol=1e-5)
    assert own.values == (210.0, 220.0)


# State


@pytest.mark.parametrize("sizes", [(3,), (1, 0, 2)])
def test_axis_of_vmap_is_no_axis_of_replicas(sizes, run):
    def step(rows):
        own = jax.vmap(lambda x: lax.psum(x, "rows"), axis_name="rows")(rows)
        of_all = jax.vmap(lambda x: lax.psum(x, ("rows", "replica")), axis_name="rows")(rows)
        largest = lax.pmax(jnp.append(rows, 0.0), (0, "replica"))
        return own, of_all, largest, lax.pmax(rows, ())

    results = run(step, sizes)

    total, start = sum(range(1, sum(sizes) + 1)), 1
    for size, (own, of_all, largest, same) in zip(sizes, results, strict=True):
        rows = np.arange(start, start + size)
        start += size
        np.testing.assert_array_equal(own, np.full(size, rows.sum()))
        np.testing.assert_array_equal(of_all, np.full(size, total))
        assert largest == sum(sizes)
        np.testing.assert_array_equal(same, rows)


@pytest.mark.parametrize(
    "value",
    [
        lambda x: jnp.float32(x.shape[0]),
        lambda x: _replica_id().astype(jnp.float32),
        lambda x: jnp.sum(jnp.ones(x.shape[0])),
        lambda x: jnp.float32(sum(range(x.shape[0]))) * 0.5,
        lambda x: jax.jit(lambda: jnp.asarray(np.arange(x.shape[0]), jnp.float32).sum())(),
        lambda x: lax.fori_loop(0, x.shape[0], lambda i, a: a * 2.0, 1.0),
        lambda x: jnp.sum(x),
        lambda x: lax.cond(x.shape[0] > 1, lambda: 1.0, lambda: 2.0),
    ],
    ids=["rows", "id", "ones", "python", "constant", "loop", "data", "branch"],
)
def test_what_differs_between_the_replicas_may_not_be_assigned(value, strategy, variable, run):
    v = variable(0.0, name="v")

    with pytest.raises(ReplicaDivergenceError, match="'v' is mirrored, but the value assigned"):
        run(lambda x: v.assign(value(x)), (2, 1), strategy)
    assert v.numpy() == 0.0


# What cannot be right


def _gathers_in_one_jit(x):
    # JAX keeps the traced function by the shapes of one replica, which say too little.
    gather = jax.jit(_all_gather)
    return gather(x), gather(x[:1])


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x: _all_reduce("MEAN", x), r"replica 1 has shape \(1,\).*one entry per example"),
        (lambda x: _sum_of_all(x) if len(x) > 1 else jnp.sum(x), "do not run the same collectives"),
        (lambda x: _all_gather(x) if len(x) > 1 else x, "do not call all_gather equally often"),
        (lambda x: x if len(x) > 1 else (x, x), "returns 2 arrays on replica 1 and 1 on"),
        (
            lambda x: lax.scan(lambda c, row: (c + _all_reduce("SUM", row), None), 0.0, x)[0],
            r"has lengths \[2, 1\] on the replicas",
        ),
        (_gathers_in_one_jit, r"one jax\.jit function with all_gather"),
        (lambda x: x.shape[0], r"the Python values \[2\] on one replica and \[1\] on another"),
    ],
    ids=["per example", "collective", "gather", "result", "scan over rows", "jit", "number"],
)
def test_steps_that_depend_on_the_number_of_rows_are_refused(step, message, run):
    with pytest.raises(ReplicaMismatchError, match=message):
        run(step, (2, 1))


def test_an_assignment_that_depends_on_the_number_of_rows_is_refused(strategy, variable, run):
    v = variable(0.0, name="v", aggregation=SUM)

    def step(x):
        if len(x) > 1:
            v.assign_add(x.sum())

    with pytest.raises(ReplicaMismatchError, match="'v' is assigned on some replicas"):
        run(step, (2, 1), strategy)


def _sum_of_all(x):
    return _all_reduce("SUM", jnp.sum(x))


@pytest.mark.parametrize(
    ("collective", "message"),
    [
        (lambda x: lax.ppermute(x, "replica", [(0, 1), (1, 0)]), "on an uneven batch"),
        (lambda x: lax.psum(x, "replica", axis_index_groups=[[0], [1]]), "on an uneven batch"),
        (
            lambda x: lax.cond(x > 2, lambda: lax.axis_index("replica"), lambda: 0),
            "replica_id_in_sync_group",
        ),
    ],
    ids=["ppermute", "groups", "axis_index in a branch"],
)
def test_other_collectives(collective, message, run):
    with pytest.raises(UnsupportedError, match=message):
        run(lambda x: collective(jnp.sum(x)), (2, 1))
