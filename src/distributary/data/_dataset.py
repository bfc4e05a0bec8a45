"""`Dataset`: the method names of tf.data on NumPy arrays, and its iterators."""

import abc
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, final

import jax
import numpy as np
from numpy.typing import DTypeLike

from distributary._threads import bound, num_cores
from distributary.data._making import (
    Batch,
    Cache,
    Concatenate,
    Filter,
    Generated,
    Interleave,
    Map,
    Unbatch,
    Zip,
    call,
    windows,
)
from distributary.data._nodes import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Node,
    Prefetch,
    Repeat,
    ShardHint,
    Shuffle,
    Slice,
    Stream,
    WithOptions,
    drawn_seed,
    options_of,
    waiting_iterators,
)
from distributary.data._sources import (
    FileNames,
    FilePaths,
    RandomAccess,
    Range,
    Single,
    generated,
    matching_files,
    node_of,
    signature_of,
    slices,
)
from distributary.data._structure import columns_of, map_arrays, specs_of
from distributary.devices import Nest, inside_jax_trace
from distributary.errors import InvalidTypeError, InvalidValueError, check_type, checked_int, shown
from distributary.options import Options
from distributary.tracing import at_end, iterator_of, next_of

# For `prefetch(AUTOTUNE)`: while you use one element, one is ready and one is being made.
_AUTOTUNED_DEPTH = 2
_DEFAULT_CYCLE_LENGTH = 8
_EXPECTED = "a Dataset, such as of Dataset.from_source"
#: The worker's own shard, in `shard(SHARD_HINT, SHARD_HINT)` with `AutoShardPolicy.HINT`.
SHARD_HINT: Final = -1


class Dataset:
    """A sequence of elements that you can iterate over again and again, in a reproducible order.

    An element is a nest (tuple, dict, namedtuple, registered dataclass) of NumPy arrays, numbers
    and strings; a list is an array. Make a dataset with one of the class methods below, or with
    `distributary.data.TextLineDataset` and the like. Every method returns a new dataset.

    While a dataset only reorders the rows of arrays or files, it works on row numbers, and gathers
    the rows one batch at a time. So `map` after `batch` costs one call per batch, and `map` before
    `batch` one call per example.

    Every `iter()` starts a new pass, and `shuffle` gives each pass another order unless you set
    `reshuffle_each_iteration=False`. The orders depend on the seed and the number of the pass.
    Without a seed, one is drawn from NumPy's global generator, so `keras.utils.set_random_seed`
    makes them reproducible.

    Source: `tf.data.Dataset`.
    """

    def __init__(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise InvalidTypeError(
                f"Dataset: got {shown(node)}, which is data and not a dataset yet. Use"
                " Dataset.from_tensor_slices, from_generator or from_source to make one of it."
            )
        self._node = node
        self._num_passes = 0

    @classmethod
    def of(cls, node: Node) -> "Dataset":
        """Returns a dataset of the class that the methods of this one return."""
        return Dataset(node)

    def show(self, element: Nest) -> Nest:
        """Returns what a loop gets for an element."""
        return element

    @property
    def node(self) -> Node:
        """Last operation of the dataset, for distributed datasets."""
        return self._node

    # Sources

    @classmethod
    def from_tensor_slices(cls, tensors: Nest, name: str | None = None) -> "Dataset":
        """Makes a dataset of the rows of arrays.

        Args:
            tensors: Nest of arrays `[row, ...]` with the same number of rows. They are not copied:
                if you write to them later, later batches see it.
            name: No effect.

        Raises:
            InvalidValueError: if the numbers of rows differ, or for scalars.
        """
        return cls.of(slices(tensors))

    @classmethod
    def from_tensors(cls, tensors: Nest, name: str | None = None) -> "Dataset":
        """Makes a dataset with one element."""
        return cls.of(Single(map_arrays(lambda array: array, tensors)))

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Any],
        output_types: Nest = None,
        output_shapes: Nest = None,
        args: Sequence[Any] | None = None,
        output_signature: Nest = None,
        name: str | None = None,
    ) -> "Dataset":
        """Makes a dataset of the elements that a function yields; it is called for every pass.

        Args:
            generator: Function that returns an iterable of elements.
            output_types: Nest of dtypes. `output_signature` is better.
            output_shapes: Nest of shapes, with `output_types`; None for any.
            args: Arguments of `generator`.
            output_signature: Nest of `TensorSpec`. Elements are converted to its dtypes if their
                values fit, and it is an error if their shapes differ. None takes elements as they
                come.
            name: No effect.
        """
        if not callable(generator):
            raise InvalidTypeError(
                f"from_generator: generator is {generator!r}, expected a function that returns an"
                " iterable. You can pass a generator object once, as lambda: generator."
            )
        if output_signature is None and output_types is not None:
            output_signature = signature_of(output_types, output_shapes)
        return cls.of(generated(generator, output_signature, args or ()))

    @classmethod
    def from_source(cls, source: Any) -> "Dataset":
        """Makes a dataset from another library's dataset, or from any Python iterable.

        Args:
            source: A `tf.data.Dataset`, a `grain` dataset or loader, a torch `Dataset` or
                `DataLoader`, a Hugging Face dataset, a `keras.utils.PyDataset`, or an iterable. If
                it has `__len__` and `__getitem__`, rows are read as they are needed, so that
                shuffling costs nothing.
        """
        return source if isinstance(source, cls) else cls.of(node_of(source, "from_source: got"))

    @classmethod
    def range(
        cls, *args: int, output_type: DTypeLike = np.int64, name: str | None = None
    ) -> "Dataset":
        """Makes a dataset of Python's `range(*args)`, as scalars of dtype `output_type`."""
        numbers = range(*args)
        return cls.of(Range(numbers.start, numbers.stop, numbers.step, np.dtype(output_type)))

    @classmethod
    def list_files(
        cls,
        file_pattern: FilePaths,
        shuffle: bool | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """Makes a dataset of the names of files that match a glob pattern.

        Args:
            file_pattern: Pattern, or a list of patterns.
            shuffle: Whether to shuffle the names, anew in every pass; None means True. If False,
                they are sorted.
            seed: Seed of the order.
            name: No effect.

        Raises:
            InvalidValueError: if no file matches.
        """
        names = cls.of(FileNames(matching_files(file_pattern)))
        return names.shuffle(len(names), seed) if shuffle in (None, True) else names

    @classmethod
    def zip(cls, *args: Nest, datasets: Nest = None, name: str | None = None) -> "Dataset":
        """Makes a dataset of the elements of several datasets side by side; ends with the shortest.

        Args:
            *args: Datasets, whose elements become tuples, or one nest of datasets.
            datasets: The nest, as a keyword.
            name: No effect.
        """
        nest = datasets if datasets is not None else args[0] if len(args) == 1 else args
        leaves, tree = jax.tree.flatten(nest, is_leaf=lambda x: isinstance(x, Dataset))
        for leaf in leaves:
            check_type("Dataset.zip: an argument", leaf, Dataset, _EXPECTED)
        return cls.of(Zip(tuple(leaf._node for leaf in leaves), tree))

    # Order

    def take(self, count: int, name: str | None = None) -> "Dataset":
        """Keeps the first `count` elements; all of them if it is -1."""
        count = checked_int("take: count", count, minimum=-1)
        return self if count < 0 else self.of(Slice(self._node, f"take({count})", count=count))

    def skip(self, count: int, name: str | None = None) -> "Dataset":
        """Drops the first `count` elements; all of them if it is -1."""
        count = checked_int("skip: count", count, minimum=-1)
        left = 0 if count < 0 else math.inf
        return self.of(Slice(self._node, f"skip({count})", max(count, 0), left))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> "Dataset":
        """Keeps every `num_shards`-th element, starting with element `index`.

        Raises:
            InvalidValueError: if `index` is not in 0 to `num_shards - 1`.
        """
        if (num_shards, index) == (SHARD_HINT, SHARD_HINT):
            return self.of(ShardHint(self._node))
        num_shards = checked_int("shard: num_shards", num_shards, minimum=1)
        index = checked_int("shard: index", index, minimum=0)
        if index >= num_shards:
            raise InvalidValueError(
                f"shard: index is {index}, expected 0 to {num_shards - 1} for {num_shards} shards."
            )
        return self.of(Slice.shard(self._node, num_shards, index))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
        name: str | None = None,
    ) -> "Dataset":
        """Puts elements in random order.

        Args:
            buffer_size: Number of elements from which the next one is drawn. If it is the number of
                elements or more, all orders are equally likely. For arrays and files, the buffer
                holds only row numbers.
            seed: Seed; None draws one from NumPy's global generator.
            reshuffle_each_iteration: Whether every pass gets its own order, including the passes of
                `repeat`; None means True.
            name: No effect.
        """
        buffer_size = checked_int("shuffle: buffer_size", buffer_size, minimum=1)
        if seed is not None:
            seed = checked_int("shuffle: seed", seed, minimum=0)
        reshuffle = reshuffle_each_iteration is not False
        return self.of(Shuffle(self._node, buffer_size, seed, reshuffle, drawn_seed()))

    def repeat(self, count: int | None = None, name: str | None = None) -> "Dataset":
        """Repeats the elements `count` times; forever if it is None or -1."""
        if count is not None:
            count = checked_int("repeat: count", count, minimum=-1)
        return self.of(Repeat(self._node, -1 if count is None else count))

    def concatenate(self, dataset: "Dataset", name: str | None = None) -> "Dataset":
        """Appends the elements of another dataset."""
        check_type("concatenate: dataset", dataset, Dataset, _EXPECTED)
        return self.of(Concatenate((self._node, dataset._node)))

    def interleave(
        self,
        map_func: Callable[..., "Dataset"],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """Makes a dataset of every element, and takes elements from these datasets in turns.

        Args:
            map_func: Function from an element to a dataset.
            cycle_length: Number of datasets that take turns; None means 8.
            block_length: Number of elements that a dataset gives per turn; None means 1.
            num_parallel_calls: None reads in the calling thread. Anything else reads each dataset
                ahead in a thread of its own.
            deterministic: No effect: the order is always the same.
            name: No effect.
        """

        def make(element: Nest) -> Node:
            dataset = call(map_func, element)
            check_type("interleave: what map_func returned", dataset, Dataset, _EXPECTED)
            return dataset._node

        cycle = _DEFAULT_CYCLE_LENGTH if cycle_length in (None, AUTOTUNE) else cycle_length
        cycle = checked_int("interleave: cycle_length", cycle, minimum=1)
        block = checked_int("interleave: block_length", block_length or 1, minimum=1)
        read_ahead = _num_threads("interleave", num_parallel_calls) is not None
        return self.of(Interleave(self._node, make, cycle, block, read_ahead, drawn_seed()))

    def flat_map(self, map_func: Callable[..., "Dataset"], name: str | None = None) -> "Dataset":
        """Makes a dataset of every element, and gives the elements of one after the other."""
        return self.interleave(map_func, cycle_length=1)

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> "Dataset":
        """Makes a dataset of each `size` elements that follow each other.

        Args:
            size: Number of elements of a window.
            shift: Number of elements between the beginnings of two windows; None means `size`.
            stride: Number of elements between two elements of a window.
            drop_remainder: Whether to drop the windows at the end that have fewer elements.
            name: No effect.

        Returns:
            A dataset whose elements are datasets: for elements that are nests, a nest of datasets.
            `flat_map(lambda window: window.batch(size))` makes arrays of them.
        """
        size = checked_int("window: size", size, minimum=1)
        shift = size if shift is None else checked_int("window: shift", shift, minimum=1)
        stride = checked_int("window: stride", stride, minimum=1)

        def generate(elements: Stream) -> Iterator[Nest]:
            for window in windows(size, shift, stride, drop_remainder, elements):
                columns, tree = columns_of(window)
                yield tree.unflatten([self.of(RandomAccess(column)) for column in columns])

        lost = (size - 1) * stride if drop_remainder else 0
        count = lambda total: total if total < 0 else max(0, -(-(total - lost) // shift))
        label = f"window({size}, {shift}, {stride}, {drop_remainder})"
        return self.of(Generated((self._node,), generate, label, count))

    # Elements

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        use_unbounded_threadpool: bool = False,
        name: str | None = None,
    ) -> "Dataset":
        """Applies a function to every element.

        Args:
            map_func: A Python function on NumPy arrays. If an element is a tuple, its items become
                the arguments. After `batch`, the function gets whole batches.
            num_parallel_calls: Number of threads; AUTOTUNE means one per core, None means none.
                Threads help if the function waits or releases the GIL.
            deterministic: No effect: results always come in the order of the elements.
            synchronous: No effect: without threads, an element is made when it is needed.
            use_unbounded_threadpool: No effect.
            name: No effect.
        """
        check_type("map: map_func", map_func, Callable, "a function")
        return self.of(Map(self._node, map_func, _num_threads("map", num_parallel_calls)))

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> "Dataset":
        """Keeps the elements for which `predicate` returns True."""
        check_type("filter: predicate", predicate, Callable, "a function")
        return self.of(Filter(self._node, predicate))

    def enumerate(self, start: int = 0, name: str | None = None) -> "Dataset":
        """Pairs every element with its number, counted from `start`."""
        size = self._node.cardinality()
        stop = start + size if size >= 0 else None
        return self.zip(self.of(Range(start, stop, 1, np.dtype(np.int64))), self)

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """Stacks elements along a new dim 0, `batch_size` at a time.

        Args:
            batch_size: Number of elements in a batch. Under a strategy, this is the global batch.
            drop_remainder: Whether to drop a last batch that has fewer elements.
            num_parallel_calls: No effect.
            deterministic: No effect.
            name: No effect.
        """
        size = checked_int("batch: batch_size", batch_size, minimum=1)
        return self.of(Batch(self._node, size, bool(drop_remainder)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Nest = None,
        padding_values: Nest = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> "Dataset":
        """Batches arrays of different sizes, padded at the end of every dim.

        Args:
            batch_size: Number of elements in a batch.
            padded_shapes: Nest of shapes. A dim that is None gets the largest size in the batch.
                None in place of the nest does this for all dims.
            padding_values: Nest of padding values, or one value for all; None means 0 and "".
            drop_remainder: Whether to drop a last batch that has fewer elements.
            name: No effect.
        """
        size = checked_int("padded_batch: batch_size", batch_size, minimum=1)
        padding = (padded_shapes, padding_values)
        return self.of(Batch(self._node, size, bool(drop_remainder), padding))

    def unbatch(self, name: str | None = None) -> "Dataset":
        """Splits batches into their rows."""
        return self.of(Unbatch(self._node))

    def rebatch(
        self, batch_size: int, drop_remainder: bool = False, name: str | None = None
    ) -> "Dataset":
        """Changes the size of batches."""
        size = checked_int("rebatch: batch_size", batch_size, minimum=1)
        return self.unbatch().batch(size, drop_remainder)

    # Rest

    def cache(self) -> "Dataset":
        """Keeps elements in memory, so that everything before this is computed only once."""
        return self.of(Cache(self._node))

    def prefetch(self, buffer_size: int, name: str | None = None) -> "Dataset":
        """Makes up to `buffer_size` elements ahead of time, in a thread; AUTOTUNE means 2.

        Distributed datasets do this by themselves, see `InputOptions`.
        """
        depth = checked_int("prefetch: buffer_size", buffer_size, minimum=-1)
        depth = _AUTOTUNED_DEPTH if depth == AUTOTUNE else depth
        return self.of(Prefetch(self._node, depth)) if depth else self

    def with_options(self, options: Options, name: str | None = None) -> "Dataset":
        """Sets options; if an option is set several times, the last one wins."""
        check_type("with_options: options", options, Options, "distributary.data.Options")
        return self.of(WithOptions(self._node, Options().merge(options)))

    def options(self) -> Options:
        """Returns the options of this dataset."""
        return options_of(self._node)

    def apply(self, transformation_func: Callable[["Dataset"], Any]) -> Any:
        """Returns `transformation_func(self)`."""
        return transformation_func(self)

    def reduce(
        self, initial_state: Nest, reduce_func: Callable[[Any, Any], Any], name: str | None = None
    ) -> Nest:
        """Returns the state after `state = reduce_func(state, element)` for every element."""
        return functools.reduce(reduce_func, self, initial_state)

    def cardinality(self) -> int:
        """Returns the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        return self._node.cardinality()

    @property
    def element_spec(self) -> Any:
        """Nest of `TensorSpec` that describes an element.

        After `map`, or for a generator without `output_signature`, the first element is computed to
        find out.
        """
        return self._node.spec()

    def as_numpy_iterator(self) -> "DatasetIterator":
        """Returns an iterator like `iter`: elements are NumPy arrays."""
        return iterator_of(self, is_plain=True)

    def __iter__(self) -> "DatasetIterator":
        return iterator_of(self, is_plain=False)

    def begin_pass(self, is_plain: bool) -> "DatasetIterator":
        """Starts a new pass and returns its iterator, also in a function that is traced."""
        self._num_passes += 1
        return DatasetIterator(self, self._num_passes - 1, None if is_plain else self.show)

    def take_back_pass(self) -> None:
        """Undoes the start of the last pass."""
        self._num_passes -= 1

    def restore(self, node: Node, num_passes: int) -> None:
        """Makes the dataset one of `node`, over which `num_passes` passes have begun."""
        self._node = node
        self._num_passes = num_passes

    def __len__(self) -> int:
        size = self._node.cardinality()
        if size == INFINITE_CARDINALITY:
            raise InvalidTypeError(
                f"The dataset {self._node.describe()} is infinite, so it has no length. Limit it"
                " with take."
            )
        if size == UNKNOWN_CARDINALITY:
            raise InvalidTypeError(
                f"The length of the dataset {self._node.describe()} is unknown before it is read."
                " cardinality() says so without an error."
            )
        return size

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<distributary.data.Dataset: {self._node.describe()}>"


def _num_threads(what: str, num_parallel_calls: int | None) -> int | None:
    if num_parallel_calls is None:
        return None
    calls = checked_int(f"{what}: num_parallel_calls", num_parallel_calls, minimum=-1)
    if calls == AUTOTUNE:
        return num_cores()
    if calls == 0:
        raise InvalidValueError(
            f"{what}: num_parallel_calls is 0, expected a number of threads, AUTOTUNE, or None."
        )
    return calls


# Iterators, with a state that you can save and restore.


class PassIterator(Iterator[Any]):
    """Base class of iterators over one pass of a dataset.

    Args:
        number: Number of the pass.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._position = 0

    @abc.abstractmethod
    def current_node(self) -> Node:
        """Returns the dataset of the pass."""

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
            OutOfRangeError: at the end; it is also a `StopIteration`.
        """
        return next(self)

    def get_next_as_optional(self) -> "Optional":
        """Returns the next element as an `Optional`, which has no value at the end."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()

    def get_state(self) -> dict[str, Any]:
        """Returns the position for `set_state`, as a small dict of numbers and strings.

        It counts the elements that you were given, not those that were made ahead of time.
        """
        node = self.current_node()
        return {
            "dataset": node.describe(),
            "iteration": self._number,
            "position": self._position,
            "seeds": node.drawn_seeds(),
        }

    def take_state(self, state: dict[str, Any]) -> Node:
        """Takes over the numbers of a state, and returns the dataset in the order of that time.

        Raises:
            InvalidValueError: if it is not a state, or belongs to another dataset.
        """
        keys = {"dataset", "iteration", "position", "seeds"}
        if not isinstance(state, dict) or set(state) != keys:
            raise InvalidValueError(
                f"set_state: got {state!r}, expected what get_state() of an iterator returned."
            )
        node = self.current_node()
        if state["dataset"] != node.describe():
            raise InvalidValueError(
                "set_state: the state belongs to another dataset. It was saved from"
                f"\n  {state['dataset']}\nand this is\n  {node.describe()}"
            )
        self._number, self._position = int(state["iteration"]), int(state["position"])
        return node.with_drawn_seeds([int(seed) for seed in state["seeds"]])

    def go_to_position(self, advance: Callable[[int], int]) -> None:
        """Skips the elements before the position by `advance`, which returns how many there were.

        Raises:
            InvalidValueError: if there are fewer.
        """
        skipped = advance(self._position)
        if skipped < self._position:
            raise InvalidValueError(
                f"set_state: the position is {self._position}, but the dataset ends after"
                f" {skipped} elements. Did its files or arrays change?"
            )


@final
class DatasetIterator(PassIterator):
    """One pass over a `Dataset`. Several threads may take elements, each of which one gets.

    Source: `tf.data.Iterator`.
    """

    def __init__(
        self, dataset: "Dataset", number: int, show: Callable[[Nest], Nest] | None = None
    ) -> None:
        super().__init__(number)
        self._show = show
        self._dataset = dataset
        self._node = dataset.node
        self._stream: Stream | None = None
        self._returned: list[Nest] = []
        # Generators refuse a second thread, and those that read ahead say their end once.
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def current_node(self) -> Node:
        return self._node

    def __next__(self) -> Any:
        return next_of(self) if inside_jax_trace() else self.pull()

    def pull(self) -> Any:
        """Returns the next element, also in a function that is traced."""
        waiting = waiting_iterators.get()
        if waiting:
            self._check_not_waiting(waiting)
        with self._lock:
            token = waiting_iterators.set((*waiting, (self._lock, threading.get_ident())))
            try:
                if self._returned:
                    element = self._returned.pop()
                else:
                    if self._stream is None:
                        self._stream = self._node.stream((self._number,))
                    element = next(self._stream)
                    if self._show is not None:
                        element = self._show(element)
            except StopIteration:
                raise at_end() from None
            finally:
                waiting_iterators.reset(token)
            self._position += 1
            return element

    def _check_not_waiting(self, waiting: Iterable[tuple[object, int]]) -> None:
        thread = threading.get_ident()
        if any(lock is self._lock and other != thread for lock, other in waiting):
            raise InvalidValueError(
                f"A thread of the dataset {self._node.describe()} takes an element of the iterator"
                " that waits for this thread, so both would wait forever. Give the function another"
                " iterator, or use no threads: map without num_parallel_calls, no prefetch."
            )

    def put_back(self, element: Nest) -> None:
        """Puts back the element that was taken last, so that it comes next again."""
        self._returned.append(element)
        self._position -= 1

    @property
    def element_spec(self) -> Any:
        """Nest of `TensorSpec` that describes an element."""
        return self._node.spec()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to the position of an iterator over the same dataset, also from another process.

        The passes that you begin afterwards are those that would have come next there. Elements of
        arrays and files are skipped without reading them. Generators, `filter` and datasets of
        other libraries are iterated up to the position.

        Raises:
            InvalidValueError: if the state belongs to another dataset.
        """
        self._node = self.take_state(state)
        self._returned.clear()
        self._dataset.restore(self._node, self._number + 1)
        mark = self._lock, threading.get_ident()
        with bound(waiting_iterators, (*waiting_iterators.get(), mark)):
            self._stream = self._node.stream((self._number,))
            self.go_to_position(self._stream.advance)


@final
class Optional:
    """A value, or no value.

    Source: `tf.experimental.Optional`.
    """

    def __init__(self, *value: Any) -> None:
        self._value = value

    @staticmethod
    def empty(element_spec: object) -> "Optional":
        """Makes one without a value."""
        return Optional()

    @staticmethod
    def from_value(value: object) -> "Optional":
        """Makes one with a value."""
        return Optional(value)

    @property
    def element_spec(self) -> Any:
        """Nest of `TensorSpec` that describes the value; None without one."""
        return specs_of(self._value[0]) if self._value else None

    def has_value(self, name: str | None = None) -> bool:
        """Returns whether there is a value."""
        return bool(self._value)

    def get_value(self, name: str | None = None) -> Any:
        """Returns the value.

        Raises:
            InvalidValueError: if there is none.
        """
        if not self._value:
            raise InvalidValueError(
                "Optional.get_value: there is no value; call has_value() first."
            )
        return self._value[0]
