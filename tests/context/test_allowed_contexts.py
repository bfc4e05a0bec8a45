"""Which call is allowed in which context: section 17 of the reference as a table."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import ContextError

CONTEXTS = ("default", "own scope", "run", "other scope")


class Subject:
    """A strategy with variables and values for the calls of the table."""

    def __init__(self, strategy):
        self.strategy, self.extended = strategy, strategy.extended
        with strategy.scope():
            self.mirrored = dist.Variable(1.0)
            self.on_read = dist.Variable(
                1.0,
                synchronization=dist.VariableSynchronization.ON_READ,
                aggregation=dist.VariableAggregation.MEAN,
            )
        self.per_replica = strategy.run(lambda: jnp.ones(2))


def _call(function, subject):
    function(subject)


def _enter(scope):
    with scope:
        pass


OK, REFUSED = None, ContextError
# Default context, own scope, inside run, another strategy's scope.
ANYWHERE = OK, OK, OK, OK
CROSS_REPLICA = OK, OK, REFUSED, REFUSED
NOT_WITH_OTHERS = OK, OK, OK, REFUSED


def _values(strategy):
    return strategy.experimental_distribute_values_from_function(lambda context: 1.0)


TABLE = {
    "run": (CROSS_REPLICA, lambda s: s.strategy.run(lambda: None)),
    "call_for_each_replica": (CROSS_REPLICA, lambda s: s.extended.call_for_each_replica(lambda: 0)),
    "lower": (CROSS_REPLICA, lambda s: s.extended.lower(lambda: jnp.ones(1))),
    "reduce": (CROSS_REPLICA, lambda s: s.strategy.reduce("sum", s.per_replica, axis=None)),
    "gather": (CROSS_REPLICA, lambda s: s.strategy.gather(s.per_replica, axis=0)),
    "reduce_to": (CROSS_REPLICA, lambda s: s.extended.reduce_to("sum", s.per_replica, s.mirrored)),
    "batch_reduce_to": (
        CROSS_REPLICA,
        lambda s: s.extended.batch_reduce_to("sum", [(s.per_replica, s.mirrored)]),
    ),
    "broadcast_to": (CROSS_REPLICA, lambda s: s.extended.broadcast_to(jnp.ones(1), s.mirrored)),
    "scope": (CROSS_REPLICA, lambda s: _enter(s.strategy.scope())),
    "experimental_distribute_dataset": (
        ANYWHERE,
        lambda s: s.strategy.experimental_distribute_dataset([np.ones(4)]),
    ),
    "distribute_datasets_from_function": (
        ANYWHERE,
        lambda s: s.strategy.distribute_datasets_from_function(lambda context: [np.ones(4)]),
    ),
    "values_from_function": ((OK, OK, "not asked", OK), lambda s: _values(s.strategy)),
    "local_results": (ANYWHERE, lambda s: s.strategy.experimental_local_results(s.mirrored)),
    "update": (NOT_WITH_OTHERS, lambda s: s.extended.update(s.mirrored, lambda v: v.assign(1.0))),
    "colocate_vars_with": (
        (REFUSED, OK, OK, REFUSED),
        lambda s: _enter(s.extended.colocate_vars_with(s.mirrored)),
    ),
    "all_reduce": (
        (OK, AttributeError, OK, AttributeError),
        lambda s: dist.get_replica_context().all_reduce("sum", 1.0),
    ),
    "mirrored read": (ANYWHERE, lambda s: s.mirrored.value() + s.mirrored),
    "on-read read": (ANYWHERE, lambda s: s.on_read.value() + s.on_read),
    "mirrored assign": (NOT_WITH_OTHERS, lambda s: s.mirrored.assign(1.0)),
    "on-read assign": (NOT_WITH_OTHERS, lambda s: s.on_read.assign(1.0)),
    "conversion of PerReplica": ((ValueError,) * 4, lambda s: np.asarray(s.per_replica)),
}
_CASES = [
    (call, context, error)
    for call, (errors, _) in TABLE.items()
    for context, error in zip(CONTEXTS, errors, strict=True)
    if error != "not asked"
]


@pytest.fixture(scope="module")
def subject():
    return Subject(dist.MirroredStrategy(["CPU:0", "CPU:1"]))


@pytest.fixture(scope="module")
def other():
    return dist.MirroredStrategy(["CPU:2", "CPU:3", "CPU:4"])


@pytest.mark.parametrize(("call", "context", "error"), _CASES)
def test_call_is_allowed_where_the_table_says(call, context, error, subject, other):
    function = TABLE[call][1]

    def act():
        if context == "run":
            subject.strategy.run(functools.partial(_call, function, subject))
        elif context == "default":
            function(subject)
        else:
            with (subject.strategy if context == "own scope" else other).scope():
                function(subject)

    if error is None:
        act()
        return
    message = {
        ContextError: r"MirroredStrategy of 2 replicas|inside Strategy\.run|inside its run",
        AttributeError: "NoneType",
        ValueError: "PerReplica cannot be converted to one array",
    }[error]
    with pytest.raises(error, match=message):
        act()


def test_variable_of_another_strategy_is_refused_in_a_step(subject, other):
    for use in (
        lambda: subject.mirrored + 1,
        lambda: subject.on_read.value(),
        lambda: subject.mirrored.assign(1.0),
        lambda: subject.mirrored.values,
    ):
        for strategy in (other, dist.OneDeviceStrategy("CPU:0"), dist.get_strategy()):
            with pytest.raises(ContextError, match=r"'Variable' of MirroredStrategy of 2 .*mixed"):
                strategy.run(use)


def test_plain_variable_is_read_in_a_step_and_assigned_where_code_runs_once(subject):
    plain = dist.Variable(0.0, name="plain")
    run = subject.strategy.run

    with subject.strategy.scope():
        plain.assign_add(1.0)
    run(lambda: dist.get_replica_context().merge_call(lambda _: plain.assign_add(10.0)))
    dist.OneDeviceStrategy("CPU:0").run(lambda: plain.assign_add(100.0))
    dist.get_strategy().run(lambda: plain.assign_add(1000.0))

    doubled = run(lambda: plain * 2)
    with pytest.raises(ContextError, match=r"'plain' was created outside of .*assign_add"):
        run(lambda: plain.assign_add(1.0))
    assert [float(x) for x in doubled.values] == [2222.0, 2222.0]
    assert plain.numpy() == 1111.0


# Creating variables


def test_variable_of_a_step_is_created_once(subject):
    class Model:
        v = None

        def __call__(self, x):
            if self.v is None:
                self.v = dist.Variable(lambda: jnp.zeros(()), name="lazy")
            return self.v.assign_add(dist.get_replica_context().all_reduce("sum", x))

    for compile_ in (lambda f: f, dist.function):
        model = Model()
        step = compile_(lambda x, model=model: subject.strategy.run(model, (x,)))

        first, second = step(jnp.float32(1.0)), step(jnp.float32(1.0))

        assert [float(x) for x in first.values] == [2.0, 2.0]
        assert [float(x) for x in second.values] == [4.0, 4.0]
        assert model.v.distribute_strategy is subject.strategy
        assert type(model.v).__name__ == "MirroredVariable"


def test_variable_created_by_every_trace_is_refused(subject):
    def step():
        return dist.Variable(1.0, name="new") + 1

    for call in (subject.strategy.run, lambda f: dist.function(f)()):
        with pytest.raises(ValueError, match=r"'new' is created inside.*Create it only once"):
            call(step)
    with pytest.raises(ValueError, match="'new': initial_value is computed by the traced function"):
        subject.strategy.run(lambda x: dist.Variable(x * 2, name="new"), (jnp.float32(1.0),))
