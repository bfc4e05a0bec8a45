"""Variables as objects: creation, attributes, arithmetic, copies."""

import copy
import operator
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import ContextError, InvalidTypeError, InvalidValueError

AUTO = dist.VariableSynchronization.AUTO
ON_WRITE = dist.VariableSynchronization.ON_WRITE
ON_READ = dist.VariableSynchronization.ON_READ
SYNC_NONE = dist.VariableSynchronization.NONE
SUM = dist.VariableAggregation.SUM
MEAN = dist.VariableAggregation.MEAN
FIRST = dist.VariableAggregation.ONLY_FIRST_REPLICA


@pytest.fixture
def create(strategy_of):
    """Creates a variable under a `MirroredStrategy` with two replicas, or the one given."""

    def create(initial_value, num_replicas=2, **kwargs):
        with strategy_of(num_replicas).scope():
            return dist.Variable(initial_value, **kwargs)

    return create


# Creation


def test_variable_keeps_its_initial_value_dtype_and_shape(create):
    for dtype, shape in (("float16", ()), ("bfloat16", (3,)), ("bool", (0,)), ("int32", (2, 1))):
        initial = np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1
        for synchronization in (ON_WRITE, ON_READ):
            v = create(
                initial,
                dtype=dtype,
                synchronization=synchronization,
                aggregation=FIRST,
                shape=shape,
            )

            found = v.dtype, v.shape, v.ndim, v.size
            assert found == (jnp.dtype(dtype), shape, len(shape), initial.size)
            assert v.numpy().dtype == v.dtype
            np.testing.assert_array_equal(v.numpy(), initial.astype(v.dtype))


@pytest.mark.parametrize(
    ("initial_value", "dtype"),
    [
        (1, "int32"),
        (True, "bool"),
        (1j, "complex64"),
        ([[1, 2], [3, 4]], "int32"),
        ((1.0, 2), "float32"),
        (np.arange(3), "int32"),
        (np.ones((2, 2)), "float32"),
        (np.uint8(1), "uint8"),
        (lambda: jnp.ones(2, jnp.bfloat16), "bfloat16"),
    ],
)
def test_dtype_follows_the_initial_value(initial_value, dtype, create):
    expected = initial_value() if callable(initial_value) else initial_value

    v = create(initial_value)

    assert v.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(v.numpy(), expected)


def test_initializer_is_called_once_and_variables_are_copied(create):
    calls = []

    def initializer():
        calls.append("called")
        return jnp.full(3, float(len(calls)))

    for synchronization in (ON_WRITE, ON_READ):
        calls.clear()
        v = create(initializer, 4, synchronization=synchronization, aggregation=SUM)
        copied = create(v)
        v.assign([5.0, 5.0, 5.0])

        assert calls == ["called"]
        assert copied.numpy().tolist() == [1.0 if synchronization is ON_WRITE else 4.0] * 3


@pytest.mark.parametrize("num_replicas", [0, 1, 2])
@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])
def test_source_array_and_numpy_are_copied(num_replicas, synchronization, strategy_of):
    # Large and aligned enough that JAX would not copy it by itself.
    source = np.ones(1 << 14, np.float32)
    strategy = strategy_of(num_replicas) if num_replicas else dist.get_strategy()
    with strategy.scope():
        v = dist.Variable(source, synchronization=synchronization, aggregation=MEAN)
        source[:] = 7
        created = v.numpy()
        assert created[0] == 1
        created[:] = source[:] = 2
        assert v.numpy()[0] == 1
        v.assign(source)
        source[:] = 7

    assert v.numpy()[0] == 2


@pytest.mark.parametrize(
    ("strategy", "kwargs"),
    [
        (dist.get_strategy, {}),
        (lambda: dist.OneDeviceStrategy("CPU:0"), {}),
        (lambda: dist.MirroredStrategy(["CPU:0", "CPU:1"]), {"aggregation": MEAN}),
        (
            lambda: dist.MirroredStrategy(["CPU:0", "CPU:1"]),
            {"aggregation": MEAN, "synchronization": ON_READ},
        ),
    ],
    ids=["default", "one device", "mirrored", "on read"],
)
def test_arrays_that_went_in_or_were_read_survive_donation(strategy, kwargs):
    strategy = strategy()
    initial, assigned, argument = (jnp.full(4, i, jnp.float32) for i in range(3))
    with strategy.scope():
        v = dist.Variable(initial, **kwargs)
        w = dist.Variable(v, **kwargs)
    kept = [v.value(), v.read_value(), jnp.asarray(v), v[:], v.numpy(), v + 0]
    if kwargs:
        kept += [c.value() for c in v.values] + [*strategy.experimental_local_results(v)]

    def add():
        v.assign_add(jnp.ones(4))
        w.assign_sub(jnp.ones(4))

    def assign(x):
        v.assign(x)
        w.assign(assigned)

    strategy.run(add)
    v.assign(assigned)
    strategy.run(add)
    strategy.run(assign, (argument,))
    strategy.run(add)
    dist.function(assign)(argument)
    dist.function(add)()
    dist.function(lambda: w.assign(v.value(), read_value=False))()
    strategy.run(add)

    for i, array in [*enumerate((initial, assigned, argument)), *((0, read) for read in kept)]:
        np.testing.assert_array_equal(array, np.full(4, i))
    np.testing.assert_array_equal(v.numpy(), np.full(4, 4))
    np.testing.assert_array_equal(w.numpy(), np.full(4, 2))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"initial_value": None}, ValueError, "'w': initial_value is missing"),
        ({"initial_value": "text"}, TypeError, "'w': got 'text'"),
        ({"initial_value": ["a", "b"]}, TypeError, r"'w': got \['a', 'b'\]"),
        ({"initial_value": [[1], [1, 2]]}, TypeError, r"'w': \[\[1\], \[1, 2\]\] is not an array"),
        ({"initial_value": dist.PerReplica([1.0, 2.0])}, TypeError, "'w'.*is a PerReplica"),
        ({"initial_value": lambda: jax.random.key(0)}, TypeError, "'w': .*dtype key<fry>.*key_da"),
        ({"shape": (3,)}, ValueError, r"'w': shape is \(3,\).*shape \(2,\)"),
        ({"synchronization": "on_read"}, ValueError, "synchronization is 'on_read'"),
        ({"synchronization": SYNC_NONE}, ValueError, "synchronization is NONE"),
        ({"aggregation": "sum"}, ValueError, "aggregation is 'sum'"),
        ({"aggregation": dist.ReduceOp.SUM}, ValueError, "aggregation is <ReduceOp.SUM"),
        ({"aggregation": MEAN, "dtype": jnp.int32}, ValueError, "MEAN, but dtype is int32"),
    ],
)
def test_impossible_variable_is_refused(kwargs, error, message, create):
    with pytest.raises(error, match=message):
        create(**{"initial_value": [1.0, 2.0], "name": "w"} | kwargs)


@pytest.mark.parametrize(
    ("synchronization", "name", "trainable"),
    [
        (AUTO, "MirroredVariable", True),
        (None, "MirroredVariable", True),
        (ON_READ, "SyncOnReadVariable", False),
    ],
)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_synchronization_chooses_the_kind_of_variable(
    synchronization, name, trainable, num_replicas, create
):
    by_name = create(1.0, num_replicas, synchronization=synchronization, aggregation=None)
    with by_name.distribute_strategy.scope():
        by_position = dist.Variable(1.0, None, None, None, synchronization)

    for v in (by_name, by_position):
        assert type(v).__name__ == name
        assert isinstance(v, dist.Variable)
        assert isinstance(v, dist.DistributedValues)
        assert v.trainable is trainable
        assert v.synchronization is (ON_READ if synchronization is ON_READ else ON_WRITE)
        assert v.aggregation is dist.VariableAggregation.NONE
        with pytest.raises(TypeError, match=rf"{name} is not constructed directly"):
            type(v)(1.0)


@pytest.mark.parametrize("strategy", [dist.get_strategy, lambda: dist.OneDeviceStrategy("CPU:1")])
def test_one_device_gives_a_plain_variable(strategy):
    with strategy().scope():
        v = dist.Variable(1, synchronization=SYNC_NONE, aggregation=MEAN)
        on_read = dist.Variable(1.0, synchronization=ON_READ, aggregation=SUM)

    v.assign_add(2)
    on_read.assign_add(2.0)

    assert type(v) is dist.Variable
    assert not isinstance(v, dist.DistributedValues)
    assert (v.numpy(), on_read.numpy()) == (3, 3.0)
    assert v.value().devices() == {jax.devices()[0 if v.device.endswith("CPU:0") else 1]}


def test_components_lie_on_the_devices_of_their_replicas(create, strategy_of):
    mirrored = create([1.0, 2.0], 4, name="w", trainable=False, aggregation=SUM)
    on_read = create([1.0, 2.0], 4, synchronization=ON_READ, trainable=True)

    assert (mirrored.trainable, mirrored.aggregation, on_read.trainable) == (False, SUM, True)
    assert not strategy_of(4).extended.variable_created_in_scope(mirrored)
    for v in (mirrored, on_read):
        components = v.values
        assert v.sharding.device_set == set(jax.devices()[:4])

        assert [c.device for c in components] == jax.devices()[:4]
        assert [c.shape for c in components] == [(2,)] * 4
        assert all(c.dtype == jnp.float32 for c in components)
        assert v.distribute_strategy.extended.value_container(components[3]) is v
        assert v.distribute_strategy.experimental_local_results(v)[1].name == components[1].name
        np.testing.assert_array_equal(components[3].numpy(), [1.0, 2.0])
        np.testing.assert_array_equal(components[3] + 1, [2.0, 3.0])
        assert not hasattr(components[0], "assign")


# Text


def test_repr_shows_every_copy_and_no_value_in_a_step(create):
    w = create([1.5, 2.0], name="w", dtype=jnp.float32)
    counter = create(0, synchronization=ON_READ, aggregation=SUM, num_replicas=1)

    assert repr(w) == str(w)
    assert repr(w) == (
        "MirroredVariable:{\n"
        "  0: <dist.Variable 'w:0' shape=(2,) dtype=float32, numpy=[1.5, 2. ]>,\n"
        "  1: <dist.Variable 'w/replica_1:0' shape=(2,) dtype=float32, numpy=[1.5, 2. ]>\n"
        "}"
    )
    assert repr(counter) == (
        "SyncOnReadVariable:{\n  0: <dist.Variable 'Variable:0' shape=() dtype=int32, numpy=0>\n}"
    )
    with w.distribute_strategy.scope():
        local = dist.Variable(0.0, synchronization=ON_READ)
    plain, seen = dist.Variable(1j, name="c"), []

    def step():
        local.assign(dist.get_replica_context().replica_id_in_sync_group + 0.5)
        seen.extend(repr(v) for v in (w, local, plain, w.values[1]))

    local.distribute_strategy.run(step)
    assert re.findall(r"numpy=([\d.]+)", repr(local)) == ["0.5", "1.5"]
    assert repr(plain) == "<dist.Variable 'c:0' shape=() dtype=complex64, numpy=1j>"
    # There are no values in a step.
    assert seen == [
        "<MirroredVariable 'w:0' shape=(2,) dtype=float32>",
        "<SyncOnReadVariable 'Variable:0' shape=() dtype=float32>",
        "<dist.Variable 'c:0' shape=() dtype=complex64>",
        "<dist.Variable 'w/replica_1:0' shape=(2,) dtype=float32>",
    ]


# Like an array

_BINARY = "add sub mul truediv floordiv mod pow eq ne lt le gt ge".split()  # noqa: SIM905
_BINARY_OF_INTEGERS = "and_ or_ xor lshift rshift".split()  # noqa: SIM905

_LEFT = np.array([7.0, -2.0, 3.5], np.float32)
_RIGHT = np.array([2.0, 3.0, -1.5], np.float32)
_BITS_LEFT, _BITS_RIGHT = np.array([6, 5, 1], np.int32), np.array([3, 1, 2], np.int32)
_OPERATIONS = [(getattr(operator, n), _LEFT, _RIGHT) for n in _BINARY] + [
    (getattr(operator, n), _BITS_LEFT, _BITS_RIGHT) for n in _BINARY_OF_INTEGERS
]


def _operator_results(left, right, others):
    """Results of the operators with a variable on either side, and what they should be."""
    for op, x, y in _OPERATIONS:
        v, w = left[x.dtype], right[y.dtype]
        expected = op(x, y)
        for other in others:
            yield op, op(v, other(y)), expected
            yield op, op(other(x), w), expected
        yield op, op(v, w), expected


_MAKE_OPERAND = [
    dist.Variable,
    lambda a: dist.Variable(a, synchronization=ON_READ, aggregation=FIRST),
    lambda a: dist.Mirrored(jnp.asarray(a), 2),
]


@pytest.mark.parametrize("is_in_run", [False, True], ids=["plain", "in run"])
def test_operators_take_variables_on_either_side(is_in_run, strategy):
    operands = []
    with (strategy if is_in_run else dist.get_strategy()).scope():
        for make in _MAKE_OPERAND if is_in_run else _MAKE_OPERAND[:1]:
            left = {a.dtype: make(a) for a in (_LEFT, _BITS_LEFT)}
            operands.append((left, {a.dtype: make(a) for a in (_RIGHT, _BITS_RIGHT)}))
    # NumPy arrays would otherwise take the operation over and ask for a NumPy array.
    others = (jnp.asarray, np.asarray)
    wanted = []

    def compute():
        made = [case for sides in operands for case in _operator_results(*sides, others)]
        wanted[:] = [(op.__name__, expected) for op, _, expected in made]
        return [result for _, result, _ in made]

    results = strategy.run(compute) if is_in_run else compute()

    for (name, expected), result in zip(wanted, results, strict=True):
        for component in strategy.experimental_local_results(result):
            assert isinstance(component, jax.Array), name
            np.testing.assert_allclose(component, expected, rtol=1e-6, err_msg=name)


def test_other_operators_and_conversions(create):
    v, matrix, bits = create(_LEFT), create([[1.0, 2.0], [3.0, 4.0]]), create(_BITS_LEFT)
    for operate in (operator.neg, operator.pos, abs, lambda x: 2 * x):
        np.testing.assert_array_equal(operate(v), operate(_LEFT))
    np.testing.assert_array_equal(round(v), np.round(_LEFT))
    np.testing.assert_array_equal(~bits, ~_BITS_LEFT)
    np.testing.assert_array_equal(matrix @ np.ones(2, np.float32), [3, 7])
    np.testing.assert_array_equal(np.ones(2, np.float32) @ matrix, [4, 6])
    np.testing.assert_array_equal(matrix @ matrix, [[7, 10], [15, 22]])
    np.testing.assert_array_equal(np.float32(2) ** matrix, [[2, 4], [8, 16]])

    scalar, vector, index = create(2.5), create([1.0, 2.0, 3.0]), create(1)

    assert (float(scalar), int(scalar), complex(scalar), bool(scalar)) == (2.5, 2, 2.5 + 0j, True)
    assert [10, 20][index] == 20
    assert len(vector) == 3
    assert [float(x) for x in vector] == [1.0, 2.0, 3.0]
    assert float(vector[-1]) == 3.0
    np.testing.assert_array_equal(vector[1:], [2.0, 3.0])
    np.testing.assert_array_equal(vector[np.array([True, False, True])], [1.0, 3.0])
    assert np.asarray(vector, np.float64).dtype == np.float64
    np.testing.assert_array_equal(np.asarray(vector), [1.0, 2.0, 3.0])
    assert isinstance(jnp.asarray(vector), jax.Array)
    assert (np.sum(vector), np.shape(vector)) == (6.0, (3,))
    with pytest.raises(ValueError, match="truth value of an array with more than one"):
        bool(vector)


def test_variable_is_used_in_jax_functions_by_its_value(create):
    v = create(_LEFT)

    def compute():
        return (
            jnp.sum(v.value()),
            jax.nn.relu(v.value()),
            jnp.stack([v, v]),
            jax.grad(lambda x: (x**2).sum())(v.value()),
        )

    for total, positive, stacked, gradient in (
        compute(),
        [r.values[1] for r in v.distribute_strategy.run(compute)],
        dist.function(compute)(),
    ):
        np.testing.assert_allclose(total, _LEFT.sum())
        np.testing.assert_array_equal(positive, np.maximum(_LEFT, 0))
        np.testing.assert_array_equal(stacked, [_LEFT, _LEFT])
        np.testing.assert_array_equal(gradient, 2 * _LEFT)
    for convert in (lambda: v.numpy(), lambda: np.asarray(v)):
        with pytest.raises(NotImplementedError, match=r"numpy\(\) is not possible.*value\(\)"):
            v.distribute_strategy.run(convert)


# Identity and copies


def test_variables_are_compared_by_element_and_referenced_by_ref(create):
    a, b = create([1.0, 2.0], name="a"), create([1.0, 3.0])

    assert (a == b).tolist() == [True, False]
    with pytest.raises(TypeError, match=r"unhashable.*MirroredVariable"):
        hash(a)
    assert a.ref() == a.ref()
    assert a.ref() != b.ref()
    assert {a.ref(): "a", b.ref(): "b"}[a.ref()] == "a"
    assert a.ref().deref() is a
    assert repr(a.ref()) == "<reference to a:0>"


@pytest.mark.parametrize(
    "kwargs",
    [{"aggregation": MEAN}, {"synchronization": ON_READ, "aggregation": SUM}, {}],
    ids=["mirrored", "on read", "plain"],
)
def test_deepcopy_is_independent(kwargs, create):
    source = create([1.0, 2.0], name="w", **kwargs) if kwargs else dist.Variable([1.0, 2.0])
    strategy = source.distribute_strategy

    def add_replica_id(v):
        v.assign_add(jnp.ones(2) * (1.0 + dist.get_replica_context().replica_id_in_sync_group))

    strategy.run(lambda: add_replica_id(source))
    duplicate = copy.deepcopy({"model": [source, source]})["model"]
    copied = [np.asarray(c) for c in strategy.experimental_local_results(duplicate[0])]
    before = [np.asarray(c) for c in strategy.experimental_local_results(source)]
    strategy.run(lambda: add_replica_id(duplicate[0]))

    assert duplicate[0] is duplicate[1]
    assert type(duplicate[0]) is type(source)
    for name in ("name", "trainable", "aggregation", "distribute_strategy"):
        assert getattr(duplicate[0], name) == getattr(source, name)
    np.testing.assert_array_equal(copied, before)
    np.testing.assert_array_equal(
        [np.asarray(c) for c in strategy.experimental_local_results(source)], before
    )


def test_other_copies_are_refused(create, strategy_of):
    v = create(1.0, name="w")

    with strategy_of(4).scope(), pytest.raises(ContextError, match=r"'w' of Mirrored.* be copied"):
        copy.deepcopy(v)
    for variable in (v, dist.Variable(1.0, name="w")):
        with pytest.raises(InvalidTypeError, match=r"'w' cannot be copied shallowly.*deepcopy"):
            copy.copy(variable)
        with pytest.raises(InvalidTypeError, match=r"'w' cannot be pickled.*v.numpy\(\)"):
            pickle.dumps(variable)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_from_an_array_to_later_steps_nothing_but_the_step_is_compiled(
    num_replicas, strategy_of, compilations
):
    strategy = strategy_of(num_replicas)
    values = [jax.device_put(np.full(n, n, np.float32)) for n in range(20, 25)]
    strategy.run(lambda x: x, (np.float32(0),))

    def step(x):
        for v in variables:
            v.assign_add(x * v)

    with compilations() as compiled:
        with strategy.scope():
            variables = [dist.Variable(value, aggregation=SUM) for value in values]
        held = [v.value() for v in variables]
        factors = strategy.experimental_distribute_values_from_function(
            lambda context: jax.device_put(np.float32(2))
        )
        for _ in range(3):
            strategy.run(step, (factors,))

    assert len(compiled) == 1, compiled
    for value, v, array in zip(values, variables, held, strict=True):
        np.testing.assert_array_equal(array, value)
        np.testing.assert_array_equal(v.numpy(), (1 + 2 * num_replicas) ** 3 * np.asarray(value))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int32", np.array([2**40])), ("int8", [300]), ("uint32", np.array([-1])), (None, [2**40])],
)
def test_whole_numbers_that_a_dtype_does_not_hold_are_refused(dtype, value, strategy):
    with strategy.scope():
        variable = dist.Variable(np.zeros(1), dtype=dtype or "int32")

        with pytest.raises(InvalidValueError, match=r"cannot hold -?\d+\. Choose another dtype"):
            dist.Variable(value, dtype=dtype)
        for assign in (variable.assign, variable.assign_add):
            with pytest.raises(InvalidValueError, match="cannot hold"):
                assign(value)
        with pytest.raises(InvalidValueError, match="cannot hold"):
            variable.scatter_update(dist.IndexedSlices(np.array(value), np.array([0])))
        assert float(dist.Variable([2**40], dtype="float32").value()[0]) == 2.0**40
    np.testing.assert_array_equal(variable, [0])
