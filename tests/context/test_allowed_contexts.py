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
        self.strategy = strategy
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
TABLE = {
    "run": (lambda s: s.strategy.run(lambda: None), OK, OK, REFUSED, REFUSED),
    "call_for_each_replica": (
        lambda s: s.strategy.extended.call_for_each_replica(lambda: None),
        *(OK, OK, REFUSED, REFUSED),
    ),
    "lower": (
        lambda s: s.strategy.extended.lower(lambda: jnp.ones(1)),
        *(OK, OK, REFUSED, REFUSED),
    ),
    "reduce": (
        lambda s: s.strategy.reduce("sum", s.per_replica, axis=None),
        *(OK, OK, REFUSED, REFUSED),
    ),
    "gather": (lambda s: s.strategy.gather(s.per_replica, axis=0), OK, OK, REFUSED, REFUSED),
    "reduce_to": (
        lambda s: s.strategy.extended.reduce_to("sum", s.per_replica, s.mirrored),
        *(OK, OK, REFUSED, REFUSED),
    ),
    "batch_reduce_to": (
        lambda s: s.strategy.extended.batch_reduce_to("sum", [(s.per_replica, s.mirrored)]),
        *(OK, OK, REFUSED, REFUSED),
    ),
    "broadcast_to": (
        lambda s: s.strategy.extended.broadcast_to(jnp.ones(1), s.mirrored),
        *(OK, OK, REFUSED, REFUSED),
    ),
    "scope": (lambda s: _enter(s.strategy.scope()), OK, OK, REFUSED, REFUSED),
    "experimental_distribute_dataset": (
        lambda s: s.strategy.experimental_distribute_dataset([np.ones(4)]),
        *(OK, OK, OK, OK),
    ),
    "distribute_datasets_from_function": (
        lambda s: s.strategy.distribute_datasets_from_function(lambda context: [np.ones(4)]),
        *(OK, OK, OK, OK),
    ),
    "experimental_distribute_values_from_function": (
        lambda s: s.strategy.experimental_distribute_values_from_function(lambda context: 1.0),
        *(OK, OK, "not asked", OK),
    ),
    "experimental_local_results": (
        lambda s: s.strategy.experimental_local_results(s.mirrored),
        *(OK, OK, OK, OK),
    ),
    "update": (
        lambda s: s.strategy.extended.update(s.mirrored, lambda v: v.assign(1.0)),
        *(OK, OK, OK, REFUSED),
    ),
    "colocate_vars_with": (
        lambda s: _enter(s.strategy.extended.colocate_vars_with(s.mirrored)),
        *(REFUSED, OK, OK, REFUSED),
    ),
    "all_reduce": (
        lambda s: dist.get_replica_context().all_reduce("sum", 1.0),
        *(OK, AttributeError, OK, AttributeError),
    ),
    "mirrored read": (lambda s: s.mirrored.value() + s.mirrored, OK, OK, OK, OK),
    "on-read read": (lambda s: s.on_read.value() + s.on_read, OK, OK, OK, OK),
    "mirrored assign": (lambda s: s.mirrored.assign(1.0), OK, OK, OK, REFUSED),
    "on-read assign": (lambda s: s.on_read.assign(1.0), OK, OK, OK, REFUSED),
    "mirrored scatter": (
        lambda s: s.mirrored.assign_add(s.mirrored.value()),
        *(OK, OK, OK, REFUSED),
    ),
    "conversion of PerReplica": (
        lambda s: np.asarray(s.per_replica),
        *(ValueError, ValueError, ValueError, ValueError),
    ),
}
_CASES = [
    (call, context, error)
    for call, (_, *errors) in TABLE.items()
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
    function = TABLE[call][0]

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


def test_plain_variable_is_read_but_not_assigned_in_a_step(subject):
    plain = dist.Variable(2.0, name="plain")

    doubled = subject.strategy.run(lambda: plain * 2)
    with pytest.raises(ContextError, match=r"'plain' was created outside of .*assign_add"):
        subject.strategy.run(lambda: plain.assign_add(1.0))

    assert [float(x) for x in doubled.values] == [4.0, 4.0]
    assert plain.numpy() == 2.0


def test_plain_variable_is_assigned_where_code_runs_once(subject):
    plain = dist.Variable(0.0)
    one_device = dist.OneDeviceStrategy("CPU:0")

    with subject.strategy.scope():
        plain.assign_add(1.0)
    subject.strategy.run(
        lambda: dist.get_replica_context().merge_call(lambda _: plain.assign_add(10.0))
    )
    one_device.run(lambda: plain.assign_add(100.0))
    dist.get_strategy().run(lambda: plain.assign_add(1000.0))

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


def test_initial_value_cannot_depend_on_the_step(subject):
    def step(x):
        return dist.Variable(x * 2, name="new")

    with pytest.raises(ValueError, match="'new': initial_value is computed by the traced function"):
        subject.strategy.run(step, (jnp.float32(1.0),))


def test_variables_are_of_the_strategy_in_scope(subject, other):
    one_device = dist.OneDeviceStrategy("CPU:1")

    for strategy in (subject.strategy, other, one_device, dist.get_strategy()):
        with strategy.scope():
            assert dist.Variable(1.0).distribute_strategy is strategy
            assert dist.function(lambda: None)() is None
