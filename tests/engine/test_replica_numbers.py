"""Steps whose Python code looks at the number of the replica."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import (
    ContextError,
    ReplicaDivergenceError,
    ReplicaMismatchError,
    TracedValueError,
)

_ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)


def _number():
    return dist.get_replica_context().replica_id_in_sync_group


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_an_index_a_key_and_a_seed(num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    names = ["a", "b", "c", "d"]
    scales = {"a": 1.0, "b": 10.0, "c": 100.0, "d": 1000.0}

    def step(x):
        number = int(_number())
        noise = np.random.default_rng([number, 3]).normal(size=3).astype(np.float32)
        return scales[names[number]] * x + noise

    batch = dist.PerReplica([_ROWS[i] for i in range(num_replicas)])
    results = strategy.experimental_local_results(strategy.run(step, args=(batch,)))

    for i, result in enumerate(results):
        noise = np.random.default_rng([i, 3]).normal(size=3)
        np.testing.assert_allclose(result, 10.0**i * _ROWS[i] + noise, rtol=1e-6)


@pytest.mark.parametrize("autograph", [None, False])
def test_branches_of_python_and_shapes_that_differ(autograph, strategy):
    def step():
        if _number() == 0:
            return jnp.ones(2)
        return jnp.ones(3) * 2

    results = strategy.run(step, options=dist.RunOptions(autograph=autograph))

    first, second = strategy.experimental_local_results(results)
    np.testing.assert_array_equal(first, [1.0, 1.0])
    np.testing.assert_array_equal(second, [2.0, 2.0, 2.0])


def test_collectives_variables_and_gradients(strategy, variable):
    w = variable([1.0, 2.0, 3.0])
    steps = variable(
        0.0, synchronization=dist.VariableSynchronization.ON_READ,
        aggregation=dist.VariableAggregation.SUM, trainable=False,
    )  # fmt: skip

    def step(x):
        weight = [2.0, 5.0][_number()]
        with dist.GradientTape() as tape:
            loss = weight * jnp.sum(w * x)
        context = dist.get_replica_context()
        gradient = context.all_reduce("SUM", tape.gradient(loss, w))
        w.assign_sub(0.1 * gradient)
        steps.assign_add(weight)
        return context.all_gather(x[None] * weight, axis=0)

    for turn in range(2):
        batch = dist.PerReplica([_ROWS[0] + turn, _ROWS[1] + turn])
        before = w.numpy()
        gathered = strategy.experimental_local_results(strategy.run(step, args=(batch,)))

        parts = [2.0 * (_ROWS[0] + turn), 5.0 * (_ROWS[1] + turn)]
        np.testing.assert_allclose(w.numpy(), before - 0.1 * sum(parts), rtol=1e-5)
        for value in gathered:
            np.testing.assert_allclose(value, parts)
    assert float(steps.value()) == 14.0


def test_inside_a_function_and_compiled_once(strategy):
    traces = []

    def step(x):
        traces.append(1)
        return x * [1.0, 3.0][_number()]

    @dist.function
    def run(x):
        return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)

    assert [float(run(jnp.float32(x))) for x in (1.0, 2.0)] == [4.0, 8.0]
    count = len(traces)
    assert float(run(jnp.float32(3.0))) == 12.0
    assert len(traces) == count


def test_a_variable_that_would_differ_is_refused(strategy, variable):
    v = variable(1.0)

    def step():
        v.assign([1.0, 2.0][_number()])

    with pytest.raises(ReplicaDivergenceError, match="'Variable'"):
        strategy.run(step)


@pytest.mark.parametrize(
    ("kind", "autograph", "message"),
    [
        (jnp.asarray, None, "control flow"),
        (int, None, "replica 0 waits in psum, replica 1 ends"),
        (int, False, "replica 0 waits in psum, replica 1 ends"),
    ],
)
def test_collectives_that_not_all_replicas_call_are_refused(kind, autograph, message, strategy):
    def step(x):
        if kind(_number()) == 0:
            x = dist.get_replica_context().all_reduce("SUM", x)
        return x

    options = dist.RunOptions(autograph=autograph)
    with pytest.raises((ContextError, ReplicaMismatchError), match=message):
        strategy.run(step, args=(jnp.ones(3),), options=options)


@pytest.mark.parametrize("uneven", [False, True])
def test_a_merge_call_of_some_replicas_is_refused(uneven, strategy_of):
    def step(x):
        if len(x) == 1 if uneven else _number() == 1:
            dist.get_replica_context().merge_call(lambda strategy: None)
        return x

    rows = dist.PerReplica([jnp.ones(2), jnp.ones(1 if uneven else 2)])
    message = "merge_call: replica 0 calls it 0 times in a step, but replica 1 1 times"
    with pytest.raises(ReplicaMismatchError, match=message):
        strategy_of(2).run(step, args=(rows,), options=dist.RunOptions(autograph=False))


def test_strings_that_differ_are_returned_per_replica(strategy):
    def step(x):
        name = f"replica-{int(_number())}"
        return {"name": name, "all": "same", "raw": name.encode(), "x": x, "no": int(_number())}

    for _ in range(2):  # the second time, from the program that is kept
        result = strategy.run(step, args=(jnp.ones(1),))

        assert result["name"].values == ("replica-0", "replica-1")
        assert result["raw"].values == (b"replica-0", b"replica-1")
        assert result["all"] == "same"
        assert [int(n) for n in result["no"].values] == [0, 1]


def test_other_numbers_of_python_values_are_refused(strategy):
    with pytest.raises(ReplicaMismatchError, match=r"returned the Python values .*'a'"):
        strategy.run(lambda: {"x": jnp.ones(1)} | ([{"name": "a"}, {}][_number()]))


def test_what_needs_more_than_the_number_says_so(strategy):
    def step(x):
        return [1.0, 2.0, 3.0][int(_number()) + int(x)]

    with pytest.raises(TracedValueError, match="needs a value computed from `x`"):
        strategy.run(step, args=(dist.PerReplica([jnp.float32(0), jnp.float32(1)]),))


def test_the_number_stays_traced_where_python_does_not_look_at_it(strategy):
    seen = []

    def step():
        seen.append(_number())
        return jnp.where(_number() == 0, 1.0, 2.0)

    results = strategy.run(step)

    assert isinstance(seen[0], jax.core.Tracer)
    assert len(seen) == 1
    np.testing.assert_array_equal(results.values, [1.0, 2.0])


def test_numbers_in_a_merge_call_are_those_of_all_replicas(strategy):
    def summed(strategy, *values):
        return [strategy.extended.reduce_to("SUM", value, value) for value in values]

    def step():
        number = int(_number())  # Python looks at it
        scale = [1.0, 10.0][number]
        context = dist.get_replica_context()
        return context.merge_call(summed, args=(_number(), scale, np.float32(scale)))

    results = strategy.run(step)

    for replica in (0, 1):
        own = [strategy.experimental_local_results(result)[replica] for result in results]
        assert [float(value) for value in own] == [1.0, 11.0, 11.0]


class _Options(dict):
    __getattr__ = dict.__getitem__


def test_names_outside_of_the_step_may_be_any_objects(strategy_of, caplog):
    def scaled(factor):
        def scale(x):
            return x * factor

        return scale

    double, half, options = scaled(2.0), scaled(0.5), _Options(rate=0.5)

    def step(x):  # two functions with a name `factor`, and an object that raises KeyError
        return (double(x) + half(x)) * options.rate

    result = strategy_of(2).run(step, args=(jnp.ones(3),))

    np.testing.assert_array_equal(result.values[1], [1.25] * 3)
    assert not caplog.records


class _Object:
    loss, number = None, 0


_GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize("keep", ["append", "item", "attribute"])
def test_what_python_keeps_outside_of_the_step_is_refused_or_told_of(keep, strategy, caplog):
    losses, record, last = [], {"loss": [1.0]}, _Object()

    def step(x, convert):
        loss = convert(jnp.mean(x))
        if keep == "append":
            losses.append(loss)
        elif keep == "item":
            record["loss"] = loss
        else:
            last.loss = loss
        return jnp.mean(x)

    name = {"append": "losses", "item": "record", "attribute": "last.loss"}[keep]
    with pytest.raises(TracedValueError, match=f"step keeps a number in {name}"):
        strategy.run(step, args=(jnp.ones(3), float))
    strategy.run(step, args=(jnp.ones(3), jnp.asarray))

    (told,) = caplog.records
    assert f"step keeps an array in {name}, which is outside" in told.getMessage()


def test_python_code_that_runs_once_per_trace_is_told_of(strategy, caplog):
    count, counter = 0, _Object()

    def step(x):
        nonlocal count
        count += 1
        counter.number += 1
        x = x + np.random.normal() + random.random() + _GENERATOR.normal()
        return x * np.float32(2) + jax.random.normal(jax.random.key(0))

    strategy.run(step, args=(jnp.ones(3),))

    told = [record.getMessage() for record in caplog.records]
    assert sorted(text.partition(",")[0].partition(" while")[0] for text in told) == [
        "step changes the number count",
        "step changes the number counter.number",
        *(
            f"step draws random numbers from {name}"
            for name in ("_GENERATOR", "np.random", "random")
        ),
    ]


def test_generators_that_the_step_does_not_draw_from_are_not_told_of(strategy, caplog):
    def step(x):
        own = []
        own.append(float(jnp.mean(x)))  # a number that Python uses in the step
        noise = jax.random.normal(jax.random.key(0))
        return own[0] * 2 + 0 * noise, random, _GENERATOR

    result = strategy.run(lambda x: step(x)[0], args=(jnp.ones(3),))

    assert [float(x) for x in result.values] == [2.0, 2.0]
    assert not caplog.records
