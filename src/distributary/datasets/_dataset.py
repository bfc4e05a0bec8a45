"""`Dataset`: tf.data's method names on NumPy arrays."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np

from distributary.datasets._elements import (
    Batch,
    Cache,
    Filter,
    Map,
    Prefetch,
    Unbatch,
    num_threads,
)
from distributary.datasets._files import FileNames, NumpyFiles, file_names, matching_files
from distributary.datasets._foreign import foreign
from distributary.datasets._iterator import DatasetIterator
from distributary.datasets._nodes import MAX_SEED, Node, describe
from distributary.datasets._options import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Options,
)
from distributary.datasets._order import Repeat, Shard, Shuffle, Skip, Take, WithOptions, options_of
from distributary.datasets._several import Concatenate, Interleave, Zip
from distributary.datasets._sources import Range, Single, generated, signature_of, slices
from distributary.datasets._structure import map_arrays
from distributary.errors import InvalidTypeError, InvalidValueError
from distributary.tracing import iterator_of

# What `prefetch(AUTOTUNE)` keeps ready: one element in use, one made, one on its way.
_AUTOTUNED_DEPTH = 2
_DEFAULT_CYCLE_LENGTH = 8
#: In `shard(SHARD_HINT, SHARD_HINT)`, with `AutoShardPolicy.HINT`: the worker's own shard.
SHARD_HINT: Final = -1


class Dataset:
    """Elements, in an order that a seed determines, that can be iterated over again and again.

    An element is a nest (tuple, dict, namedtuple, registered dataclass) of NumPy arrays, numbers
    and strings; a list is an array. Made by the class methods below and by
    `distributary.data.TextLineDataset` and its like; methods give new datasets.

    While a dataset only reorders the rows of arrays or files, it works on row numbers, and the
    rows are gathered a batch at a time. `map` after `batch` therefore costs one call per batch,
    before it one per example.

    Every `iter()` is a new pass: `shuffle` gives another order unless
    `reshuffle_each_iteration=False`. The orders follow from the seed and the number of the pass;
    those without a seed from NumPy's global generator, so `keras.utils.set_random_seed` fixes them.

    Source: `tf.data.Dataset`.
    """

    def __init__(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise InvalidTypeError(
                f"Dataset({type(node).__name__}): use Dataset.from_tensor_slices, from_generator or"
                " from_source to make a dataset."
            )
        self._node = node
        self._num_passes = 0

    @property
    def node(self) -> Node:
        """The last operation, for `distributary.inputs`."""
        return self._node

    # Sources

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> "Dataset":
        """The rows of arrays.

        Args:
            tensors: Nest of arrays `[row, ...]` with the same number of rows. Taken as they are,
                not copied; what is written to them later is seen by later batches.
            name: Without effect.

        Raises:
            InvalidValueError: if the numbers of rows differ, or for scalars.
        """
        return Dataset(slices(tensors))

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> "Dataset":
        """One element."""
        return Dataset(Single(map_arrays(lambda array: array, tensors)))

    @staticmethod
    def from_generator(
        generator: Callable[..., Any],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Sequence[Any] | None = None,
        output_signature: Any = None,
        name: str | None = None,
    ) -> "Dataset":
        """What a function returns when it is iterated over; called for every pass.

        Args:
            generator: Function that returns an iterable of elements.
            output_types: Nest of dtypes; `output_signature` is better.
            output_shapes: Nest of shapes, with `output_types`; None for any.
            args: Arguments of `generator`.
            output_signature: Nest of `TensorSpec`; elements are converted to its dtypes if their
                values fit, and an error if their shapes differ. None takes elements as they come.
            name: Without effect.
        """
        if not callable(generator):
            raise InvalidTypeError(
                f"from_generator: generator is {generator!r}, expected a function that returns an"
                " iterable. A generator object can be passed as lambda: generator, once."
            )
        if output_signature is None and output_types is not None:
            output_signature = signature_of(output_types, output_shapes)
        return Dataset(generated(generator, output_signature, args or ()))

    @staticmethod
    def from_source(source: Any) -> "Dataset":
        """The elements of another library's dataset, or of any Python iterable.

        Args:
            source: A `tf.data.Dataset`, a `grain` dataset or loader, a torch `Dataset` or
                `DataLoader`, a Hugging Face dataset, a `keras.utils.PyDataset`, or an iterable. Of
                those with `__len__` and `__getitem__` rows are read as they are needed, so that
                shuffling costs nothing.
        """
        return (
            source if isinstance(source, Dataset) else Dataset(foreign(source, "from_source: got"))
        )

    @staticmethod
    def from_npy(filenames: Any) -> "Dataset":
        """The rows of `.npy` files, or of the arrays in `.npz` files as dicts.

        Args:
            filenames: Names of files with arrays `[row, ...]`. Only the rows that are needed are
                read, of `.npz` files everything.

        Raises:
            InvalidValueError: for files that are damaged, hold Python objects, or do not agree.
        """
        node = NumpyFiles(file_names(filenames, "from_npy"))
        node.check()
        return Dataset(node)

    @staticmethod
    def range(*args: int, output_type: Any = np.int64, name: str | None = None) -> "Dataset":
        """The numbers of Python's `range(*args)`, as scalars of dtype `output_type`."""
        numbers = range(*args)
        return Dataset(Range(numbers.start, numbers.stop, numbers.step, np.dtype(output_type)))

    @staticmethod
    def list_files(
        file_pattern: Any, shuffle: bool | None = None, seed: int | None = None
    ) -> "Dataset":
        """The names of files that match a glob pattern.

        Args:
            file_pattern: Pattern, or a list of patterns.
            shuffle: Whether their order is random, anew in every pass; None means True. Else they
                are sorted.
            seed: Seed of the order.

        Raises:
            InvalidValueError: if no file matches.
        """
        names = Dataset(FileNames(matching_files(file_pattern)))
        return names.shuffle(len(names), seed) if shuffle in (None, True) else names

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> "Dataset":
        """Elements of several datasets side by side; ends with the shortest.

        Args:
            *args: Datasets, which give tuples; or one nest of datasets.
            datasets: The nest, by name.
            name: Without effect.
        """
        nest = datasets if datasets is not None else args[0] if len(args) == 1 else args
        leaves, tree = jax.tree.flatten(nest, is_leaf=lambda x: isinstance(x, Dataset))
        for leaf in leaves:
            if not isinstance(leaf, Dataset):
                raise InvalidTypeError(f"Dataset.zip: got {leaf!r}, expected datasets.")
        return Dataset(Zip(tuple(leaf._node for leaf in leaves), tree))

    # Order

    def take(self, count: int, name: str | None = None) -> "Dataset":
        """The first `count` elements; all if it is -1."""
        count = _int("take", "count", count, minimum=-1)
        return self if count < 0 else Dataset(Take(self._node, count))

    def skip(self, count: int, name: str | None = None) -> "Dataset":
        """All but the first `count` elements; none if it is -1."""
        return Dataset(Skip(self._node, _int("skip", "count", count, minimum=-1)))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> "Dataset":
        """Every `num_shards`-th element, beginning with number `index`.

        Raises:
            InvalidValueError: if `index` is not in 0 to `num_shards - 1`.
        """
        if (num_shards, index) == (SHARD_HINT, SHARD_HINT):
            return Dataset(Shard(self._node, num_shards, index))
        num_shards = _int("shard", "num_shards", num_shards, minimum=1)
        index = _int("shard", "index", index, minimum=0)
        if index >= num_shards:
            raise InvalidValueError(
                f"shard: index is {index}, expected 0 to {num_shards - 1} for {num_shards} shards."
            )
        return Dataset(Shard(self._node, num_shards, index))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """Elements in random order.

        Args:
            buffer_size: From how many elements the next one is drawn. The number of elements or
                more gives a uniform permutation. Of arrays and files only row numbers are kept.
            seed: Seed; None draws one from NumPy's global generator.
            reshuffle_each_iteration: Whether every pass, also of `repeat`, has an order of its own;
                None means True.
            name: Without effect.
        """
        buffer_size = _int("shuffle", "buffer_size", buffer_size, minimum=1)
        if seed is not None:
            seed = _int("shuffle", "seed", seed, minimum=0)
        reshuffle = reshuffle_each_iteration is not False
        return Dataset(Shuffle(self._node, buffer_size, seed, reshuffle, _draw()))

    def repeat(self, count: int | None = None, name: str | None = None) -> "Dataset":
        """The elements `count` times over; without end if it is None or -1."""
        if count is not None:
            count = _int("repeat", "count", count, minimum=-1)
        return Dataset(Repeat(self._node, -1 if count is None else count))

    def concatenate(self, dataset: "Dataset", name: str | None = None) -> "Dataset":
        """The elements of this dataset, then those of another."""
        if not isinstance(dataset, Dataset):
            raise InvalidTypeError(f"concatenate: got {dataset!r}, expected a Dataset.")
        return Dataset(Concatenate((self._node, dataset._node)))

    def interleave(
        self,
        map_func: Callable[..., "Dataset"],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """The elements of the datasets that `map_func` makes of every element, in turns.

        Args:
            map_func: From an element to a dataset.
            cycle_length: How many datasets take turns; None means 8.
            block_length: How many elements a dataset gives per turn; None means 1.
            num_parallel_calls: Anything but None reads every dataset ahead in a thread of its own.
            deterministic: Without effect: the order is always the same.
            name: Without effect.
        """

        def make(element: Any) -> Node:
            dataset = map_func(*element) if type(element) is tuple else map_func(element)
            if not isinstance(dataset, Dataset):
                raise InvalidTypeError(
                    f"interleave: map_func returned {dataset!r}, expected a Dataset."
                )
            return dataset._node

        cycle = _DEFAULT_CYCLE_LENGTH if cycle_length in (None, AUTOTUNE) else cycle_length
        cycle = _int("interleave", "cycle_length", cycle, minimum=1)
        block = _int("interleave", "block_length", block_length or 1, minimum=1)
        threads = _threads("interleave", num_parallel_calls)
        return Dataset(Interleave(self._node, make, cycle, block, threads, _draw()))

    def flat_map(self, map_func: Callable[..., "Dataset"], name: str | None = None) -> "Dataset":
        """The elements of the datasets that `map_func` makes, one dataset after the other."""
        return self.interleave(map_func, cycle_length=1)

    # Elements

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """The results of a function of every element.

        Args:
            map_func: A Python function on NumPy arrays; the items of a tuple are its arguments.
                After `batch` it is called with whole batches.
            num_parallel_calls: Number of threads; AUTOTUNE for one per core, None for none. Good
                for functions that wait or release the GIL.
            deterministic: Without effect: the order is always that of the elements.
            name: Without effect.
        """
        _callable("map", "map_func", map_func)
        return Dataset(Map(self._node, map_func, _threads("map", num_parallel_calls)))

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> "Dataset":
        """The elements of which `predicate` says True."""
        _callable("filter", "predicate", predicate)
        return Dataset(Filter(self._node, predicate))

    def enumerate(self, start: int = 0, name: str | None = None) -> "Dataset":
        """Pairs of a number, counted from `start`, and an element."""
        size = self._node.cardinality()
        stop = start + size if size >= 0 else None
        return Dataset.zip(Dataset(Range(start, stop, 1, np.dtype(np.int64))), self)

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """Elements stacked along a new dim 0, `batch_size` at a time.

        Args:
            batch_size: Number of elements; for strategies, of all replicas together.
            drop_remainder: Whether a last batch of fewer elements is left out.
            num_parallel_calls: Without effect.
            deterministic: Without effect.
            name: Without effect.
        """
        size = _int("batch", "batch_size", batch_size, minimum=1)
        return Dataset(Batch(self._node, size, bool(drop_remainder)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> "Dataset":
        """Batches of arrays of different sizes, filled up at the end of every dim.

        Args:
            batch_size: Number of elements.
            padded_shapes: Nest of shapes, with None for the largest size of the batch; None for
                that everywhere.
            padding_values: Nest of what is filled in, or one for all; None for 0 and "".
            drop_remainder: Whether a last batch of fewer elements is left out.
            name: Without effect.
        """
        size = _int("padded_batch", "batch_size", batch_size, minimum=1)
        padding = (padded_shapes, padding_values)
        return Dataset(Batch(self._node, size, bool(drop_remainder), padding))

    def unbatch(self, name: str | None = None) -> "Dataset":
        """The rows of batches."""
        return Dataset(Unbatch(self._node))

    def rebatch(
        self, batch_size: int, drop_remainder: bool = False, name: str | None = None
    ) -> "Dataset":
        """Batches of another size."""
        return self.unbatch().batch(batch_size, drop_remainder)

    # Rest

    def cache(self, filename: str = "", name: str | None = None) -> "Dataset":
        """Keeps elements in memory, so that what comes before is computed once.

        Raises:
            InvalidValueError: for a file name; save arrays and use `from_npy` instead.
        """
        if filename:
            raise InvalidValueError(
                f"cache: filename is {filename!r}; only memory is supported. Save the arrays with"
                " numpy.save and read them with Dataset.from_npy."
            )
        return Dataset(Cache(self._node, {}))

    def prefetch(self, buffer_size: int, name: str | None = None) -> "Dataset":
        """Makes elements ahead in a thread, at most `buffer_size` of them; 2 for AUTOTUNE.

        Distributed datasets read ahead by themselves, see `InputOptions`.
        """
        depth = _int("prefetch", "buffer_size", buffer_size, minimum=-1)
        depth = _AUTOTUNED_DEPTH if depth == AUTOTUNE else depth
        return Dataset(Prefetch(self._node, depth)) if depth else self

    def with_options(self, options: Options, name: str | None = None) -> "Dataset":
        """The same dataset with options; those set later win."""
        if not isinstance(options, Options):
            raise InvalidTypeError(
                f"with_options: got {options!r}, expected distributary.data.Options."
            )
        return Dataset(WithOptions(self._node, Options().merge(options)))

    def options(self) -> Options:
        """The options of this dataset."""
        return options_of(self._node)

    def apply(self, transformation_func: Callable[["Dataset"], Any]) -> Any:
        """`transformation_func(self)`."""
        return transformation_func(self)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """The state after `state = reduce_func(state, element)` for every element."""
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def cardinality(self) -> int:
        """Number of elements, or INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        return self._node.cardinality()

    @property
    def element_spec(self) -> Any:
        """Nest of `TensorSpec` like the elements.

        Of `map` and generators without `output_signature` it is that of the first element, which is
        computed for it.
        """
        return self._node.spec()

    def as_numpy_iterator(self) -> "DatasetIterator":
        """The same as `iter`: elements are NumPy arrays."""
        return iterator_of(self, is_plain=True)

    def __iter__(self) -> "DatasetIterator":
        return iterator_of(self, is_plain=False)

    def begin_pass(self, is_plain: bool) -> "DatasetIterator":
        """A new iterator, also for functions that are traced."""
        self._num_passes += 1
        return DatasetIterator(self, self._node, self._num_passes - 1, is_plain)

    def take_back_pass(self) -> None:
        """The pass that began last has not begun."""
        self._num_passes -= 1

    def restore(self, node: Node, num_passes: int) -> None:
        """From now on the dataset is `node`, and so many passes over it have begun."""
        self._node = node
        self._num_passes = num_passes

    def __len__(self) -> int:
        size = self._node.cardinality()
        if size == INFINITE_CARDINALITY:
            raise InvalidTypeError("The dataset is infinite, so it has no length.")
        if size == UNKNOWN_CARDINALITY:
            raise InvalidTypeError(
                f"The length of the dataset {describe(self._node)} is unknown before it is read."
            )
        return size

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<distributary.data.Dataset: {describe(self._node)}>"


def _draw() -> int:
    return int(np.random.randint(0, MAX_SEED, dtype=np.int64))


def _callable(what: str, name: str, value: Any) -> None:
    if not callable(value):
        raise InvalidTypeError(f"{what}: {name} is {value!r}, expected a function.")


def _threads(what: str, num_parallel_calls: int | None) -> int | None:
    if num_parallel_calls is None:
        return None
    calls = _int(what, "num_parallel_calls", num_parallel_calls, minimum=-1)
    if calls == 0:
        raise InvalidValueError(
            f"{what}: num_parallel_calls is 0, expected a number of threads, AUTOTUNE, or None."
        )
    return num_threads(calls)


def _int(what: str, name: str, value: Any, minimum: int) -> int:
    is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_number:
        raise InvalidTypeError(f"{what}: {name} is {value!r}, expected an int.")
    if value < minimum:
        raise InvalidValueError(f"{what}: {name} is {value}, expected a number >= {minimum}.")
    return int(value)
