"""Which strategy is current, and where."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

import distributary as dist
from distributary.errors import ContextError, DistributaryWarning


class State(NamedTuple):
    strategy: object
    has_strategy: bool
    in_cross_replica_context: bool
    has_replica_context: bool


def _state() -> State:
    return State(
        dist.get_strategy(),
        dist.has_strategy(),
        dist.in_cross_replica_context(),
        dist.get_replica_context() is not None,
    )


DEFAULT = State(dist.get_strategy(), False, False, True)


def _cross_replica(strategy):
    return State(strategy, True, True, False)


def _replica(strategy):
    return State(strategy, True, False, True)


def _in_thread(function):
    """Calls `function` in a new thread and returns its result, or raises its exception."""

    def call():  # whose frame is of this file, which a warning names
        return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_scope_of_the_default_strategy_changes_nothing():
    with dist.get_strategy().scope(), dist.get_strategy().scope() as strategy:
        assert strategy is dist.get_strategy()
        assert _state() == DEFAULT


def test_state_in_every_context(strategy):
    with strategy.scope():
        v = dist.Variable(1.0)
    seen = {}

    def note(where):
        seen[where] = _state()

    def step():
        note("run")
        dist.get_replica_context().merge_call(lambda _: note("merge_call"))
        strategy.extended.update(v, lambda _: note("update in run"))

    def in_merge_call(merged):
        merged.run(lambda: note("run in merge_call"))

    strategy.run(step)
    strategy.run(lambda: dist.get_replica_context().merge_call(in_merge_call))
    strategy.extended.update(v, lambda _: note("update"))
    with strategy.scope() as entered:
        note("scope")
        dist.function(lambda: note("function in scope"))()
        seen["thread"] = _in_thread(_state)
        strategy.run(lambda: note("run in scope"))
    dist.function(lambda: note("function"))()
    dist.function(lambda: strategy.run(lambda: note("run in function")))()
    dist.get_strategy().run(lambda: note("run of the default strategy"))

    assert entered is strategy
    assert seen == {
        "run": _replica(strategy),
        "merge_call": _cross_replica(strategy),
        "update in run": _cross_replica(strategy),
        "run in merge_call": _replica(strategy),
        "update": _cross_replica(strategy),
        "scope": _cross_replica(strategy),
        "function in scope": _cross_replica(strategy),
        "thread": DEFAULT,
        "run in scope": _replica(strategy),
        "function": DEFAULT,
        "run in function": _replica(strategy),
        "run of the default strategy": DEFAULT,
    }
    assert _state() == DEFAULT


# Nesting


def test_scope_may_be_entered_again(strategy):
    scope = strategy.scope()

    for _ in range(2):
        with scope, scope, strategy.scope():
            assert _state() == _cross_replica(strategy)
        assert _state() == DEFAULT


def test_context_is_left_by_an_exception_in_a_step(strategy):
    with strategy.scope():
        v = dist.Variable(1.0)

    def fail(*_):
        raise KeyError("body")

    def fail_in_scope():
        with strategy.scope():
            fail()

    for call in (
        fail_in_scope,
        lambda: strategy.run(fail),
        lambda: strategy.run(lambda: dist.get_replica_context().merge_call(fail)),
        lambda: strategy.extended.update(v, fail),
        dist.function(fail),
    ):
        with pytest.raises(KeyError, match="body"):
            call()
        assert _state() == DEFAULT


def test_strategies_cannot_be_nested(strategy_of):
    outer, inner = strategy_of(2), strategy_of(4)

    for other in (inner, dist.OneDeviceStrategy("CPU:0"), dist.get_strategy()):
        with outer.scope():
            with pytest.raises(ContextError, match=r"scope\(\) of .* while Mirrored.*2 replicas"):
                other.scope().__enter__()
            assert _state() == _cross_replica(outer)


def test_scope_needs_its_parentheses(strategy):
    with (
        pytest.raises(ContextError, match=r"write `with strategy\.scope\(\):`, with"),
        strategy.scope,
    ):
        pass

    assert not dist.has_strategy()


def test_scopes_are_left_in_reverse_order(strategy):
    first, second = strategy.scope(), strategy.scope()
    with pytest.raises(ContextError, match="scope is not open"):
        first.__exit__(None, None, None)
    first.__enter__()
    second.__enter__()

    with pytest.raises(ContextError, match="another order"):
        first.__exit__(None, None, None)

    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    assert _state() == DEFAULT


# experimental_set_strategy


@pytest.fixture
def _no_global_strategy():
    yield
    dist.experimental_set_strategy(None)


@pytest.mark.usefixtures("_no_global_strategy")
def test_set_strategy_holds_until_the_next_call(strategy_of):
    first, second = strategy_of(2), strategy_of(4)

    dist.experimental_set_strategy(first)
    assert _state() == _cross_replica(first)
    dist.experimental_set_strategy(second)
    assert _state() == _cross_replica(second)
    with second.scope():
        assert dist.Variable(1.0).distribute_strategy is second
    with pytest.raises(ContextError, match=r"2 replicas.* while .*4 replicas"):
        first.scope().__enter__()
    for _ in range(2):
        dist.experimental_set_strategy(None)
        assert _state() == DEFAULT
    with pytest.raises(TypeError, match="experimental_set_strategy: got 'mirrored'"):
        dist.experimental_set_strategy("mirrored")


@pytest.mark.usefixtures("_no_global_strategy")
def test_set_strategy_is_refused_in_a_scope(strategy):
    refused = {"match": r"experimental_set_strategy.*`with` is open"}

    with pytest.raises(ContextError, **refused):
        strategy.run(lambda: dist.experimental_set_strategy(strategy))
    with strategy.scope(), pytest.raises(ContextError, **refused):
        dist.experimental_set_strategy(strategy)
    dist.experimental_set_strategy(strategy)
    with strategy.scope(), pytest.raises(ContextError, **refused):
        dist.experimental_set_strategy(None)

    assert _state() == _cross_replica(strategy)


@pytest.mark.usefixtures("_no_global_strategy")
def test_set_strategy_holds_for_one_thread(strategy_of):
    strategy, other = strategy_of(2), strategy_of(4)

    def in_other_thread():
        before = _state()
        dist.experimental_set_strategy(other)
        inside = _state()
        dist.experimental_set_strategy(None)
        return before, inside, _state()

    dist.experimental_set_strategy(strategy)

    assert _in_thread(in_other_thread) == (DEFAULT, _cross_replica(other), DEFAULT)
    assert _state() == _cross_replica(strategy)


# Threads


def test_one_scope_object_serves_several_threads(strategy):
    scope = strategy.scope()
    entered, leave = threading.Event(), threading.Event()
    states = []

    def in_other_thread():
        with scope:
            entered.set()
            assert leave.wait(20)
            states.append(_state())
        states.append(_state())

    with ThreadPoolExecutor(1) as pool:
        with scope:
            ended = pool.submit(in_other_thread)
            assert entered.wait(20)
        states.append(_state())
        leave.set()
        ended.result()

    assert states == [DEFAULT, _cross_replica(strategy), DEFAULT]


def test_steps_of_two_threads_are_traced_side_by_side(strategy_of):
    strategies = [strategy_of(2), strategy_of(2)]
    variables = []
    for strategy in strategies:
        with strategy.scope():
            variables.append(dist.Variable(0.0))
    barrier = threading.Barrier(2, timeout=20)

    def train(i):
        def step():
            barrier.wait()  # Both threads are in the middle of their traces.
            assert dist.get_strategy() is strategies[i]
            variables[i].assign_add(i + 1.0)

        strategies[i].run(step)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))

    assert [v.numpy() for v in variables] == [1.0, 2.0]


def test_variable_created_in_a_helper_thread_by_mistake_warns_once(strategy_of):
    def create():
        with pytest.warns(DistributaryWarning, match="'w' is created in a thread") as caught:
            v = dist.Variable(1.0, name="w")
        dist.Variable(1.0, name="w")  # A second warning would be an error.
        assert [w.filename for w in caught] == [__file__]
        return type(v)

    def create_in_scope():
        with strategy_of(2).scope():
            return type(dist.Variable(1.0)).__name__

    assert _in_thread(lambda: type(dist.Variable(1.0))) is dist.Variable
    with strategy_of(2).scope():
        assert _in_thread(create_in_scope) == "MirroredVariable"
        for _ in range(2):  # The second thread may get the identifier of the first.
            assert _in_thread(create) is dist.Variable
