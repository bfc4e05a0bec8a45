"""When a step is traced again, and when its program is forgotten."""

import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import DistributaryWarning


@pytest.fixture(params=["run", "function"])
def traced(request, strategy_of):
    """Calls a step by its arguments; and the list of its traces."""
    strategy = strategy_of(2)
    traces = []

    def step(*args, **kwargs):
        traces.append(args)
        return jnp.ones(1)

    if request.param == "run":
        return lambda *args, **kwargs: strategy.run(step, args, kwargs), traces
    return dist.function(step), traces


def _ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


class Config:
    """A static argument, keyed by identity."""


_CONFIG = Config()

# First arguments, later arguments, whether the later ones need another program.
CALLS = {
    "other values": ((_ones(2),), (2 * _ones(2),), False),
    "other shape": ((_ones(2),), (_ones(3),), True),
    "other dtype": ((_ones(2),), (_ones(2, dtype=np.int32),), True),
    "other int": ((1,), (2,), False),
    "float for int": ((1,), (1.0,), True),
    "other bool": ((True,), (False,), True),
    "int for bool": ((True,), (1,), True),
    "other text": (("a",), ("b",), True),
    "other structure": (([_ones(1)],), ((_ones(1),),), True),
    "other keys": (({"a": _ones(1)},), ({"b": _ones(1)},), True),
    "other order of keys": (({"a": 1, "b": 2},), ({"b": 3, "a": 4},), False),
    "same object": ((_CONFIG,), (_CONFIG,), False),
    "other object": ((_CONFIG,), (Config(),), True),
    "components": ((dist.PerReplica([1.0, 2.0]),), (dist.PerReplica([3.0, 4.0]),), False),
    "uneven components": (
        (dist.PerReplica([_ones(1), _ones(1)]),),
        (dist.PerReplica([_ones(1), _ones(2)]),),
        True,
    ),
}


@pytest.mark.parametrize(("first", "later", "again"), CALLS.values(), ids=CALLS)
def test_step_is_traced_again_only_for_other_arguments(first, later, again, traced):
    call, traces = traced

    call(*first)
    once = len(traces)
    call(*first)
    assert len(traces) == once >= 1
    call(*later)
    assert (len(traces) > once) == again
    twice = len(traces)
    call(*first)
    call(*later)
    assert len(traces) == twice


def test_keywords_share_a_program_and_variables_do_not(traced):
    call, traces = traced
    a, b = dist.Variable(1.0), dist.Variable(1.0)

    for v in (a, b, a, b):
        call(v, x=jnp.ones(2))
        call(v, x=jnp.zeros(2))

    assert [args[0] is v for args, v in zip(traces, (a, b), strict=True)] == [True, True]


def test_new_variable_of_a_model_is_seen(strategy, variable):
    class Model:
        pass

    model = Model()
    model.v = variable(1.0)

    def step():
        return model.v.value()

    first = strategy.run(step)
    model.v = variable(5.0)
    gc.collect()
    second = strategy.run(step)

    assert (float(first.values[0]), float(second.values[0])) == (1.0, 5.0)


# Warnings about retracing


def _warns(message):
    return pytest.warns(DistributaryWarning, match=message)


def test_retracing_warns_once_and_names_the_argument(strategy):
    def my_step(x, flag):
        return x

    for n in range(1, 9):
        strategy.run(my_step, (np.ones(n), True))
    with _warns(
        r"Strategy\.run: .*my_step' .*8 times.*argument number 0 .*float64\[8\] to float64\[9\]"
    ):
        strategy.run(my_step, (np.ones(9), True))
    for n in range(10, 12):
        strategy.run(my_step, (np.ones(n), True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([(str(i),) for i in range(9)], r"number 0 .*'7'.*'8'"),
        ([([1] * i,) for i in range(9)], "structure of its arguments changes"),
        ([(_ones(2), _ones(i)) for i in range(9)], r"number 1 .*float32\[7\] to float32\[8\]"),
    ],
    ids=["text", "structure", "second argument"],
)
def test_retracing_warning_names_the_cause(arguments, message, traced):
    call, _ = traced

    for args in arguments[:-1]:
        call(*args)
    with _warns(message):
        call(*arguments[-1])


# Programs are forgotten


class Box:
    """Something that a step captures."""

    def __init__(self, value):
        self.value = value


def test_a_step_defined_inside_a_function_that_takes_an_iterator_is_traced_once(strategy):
    dataset = strategy.experimental_distribute_dataset([_ones(2)] * 9)
    traces = Box([])
    weights = {"w": dist.Variable(1.0)}

    @dist.function
    def train(iterator, box, factor):
        def scaled(x):
            return x * factor * weights["w"]

        def step(x, offset=box.value):
            traces.value.append(box)
            return scaled(x).sum() + box.value + offset

        return strategy.reduce("SUM", strategy.run(step, (next(iterator),)), axis=None)

    iterator, one, two = iter(dataset), Box(1.0), Box(10.0)
    results = [float(train(iterator, box, 1.0)) for box in (one, one, two, two, one)]
    results += [float(train(iterator, one, factor)) for factor in (3.0, 3.0, -0.0, 0.0)]

    assert results == [6, 6, 42, 42, 6, 10, 10, 4, 4]
    assert [box is two for box in traces.value] == [False, True, False, False, False]
    reference = weakref.ref(two)
    traces.value.clear()
    del two
    gc.collect()
    assert reference() is None


def test_static_argument_is_collected(traced):
    call, traces = traced
    config = Config()
    call(config)
    reference = weakref.ref(config)

    traces.clear()
    del config
    gc.collect()

    assert reference() is None
