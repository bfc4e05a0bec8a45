"""`Dataset`: the method names of tf.data on NumPy arrays."""

import functools
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np
from numpy.typing import DTypeLike

from distributary._types import Nest
from distributary.data import _saved as saved
from distributary.data._arrays import Range, Single, slices
from distributary.data._batching import Batch, Unbatch
from distributary.data._file_names import (
    FileNames,
    FilePaths,
    file_names,
    matching_files,
)
from distributary.data._foreign import foreign
from distributary.data._generated import (
    Generated,
    Mixture,
    Resampled,
    chosen,
    groups,
    scanned,
    shares,
    unique,
    windows,
)
from distributary.data._iterables import RandomAccess, generated, signature_of
from distributary.data._iterator import DatasetIterator
from distributary.data._mapping import Cache, Filter, Map, call
from distributary.data._nodes import MAX_SEED, Node
from distributary.data._numpy_files import numpy_files
from distributary.data._options import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Options,
)
from distributary.data._order import (
    Repeat,
    ShardHint,
    Shuffle,
    Slice,
    WithOptions,
    options_of,
    shard,
)
from distributary.data._prefetch import Prefetch
from distributary.data._several import Concatenate, Interleave, Zip
from distributary.data._streams import Stream
from distributary.data._structure import Array, TensorSpec, columns_of, map_arrays
from distributary.errors import InvalidTypeError, InvalidValueError, shown
from distributary.tracing import iterator_of

_log = logging.getLogger(__name__)

# For `prefetch(AUTOTUNE)`: while you use one element, one is ready and one is being made.
_AUTOTUNED_DEPTH = 2
_DEFAULT_CYCLE_LENGTH = 8
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
                f"Dataset: got {node!r}, which is data and not a dataset yet. Use"
                " Dataset.from_tensor_slices, from_generator or from_source to make one of it."
            )
        self._node = node
        self._num_passes = 0
        self._show = self.shows_arrays_by()

    @classmethod
    def shows_arrays_by(cls) -> Callable[[Array], Any] | None:
        """Returns what loops get for an array; None for the array itself.

        What the methods of a dataset return does the same.
        """
        return None

    @classmethod
    def _made(cls, node: Node) -> "Dataset":
        made = Dataset(node)
        made._show = cls.shows_arrays_by()
        return made

    def _derived(self, node: Node) -> "Dataset":
        made = Dataset(node)
        made._show = self._show
        return made

    @property
    def node(self) -> Node:
        """Last operation of the dataset, for `distributary.inputs`."""
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
        return cls._made(slices(tensors))

    @classmethod
    def from_tensors(cls, tensors: Nest, name: str | None = None) -> "Dataset":
        """Makes a dataset with one element."""
        return cls._made(Single(map_arrays(lambda array: array, tensors)))

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
        return cls._made(generated(generator, output_signature, args or ()))

    @classmethod
    def from_source(cls, source: Any) -> "Dataset":
        """Makes a dataset from another library's dataset, or from any Python iterable.

        Args:
            source: A `tf.data.Dataset`, a `grain` dataset or loader, a torch `Dataset` or
                `DataLoader`, a Hugging Face dataset, a `keras.utils.PyDataset`, or an iterable. If
                it has `__len__` and `__getitem__`, rows are read as they are needed, so that
                shuffling costs nothing.
        """
        is_ours = isinstance(source, Dataset)
        return source if is_ours else cls._made(foreign(source, "from_source: got"))

    @classmethod
    def from_npy(cls, filenames: FilePaths) -> "Dataset":
        """Makes a dataset of the rows of `.npy` files, or of the arrays in `.npz` files as dicts.

        Args:
            filenames: Names of files with arrays `[row, ...]`. Of `.npy` files, only the rows that
                are needed are read; `.npz` files are read whole.

        Raises:
            InvalidValueError: for files that are damaged, contain Python objects, or do not match.
        """
        return cls._made(numpy_files(file_names(filenames, "from_npy")))

    @classmethod
    def range(
        cls, *args: int, output_type: DTypeLike = np.int64, name: str | None = None
    ) -> "Dataset":
        """Makes a dataset of Python's `range(*args)`, as scalars of dtype `output_type`."""
        numbers = range(*args)
        return cls._made(Range(numbers.start, numbers.stop, numbers.step, np.dtype(output_type)))

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
        names = cls._made(FileNames(matching_files(file_pattern)))
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
            if not isinstance(leaf, Dataset):
                raise InvalidTypeError(
                    f"Dataset.zip: got {shown(leaf)}, expected datasets. Make one of it with"
                    " Dataset.from_source."
                )
        return cls._made(Zip(tuple(leaf._node for leaf in leaves), tree))

    @classmethod
    def counter(
        cls,
        start: int = 0,
        step: int = 1,
        dtype: DTypeLike = np.int64,
        name: str | None = None,
    ) -> "Dataset":
        """Makes an endless dataset of `start`, `start + step`, ... as scalars of a dtype."""
        start, step = _int("counter", "start", start), _int("counter", "step", step)
        made = np.dtype(dtype).type
        return cls.range(1).repeat().enumerate().map(lambda i, _: made(start + i * step))

    @classmethod
    def random(
        cls,
        seed: int | None = None,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """Makes an endless dataset of random numbers from 0 to 2**32 - 1, as int64.

        Args:
            seed: Seed; None draws one from NumPy's global generator.
            rerandomize_each_iteration: Must not be True: every pass has the same numbers.
            name: No effect.

        Source: `tf.data.Dataset.random`, whose numbers are others.
        """
        if rerandomize_each_iteration:
            raise InvalidValueError(
                "Dataset.random: rerandomize_each_iteration is True, but every pass has the same"
                " numbers. Shuffle the dataset, which gives each pass another order."
            )
        start = _draw() if seed is None else _int("random", "seed", seed, minimum=0)

        def numbers() -> Iterator[np.int64]:
            generator = np.random.default_rng(start)
            while True:
                yield from generator.integers(2**32, size=256)

        endless = cls.from_generator(numbers, output_signature=TensorSpec((), np.int64))
        return endless.assert_cardinality(INFINITE_CARDINALITY)

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: "Sequence[Dataset]",
        weights: Sequence[float] | np.ndarray | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """Takes each element from one of several datasets, which is drawn.

        Args:
            datasets: Datasets with elements of one structure.
            weights: Number per dataset to which its probability is proportional; None for equal
                ones.
            seed: Seed; None draws one from NumPy's global generator.
            stop_on_empty_dataset: Whether the end of one dataset is the end; otherwise the others
                go on.
            rerandomize_each_iteration: No effect: every pass draws anew.
            name: No effect.
        """
        nodes = _nodes("sample_from_datasets", datasets)
        shares = np.ones(len(nodes)) if weights is None else np.asarray(weights, np.float64)
        if shares.shape != (len(nodes),) or not (shares >= 0).all() or not shares.any():
            raise InvalidValueError(
                f"sample_from_datasets: weights is {shown(weights)}, expected {len(nodes)} numbers,"
                " one per dataset, of which none is negative and one is positive."
            )
        if seed is not None:
            seed = _int("sample_from_datasets", "seed", seed, minimum=0)
        drawn = tuple(shares.tolist())
        return cls._made(Mixture(nodes, drawn, stop_on_empty_dataset, _draw(), seed))

    @classmethod
    def choose_from_datasets(
        cls,
        datasets: "Sequence[Dataset]",
        choice_dataset: "Dataset",
        stop_on_empty_dataset: bool = True,
        name: str | None = None,
    ) -> "Dataset":
        """Takes each element from the dataset whose number `choice_dataset` gives."""
        nodes = _nodes("choose_from_datasets", [choice_dataset, *datasets])
        choose = functools.partial(chosen, bool(stop_on_empty_dataset))
        return cls._made(Generated(nodes, choose, "choose_from_datasets"))

    # Order

    def take(self, count: int, name: str | None = None) -> "Dataset":
        """Keeps the first `count` elements; all of them if it is -1."""
        count = _int("take", "count", count, minimum=-1)
        return (
            self if count < 0 else self._derived(Slice(self._node, f"take({count})", count=count))
        )

    def skip(self, count: int, name: str | None = None) -> "Dataset":
        """Drops the first `count` elements; all of them if it is -1."""
        count = _int("skip", "count", count, minimum=-1)
        left = 0 if count < 0 else math.inf
        return self._derived(Slice(self._node, f"skip({count})", max(count, 0), left))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> "Dataset":
        """Keeps every `num_shards`-th element, starting with element `index`.

        Raises:
            InvalidValueError: if `index` is not in 0 to `num_shards - 1`.
        """
        if (num_shards, index) == (SHARD_HINT, SHARD_HINT):
            return self._derived(ShardHint(self._node))
        num_shards = _int("shard", "num_shards", num_shards, minimum=1)
        index = _int("shard", "index", index, minimum=0)
        if index >= num_shards:
            raise InvalidValueError(
                f"shard: index is {index}, expected 0 to {num_shards - 1} for {num_shards} shards."
            )
        return self._derived(shard(self._node, num_shards, index))

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
        buffer_size = _int("shuffle", "buffer_size", buffer_size, minimum=1)
        if seed is not None:
            seed = _int("shuffle", "seed", seed, minimum=0)
        reshuffle = reshuffle_each_iteration is not False
        return self._derived(Shuffle(self._node, buffer_size, seed, reshuffle, _draw()))

    def repeat(self, count: int | None = None, name: str | None = None) -> "Dataset":
        """Repeats the elements `count` times; forever if it is None or -1."""
        if count is not None:
            count = _int("repeat", "count", count, minimum=-1)
        return self._derived(Repeat(self._node, -1 if count is None else count))

    def concatenate(self, dataset: "Dataset", name: str | None = None) -> "Dataset":
        """Appends the elements of another dataset."""
        if not isinstance(dataset, Dataset):
            raise InvalidTypeError(
                f"concatenate: got {shown(dataset)}, expected a Dataset. Make one of it with"
                " Dataset.from_source."
            )
        return self._derived(Concatenate((self._node, dataset._node)))

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
            if not isinstance(dataset, Dataset):
                raise InvalidTypeError(
                    f"interleave: map_func returned {shown(dataset)}, expected a Dataset."
                )
            return dataset._node

        cycle = _DEFAULT_CYCLE_LENGTH if cycle_length in (None, AUTOTUNE) else cycle_length
        cycle = _int("interleave", "cycle_length", cycle, minimum=1)
        block = _int("interleave", "block_length", block_length or 1, minimum=1)
        read_ahead = _num_threads("interleave", num_parallel_calls) is not None
        return self._derived(Interleave(self._node, make, cycle, block, read_ahead, _draw()))

    def flat_map(self, map_func: Callable[..., "Dataset"], name: str | None = None) -> "Dataset":
        """Makes a dataset of every element, and gives the elements of one after the other."""
        return self.interleave(map_func, cycle_length=1)

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> "Dataset":
        """Keeps the elements before the first for which `predicate` returns False."""
        _callable("take_while", "predicate", predicate)
        holds = functools.partial(call, predicate)
        generate = functools.partial(itertools.takewhile, holds)
        return self._derived(Generated((self._node,), generate, "take_while"))

    def unique(self, name: str | None = None) -> "Dataset":
        """Keeps each element where it comes first."""
        return self._derived(Generated((self._node,), unique, "unique"))

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
        size = _int("window", "size", size, minimum=1)
        shift = size if shift is None else _int("window", "shift", shift, minimum=1)
        stride = _int("window", "stride", stride, minimum=1)

        def generate(elements: Stream) -> Iterator[Nest]:
            for window in windows(size, shift, stride, drop_remainder, elements):
                columns, tree = columns_of(window)
                yield tree.unflatten([_dataset_of(column) for column in columns])

        lost = (size - 1) * stride if drop_remainder else 0
        count = lambda total: max(0, -(-(total - lost) // shift))
        label = f"window({size}, {shift}, {stride}, {drop_remainder})"
        return self._derived(Generated((self._node,), generate, label, count))

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: "Callable[[Any, Dataset], Dataset]",
        window_size: int | None = None,
        window_size_func: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """Collects elements by a key, and makes a dataset of each group.

        Args:
            key_func: Function from an element to an integer.
            reduce_func: Function from a key and a dataset of up to `window_size` elements with
                that key to a dataset, whose elements come next.
            window_size: Number of elements of a group.
            window_size_func: Function from a key to that number, in place of `window_size`.
            name: No effect.
        """
        if (window_size is None) == (window_size_func is None):
            raise InvalidValueError(
                f"group_by_window: window_size is {window_size} and window_size_func is"
                f" {shown(window_size_func)}. Give one of them."
            )
        if window_size is not None:
            window_size = _int("group_by_window", "window_size", window_size, minimum=1)
        key_of = functools.partial(call, key_func)

        def size_of(key: int) -> int:
            size = window_size_func(np.int64(key)) if window_size_func else window_size
            return int(np.asarray(size))

        def generate(elements: Stream) -> Iterator[Nest]:
            for key, group in groups(key_of, size_of, elements):
                yield key, _dataset_of(group)

        return self._derived(Generated((self._node,), generate, "group_by_window")).flat_map(
            reduce_func
        )

    # Elements

    def scan(
        self,
        initial_state: Nest,
        scan_func: Callable[[Any, Any], tuple[Nest, Nest]],
        name: str | None = None,
    ) -> "Dataset":
        """Applies a function that hands a state from one element to the next.

        Args:
            initial_state: Nest of arrays.
            scan_func: Function from a state and an element to the new state and an output.
            name: No effect.
        """
        _callable("scan", "scan_func", scan_func)
        generate = functools.partial(scanned, initial_state, scan_func)
        return self._derived(Generated((self._node,), generate, "scan", lambda size: size))

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
        _callable("map", "map_func", map_func)
        return self._derived(Map(self._node, map_func, _num_threads("map", num_parallel_calls)))

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> "Dataset":
        """Keeps the elements for which `predicate` returns True."""
        _callable("filter", "predicate", predicate)
        return self._derived(Filter(self._node, predicate))

    def enumerate(self, start: int = 0, name: str | None = None) -> "Dataset":
        """Pairs every element with its number, counted from `start`."""
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
        """Stacks elements along a new dim 0, `batch_size` at a time.

        Args:
            batch_size: Number of elements in a batch. Under a strategy, this is the global batch.
            drop_remainder: Whether to drop a last batch that has fewer elements.
            num_parallel_calls: No effect.
            deterministic: No effect.
            name: No effect.
        """
        size = _int("batch", "batch_size", batch_size, minimum=1)
        return self._derived(Batch(self._node, size, bool(drop_remainder)))

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
        size = _int("padded_batch", "batch_size", batch_size, minimum=1)
        padding = (padded_shapes, padding_values)
        return self._derived(Batch(self._node, size, bool(drop_remainder), padding))

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Nest = None,
        padding_values: Nest = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> "Dataset":
        """Makes batches of elements of similar lengths.

        Args:
            element_length_func: Function from an element to its length.
            bucket_boundaries: Upper bounds of the lengths of all buckets but the last, exclusive.
            bucket_batch_sizes: Batch size of each bucket; one more than boundaries.
            padded_shapes: Like that of `padded_batch`.
            padding_values: Like those of `padded_batch`.
            pad_to_bucket_boundary: Whether to pad sizes that `padded_shapes` leaves open to the
                boundary less 1, instead of the longest of the batch. Then no element may be as
                long as the last boundary.
            no_padding: Whether elements of a batch have the same shapes, so that `batch` does.
            drop_remainder: Whether to drop what does not fill a batch.
            name: No effect.
        """
        bounds, sizes = [*bucket_boundaries], [*bucket_batch_sizes]
        if len(sizes) != len(bounds) + 1 or sorted(set(bounds)) != bounds:
            raise InvalidValueError(
                f"bucket_by_sequence_length: bucket_boundaries is {bounds}, bucket_batch_sizes is"
                f" {sizes}. Give boundaries that increase, and one more batch size than boundaries."
            )

        def bucket_of(*element: Nest) -> int:
            return int(np.searchsorted(bounds, np.asarray(element_length_func(*element)), "right"))

        def batch(bucket: Any, elements: Dataset) -> Dataset:
            size = sizes[bucket]
            if no_padding:
                return elements.batch(size, drop_remainder)
            shapes = padded_shapes
            if pad_to_bucket_boundary:
                if bucket == len(bounds):
                    raise InvalidValueError(
                        "bucket_by_sequence_length: an element is as long as the last boundary,"
                        f" {bounds[-1]}, so that there is no length to pad to. Filter long"
                        " elements, or add a boundary."
                    )
                shapes = _filled(shapes, elements.element_spec, bounds[bucket] - 1)
            return elements.padded_batch(size, shapes, padding_values, drop_remainder)

        return self.group_by_window(bucket_of, batch, window_size_func=sizes.__getitem__)

    def unbatch(self, name: str | None = None) -> "Dataset":
        """Splits batches into their rows."""
        return self._derived(Unbatch(self._node))

    def rebatch(
        self, batch_size: int, drop_remainder: bool = False, name: str | None = None
    ) -> "Dataset":
        """Changes the size of batches."""
        return self.unbatch().batch(batch_size, drop_remainder)

    def assert_cardinality(self, expected_cardinality: int) -> "Dataset":
        """Says how many elements there are; a pass with another number raises an error at its end.

        Raises:
            InvalidValueError: in a pass that has more elements or fewer.

        Source: `tf.data.experimental.assert_cardinality`.
        """
        expected = _int("assert_cardinality", "expected_cardinality", expected_cardinality)

        def generate(elements: Stream) -> Iterator[Nest]:
            found = 0
            for element in elements:
                found += 1
                if found > expected >= 0:
                    break
                yield element
            if found != expected >= 0:
                more = "more" if found > expected else f"only {found}"
                raise InvalidValueError(
                    f"assert_cardinality: expected {expected} elements, but the dataset has {more}."
                )

        label = f"assert_cardinality({expected})"
        return self._derived(Generated((self._node,), generate, label, known=expected))

    def ignore_errors(self, log_warning: bool = False, name: str | None = None) -> "Dataset":
        """Leaves out the elements whose `map` or `filter` raises an error.

        Args:
            log_warning: Whether to log each error.
            name: No effect.

        Source: `tf.data.Dataset.ignore_errors`.
        """

        def generate(elements: Stream) -> Iterator[Nest]:
            while True:
                try:
                    yield next(elements)
                except StopIteration:
                    return
                except Exception as error:
                    if log_warning:
                        _log.warning("Dataset.ignore_errors: %s", error)

        return self._derived(Generated((self._node,), generate, "ignore_errors"))

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Sequence[float] | np.ndarray,
        initial_dist: Sequence[float] | np.ndarray | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """Leaves out elements at random, so that classes come as often as you ask for.

        Args:
            class_func: Function from an element to the number of its class.
            target_dist: Share of every class in the result.
            initial_dist: Share of every class in this dataset; None counts them as they come.
            seed: Seed; None draws one from NumPy's global generator.
            name: No effect.

        Returns:
            A dataset of pairs `(class, element)`.

        Raises:
            InvalidValueError: if the shares are no distributions of the same classes, or a class
                that you ask for has the initial share 0.

        Source: `tf.data.Dataset.rejection_resample`, which chooses other elements.
        """
        _callable("rejection_resample", "class_func", class_func)
        if seed is not None:
            seed = _int("rejection_resample", "seed", seed, minimum=0)
        target = shares("target_dist", target_dist)
        initial = None if initial_dist is None else shares("initial_dist", initial_dist)
        class_of = functools.partial(call, class_func)
        return self._derived(Resampled(self._node, class_of, target, initial, _draw(), seed))

    # Rest

    def cache(self, filename: str = "", name: str | None = None) -> "Dataset":
        """Keeps elements, so that everything before this is computed only once.

        Args:
            filename: Folder to keep them in, see `snapshot`; "" keeps them in memory.
            name: No effect.
        """
        return self.snapshot(filename) if filename else self._derived(Cache(self._node))

    def snapshot(
        self,
        path: str,
        compression: str | None = "AUTO",
        reader_func: "Callable[[Dataset], Dataset] | None" = None,
        shard_func: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """Saves the elements of the first complete pass, for later passes and later programs.

        Every pipeline has a folder of its own below `path`. Its name depends on the data or files,
        on the arguments, and on the code of functions with the values that they capture. If a
        function uses global variables or objects that change, remove the folder; if these differ
        between workers, give each worker its own.

        Args:
            path: Folder.
            compression: "GZIP", or "AUTO" or None for none.
            reader_func: See `load`.
            shard_func: See `save`.
            name: No effect.

        Source: `tf.data.Dataset.snapshot`.
        """
        kind = saved.compression_of("snapshot", compression)

        def save(node: Node, elements: Stream, folder: str) -> Iterator[Nest]:
            return saved.saving(node, elements, folder, kind, shard_func, replaces=False)

        load = functools.partial(_loaded, reader_func=reader_func)
        return self._derived(saved.Snapshot(self._node, os.fsdecode(path), save, load))

    def save(
        self,
        path: str | os.PathLike[str],
        compression: str | None = None,
        shard_func: Callable[..., Any] | None = None,
        checkpoint_args: object = None,
    ) -> None:
        """Saves the elements of a pass in a folder, and replaces the dataset that it has.

        The folder has all elements or, if this fails, what it had before. In a job of several
        workers, one of them saves; see `strategy.is_chief`.

        Args:
            path: Folder.
            compression: "GZIP"; None for none.
            shard_func: Function from an element to the number of its file; None for one file.
                Several files can be read by several workers.
            checkpoint_args: Must be None: a save that was interrupted starts again.

        Raises:
            InvalidTypeError: for elements other than arrays of numbers, text and bytes.
            InvalidValueError: for elements of several structures.

        Source: `tf.data.Dataset.save`, which has another format.
        """
        if checkpoint_args is not None:
            raise InvalidValueError(
                "Dataset.save: checkpoint_args is given, but a save that was interrupted starts"
                " again. Leave it out."
            )
        kind = saved.compression_of("save", compression)
        elements = self.as_numpy_iterator()
        for _ in saved.saving(self._node, elements, os.fsdecode(path), kind, shard_func, True):
            pass

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        element_spec: Nest = None,
        compression: str | None = None,
        reader_func: "Callable[[Dataset], Dataset] | None" = None,
        wait: bool = False,
    ) -> "Dataset":
        """Makes a dataset of the elements that `save` has saved in a folder.

        Args:
            path: Folder.
            element_spec: Nest of `TensorSpec` like the elements; needed if they are named tuples or
                objects.
            compression: No effect: the folder says it.
            reader_func: Function from a dataset of datasets, one for every file, to the dataset to
                read; None reads one file after the other.
            wait: Whether to wait until something is saved there.

        Raises:
            InvalidValueError: if there is no dataset, it has other elements, or it is damaged.

        Source: `tf.data.Dataset.load`.
        """
        folder = os.fsdecode(path)
        while wait and not saved.is_saved(folder):
            time.sleep(0.1)
        return cls._made(_loaded(folder, reader_func, element_spec))

    def prefetch(self, buffer_size: int, name: str | None = None) -> "Dataset":
        """Makes up to `buffer_size` elements ahead of time, in a thread; AUTOTUNE means 2.

        Distributed datasets do this by themselves, see `InputOptions`.
        """
        depth = _int("prefetch", "buffer_size", buffer_size, minimum=-1)
        depth = _AUTOTUNED_DEPTH if depth == AUTOTUNE else depth
        return self._derived(Prefetch(self._node, depth)) if depth else self

    def with_options(self, options: Options, name: str | None = None) -> "Dataset":
        """Sets options; if an option is set several times, the last one wins."""
        if not isinstance(options, Options):
            raise InvalidTypeError(
                f"with_options: got {options!r}, expected distributary.data.Options."
            )
        return self._derived(WithOptions(self._node, Options().merge(options)))

    def options(self) -> Options:
        """Returns the options of this dataset."""
        return options_of(self._node)

    def apply(self, transformation_func: Callable[["Dataset"], Any]) -> Any:
        """Returns `transformation_func(self)`."""
        return transformation_func(self)

    def reduce(
        self,
        initial_state: Nest,
        reduce_func: Callable[[Any, Any], Any],
        name: str | None = None,
    ) -> Nest:
        """Returns the state after `state = reduce_func(state, element)` for every element."""
        return functools.reduce(reduce_func, self, initial_state)

    def get_single_element(self, name: str | None = None) -> Nest:
        """Returns the only element.

        Raises:
            InvalidValueError: if there are none, or several.
        """
        elements = [*self.take(2)]
        if len(elements) != 1:
            raise InvalidValueError(
                f"get_single_element: the dataset {self._node.describe()} has"
                f" {'no elements' if not elements else 'more than one element'}, expected one."
            )
        return elements[0]

    def cardinality(self) -> int:
        """Returns the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        number = self._node.cardinality()
        return number if self._show is None else self._show(np.asarray(number))

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
        show = None if is_plain else self._show
        return DatasetIterator(self, self._num_passes - 1, show)

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


def _loaded(
    folder: str, reader_func: Callable[[Dataset], Dataset] | None, element_spec: Nest = None
) -> Node:
    """Returns the node that reads a folder."""
    node = saved.load(folder, element_spec)
    if reader_func is None:
        return node
    found = reader_func(Dataset(saved.shards(node, Dataset)))
    if not isinstance(found, Dataset):
        raise InvalidTypeError(f"load: reader_func returned {shown(found)}, expected a Dataset.")
    return found._node


def _dataset_of(elements: Sequence[Nest]) -> Dataset:
    return Dataset(RandomAccess(elements))


def _nodes(what: str, datasets: Sequence[Any]) -> tuple[Node, ...]:
    for number, dataset in enumerate(datasets):
        if not isinstance(dataset, Dataset):
            raise InvalidTypeError(
                f"{what}: dataset {number} is {shown(dataset)}, expected a Dataset. Make one of it"
                " with Dataset.from_source."
            )
    if not datasets:
        raise InvalidValueError(f"{what}: datasets is empty, expected at least one.")
    return tuple(dataset.node for dataset in datasets)


def _filled(shapes: Nest, spec: Nest, size: int) -> Nest:
    """Returns shapes to pad to, with `size` for the dims that are open."""
    if shapes is None:
        shapes = jax.tree.map(lambda leaf: [None] * len(leaf.shape), spec)
    is_shape = lambda node: (
        isinstance(node, (list, tuple)) and all(dim is None or isinstance(dim, int) for dim in node)
    )
    return jax.tree.map(
        lambda shape: [size if dim in (None, -1) else dim for dim in shape],
        shapes,
        is_leaf=is_shape,
    )


def _draw() -> int:
    return int(np.random.randint(0, MAX_SEED, dtype=np.int64))


def _callable(what: str, name: str, value: object) -> None:
    if not callable(value):
        raise InvalidTypeError(f"{what}: {name} is {shown(value)}, expected a function.")


def _num_threads(what: str, num_parallel_calls: int | None) -> int | None:
    if num_parallel_calls is None:
        return None
    calls = _int(what, "num_parallel_calls", num_parallel_calls, minimum=-1)
    if calls == AUTOTUNE:
        return os.cpu_count() or 1
    if calls == 0:
        raise InvalidValueError(
            f"{what}: num_parallel_calls is 0, expected a number of threads, AUTOTUNE, or None."
        )
    return calls


def _int(what: str, name: str, value: Any, minimum: float = -math.inf) -> int:
    is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_number:
        raise InvalidTypeError(f"{what}: {name} is {shown(value)}, expected an int.")
    if value < minimum:
        raise InvalidValueError(f"{what}: {name} is {value}, expected a number >= {minimum}.")
    return int(value)
