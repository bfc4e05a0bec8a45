"""What assigning does, in every context, against a model of it in NumPy."""

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import InvalidValueError, ReplicaDivergenceError, ReplicaMismatchError

AUTO = dist.VariableSynchronization.AUTO
ON_WRITE = dist.VariableSynchronization.ON_WRITE
ON_READ = dist.VariableSynchronization.ON_READ
NONE = dist.VariableAggregation.NONE
SUM = dist.VariableAggregation.SUM
MEAN = dist.VariableAggregation.MEAN
FIRST = dist.VariableAggregation.ONLY_FIRST_REPLICA

KINDS = ("assign", "assign_add", "assign_sub")
CONTEXTS = (
    "run",
    "default",
    "scope",
    "merge_call",
    "update",
    "update in run",
    "function",
    "function in scope",
)
INITIAL = 10.0
CROSS_REPLICA_VALUE = 4.0


class Case(NamedTuple):
    synchronization: dist.VariableSynchronization
    aggregation: dist.VariableAggregation
    kind: str

    def __str__(self):
        return f"{self.synchronization.name}-{self.aggregation.name}-{self.kind}"


CASES = [
    Case(*case) for case in itertools.product((AUTO, ON_READ), (NONE, SUM, MEAN, FIRST), KINDS)
]


class Outcome(NamedTuple):
    """What is seen of a variable after an assignment."""

    in_step: Any  # v.value() where it was assigned; one value per replica inside run
    copies: np.ndarray  # the components, [replica]
    numpy: float | None  # v.numpy() outside, None if there is no such value
    in_next_run: np.ndarray  # v.value() in another run, [replica]


def _combine(aggregation, values):
    """One value of the values of the replicas."""
    return {SUM: np.sum, MEAN: np.mean, FIRST: lambda v: v[0]}[aggregation](values)


def _apply(kind, current, value):
    return {"assign": 0 * current, "assign_add": current, "assign_sub": current}[kind] + (
        -value if kind == "assign_sub" else value
    )


def model(case: Case, context: str, num_replicas: int) -> Outcome | type[Exception]:
    """Section 7 of the reference, and an error where copies would drift apart."""
    on_read = case.synchronization is ON_READ
    copies = np.full(num_replicas, INITIAL, np.float32)
    values = np.full(num_replicas, CROSS_REPLICA_VALUE, np.float32)
    if context == "run":
        values = np.arange(1, num_replicas + 1, dtype=np.float32)
        if not on_read and num_replicas > 1:
            if case.aggregation is NONE:
                return ReplicaDivergenceError
            values = np.full(num_replicas, _combine(case.aggregation, values), np.float32)
    elif on_read and not context.startswith("update"):
        if case.aggregation is NONE or (case.aggregation is SUM and case.kind != "assign"):
            return InvalidValueError
        if case.aggregation is SUM:
            values = values / num_replicas
    copies = _apply(case.kind, copies, values)
    numpy = copies[0]
    if on_read:
        numpy = None if case.aggregation is NONE else _combine(case.aggregation, copies)
    per_replica = context == "run" or context.startswith("update")
    return Outcome(copies if per_replica else numpy, copies, numpy, copies)


def _variable(strategy, case, name="v"):
    with strategy.scope():
        return dist.Variable(
            INITIAL, name=name, synchronization=case.synchronization, aggregation=case.aggregation
        )


def _assign_all(strategy, context: str, variables: dict[Case, dist.Variable]) -> dict[Case, Any]:
    """Assigns to every variable in `context`; returns what is read there at once."""

    def assign(v, kind, value=CROSS_REPLICA_VALUE):
        getattr(v, kind)(value)
        return v.value()

    def assign_all():
        return [assign(v, case.kind) for case, v in variables.items()]

    def assign_in_run():
        one_more = dist.get_replica_context().replica_id_in_sync_group + 1.0
        return [assign(v, case.kind, one_more) for case, v in variables.items()]

    # All variables in the update of the first, which is one program.
    update = lambda: strategy.extended.update(
        next(iter(variables.values())), lambda _: assign_all()
    )
    if context == "run":
        seen = strategy.run(assign_in_run)
    elif context.startswith("update"):
        seen = update() if context == "update" else strategy.run(update)
    else:
        seen = _call(strategy, context, assign_all)
    return dict(zip(variables, seen, strict=True))


def _call(strategy, context: str, function: Callable[[], Any]) -> Any:
    """Calls `function` in a context that is no update."""
    if context.endswith("scope"):
        with strategy.scope():
            return _call(strategy, context.removesuffix("scope").removesuffix(" in "), function)
    if context == "function":
        return dist.function(function)()
    if context == "run":
        return strategy.run(function)
    if context == "merge_call":
        return strategy.run(lambda: dist.get_replica_context().merge_call(lambda _: function()))
    return function()


def _components(strategy, value) -> np.ndarray:
    return np.array([np.asarray(c) for c in strategy.experimental_local_results(value)])


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("context", CONTEXTS)
def test_assignments_do_what_the_model_does(context, num_replicas):
    """Every allowed assignment of one context and strategy, all in one program."""
    strategy = dist.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
    outcomes = {case: model(case, context, num_replicas) for case in CASES}
    allowed = {case: o for case, o in outcomes.items() if isinstance(o, Outcome)}
    variables = {case: _variable(strategy, case) for case in allowed}

    seen = _assign_all(strategy, context, variables)
    later = strategy.run(lambda: [v.value() for v in variables.values()])

    for (case, expected), in_next_run in zip(allowed.items(), later, strict=True):
        v = variables[case]
        in_step = _components(strategy, seen[case])
        np.testing.assert_array_equal(_components(strategy, v), expected.copies, str(case))
        np.testing.assert_array_equal(
            _components(strategy, in_next_run), expected.in_next_run, str(case)
        )
        np.testing.assert_array_equal(
            in_step, np.broadcast_to(expected.in_step, in_step.shape), str(case)
        )
        assert expected.numpy is None or v.numpy() == expected.numpy, case


@pytest.mark.parametrize("context", CONTEXTS)
def test_refused_assignments_change_nothing(context, strategy):
    for case in CASES:
        error = model(case, context, 2)
        if isinstance(error, Outcome):
            continue
        v = _variable(strategy, case, name="refused")

        with pytest.raises(error, match="'refused'"):
            _assign_all(strategy, context, {case: v})

        assert [c.numpy() for c in v.values] == [INITIAL, INITIAL]


# The same value on every replica


SAME_VALUES: dict[str, Callable[[Any], Any]] = {
    "number": lambda captured: 5.0,
    "NumPy array": lambda captured: np.float32(5.0),
    "captured array": lambda captured: captured,
    "computed from a captured array": lambda captured: jnp.sqrt(captured * 5),
}


def test_equal_values_of_all_replicas_count_once_unless_summed(strategy_of):
    strategy = strategy_of(4)
    variables = {
        (name, case): _variable(strategy, case)
        for name in SAME_VALUES
        for case in CASES
        if case.synchronization is AUTO and case.aggregation is not SUM
    }
    captured = jnp.float32(5.0)

    def step():
        for (name, case), v in variables.items():
            getattr(v, case.kind)(SAME_VALUES[name](captured))

    strategy.run(step)

    for (name, case), v in variables.items():
        assert v.numpy() == _apply(case.kind, INITIAL, 5.0), (name, case)


def test_number_counts_once_per_replica_where_that_is_clear(strategy_of):
    def add(num_replicas, value, *args):
        strategy = strategy_of(num_replicas)
        v = _variable(strategy, Case(AUTO, SUM, "assign_add"), name="total")
        strategy.run(lambda *x: v.assign_add(x[0] if x else value, read_value=False), args)
        return v.numpy() - INITIAL

    assert add(1, 5.0) == 5.0
    assert add(4, None, np.float32(5.0)) == 4 * 5.0
    for value in (5.0, np.float32(5.0)):
        with pytest.raises(
            ValueError, match=rf"'total': assign_add got {re.escape(repr(value))}.*or 2 times"
        ):
            add(2, value)


# Integers, booleans and shapes


@pytest.mark.parametrize(
    ("num_replicas", "context"), [(1, "function"), (2, "scope"), (4, "merge_call")]
)
def test_parts_of_an_integer_add_up_to_it(num_replicas, context, strategy_of):
    strategy = strategy_of(num_replicas)
    values = np.array([7, -7, 0, 1, 2**31 - 1, -(2**31)], np.int32)
    with strategy.scope():
        v = dist.Variable(np.zeros_like(values), synchronization=ON_READ, aggregation=SUM)

    _call(strategy, context, lambda: v.assign(values, read_value=False))

    np.testing.assert_array_equal(v.numpy(), values)
    assert v.numpy().dtype == np.int32
    # Replica 0 takes the remainder.
    parts = np.array([part.numpy() for part in v.values])
    np.testing.assert_array_equal(parts[1:], np.tile(values // num_replicas, (len(parts) - 1, 1)))


_DTYPES_OF = {
    SUM: ("float32", "float16", "bfloat16", "int32", "complex64"),
    MEAN: ("float32", "float16", "bfloat16", "complex64"),
    FIRST: ("float32", "float16", "bfloat16", "int32", "bool", "complex64"),
}


@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])
def test_replicas_are_combined_in_every_dtype(synchronization, strategy_of):
    strategy = strategy_of(4)
    with strategy.scope():
        variables = {
            (aggregation, dtype): dist.Variable(
                np.zeros((2, 3)), None, None, dtype, synchronization, aggregation
            )
            for aggregation, dtypes in _DTYPES_OF.items()
            for dtype in dtypes
        }
        large = dist.Variable(jnp.float16(0), None, None, None, synchronization, MEAN)
    rows = np.arange(24).reshape(4, 2, 3)

    def step(x):
        for v in variables.values():
            v.assign(x.astype(v.dtype))
        large.assign(jnp.float16(40000))  # their sum is not finite, and their mean is

    strategy.run(step, args=(dist.PerReplica(list(rows)),))

    for (aggregation, dtype), v in variables.items():
        total = {SUM: rows.sum(0), MEAN: rows.mean(0), FIRST: rows[0]}[aggregation]
        expected = (total != 0 if dtype == "bool" else total).astype(jnp.dtype(dtype))
        assert v.numpy().dtype == expected.dtype
        np.testing.assert_array_equal(v.numpy(), expected, err_msg=f"{aggregation} {dtype}")
    assert large.numpy() == 40000


@pytest.mark.parametrize(
    ("synchronization", "context"),
    [(ON_WRITE, "run"), (ON_WRITE, "function"), (ON_READ, "run"), (ON_READ, "scope")],
)
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.ones(3, np.float32), ValueError, r"'m': assign.*shape \(3,\).*shape \(2, 3\)"),
        (1.0, ValueError, r"'m': assign.*shape \(\).*shape \(2, 3\).*not broadcast"),
        (np.ones((2, 3), np.complex64), TypeError, r"'m': assign got dtype complex64.*is float32"),
        ("text", TypeError, "'m': assign: got 'text'"),
        (None, TypeError, "'m': assign: got None"),
        (dist.IndexedSlices(np.ones((1, 3)), np.zeros(1, int)), TypeError, "'m'.*scatter_add"),
    ],
    ids=["vector", "scalar", "complex", "text", "None", "slices"],
)
def test_value_that_does_not_fit_is_refused(
    synchronization, context, value, error, message, strategy, variable
):
    v = variable(
        np.zeros((2, 3), np.float32), name="m", synchronization=synchronization, aggregation=MEAN
    )

    with pytest.raises(error, match=message):
        _call(strategy, context, lambda: v.assign(value, read_value=False))

    np.testing.assert_array_equal(v.numpy(), np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("float32", True, 1.0),
        ("float16", np.float64(0.5), 0.5),
        ("complex64", 2.0, 2.0),
        ("int32", np.uint8(7), 7),
        ("bfloat16", np.float32(1.5), 1.5),
        ("int32", 1.5, None),
        ("bool", 1, None),
        ("int32", np.float16(1), None),
    ],
)
def test_value_is_converted_unless_it_is_of_a_wider_kind(dtype, value, expected):
    v = dist.Variable(0, dtype=dtype, name="v")

    if expected is None:
        with pytest.raises(TypeError, match=rf"'v': assign got dtype .*is {dtype}.*astype"):
            v.assign(value)
        return
    v.assign(value)
    assert v.dtype == jnp.dtype(dtype)
    assert v.numpy() == expected


# Results and sources of assignments


def test_assign_returns_the_variable_outside_the_value_inside_or_nothing(strategy):
    for synchronization in (ON_WRITE, ON_READ):
        v = _variable(strategy, Case(synchronization, MEAN, "assign"))

        assert v.assign(1.0) is v
        assert dist.function(lambda v=v: v.assign(2.0))() == 2.0
        assigned = strategy.run(lambda v=v: v.assign_add(jnp.float32(3.0)))
        assert _components(strategy, assigned).tolist() == [5.0, 5.0]
        assert v.assign(1.0, read_value=False) is None
        assert strategy.run(lambda v=v: v.assign(2.0, read_value=False)) is None
        assert dist.function(lambda v=v: v.assign_add(3.0, read_value=False))() is None
        assert v.numpy() == 5.0


def test_variables_mirrored_values_and_nests_can_be_assigned(strategy, variable):
    v = _variable(strategy, Case(AUTO, NONE, "assign"))
    total = _variable(strategy, Case(ON_READ, SUM, "assign"))
    vector, w = variable([0.0, 0.0, 0.0]), variable(3.0)
    mirrored = strategy.extended.update(v, lambda v: v.assign(3.0))

    v.assign(total)
    from_sum = v.numpy()
    v.assign_add(mirrored)
    strategy.run(lambda x: vector.assign([x, 2.0, w], read_value=False), (np.float32(1.0),))
    inside = vector.numpy()
    vector.assign([w, w, 1.0])

    assert isinstance(mirrored, dist.Mirrored)
    assert (from_sum, v.numpy()) == (20.0, 23.0)
    np.testing.assert_array_equal(inside, [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(vector.numpy(), [3.0, 3.0, 1.0])


def _of_a_step(strategy):
    return strategy.run(lambda: dist.get_replica_context().replica_id_in_sync_group + 1.0)


def _made_by_hand(strategy):
    return dist.PerReplica([i + 1.0 for i in range(strategy.num_replicas_in_sync)])


@pytest.mark.parametrize(
    ("make", "is_uneven", "kind"),
    [
        (_of_a_step, False, dist.MirroredStrategy),
        (_made_by_hand, True, dist.MirroredStrategy),
        (_made_by_hand, False, dist.CentralStorageStrategy),
        (_of_a_step, True, dist.CentralStorageStrategy),
    ],
)
def test_captured_value_per_replica_is_that_of_each_replica(make, is_uneven, kind):
    strategy = kind(["CPU:1", "CPU:2"])
    cases = [c for c in CASES if c.synchronization is ON_READ or c.aggregation is not NONE]
    variables = {c: _variable(strategy, c) for c in cases}
    captured = make(strategy)
    rows = dist.PerReplica([jnp.ones(1), jnp.ones(2 if is_uneven else 1)])

    def step(rows):
        for case, v in variables.items():
            getattr(v, case.kind)(captured)

    strategy.run(step, (rows,))

    combine = {SUM: 3.0, MEAN: 1.5, FIRST: 1.0}
    for case, v in variables.items():
        on_read = case.synchronization is ON_READ
        each = [1.0, 2.0] if on_read else [combine[case.aggregation]]
        expected = [_apply(case.kind, INITIAL, x) for x in each]
        assert sorted({float(c.numpy()) for c in v.values}) == sorted(expected), case
    v = _variable(strategy, Case(AUTO, NONE, "assign"), name="w")
    with pytest.raises(ReplicaDivergenceError, match="'w' is mirrored"):
        strategy.run(lambda: v.assign(_made_by_hand(strategy)))
    v = _variable(strategy, Case(AUTO, SUM, "assign"))

    @dist.function
    def both():
        each = make(strategy)
        strategy.run(lambda: v.assign(each))

    both()
    assert v.numpy() == 3.0


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], [1.0, np.ones(2)]], ids=str)
def test_captured_value_per_replica_must_fit_the_replicas(values, strategy):
    v = _variable(strategy, Case(AUTO, SUM, "assign"), name="w")

    with pytest.raises(ReplicaMismatchError, match=r"'w': assign got a PerReplica .* are 2 "):
        strategy.run(lambda: v.assign(dist.PerReplica(values)))


@pytest.mark.parametrize(
    ("context", "kind"),
    [("scope", "assign"), ("merge_call", "assign_add"), ("function", "assign_sub")],
)
def test_value_per_replica_is_refused_in_a_cross_replica_context(context, kind, strategy):
    v = _variable(strategy, Case(AUTO, NONE, kind), name="w")
    per_replica = dist.PerReplica([jnp.float32(1), jnp.float32(2)])

    with pytest.raises(ReplicaDivergenceError, match=rf"'w': {kind} got a PerReplica.*reduce"):
        if context == "scope":
            with strategy.scope():
                getattr(v, kind)(per_replica)
        elif context == "function":
            dist.function(lambda x: getattr(v, kind)(x))(per_replica)
        else:
            strategy.run(
                lambda x: dist.get_replica_context().merge_call(
                    lambda _, merged: getattr(v, kind)(merged), (x,)
                ),
                (per_replica,),
            )


@pytest.mark.parametrize(
    ("synchronization", "kind"), [(ON_WRITE, "assign"), (ON_READ, "assign_add")]
)
def test_array_on_another_device_is_brought_to_the_variable(synchronization, kind, strategy_of):
    strategy = strategy_of(2)
    v = _variable(strategy, Case(synchronization, MEAN, kind))
    component = (
        strategy_of(4)
        .run(lambda: dist.get_replica_context().replica_id_in_sync_group * 1.0)
        .values[3]
    )

    getattr(v, kind)(component)

    assert v.numpy() == _apply(kind, INITIAL, 3.0)
    assert _components(strategy, strategy.run(lambda: v.value())).tolist() == [v.numpy()] * 2


def test_update_returns_one_result_per_copy(strategy):
    v = _variable(strategy, Case(AUTO, NONE, "assign"))

    together, each = (
        strategy.extended.update(v, lambda v, x: v.assign_add(x), (2.0,), group=group)
        for group in (True, False)
    )

    assert isinstance(together, dist.Mirrored)
    assert [float(c) for c in (*together.values, *each)] == [12.0, 12.0, 14.0, 14.0]
    assert strategy.extended.update(v, lambda v: v.assign(2.0, read_value=False)) is None
    local = _variable(strategy, Case(ON_READ, SUM, "assign_add"))
    strategy.extended.update(local, lambda v, x: v.assign_add(x), (_made_by_hand(strategy),))
    assert _components(strategy, local).tolist() == [11.0, 12.0]  # each gets its component
