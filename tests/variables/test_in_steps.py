"""Reading and assigning variables inside compiled steps, JAX control flow and transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distributary as dist
from distributary.errors import ContextError, UnsupportedError

ON_READ = dist.VariableSynchronization.ON_READ
SUM = dist.VariableAggregation.SUM
MEAN = dist.VariableAggregation.MEAN


# Control flow: each body reads and assigns a variable that starts as 1.


def _scan_in_reverse(v):
    def body(carry, x):
        v.assign(v * 2 + x)
        return carry, v.value()

    return lax.scan(body, 0.0, jnp.arange(3.0), reverse=True)[1]


def _while_loop(v):
    def body(count):
        v.assign(v * 2)
        return count + 1

    return lax.while_loop(lambda count: v.value() < 10, body, 0)


def _cond(v):
    first = lax.cond(v.value() > 0, lambda: v.assign(5.0), lambda: v.assign_sub(1.0))
    return first, lax.cond(v.value() < 0, lambda: v.assign(7.0), lambda: v.assign_sub(1.0))


def _cond_with_one_writing_branch(v):
    first = lax.cond(v.value() < 0, lambda: v.assign(5.0), lambda: v.value())
    return first, lax.cond(v.value() > 0, lambda: v.assign(5.0), lambda: v.value())


def _switch(v):
    branches = [lambda i=i: v.assign_add(10.0**i) for i in range(3)]
    return [lax.switch(i, branches) for i in jnp.array([2, 0, 1])]


def _nested_jit(v):
    @jax.jit
    def scale(x):
        return v.assign(v * x)

    return scale(3.0), v.value(), scale(2.0), v.value()


def _nested(v):
    def body(carry, x):
        return lax.cond(x > 0, jax.jit(lambda: v.assign_add(x)), lambda: v.value()), v.value()

    return lax.scan(body, 0.0, jnp.arange(3.0))


def _vmap_of_a_read(v):
    v.assign_add(1.0)
    return jax.vmap(lambda x: x * v.value())(jnp.arange(3.0))


def _vmap_with_an_assignment(v):
    add = lambda x: jax.vmap(lambda y: y + v.assign_add(1.0))(x * jnp.ones(2))
    return add(1.0), add(2.0), v.assign_add(1.0)


def _scan_of_scans(v):
    inner = lambda carry, _: (carry + v.assign_add(1.0), None)
    outer = lambda carry, _: (lax.scan(inner, carry, None, length=3)[0], None)
    return lax.scan(outer, 0.0, None, length=1)[0]


def _grad_of_a_scan_that_reads(v):
    v.assign_add(1.0)
    return jax.grad(lambda x: lax.scan(lambda c, _: (c * v.value(), None), x, length=3)[0])(1.0)


# Body, leaves of its result, and the value afterwards.
CONTROL_FLOW = {
    "scan": (
        lambda v: lax.scan(lambda c, x: (c + v.assign_add(x), v.value()), 0.0, jnp.arange(3.0)),
        [7, [1, 2, 4]],
        4,
    ),
    # JAX traces such a body twice: the carry starts weakly typed.
    "scan of a Python number": (
        lambda v: lax.scan(lambda c, _: (c + v.assign_add(1.0), None), 0, None, length=3)[0],
        [9],
        4,
    ),
    "scan of scans": (_scan_of_scans, [9], 4),
    "vmap with an assignment": (_vmap_with_an_assignment, [[3, 3], [5, 5], 4], 4),
    "scan in reverse": (_scan_in_reverse, [[18, 9, 4]], 18),
    "empty scan": (
        lambda v: lax.scan(lambda c, x: (c, v.assign_add(x)), v.value(), jnp.zeros(0))[0],
        [1],
        1,
    ),
    "while loop": (_while_loop, [4], 16),
    "cond": (_cond, [5, 4], 4),
    "cond with one writing branch": (_cond_with_one_writing_branch, [1, 5], 5),
    "switch": (_switch, [101, 102, 112], 112),
    "nested jit": (_nested_jit, [3, 3, 6, 6], 6),
    "checkpoint": (lambda v: jax.checkpoint(lambda x: v.assign_add(x) * v.value())(2.0), [9], 3),
    "nested": (_nested, [4, [1, 2, 4]], 4),
    "vmap of a read": (_vmap_of_a_read, [[0, 2, 4]], 2),
    "grad with an assignment": (
        lambda v: (jax.grad(lambda x: v.assign(5.0) * x * x)(3.0), v.value()),
        [30, 5],
        5,
    ),
    "grad of a scan that reads": (_grad_of_a_scan_that_reads, [8], 2),
}


def _run(strategy, function):
    results = strategy.run(function)
    return [strategy.experimental_local_results(result) for result in results]


def _function(strategy, function):
    return [(result,) for result in dist.function(function)()]


_MIRRORED = {"aggregation": MEAN}
_ON_READ = {"synchronization": ON_READ, "aggregation": MEAN}
_SETUPS = {
    "mirrored": (2, _run, _MIRRORED),
    "on read": (2, _run, _ON_READ),
    "one replica": (1, _run, _MIRRORED),
    "mirrored in a function": (2, _function, _MIRRORED),
    "on read in a function": (2, _function, _ON_READ),
}


@pytest.mark.parametrize(("num_replicas", "call", "kwargs"), _SETUPS.values(), ids=_SETUPS)
def test_control_flow_carries_variables(num_replicas, call, kwargs, strategy_of):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        variables = {name: dist.Variable(1.0, **kwargs) for name in CONTROL_FLOW}

    results = call(
        strategy, lambda: [body(variables[name]) for name, (body, *_) in CONTROL_FLOW.items()]
    )

    for (name, (_, expected, value_afterwards)), result in zip(
        CONTROL_FLOW.items(), results, strict=True
    ):
        for component in result:
            leaves = jax.tree.leaves(component)
            for leaf, should_be in zip(leaves, expected, strict=True):
                np.testing.assert_allclose(leaf, should_be, rtol=1e-6, err_msg=name)
        assert variables[name].numpy() == value_afterwards, name


def test_replicas_loop_over_values_of_their_own(strategy_of):
    strategy = strategy_of(4)
    with strategy.scope():
        local = dist.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
        total = dist.Variable(0.0, aggregation=SUM)

    def step():
        replica_id = dist.get_replica_context().replica_id_in_sync_group
        # The number of rounds and the branch differ between replicas, so no collective is inside.
        lax.fori_loop(0, replica_id, lambda i, c: c + local.assign_add(1.0), 0.0)
        lax.cond(replica_id % 2 == 0, lambda: local.assign_add(0.5), lambda: local.value())
        # All replicas go round alike, and each round has a collective.
        lax.scan(lambda c, x: (c, total.assign_add(x + replica_id)), 0.0, jnp.arange(2.0))

    strategy.run(step)

    assert [c.numpy() for c in local.values] == [0.5, 1.0, 2.5, 3.0]
    assert total.numpy() == (0 + 1 + 2 + 3) + (1 + 2 + 3 + 4)


# Helpers whose trace JAX keeps


def test_cached_helper_reads_the_current_value(strategy, variable):
    v = variable(1.0)
    local = variable(1.0, synchronization=ON_READ, aggregation=SUM)

    @jax.jit
    def helper(x):
        return v * x + local.value()

    def step(x):
        before = helper(x)
        v.assign_add(1.0)
        local.assign(local + dist.get_replica_context().replica_id_in_sync_group)
        return before, helper(x)

    def other_step():
        return helper(jnp.float32(10.0))

    first, second = strategy.run(step, (jnp.float32(10.0),))
    third, fourth = strategy.run(step, (jnp.float32(10.0),))
    v.assign(7.0)
    outside = strategy.run(other_step)

    components = [[float(c) for c in r.values] for r in (first, second, third, fourth, outside)]
    assert components == [[11, 11], [21, 22], [21, 22], [31, 33], [71, 73]]


def test_cached_helper_assigns_in_several_steps_and_not_under_grad(strategy, variable):
    v = variable(0.0, name="w")

    @jax.jit
    def helper(x):
        v.assign(v * 2 + x)
        return x * x

    def step(x):
        return helper(x), helper(x + 1)

    strategy.run(step, (jnp.float32(1.0),))
    strategy.run(lambda x: helper(x), (jnp.float32(1.0),))
    dist.function(step)(jnp.float32(1.0))

    assert v.numpy() == ((((0 * 2 + 1) * 2 + 2) * 2 + 1) * 2 + 1) * 2 + 2
    with pytest.raises(UnsupportedError, match="'w'"):
        strategy.run(lambda: jax.grad(helper)(jnp.float32(2.0)))
    assert v.numpy() == 40.0


def test_a_cached_helper_reads_and_assigns_by_the_context_it_is_called_in(strategy, variable):
    local = variable(1.0, synchronization=ON_READ, aggregation=SUM)
    v = variable(0.0, aggregation=SUM)
    read, add = jax.jit(lambda: local.value() * 1), jax.jit(lambda x: v.assign_add(x))

    def step(x):
        context = dist.get_replica_context()
        add(x)  # a sum over two replicas
        context.merge_call(lambda _: add(jnp.sqrt(1.0)))  # once
        return read(), context.merge_call(lambda _: read())

    own, total = strategy.run(step, (jnp.float32(1.0),))

    assert [float(x) for x in own.values] == [1.0, 1.0]
    assert [float(x) for x in total.values] == [2.0, 2.0]
    assert v.numpy() == 3.0


# Assignments JAX would lose


def _in_grad_of_scan(v):
    def loss(x):
        return lax.scan(lambda c, _: (c * v.assign_add(1.0), None), x, length=2)[0]

    jax.grad(loss)(2.0)


LOST = {
    "grad of scan": _in_grad_of_scan,
    "vmap": lambda v: jax.vmap(lambda x: v.assign(x))(jnp.ones(3)),
    "grad of jit": lambda v: jax.grad(jax.jit(lambda x: x * v.assign(2.0)))(2.0),
    "grad of checkpoint": lambda v: jax.grad(jax.checkpoint(lambda x: x * v.assign_add(2.0)))(2.0),
    "grad of cond": lambda v: jax.grad(
        lambda x: lax.cond(x > 0, lambda: x * v.assign(2.0), lambda: x)
    )(2.0),
    "eval shape": lambda v: jax.eval_shape(lambda: v.assign(2.0)),
    "condition": lambda v: lax.while_loop(lambda c: v.assign_add(1.0) < 5, lambda c: c, 0),
}


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("step", LOST.values(), ids=LOST)
def test_assignment_that_would_be_lost_is_refused(step, num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = dist.Variable(1.0, name="w")

    where = r"(inside|assigned inside) a function|assigned in the condition"
    with pytest.raises(UnsupportedError, match=rf"'w' (at .*test_in_steps\.py:\d+ )?is ({where})"):
        strategy.run(lambda: [step(v), None][1])

    assert v.numpy() == 1.0


def test_read_in_a_custom_derivative_is_refused_by_name(strategy, variable):
    v = variable(1.0, name="w")
    forward, reverse = jax.custom_jvp(lambda x: x * v.value()), jax.custom_vjp(lambda x: x * v)
    forward.defjvp(lambda primals, tangents: (forward(*primals), tangents[0]))
    reverse.defvjp(lambda x: (x * v, None), lambda _, g: (g,))

    for function, kind in ((forward, "custom_jvp"), (reverse, "custom_vjp")):
        with pytest.raises(UnsupportedError, match=rf"{kind}.*v\.value\(\)"):
            strategy.run(lambda function=function: function(2.0))


@pytest.mark.parametrize(
    "kwargs", [{}, {"aggregation": MEAN}, {"synchronization": ON_READ}], ids=str
)
def test_eager_transformation_cannot_leave_its_tracer_in_a_variable(kwargs, strategy_of):
    strategy = strategy_of(2) if kwargs else dist.get_strategy()
    with strategy.scope():
        v = dist.Variable([1.0, 2.0], name="w", **({"aggregation": MEAN} | kwargs))

    def assign(x):
        v.assign([x, x])
        return x

    def assign_add(x):
        v.assign_add(jnp.stack([x, x]))
        return x

    def scatter(x):
        v.scatter_add(dist.IndexedSlices(x[None], [0]))
        return x

    def constants(x):
        v.assign_add([1.0, 1.0])
        return (v * x * x).sum()

    functions = [assign, assign_add]
    if v.synchronization is not ON_READ:
        functions.append(scatter)
    for function in functions:
        with pytest.raises(UnsupportedError, match=r"'w': \w+ got a value traced by jax\.vmap"):
            jax.vmap(function)(jnp.ones(1))
    np.testing.assert_array_equal(v.numpy(), [1.0, 2.0])

    # There is a value, from which no gradient comes.
    assert jax.grad(assign)(3.0) == 1
    np.testing.assert_array_equal(v.numpy(), [3.0, 3.0])
    v.assign([1.0, 2.0])
    if v.synchronization is not ON_READ:  # which has no value outside of a step
        assert float(jax.grad(constants)(1.0)) == 2 * (2.0 + 3.0)
        np.testing.assert_array_equal(jax.vmap(lambda x: x * v)(jnp.ones(3)), [[2.0, 3.0]] * 3)


# Values and donation


def test_components_are_current_in_every_step(strategy, variable):
    v = variable(1.0)
    local = variable(1.0, synchronization=ON_READ, aggregation=SUM)

    def read():
        return [c * 1.0 for c in (*v.values, *strategy.experimental_local_results(local))]

    def assign_and_read():
        v.assign_add(1.0)
        local.assign_add(1.0 * dist.get_replica_context().replica_id_in_sync_group)
        return read()

    compiled = dist.function(read)
    seen = [compiled(), *zip(*(r.values for r in strategy.run(assign_and_read)), strict=True)]
    v.assign(5.0)
    seen += [compiled(), *zip(*(r.values for r in strategy.run(read)), strict=True)]

    assert [[float(x) for x in row] for row in seen] == [
        [1, 1, 1, 1],
        [2, 2, 1, 2],
        [2, 2, 1, 2],
        [5, 5, 1, 2],
        [5, 5, 1, 2],
        [5, 5, 1, 2],
    ]


# Raw jax.jit


@pytest.mark.parametrize("kwargs", [_MIRRORED, _ON_READ, {}], ids=["mirrored", "on read", "plain"])
def test_raw_jit_is_refused(kwargs, strategy_of):
    strategy = strategy_of(2) if kwargs else dist.get_strategy()
    with strategy.scope():
        v = dist.Variable([1.0, 2.0], name="w", **kwargs)
    uses = {
        "read": [lambda: v.value(), lambda: v + 1, lambda: jnp.asarray(v), lambda: v.numpy()],
        "assigned": [lambda: v.assign([0.0, 0.0], read_value=False)],
    }
    if kwargs:
        uses["read"].append(lambda: v.values[0].value())

    for verb, functions in uses.items():
        message = rf"'w' is {verb} inside.*distributary\.function"
        for function in functions:
            with pytest.raises(ContextError, match=message):
                jax.jit(function)()
            with pytest.raises(ContextError, match=message):
                lax.scan(lambda c, _, function=function: (function(), c)[::-1], 0.0, length=2)

    np.testing.assert_array_equal(v.numpy(), [1.0, 2.0])
