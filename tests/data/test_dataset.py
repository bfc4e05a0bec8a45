"""Operations of `distributary.data.Dataset`, against plain Python on the same elements."""

import collections
import copy
import itertools
import pickle
import threading
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distributary.data import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    Dataset,
    Options,
    TensorSpec,
)
from distributary.errors import InvalidTypeError, InvalidValueError, OutOfRangeError


def _values(dataset):
    return [jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), element) for element in dataset]


def _generated(*values):
    return Dataset.from_generator(lambda: iter(values))


# Both kinds of pipeline: row numbers over a source, and elements one by one.
_RANGES = {
    "rows": lambda n: Dataset.range(n),
    "elements": lambda n: _generated(*range(n)),
    "mapped": lambda n: Dataset.range(2 * n).map(lambda x: x // 2).shard(2, 1),
}


@pytest.fixture(params=_RANGES)
def range_of(request):
    return _RANGES[request.param]


@pytest.mark.parametrize(
    ("apply", "expected"),
    [
        (lambda d: d.take(3), [0, 1, 2]),
        (lambda d: d.take(-1), list(range(10))),
        (lambda d: d.skip(7), [7, 8, 9]),
        (lambda d: d.skip(-1), []),
        (lambda d: d.shard(3, 1), [1, 4, 7]),
        (lambda d: d.repeat(2), [*range(10), *range(10)]),
        (lambda d: d.repeat().take(12), [*range(10), 0, 1]),
        (lambda d: d.concatenate(d.take(2)), [*range(10), 0, 1]),
        (lambda d: d.map(lambda x: x * x).take(4), [0, 1, 4, 9]),
        (lambda d: d.map(lambda x: x + 1, num_parallel_calls=3), list(range(1, 11))),
        (lambda d: d.filter(lambda x: x % 3 == 0), [0, 3, 6, 9]),
        (lambda d: d.batch(4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (lambda d: d.batch(4, drop_remainder=True), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (lambda d: d.repeat(2).batch(15), [[*range(10), *range(5)], [*range(5, 10)]]),
        (lambda d: d.batch(4).unbatch(), list(range(10))),
        (lambda d: d.batch(4).rebatch(3), [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]),
        (lambda d: d.batch(4).map(lambda x: x.sum()), [6, 22, 17]),
        (lambda d: d.prefetch(2).take(3), [0, 1, 2]),
        (lambda d: d.prefetch(AUTOTUNE).batch(8), [list(range(8)), [8, 9]]),
        (lambda d: d.enumerate(5).take(2), [(5, 0), (6, 1)]),
        (lambda d: d.cache().repeat(2).skip(8).take(4), [8, 9, 0, 1]),
        (lambda d: d.apply(lambda own: own.take(1)), [0]),
        (lambda d: Dataset.zip(d, d.skip(8)), [(0, 8), (1, 9)]),
        (lambda d: Dataset.zip({"a": d, "b": (d,)}).take(1), [{"a": 0, "b": (0,)}]),
        (lambda d: Dataset.zip((d, d)).batch(6).skip(1), [([6, 7, 8, 9], [6, 7, 8, 9])]),
        (lambda d: d.take(2).flat_map(lambda x: Dataset.range(x, x + 2)), [0, 1, 1, 2]),
    ],
)
def test_operations_give_what_they_give_in_tf_data(apply, expected, range_of):
    dataset = apply(range_of(10))

    assert _values(dataset) == expected
    assert _values(dataset) == expected  # starts over
    assert dataset.cardinality() in (len(expected), UNKNOWN_CARDINALITY)


def test_interleave_takes_turns_and_replaces_a_source_when_its_turn_comes_again():
    sources = [[1, 1, 1], [2], [3, 3, 3, 3], [4, 4], [5]]
    dataset = Dataset.range(5).interleave(
        lambda i: _generated(*sources[i]), cycle_length=3, block_length=2
    )

    # Worked out by hand from the description in TensorFlow's documentation.
    assert _values(dataset) == [1, 1, 2, 3, 3, 1, 4, 4, 3, 3, 5]
    threaded = Dataset.range(5).interleave(
        lambda i: _generated(*sources[i]), 3, 2, num_parallel_calls=AUTOTUNE
    )
    assert _values(threaded) == _values(dataset)


@pytest.mark.parametrize("buffer_size", [1, 3, 9, 10, 1000])
def test_shuffle_permutes_and_draws_from_its_buffer_only(buffer_size, range_of):
    orders = [_values(range_of(10).shuffle(buffer_size, seed=seed)) for seed in range(20)]

    for order in orders:
        assert sorted(order) == list(range(10))
        assert all(x < place + buffer_size for place, x in enumerate(order))
    assert len({tuple(order) for order in orders}) > (1 if buffer_size == 1 else 10) - 1
    same = [_values(Dataset.range(10).shuffle(buffer_size, seed=seed)) for seed in range(20)]
    assert orders == same  # of rows and elements


def test_a_large_buffer_gives_a_uniform_permutation():
    firsts = collections.Counter(
        next(iter(Dataset.range(4).shuffle(4, seed=seed))) for seed in range(2000)
    )

    assert all(420 < firsts[i] < 580 for i in range(4))  # 500 expected, 4 standard deviations


def test_every_pass_has_its_own_order_which_the_seed_determines():
    make = lambda **kwargs: Dataset.range(20).shuffle(20, seed=3, **kwargs)
    first, second = make(), make()

    passes = [_values(first) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert [_values(second) for _ in range(3)] == passes
    epochs = _values(make().repeat(2))
    assert epochs[:20] != epochs[20:]
    fixed = make(reshuffle_each_iteration=False)
    assert _values(fixed) == _values(fixed)
    repeated = _values(fixed.repeat(2))
    assert repeated[:20] == repeated[20:]


def test_without_a_seed_the_order_follows_numpys_generator():
    orders = []
    for seed in (0, 0, 1):
        np.random.seed(seed)
        orders.append(_values(Dataset.range(50).shuffle(50)))

    assert orders[0] == orders[1] != orders[2]


def test_a_copy_of_an_iterator_goes_on_by_itself():
    elements = iter(Dataset.range(3))

    copied = copy.deepcopy(elements)

    assert _values(copied) == _values(elements) == [0, 1, 2]


def test_two_iterators_do_not_disturb_each_other():
    dataset = Dataset.range(20).shuffle(5, seed=0)
    alone = _values(Dataset.range(20).shuffle(5, seed=0))

    first = iter(dataset)
    head = [int(next(first)) for _ in range(5)]
    second = iter(dataset)
    next(second)
    assert head + [int(x) for x in first] == alone


@pytest.mark.parametrize("is_restored", [False, True])
@pytest.mark.parametrize(
    "operation",
    [
        lambda d, f: d.map(f, num_parallel_calls=2),
        lambda d, f: d.map(f).prefetch(2),
        lambda d, f: Dataset.range(2).interleave(lambda _: d.map(f), num_parallel_calls=2),
        lambda d, f: d.map(f, num_parallel_calls=2).repeat(2).prefetch(1),
    ],
)
def test_an_iterator_is_refused_in_threads_for_which_it_waits(operation, is_restored):
    elements = iter(operation(Dataset.range(8), lambda x: x + next(elements)))
    if is_restored:
        elements.set_state({**elements.get_state()})
    taken = []

    def take():
        with pytest.raises(InvalidValueError, match="so both would wait forever") as error:
            next(elements)
        taken.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(60.0)
    assert taken


def test_an_iterator_may_be_used_in_threads_of_another():
    numbers = iter(Dataset.range(100, 104).prefetch(2))
    pairs = Dataset.range(4).map(lambda x: (x, next(numbers)), num_parallel_calls=2).prefetch(2)

    first, second = zip(*_values(pairs), strict=True)

    assert list(first) == [0, 1, 2, 3]
    assert sorted(second) == [100, 101, 102, 103]


def test_sizes_of_batches_are_refused_by_the_method_that_got_them():
    for name in ("batch", "padded_batch", "rebatch"):
        with pytest.raises(InvalidValueError, match=f"^{name}: batch_size is 0"):
            getattr(Dataset.range(4).batch(2), name)(0)


Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclass
class Example:
    image: np.ndarray
    label: np.ndarray


@pytest.mark.parametrize(
    "nest",
    [
        np.arange(6.0),
        (np.arange(6), np.ones((6, 2))),
        {"a": np.arange(6), "b": {"c": np.zeros((6, 1, 2))}},
        Point(np.arange(6), np.arange(6) * 2),
        Example(np.ones((6, 2, 2)), np.arange(6)),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_elements_are_nests(nest):
    dataset = Dataset.from_tensor_slices(nest)

    batches = list(dataset.shuffle(6, seed=0).batch(4))
    order = _values(Dataset.range(6).shuffle(6, seed=0).batch(4))
    for batch, rows in zip(batches, order, strict=True):
        assert jax.tree.structure(batch) == jax.tree.structure(nest)
        expected = jax.tree.map(lambda leaf, rows=rows: leaf[rows], nest)
        jax.tree.map(np.testing.assert_array_equal, batch, expected)
    one_by_one = list(dataset.map(lambda *parts: parts[0] if len(parts) == 1 else parts).batch(6))
    assert len(one_by_one) == 1
    spec = jax.tree.leaves(dataset.element_spec, is_leaf=lambda x: isinstance(x, TensorSpec))
    assert [s.shape for s in spec] == [leaf.shape[1:] for leaf in jax.tree.leaves(nest)]


def test_tuples_are_structures_lists_arrays_and_text_stays():
    assert Dataset.from_tensor_slices([[1, 2], [3, 4]]).element_spec == TensorSpec((2,), "int64")
    assert _values(Dataset.from_tensor_slices(([1, 2], [3, 4]))) == [(1, 3), (2, 4)]
    assert _values(_generated([1, 2], [3, 4]).batch(2)) == [[[1, 2], [3, 4]]]
    assert _values(Dataset.from_tensor_slices(["a", "longer"]).batch(2)) == [["a", "longer"]]
    records = _generated(b"a\x00", b"\x00\x00bc").batch(2)
    assert _values(records) == [[b"a\x00", b"\x00\x00bc"]]


def test_map_receives_the_items_of_a_tuple_and_other_nests_whole():
    pair = Dataset.from_tensor_slices((np.arange(2), np.arange(2) + 5))
    named = Dataset.from_tensor_slices({"a": np.arange(2)})

    assert _values(pair.map(lambda x, y: x + y)) == [5, 7]
    assert _values(named.map(lambda row: row["a"] * 2)) == [0, 2]
    assert _values(pair.filter(lambda x, y: y == 6)) == [(1, 6)]


def test_elements_of_different_shape_are_refused_or_filled_up():
    ragged = _generated(np.arange(2), np.arange(3))

    with pytest.raises(ValueError, match=r"element 1 .* shape \(3,\).* \(2,\).*padded_batch"):
        list(ragged.batch(2))
    assert _values(ragged.padded_batch(2)) == [[[0, 1, 0], [0, 1, 2]]]
    assert _values(ragged.padded_batch(2, [4], 9)) == [[[0, 1, 9, 9], [0, 1, 2, 9]]]
    with_scalar = ragged.map(lambda row: (row, len(row))).padded_batch(2, ([np.int32(4)], []))
    ((rows, sizes),) = with_scalar
    assert (rows.shape, sizes.tolist()) == ((2, 4), [2, 3])
    with pytest.raises(TypeError, match=r"padding_values has 1.5 for arrays of int64"):
        list(ragged.padded_batch(2, None, 1.5))
    with pytest.raises(ValueError, match=r"asks for \(2,\).*\(3,\)"):
        list(ragged.padded_batch(2, [2]))
    with pytest.raises(ValueError, match="ragged list"):
        list(_generated([[1], [2, 3]]).batch(1))
    with pytest.raises(TypeError, match=r"dtype float64.*int64"):
        list(_generated(np.array(1), np.array(1.5)).batch(2))
    with pytest.raises(ValueError, match="structure"):
        list(_generated((1, 2), (1,)).batch(2))


def test_generators_keep_to_their_signature():
    spec = (TensorSpec((None, 2), np.float32), TensorSpec((), np.int32))
    make = lambda *elements: Dataset.from_generator(lambda: elements, output_signature=spec)

    ok = make((np.ones((3, 2), np.float32), 1))
    assert ok.element_spec == spec
    ((x, y),) = ok
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    for bad, error, message in [
        ((np.ones((3, 3), np.float32), 1), ValueError, r"element 0 has shape \(3, 3\)"),
        ((1j * np.ones((3, 2)), 1), TypeError, "complex128, but output_signature has float32"),
        ((np.ones((3, 2), np.float32),), TypeError, "structure"),
        ((np.ones((3, 2), np.float32), 1.5), TypeError, "element 0 is 1.5 with dtype float64, but"),
    ]:
        with pytest.raises(error, match=message):
            list(make(bad))
    flat = lambda: [(1, (2, 3))]
    nested = (TensorSpec((), np.int32), TensorSpec((2,), np.int32))
    ((_, pair),) = Dataset.from_generator(flat, output_signature=nested)
    assert pair.tolist() == [2, 3]
    assert _values(Dataset.from_generator(lambda: [(1,), (2,)], np.int64, (1,))) == [[1], [2]]
    old = Dataset.from_generator(lambda n: range(n), np.int64, (), args=(3,))
    assert _values(old) == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (np.float64(1.3), np.float32, np.float32(1.3)),
        (1.5, np.float32, np.float32(1.5)),
        (1.5, jnp.bfloat16, jnp.bfloat16(1.5)),
        (np.float64(2), np.int32, np.int32(2)),
        (True, np.int32, np.int32(1)),
        (1, np.bool_, np.True_),
        # TensorFlow gives 1, 0, True, 5 and 0.
        (1.5, np.int32, TypeError),
        (np.int64(1) << 40, np.int32, TypeError),
        (2, np.bool_, TypeError),
        ("5", np.float32, TypeError),
        (5, object, TypeError),
        (float("nan"), np.int32, TypeError),
    ],
)
def test_elements_of_generators_get_the_dtypes_of_the_signature(value, dtype, expected):
    dataset = Dataset.from_generator(lambda: [value], output_types=dtype)
    if expected is TypeError:
        with pytest.raises(TypeError, match=r"element 0 is .*, but output_signature has "):
            list(dataset)
        return

    (element,) = dataset

    assert element.dtype == dtype
    np.testing.assert_array_equal(element, expected)


def test_output_types_need_no_shapes():
    rows = [(np.ones((1, 2)), {"y": 1}), (np.ones((3, 2)), {"y": 2})]
    types = (np.float32, {"y": np.int32})

    alone = Dataset.from_generator(lambda: rows, types)
    partly = Dataset.from_generator(lambda: rows, types, (None, {"y": ()}))
    sized = Dataset.from_generator(lambda: rows, types, ((None, 2), {"y": ()}))
    with_signature = Dataset.from_generator(
        lambda: [1.0], output_signature=TensorSpec(None, np.float32)
    )

    for dataset in (alone, partly, sized):
        assert [(x.dtype, x.shape, y["y"].dtype) for x, y in dataset] == [
            (np.float32, (1, 2), np.int32),
            (np.float32, (3, 2), np.int32),
        ]
    # As it is with the first element where nothing else is known.
    assert alone.element_spec == (TensorSpec((1, 2)), {"y": TensorSpec((), np.int32)})
    assert sized.element_spec == (TensorSpec((None, 2)), {"y": TensorSpec((), np.int32)})
    assert with_signature.batch(1).element_spec == TensorSpec((None,))
    with pytest.raises(ValueError, match=r"output_shapes is \(\(\),\) with output_types"):
        Dataset.from_generator(lambda: rows, types, ((),))


def test_sparse_matrices_are_refused(strategy_of):
    sparse = pytest.importorskip("scipy.sparse")
    uses = (
        Dataset.from_tensor_slices,
        lambda matrix: Dataset.from_tensors((matrix, 1)),
        lambda matrix: list(Dataset.from_generator(lambda: [matrix]).batch(1)),
        lambda matrix: list(strategy_of(2).experimental_distribute_dataset([matrix])),
    )
    for use in uses:
        for matrix in (sparse.eye(4, format="csr"), sparse.coo_array(np.eye(4))):
            with pytest.raises(TypeError, match=r"holds the sparse matrix .*matrix\.toarray\(\)"):
                use(matrix)


def test_element_spec_knows_which_sizes_vary():
    arrays = Dataset.from_tensor_slices((np.zeros((5, 3), np.float32), np.zeros(5, np.int32)))

    assert arrays.batch(2).element_spec[0] == TensorSpec((None, 3), np.float32)
    assert arrays.batch(2, drop_remainder=True).element_spec[1] == TensorSpec((2,), np.int32)
    assert arrays.batch(2).unbatch().element_spec[0] == TensorSpec((3,), np.float32)
    assert arrays.map(lambda x, y: x[:2]).element_spec == TensorSpec((2,), np.float32)
    mapped = arrays.batch(2).map(lambda x, y: {"x": x * 2, "n": len(y), "two": np.zeros((3, 2))})
    assert mapped.prefetch(1).element_spec == {
        "x": TensorSpec((None, 3), np.float32),
        "n": TensorSpec((), np.int64),
        "two": TensorSpec((3, 2), np.float64),
    }
    whole = arrays.batch(2, drop_remainder=True).map(lambda x, y: y)
    assert whole.element_spec == TensorSpec((2,), np.int32)
    with pytest.raises(ValueError, match="empty"):
        _ = Dataset.from_generator(list).element_spec


def test_cardinality_and_len():
    assert Dataset.range(10).repeat().cardinality() == INFINITE_CARDINALITY
    assert Dataset.range(10).repeat().take(5).cardinality() == 5
    assert Dataset.range(10).filter(bool).cardinality() == UNKNOWN_CARDINALITY
    assert len(Dataset.range(10).batch(3)) == 4
    assert len(Dataset.range(1, 10, 4)) == 3
    with pytest.raises(TypeError, match="infinite"):
        len(Dataset.range(10).repeat())
    with pytest.raises(TypeError, match="unknown"):
        len(Dataset.range(10).filter(bool))


def test_reduce_and_optional_and_the_end():
    assert Dataset.range(5).reduce(0, lambda total, x: total + x) == 10
    iterator = iter(Dataset.range(1))
    assert iterator.get_next_as_optional().get_value() == 0
    empty = iterator.get_next_as_optional()
    assert not empty.has_value()
    with pytest.raises(ValueError, match="no value"):
        empty.get_value()
    with pytest.raises(OutOfRangeError):
        iterator.get_next()
    with pytest.raises(StopIteration):
        iterator.get_next()


def test_options_are_merged_and_checked():
    first, second = Options(), Options()
    first.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    first.deterministic = True
    second.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA

    merged = Dataset.range(4).with_options(first).batch(2).with_options(second).options()
    assert merged.experimental_distribute.auto_shard_policy is AutoShardPolicy.DATA
    assert merged.deterministic is True
    first.experimental_deterministic = False
    first.threading.private_threadpool_size = 4
    first.experimental_optimization.apply_default_optimizations = True
    first.autotune.enabled = False
    assert _values(Dataset.range(3).with_options(first)) == [0, 1, 2]  # they have no effect
    with pytest.raises(AttributeError, match=r"no option 'determinism'; it has .*deterministic"):
        first.determinism = True
    with pytest.raises(AttributeError, match="no option 'polcy'; it has auto_shard_policy"):
        first.experimental_distribute.polcy = AutoShardPolicy.OFF
    with pytest.raises(TypeError, match="'off', expected AutoShardPolicy"):
        first.experimental_distribute.auto_shard_policy = "off"
    with pytest.raises(TypeError, match=r"expected distributary\.data\.Options"):
        Dataset.range(1).with_options({})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dataset.range(3).batch(0), "batch_size is 0, expected a number >= 1"),
        (lambda: Dataset.range(3).batch(2.0), r"batch_size is 2\.0, expected an int"),
        (lambda: Dataset.range(3).shuffle(0), "buffer_size is 0"),
        (lambda: Dataset.range(3).shard(2, 2), "index is 2, expected 0 to 1"),
        (lambda: Dataset.range(3).take(-2), "count is -2"),
        (lambda: Dataset.range(3).map(3), "map_func is 3, expected a function"),
        (lambda: Dataset.range(3).map(abs, num_parallel_calls=0), "num_parallel_calls is 0"),
        (lambda: Dataset.from_tensor_slices((np.ones(2), np.ones(3))), r"\[2, 3\] rows"),
        (lambda: Dataset.from_tensor_slices(5), "scalar 5"),
        (lambda: Dataset.from_tensor_slices({}), "no arrays"),
        (lambda: jax.jit(Dataset.from_tensor_slices)(np.ones(3)), "array that a step computes"),
        (lambda: Dataset.from_generator([1]), r"generator is \[1\], expected a function"),
        (lambda: Dataset.from_generator(list, [np.int32]), "a list would be one array"),
        (lambda: Dataset.zip(Dataset.range(1), 3), "an argument is 3, expected a Dataset"),
        (lambda: Dataset.range(1).concatenate(3), "dataset is 3"),
        (lambda: list(Dataset.range(1).interleave(lambda x: x)), "expected a Dataset"),
        (lambda: list(Dataset.from_generator(lambda: 3)), "returned 3, which cannot be iterated"),
        (lambda: list(_generated(object()).batch(1)), "an object. Elements are nests"),
        (lambda: Dataset(3), "from_tensor_slices, from_generator or"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        make()


def test_batches_do_not_change_with_the_array_they_came_from():
    array = np.arange(8)
    batches = iter(Dataset.from_tensor_slices(array).batch(4))

    first = next(batches)
    array[:] = -1
    np.testing.assert_array_equal(first, [0, 1, 2, 3])


def test_rows_are_gathered_where_they_are_needed():
    read = []

    class Source:
        def __len__(self):
            return 100

        def __getitem__(self, number):
            read.append(number)
            return np.int64(number)

    dataset = Dataset.from_source(Source()).shuffle(100, seed=0).skip(90).take(4).batch(2)

    assert [x for batch in _values(dataset) for x in batch] == read
    assert len(read) == 4


def test_a_cache_computes_elements_once():
    for make in (lambda: Dataset.range(4), lambda: _generated(*range(4))):
        calls = []
        dataset = make().map(lambda x, calls=calls: calls.append(x) or x * 2).cache()
        first = _values(dataset)
        assert _values(dataset) == first == [0, 2, 4, 6]
        assert _values(dataset.shuffle(4, seed=1).take(2)) != []
        assert len(calls) == 4


_PIPELINES = {
    "shuffled": lambda: Dataset.range(23).shuffle(23, seed=1).repeat(3).batch(4),
    "no seed": lambda: Dataset.range(23).shuffle(23).repeat(3).batch(4),
    "small buffer": lambda: Dataset.range(23).shuffle(5, seed=1).repeat(3).batch(4),
    "elements": lambda: _generated(*range(23)).shuffle(5, seed=1).repeat(3).batch(4),
    "filtered": lambda: Dataset.range(40).filter(lambda x: x % 3).shuffle(7, seed=2).batch(4),
    "mapped": lambda: Dataset.range(23).map(lambda x: x * 2).batch(5).map(lambda b: b + 1),
    "threads": lambda: Dataset.range(23).map(lambda x: x * 2, num_parallel_calls=2).batch(5),
    "interleaved": lambda: Dataset.range(5).interleave(
        lambda i: Dataset.range(i, i + 6).shuffle(6), cycle_length=2
    ),
    "rebatched": lambda: Dataset.range(23).shuffle(23, seed=1).batch(7).rebatch(3),
    "zipped": lambda: Dataset.zip(Dataset.range(9), Dataset.range(9).shuffle(9)).repeat(2),
    "joined": lambda: Dataset.range(9).concatenate(Dataset.range(9).shuffle(4)).shard(2, 1),
    "skipped": lambda: Dataset.range(30).skip(3).take(20).shuffle(4).repeat(2).shard(3, 1),
    "prefetched": lambda: Dataset.range(30).shuffle(30).batch(2).prefetch(3),
    "windows": lambda: Dataset.range(30).shuffle(9).window(3, 1).flat_map(lambda w: w.batch(3)),
    "cached": lambda: Dataset.range(30).shuffle(30).cache().repeat(2).batch(7),
}


@pytest.mark.parametrize("name", _PIPELINES)
def test_a_saved_position_gives_the_same_remaining_elements(name):
    dataset = _PIPELINES[name]()
    list(dataset)  # an earlier epoch

    for taken in (0, 1, 4, 8):
        iterator = iter(dataset)
        list(itertools.islice(iterator, taken))
        state = pickle.loads(pickle.dumps(iterator.get_state()))
        rest = _values(iterator)
        following = _values(dataset)

        restored_dataset = _PIPELINES[name]()
        restored = iter(restored_dataset)
        restored.set_state(state)
        assert _values(restored) == rest
        assert restored.get_state()["position"] >= state["position"]
        assert _values(restored_dataset) == following
        assert len(pickle.dumps(state)) < 1000


def test_a_state_of_another_dataset_is_refused():
    state = iter(Dataset.range(10).batch(2)).get_state()

    with pytest.raises(ValueError, match=r"another dataset(.|\n)*batch\(2.*(.|\n)*batch\(3"):
        iter(Dataset.range(10).batch(3)).set_state(state)
    with pytest.raises(ValueError, match="expected what get_state"):
        iter(Dataset.range(10)).set_state({"position": 3})
    with pytest.raises(ValueError, match="ends after 5 elements"):
        iter(Dataset.range(10).batch(2)).set_state({**state, "position": 7})


def test_skipping_to_a_position_reads_nothing():
    read = []
    make = lambda: (
        Dataset.range(10**9).shuffle(1000, seed=1).map(lambda x: read.append(x) or x).batch(10)
    )
    state = {**iter(make()).get_state(), "position": 50}

    iterator = iter(make())
    iterator.set_state(state)
    assert read == []
    next(iterator)
    assert len(read) == 10


def test_repeat_jumps_over_whole_epochs():
    dataset = Dataset.range(7).shuffle(7, seed=1).repeat().batch(2)
    state = {**iter(dataset).get_state(), "position": 7 * 10**8 + 1, "iteration": 0}

    far = iter(dataset)
    far.set_state(state)
    # Two epochs are 7 batches; this is the second batch of the first of two.
    first = [x for batch in _values(itertools.islice(far, 2)) for x in batch]
    boundary = _values(itertools.islice(far, 1))[0]
    assert len({*first, boundary[0]}) == 5
    second = [boundary[1], *(x for batch in _values(itertools.islice(far, 3)) for x in batch)]
    assert sorted(second) == list(range(7))


def test_looking_ahead_loses_no_element_of_an_iterator(strategy_of):
    slices = lambda row: Dataset.from_tensor_slices(row).batch(1)
    mapped = Dataset.from_source(iter([1.0, 2.0])).shuffle(2, seed=0).map(lambda x: x + 1)
    assert mapped.element_spec == TensorSpec((), np.float64)
    assert sorted(mapped) == [2.0, 3.0]

    interleaved = Dataset.from_source(iter([np.arange(2), np.arange(2, 4)])).flat_map(slices)
    assert interleaved.element_spec == TensorSpec((1,), np.int64)
    distributed = strategy_of(1).experimental_distribute_dataset(interleaved)
    assert [int(batch[0]) for batch in distributed] == [0, 1, 2, 3]


@given(
    size=st.integers(0, 20),
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 9)),
            st.tuples(st.just("skip"), st.integers(0, 9)),
            st.tuples(st.just("repeat"), st.integers(0, 3)),
            st.tuples(st.just("shard"), st.just(3), st.integers(0, 2)),
        ),
        max_size=3,
    ),
    ways=st.lists(st.tuples(st.sampled_from(["next", "block", "advance"]), st.integers(1, 7))),
    is_source=st.booleans(),
)
@settings(deadline=None)
def test_elements_blocks_and_jumps_follow_each_other(size, operations, ways, is_source):
    expected = list(range(size))
    by_number = Dataset.range(size)
    dataset = by_number if is_source else Dataset.from_generator(lambda: iter(by_number))
    for name, *args in operations:
        dataset = getattr(dataset, name)(*args)
        expected = {
            "take": lambda rows, count: rows[:count],
            "skip": lambda rows, count: rows[count:],
            "repeat": lambda rows, count: rows * count,
            "shard": lambda rows, num_shards, index: rows[index::num_shards],
        }[name](expected, *args)

    stream = dataset.node.stream((0,))
    for way, count in ways:
        wanted, expected = expected[:count], expected[count:]
        if way == "next":
            assert list(itertools.islice(stream, count)) == wanted
        elif way == "block":
            block = stream.block(count)
            assert ([] if block is None else block.tolist()) == wanted
        else:
            assert stream.advance(count) == len(wanted)


@settings(max_examples=50, deadline=None)
@given(
    total=st.integers(0, 12),
    size=st.integers(1, 4),
    shift=st.integers(1, 5),
    stride=st.integers(1, 3),
    drop=st.booleans(),
)
def test_windows(total, size, shift, stride, drop):
    dataset = Dataset.range(total).window(size, shift, stride, drop)

    starts = range(0, total, shift)
    expected = [[*range(total)][start : start + size * stride : stride] for start in starts]
    expected = [window for window in expected if len(window) == size or not drop]
    assert [_values(window) for window in dataset] == expected
    assert dataset.cardinality() == len(expected)


def test_a_function_that_does_not_take_the_parts_of_an_element_is_refused():
    pairs = Dataset.from_tensor_slices((np.ones(3), np.ones(3)))

    for fn in (lambda pair: pair[0], lambda x, y, z: x):
        message = r"as fn\(x, y\): .* argument.*Write def fn\(x, y\):"
        with pytest.raises(InvalidTypeError, match=message):
            _values(pairs.map(fn))
    with pytest.raises(TypeError, match="'int' object is not iterable"):  # one of its own
        _values(pairs.map(lambda x, y: sum(3)))


def test_an_item_that_stops_iteration_does_not_end_the_data():
    class Items:
        def __len__(self):
            return 3

        def __getitem__(self, number):
            return next(iter([[0], [], [2]][number]))

    with pytest.raises(RuntimeError, match="item 1 of Items raised StopIteration"):
        list(Dataset.from_source(Items()))


def test_a_function_may_write_to_its_arrays(tmp_path):
    def add_one(x):
        x += 1
        return x

    zeros = np.zeros((2, 2))
    np.save(tmp_path / "zeros.npy", zeros)
    mapped = np.load(tmp_path / "zeros.npy", mmap_mode="r+")
    rows = Dataset.from_tensor_slices(zeros)
    for dataset in (
        *(rows, rows.batch(1), rows.cache(), rows.batch(1).cache(), rows.shuffle(2, seed=1)),
        *(Dataset.from_tensors(zeros[0]).repeat(2), Dataset.from_tensor_slices(mapped)),
        *(rows.map(lambda x: 2 * x).cache(), Dataset.range(1).flat_map(lambda _: rows.cache())),
    ):
        for threads in (None, 2):
            ones = dataset.map(add_one, num_parallel_calls=threads)
            for _ in range(2):
                assert np.ravel([*ones]).tolist() == [1, 1, 1, 1]
    assert not zeros.any()
    assert not np.load(tmp_path / "zeros.npy").any()
    for dataset in (rows, rows.cache(), Dataset.from_tensors(zeros), rows.batch(2).cache()):
        for use in (lambda d: [*map(add_one, d)], lambda d: list(d.filter(add_one))):
            with pytest.raises(ValueError, match="read-only"):
                use(dataset)
    (ordered,) = Dataset.from_tensors(collections.OrderedDict(x=zeros))
    with pytest.raises(ValueError, match="read-only"):
        ordered["x"] += 1
    popped = Dataset.from_tensors({"x": 1, "y": 2}).repeat(2).map(lambda row: row.pop("x"))
    assert _values(popped) == [1, 1]


@pytest.mark.parametrize("num_parallel_calls", [None, 2])
def test_a_function_that_stops_iteration_does_not_end_the_data(num_parallel_calls):
    labels = [[1], [], [1]]
    first = lambda i: np.int32(next(iter(labels[int(i)])))
    mapped = Dataset.range(3).map(first, num_parallel_calls=num_parallel_calls)

    for dataset in (mapped, mapped.batch(3), Dataset.range(3).filter(lambda i: first(i) > 0)):
        with pytest.raises(RuntimeError, match=r"lambda.* raised StopIteration, .* a default\."):
            list(dataset)


def test_windows_of_nests_are_nests_of_datasets():
    pairs = Dataset.from_tensor_slices((np.arange(6), np.arange(6) * 10.0))

    windows = pairs.window(4, shift=2, drop_remainder=True)
    batches = windows.flat_map(lambda x, y: Dataset.zip((x.batch(4), y.batch(4))))

    found = [(x.tolist(), y.tolist()) for x, y in batches]
    assert found == [([0, 1, 2, 3], [0, 10, 20, 30]), ([2, 3, 4, 5], [20, 30, 40, 50])]
    (named,) = Dataset.from_tensors({"a": 1}).window(2)
    assert {key: _values(part) for key, part in named.items()} == {"a": [1]}
