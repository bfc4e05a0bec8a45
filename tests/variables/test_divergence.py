"""Copies of a mirrored variable cannot drift apart: such a step is refused when it is traced."""

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distributary as dist
from distributary.errors import ContextError, ReplicaDivergenceError, UnsupportedError

ON_READ = dist.VariableSynchronization.ON_READ
SUM = dist.VariableAggregation.SUM


def _context():
    return dist.get_replica_context()


def _replica_id():
    return _context().replica_id_in_sync_group * 1.0


# Ways to write a value x to a variable v


def _while_loop_by_condition(v, x):
    def body(i):
        v.assign_add(1.0)
        return i + 1

    lax.while_loop(lambda i: i < x, body, 0.0)


def _scan_in_jit_in_cond(v, x):
    scan = jax.jit(lambda y: lax.scan(lambda c, s: (c, v.assign_add(s)), 0.0, y * jnp.ones(2))[0])
    lax.cond(v.value() > 0, scan, lambda y: y, x)


def _through_another_variable(v, x):
    with_sum = jnp.stack([v.value(), x]).sum()
    v.assign(with_sum)
    v.assign(v * 2)


WRITES = {
    "assign": lambda v, x: v.assign(x),
    "scan over values": lambda v, x: lax.scan(
        lambda c, step: (c, v.assign_add(step)), 0.0, x * jnp.arange(3.0)
    ),
    "scan with carry": lambda v, x: lax.scan(
        lambda c, step: (c + x, v.assign_add(c)), 0.0, None, length=3
    ),
    "cond by operand": lambda v, x: lax.cond(
        v.value() > 0, lambda y: v.assign(y), lambda y: v.assign_add(1.0), x
    ),
    "cond by predicate": lambda v, x: lax.cond(x > 0, lambda: v.assign(1.0), lambda: v.assign(2.0)),
    "switch": lambda v, x: lax.switch(
        x.astype(jnp.int32), [lambda: v.assign(0.0), lambda: v.assign(1.0)]
    ),
    "while loop by condition": _while_loop_by_condition,
    "jit": lambda v, x: jax.jit(lambda y: v.assign(y))(x),
    "checkpoint": lambda v, x: jax.checkpoint(lambda y: v.assign(y))(x),
    "scan in jit in cond": _scan_in_jit_in_cond,
    "through another variable": _through_another_variable,
    "update": lambda v, x: v.distribute_strategy.extended.update(v, lambda v, y: v.assign(y), (x,)),
}


def _name(function):
    return function.__name__.strip("_")


@pytest.fixture
def mirrored(variable):
    return variable(1.0, name="w")


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_value_that_differs_between_replicas_is_refused(write, mirrored, strategy):
    with pytest.raises(
        ReplicaDivergenceError,
        match=r"'w' is mirrored, but the value assigned to it at .*test_divergence\.py:\d+ can",
    ):
        strategy.run(lambda: write(mirrored, _replica_id()))

    assert mirrored.numpy() == 1.0


def test_reduced_values_are_written_alike_on_all_replicas(strategy_of):
    def written(strategy, value_of):
        with strategy.scope():
            variables = [dist.Variable(1.0) for _ in WRITES]

        def step():
            for write, variable in zip(WRITES.values(), variables, strict=True):
                write(variable, value_of())

        strategy.run(step)
        return [strategy.experimental_local_results(v) for v in variables]

    both = written(strategy_of(2), lambda: _context().all_reduce("sum", _replica_id()))
    alone = written(dist.OneDeviceStrategy("CPU:0"), lambda: jnp.float32(1.0))

    for name, copies, (expected,) in zip(WRITES, both, alone, strict=True):
        assert [float(c.numpy()) for c in copies] == [expected.numpy()] * 2, name


# Where a difference comes from


def _from_own_part_of_a_gather(x, local):
    everything = _context().all_gather(x[None], 0)
    return everything[_context().replica_id_in_sync_group]


def _from_reference_written_in_a_loop(x, local):
    reference = jax.new_ref(jnp.float32(0))

    def add(carry, _):
        reference[...] += x
        return carry, None

    lax.scan(add, 0.0, None, length=2)
    return jax.freeze(reference)


def _from_ragged_all_to_all(x, local):
    one_each, numbers = jnp.ones(2, jnp.int32), jnp.arange(2)
    return lax.ragged_all_to_all(
        x * jnp.ones(2), jnp.zeros(2), numbers, one_each, numbers, one_each, axis_name="replica"
    ).sum()


DIFFERENT = {
    "replica id": lambda x, local: _replica_id(),
    "argument": lambda x, local: x,
    "on read variable": lambda x, local: local[0],
    "own part of a gather": _from_own_part_of_a_gather,
    "scattered sum": lambda x, local: lax.psum_scatter(jnp.ones(2), "replica"),
    "host callback": lambda x, local: jax.pure_callback(
        lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32)
    ),
    "function of another library": lambda x, local: jax.ffi.ffi_call(
        "nobody_registered_it", jax.ShapeDtypeStruct((), jnp.float32)
    )(),
    "random numbers of the device": lambda x, local: lax.rng_uniform(
        jnp.float32(0), jnp.float32(1), ()
    ),
    "memory nobody wrote": lambda x, local: lax.empty((), jnp.float32),
    "reference written in a loop": _from_reference_written_in_a_loop,
    "sum over an axis of vmap": lambda x, local: jax.vmap(
        lambda y: lax.psum(y * x, "rows"), axis_name="rows"
    )(jnp.ones(3))[0],
    "sum over a dim": lambda x, local: lax.psum(x * jnp.ones(3), (0,)),
    "sum of each group": lambda x, local: lax.psum(x, "replica", axis_index_groups=[[0], [1]]),
    "permutation": lambda x, local: lax.ppermute(x, "replica", [(0, 1), (1, 0)]),
    "all to all": lambda x, local: lax.all_to_all(x * jnp.arange(2.0), "replica", 0, 0).sum(),
    "ragged all to all": _from_ragged_all_to_all,
    "merge call": lambda x, local: _context().merge_call(lambda strategy, y: y, (x,)),
}


def _of_sum(x, local):
    return _context().all_reduce("sum", x)


def _of_psum_over_an_axis_of_vmap_too(x, local):
    sums = jax.vmap(lambda y: lax.psum(y * x, ("rows", "replica")), axis_name="rows")(jnp.ones(3))
    return sums[0]


def _of_gradient_of_a_branch(x, local):
    total = lax.psum(x, "replica")
    return jax.grad(lambda y: lax.cond(y > 0, lambda z: z * z, lambda z: z, y))(total)


EQUAL = {
    "constant": lambda x, local: 3.0,
    "sum": _of_sum,
    "mean": lambda x, local: _context().all_reduce("mean", local[1]),
    "gather": lambda x, local: _context().all_gather(x[None], 0).max(),
    "psum": lambda x, local: lax.psum(x, "replica"),
    "psum over an axis of vmap too": _of_psum_over_an_axis_of_vmap_too,
    "largest": lambda x, local: lax.pmax(x, "replica") + lax.pmin(x, "replica"),
    "gradient of a branch": _of_gradient_of_a_branch,
    "reduce in merge call": lambda x, local: _context().merge_call(
        lambda strategy, y: strategy.reduce("sum", y, axis=None), (x,)
    ),
    "on read variable in merge call": lambda x, local: _context().merge_call(
        lambda strategy: local[0]
    ),
    "random numbers": lambda x, local: jax.random.uniform(jax.random.key(0)),
    "loop": lambda x, local: lax.fori_loop(0, 3, lambda i, c: c + _of_sum(x, local), 0.0),
}


@pytest.fixture
def run_with(strategy, variable):
    """Assigns what functions compute from an argument and a variable that differ."""
    local = variable([1.0, 2.0], synchronization=ON_READ, aggregation=SUM)

    def run(*functions):
        variables = [variable(1.0, name="w") for _ in functions]

        def step(x):
            for v, compute in zip(variables, functions, strict=True):
                v.assign(compute(x, local), read_value=False)

        strategy.run(step, (dist.PerReplica([jnp.float32(1), jnp.float32(2)]),))
        return variables

    return run


@pytest.mark.parametrize("compute", DIFFERENT.values(), ids=DIFFERENT)
def test_every_source_of_difference_is_seen(compute, run_with):
    with pytest.raises(ReplicaDivergenceError, match="'w' is mirrored"):
        run_with(compute)


def test_equal_values_are_accepted(run_with):
    for name, v in zip(EQUAL, run_with(*EQUAL.values()), strict=True):
        copies = [float(c.numpy()) for c in v.values]
        assert copies[0] == copies[1] != 1.0, name


def test_arguments_all_replicas_share_are_equal(mirrored, strategy):
    shared = strategy.extended.update(mirrored, lambda v: v.assign(2.0))

    def step(array, mirrored_value, number, plain):
        mirrored.assign(array + mirrored_value + number + plain)

    strategy.run(step, (np.float32(1), shared, 3.0, dist.Variable(4.0)))

    assert mirrored.numpy() == 1 + 2 + 3 + 4


def test_difference_outside_of_run_is_refused(mirrored, strategy):
    per_replica = dist.PerReplica([jnp.float32(1), jnp.float32(2)])

    def step():
        mirrored.assign(_replica_id())

    line = step.__code__.co_firstlineno + 1

    @dist.function
    def epoch():
        strategy.run(lambda: mirrored.assign(1.0))
        strategy.run(step)

    with pytest.raises(ReplicaDivergenceError, match=rf"'w' is.*test_divergence\.py:{line} can"):
        epoch()
    with pytest.raises(ReplicaDivergenceError, match=r"'w' is mirrored.*test_divergence\.py:\d+"):
        strategy.extended.update(mirrored, lambda v, x: v.assign(x), (per_replica,))

    assert mirrored.numpy() == 1.0


def test_difference_written_by_a_helper_whose_trace_jax_kept_is_refused(mirrored, strategy):
    helper = jax.jit(lambda x: mirrored.assign(x))

    strategy.run(lambda: helper(_context().all_reduce("sum", _replica_id())))
    with pytest.raises(ReplicaDivergenceError, match="'w' is mirrored"):
        strategy.run(lambda: helper(_replica_id()))

    assert mirrored.numpy() == 1.0


# Collectives that distributary does not know


_swap = jex_core.Primitive("swap_with_neighbor")
_swap.def_abstract_eval(lambda x, **params: x)


def _swapped_in_a_scan(x):
    return lax.scan(lambda c, _: (_swap.bind(c, axes=("replica",)), None), x, None, length=2)[0]


def _swapped_in_a_branch(x):
    return lax.cond(True, lambda y: _swap.bind(y, axis=("replica",)), lambda y: y, x)


_of_effects = jex_core.Primitive("swap_by_effect")


@_of_effects.def_effectful_abstract_eval
def _effects_of_a_sum(x):
    summing = jax.make_jaxpr(lambda x: lax.psum(x, "replica"), axis_env=[("replica", 2)])(1.0)
    return x, summing.jaxpr.eqns[0].effects


def _sent(x):
    lax.psend(x, "replica", [(0, 0)])
    return x


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(
    ("collective", "name"),
    [
        (lambda x: _swap.bind(x, axis_name="replica"), "swap_with_neighbor"),
        (_swapped_in_a_scan, "swap_with_neighbor"),
        (_swapped_in_a_branch, "swap_with_neighbor"),
        (_of_effects.bind, "swap_by_effect"),
        (_sent, "psend"),
    ],
)
def test_unknown_collective_is_refused(collective, name, num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)

    with pytest.raises(
        UnsupportedError, match=rf"collective '{name}' at .*test_divergence\.py:\d+ is none"
    ):
        strategy.run(lambda: collective(_replica_id()))


# Collectives that not all replicas would reach


def _all_reduce(v):
    return _context().all_reduce("sum", jnp.float32(1.0))


def _all_gather(v):
    return _context().all_gather(jnp.ones(1), 0).sum()


def _assignment_with_aggregation(v):
    return v.assign(jnp.sqrt(v.value()))


def _merge_call(v):
    return _context().merge_call(lambda s, x: s.reduce("mean", x, axis=None), (jnp.float32(1.0),))


def _all_reduce_in_jit(v):
    return jax.jit(lambda: _all_reduce(v))()


COLLECTIVES = [
    _all_reduce,
    _all_gather,
    _assignment_with_aggregation,
    _merge_call,
    _all_reduce_in_jit,
]


def _in_cond(collective, v, x):
    return lax.cond(x > 0, lambda: collective(v), lambda: 0.0)


def _in_switch(collective, v, x):
    return lax.switch(x.astype(jnp.int32), [lambda: 0.0, lambda: collective(v)])


def _in_while_loop(collective, v, x):
    return lax.while_loop(lambda c: c < x, lambda c: c + collective(v), 0.0)


@pytest.mark.parametrize(
    ("control_flow", "collective"),
    [
        *[(_in_cond, collective) for collective in COLLECTIVES],
        (_in_switch, _all_reduce),
        (_in_while_loop, _all_reduce),
    ],
    ids=_name,
)
def test_collective_some_replicas_would_skip_is_refused(
    control_flow, collective, strategy, variable
):
    v = variable(1.0, aggregation=SUM)

    with pytest.raises(ContextError, match=r"collective .*control flow.*waiting forever"):
        strategy.run(lambda: control_flow(collective, v, _replica_id()))


# Replicas that are traced one by one have numbers of their own as constants.


@pytest.mark.parametrize("control_flow", [_in_cond, _in_switch, _in_while_loop], ids=_name)
@pytest.mark.parametrize("by_rows", [True, False])
def test_collective_some_replicas_would_skip_is_refused_where_each_is_traced(
    by_rows, control_flow, strategy, variable
):
    v = variable(1.0, aggregation=SUM)
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.ones(1 + (by_rows and context.replica_id_in_sync_group))
    )

    def step(x):
        number = len(x) - 1 if by_rows else [0, 1][int(_context().replica_id_in_sync_group)]
        return control_flow(_all_reduce, v, jnp.float32(number))

    with pytest.raises(ContextError, match=r"collective .*control flow.*waiting forever"):
        strategy.run(step, args=(rows,))


def _loop_with_a_sum(x):
    total = lambda c, _: (c + _context().all_reduce("sum", x.sum()), None)
    return lax.scan(total, 0.0, None, length=2)[0]


def _loop_until_the_sum_is_large(x):
    add = lambda c: c + _context().all_reduce("sum", x.sum())
    return lax.while_loop(lambda c: c < 10.0, add, 0.0)


def _branch_by_the_sum(x):
    total = _context().all_reduce("sum", x.sum())
    again = lambda: _context().all_reduce("sum", 2 * x.sum())
    return lax.cond(total > 100, lambda: total, again)


def _loop_over_rows_beside_a_sum(x):
    def body(carry, row):
        own, total = carry
        return (own + row, total + _context().all_reduce("sum", x.sum())), own

    return lax.scan(body, (x[0], 0.0), jnp.broadcast_to(x.sum(), 2))[0][1]


def test_sums_in_control_flow_of_an_uneven_batch_may_be_assigned(strategy, variable):
    expected = {
        _loop_with_a_sum: 6.0,
        _loop_until_the_sum_is_large: 12.0,
        _branch_by_the_sum: 6.0,
        _loop_over_rows_beside_a_sum: 6.0,
    }
    variables = {function: variable(0.0) for function in expected}
    rows = dist.PerReplica([jnp.ones(2), jnp.ones(1)])

    strategy.run(lambda x: [v.assign(function(x)) for function, v in variables.items()], (rows,))

    assert {function: v.numpy() for function, v in variables.items()} == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.scan(lambda c, _: (c + _sum(x) / len(x), None), 0.0, None, length=2)[0],
        lambda x: lax.scan(lambda c, _: (c + len(x), _sum(c)), 0.0, None, length=2)[0],
        lambda x: lax.scan(lambda c, _: (c + _sum(x), c * len(x)), 0.0, None, length=2)[1][1],
        lambda x: lax.scan(lambda c, _: (c[::-1], _sum(c[0])), _own(x), None, length=2)[0][0],
        lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + _sum(x), c[1]), _own(x))[1],
        lambda x: lax.cond(_sum(x) > 0, lambda: _sum(x) / len(x), lambda: 0.0),
    ],
)
def test_what_differs_in_control_flow_with_a_sum_may_not_be_assigned(function, strategy, variable):
    v = variable(0.0)
    rows = dist.PerReplica([jnp.ones(2), jnp.ones(1)])

    with pytest.raises(ReplicaDivergenceError, match="can differ between replicas"):
        strategy.run(lambda x: v.assign(function(x)), args=(rows,))


def _sum(x):
    return _context().all_reduce("sum", jnp.sum(x))


def _own(x):
    return 0.0, jnp.float32(len(x))


@pytest.mark.parametrize("control_flow", [_in_cond, _in_switch, _in_while_loop], ids=_name)
def test_collectives_all_replicas_reach_alike_are_accepted(control_flow, strategy, variable):
    v = variable(1.0, aggregation=SUM)

    def step(x):
        return [control_flow(collective, v, x) for collective in COLLECTIVES]

    results = strategy.run(step, (np.float32(1.0),))

    for collective, result in zip(COLLECTIVES, results, strict=True):
        expected = 1.0 if collective is _merge_call else 2.0
        assert [float(x) for x in result.values] == [expected, expected], _name(collective)


# Every value that a body assigns counts by itself


def _scanned(body):
    lax.scan(lambda c, _: (c, body()), 0.0, None, length=3)


def _scanned_twice(body):
    lax.scan(lambda c, _: (c, _scanned(body)), 0.0, None, length=2)


def _while_small(body):
    lax.while_loop(lambda i: i < 3, lambda i: [body(), i + 1][1], 0)


def _branched(body):
    lax.cond(_sum(jnp.ones(1)) > 0, lambda: [body(), 0][1], lambda: 0)


def _rematerialized(body):
    jax.checkpoint(lambda x: [body(), x][1])(1.0)


_ROUNDS = {_scanned_twice: 6, _while_small: 3, _branched: 1, _rematerialized: 1}


@pytest.mark.parametrize("num_rows", [3, 1])
def test_what_a_body_makes_of_its_rows_does_not_count_for_its_other_assignments(
    num_rows, strategy, variable
):
    own = {"synchronization": ON_READ, "aggregation": SUM}
    variables = {
        repeated: (variable(0.0), variable(1.0), variable(0.0, **own), variable(0.0, **own))
        for repeated in _ROUNDS
    }

    def step(x):
        total = _sum(x)

        def body(count, average, metric, largest):
            metric.assign_add(jnp.sum(x))
            largest.assign(jnp.max(x, initial=metric.value()))
            average.assign(0.5 * average + 0.5 * total)
            count.assign_add(1.0)

        for repeated, assigned in variables.items():
            repeated(lambda assigned=assigned: body(*assigned))

    rows = np.arange(1, num_rows + 1, dtype=np.float32)
    strategy.run(step, args=(next(iter(strategy.experimental_distribute_dataset([rows]))),))

    for repeated, (count, average, metric, _) in variables.items():
        rounds = _ROUNDS[repeated]
        assert (count.numpy(), metric.numpy()) == (rounds, rounds * rows.sum()), _name(repeated)
        left = 0.5**rounds  # of the value at the start
        np.testing.assert_allclose(average.numpy(), left + (1 - left) * rows.sum(), rtol=1e-6)


def _through_another(x, own, v):
    lax.scan(lambda c, _: (c, [own.assign_add(len(x)), v.assign(own)][0]), 0.0, None, 2)


OF_OWN_ROWS = {
    "counted by rows": lambda x, own, v: lax.scan(
        lambda c, row: (c, [own.assign(row), v.assign_add(1.0)][0]), 0.0, x
    ),
    "of own rows": lambda x, own, v: lax.scan(
        lambda c, _: (c, [own.assign(len(x)), v.assign_add(len(x))][0]), 0.0, None, 2
    ),
    "through another": _through_another,
    "through another in a loop within": lambda x, own, v: lax.scan(
        lambda c, _: (c, _through_another(x, own, v)), 0.0, None, 2
    ),
    "while own rows": lambda x, own, v: lax.while_loop(
        lambda i: i < len(x), lambda i: [v.assign_add(1.0), i + 1][1], 0
    ),
    "of a decision": lambda x, own, v: lax.cond(
        own.value() > 1, lambda: [v.assign_add(1.0), 0][1], lambda: 0
    ),
}


@pytest.mark.parametrize("assign", OF_OWN_ROWS.values(), ids=OF_OWN_ROWS)
def test_what_a_body_assigns_from_its_own_rows_is_refused(assign, strategy, variable):
    v, own = variable(0.0, name="v"), variable(0.0, synchronization=ON_READ)
    rows = dist.PerReplica([jnp.ones(2), jnp.ones(1)])

    with pytest.raises(ReplicaDivergenceError, match="'v' is mirrored"):
        strategy.run(lambda x: assign(x, own, v), args=(rows,))


def test_what_a_branch_passes_on_is_not_of_the_decision(strategy, variable):
    v = variable(1.0)
    rows = dist.PerReplica([jnp.ones(2), jnp.full(2, 3.0)])

    def step(x):
        own, same = lax.cond(x[0] > 2, lambda w: (w * x[0], w), lambda w: (w, w), v.value())
        _, again = lax.while_loop(lambda c: c[0] < x[0], lambda c: (c[0] + 1, c[1]), (0.0, same))
        v.assign(again * 2)
        return own

    own = strategy.run(step, args=(rows,))

    assert [float(x) for x in own.values] == [1.0, 3.0]
    assert v.numpy() == 2.0
