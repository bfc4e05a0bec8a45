"""Kinds of control flow, each over every kind of value, its gradients, variables and replicas.

Python itself is the reference: the same function, not converted, on concrete values.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist

FLOWS = {}


def flow(function):
    """Notes a kind of control flow: `step` gives the next value, `test` looks at one."""
    FLOWS[function.__name__] = function
    return function


@flow
def if_else(x, n, step, test):
    if test(x):
        y = step(x)
    else:
        y = step(step(x))
    return y


@flow
def elif_with_not(x, n, step, test):
    if not test(x):
        return step(x)
    elif n > 2:
        x = step(step(step(x)))
    else:
        x = step(step(x))
    return x


@flow
def expression_with_and(x, n, step, test):
    return step(x) if test(x) and n > 2 else x


@flow
def while_loop(x, n, step, test):
    while n > 0:
        x = step(x)
        n = n - 1
    return x


@flow
def while_with_break(x, n, step, test):
    i = 0
    while i < 5:
        if i >= n:
            break
        x = step(x)
        i += 1
    return x, i


@flow
def for_over_a_range(x, n, step, test):
    for i in jnp.arange(4):
        if i < n:
            x = step(x)
    return x


@flow
def for_with_break(x, n, step, test):
    count = 0
    for i in jnp.arange(6):
        if i >= n:
            break
        count += 1
        x = step(x)
    return x, count


@flow
def for_with_early_return(x, n, step, test):
    for i in jnp.arange(3):
        x = step(x)
        if i >= n:
            return x
    return step(x)


@flow
def nested_loops(x, n, step, test):
    for i in jnp.arange(2):
        j = 0
        while j < n:
            if test(x):
                x = step(x)
            j += i + 1
    return x


@flow
def inner_function(x, n, step, test):
    def twice(value):
        if n > 1:
            value = step(value)
        return step(value)

    while n > 2:
        x = twice(x)
        n -= 1
    return twice(x)


def _plus(x):
    return jax.tree.map(lambda leaf: leaf * 2 + 1, x)


def _is_small(x):
    return sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(x)) < 20


KINDS = {
    "bfloat16": np.asarray(0.5, jnp.bfloat16),
    "complex64": np.complex64(1 + 2j),
    "empty": np.zeros((0, 2), np.float32),
    "nest": {"a": np.ones((2, 2), np.float32), "b": [(np.float32(2.0), np.int32(-4))]},
}
COUNTS = (0, 1, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind):
    x = jax.tree.map(jnp.asarray, KINDS[kind])
    flows = lambda x, n: {name: f(x, n, _plus, _is_small) for name, f in FLOWS.items()}

    compiled = dist.function(flows, autograph=True)

    for n in COUNTS:
        expected, got = flows(x, n), compiled(x, jnp.int32(n))
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
            np.testing.assert_array_equal(a, b)


def test_gradients():
    x = jnp.array([0.3, -0.7])
    w = dist.Variable(1.25)

    def losses(x, w, n):
        step = lambda value: jnp.tanh(value * w) + value
        results = [function(x, n, step, _is_small) for function in FLOWS.values()]
        return [jnp.sum(jax.tree.leaves(result)[0] ** 2) for result in results]

    @dist.function(autograph=True)
    def gradients(x, n):
        with dist.GradientTape(persistent=True) as tape:
            tape.watch(x)
            values = losses(x, w, n)
        return values, [tape.gradient(value, [x, w]) for value in values]

    for n in COUNTS:
        values, found = gradients(x, jnp.int32(n))
        reference = functools.partial(losses, n=n)
        by_hand = jax.jacobian(reference, (0, 1))(x, jnp.float32(1.25))
        np.testing.assert_allclose(values, reference(x, 1.25), rtol=1e-5)
        for name, (of_x, of_w), (own_x, own_w) in zip(FLOWS, by_hand, found, strict=True):
            for own, other in ((own_x, of_x), (own_w, of_w)):
                own = 0.0 if own is None else own
                np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6, err_msg=name)


def test_variables_of_replicas(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        own = {
            name: dist.Variable(0, synchronization=dist.VariableSynchronization.ON_READ)
            for name in FLOWS
        }
        last = {
            name: dist.Variable(0.0, aggregation=dist.VariableAggregation.MEAN) for name in FLOWS
        }

    def step(x, n):
        for name, function in FLOWS.items():

            def counted(value, name=name):
                own[name].assign_add(1)
                return value * 2 + 1

            last[name].assign(jax.tree.leaves(function(x, n, counted, _is_small))[0])

    options = dist.RunOptions(autograph=True)
    numbers, counts = [1.0, -3.0], [1, 3]
    args = dist.PerReplica([jnp.float32(x) for x in numbers]), dist.PerReplica(counts)
    strategy.run(step, args=args, options=options)

    for name, function in FLOWS.items():
        calls, results = [], []
        for x, n in zip(numbers, counts, strict=True):
            made = []
            noted = lambda v, made=made: made.append(v) or v * 2 + 1
            results.append(jax.tree.leaves(function(x, n, noted, _is_small))[0])
            calls.append(len(made))
        assert [int(component.value()) for component in own[name].values] == calls, name
        np.testing.assert_allclose(last[name], np.mean(results), rtol=1e-6, err_msg=name)
