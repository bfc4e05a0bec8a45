"""`tf.data`: datasets whose loops yield arrays with TensorFlow's method `numpy()`."""

import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
from numpy.typing import DTypeLike

from distributary import data
from distributary.context import get_strategy
from distributary.data import DistributedInput
from distributary.devices import Nest
from distributary.errors import InvalidTypeError, InvalidValueError, check_type, checked_int, shown
from distributary.options import InputOptions
from distributary.tensorflow import _saved_data as saved
from distributary.tensorflow._io import decode_csv, parse_example
from distributary.tensorflow._operations import as_element

_log = logging.getLogger(__name__)


class Dataset(data.Dataset):
    """A `distributary.data.Dataset` with the other methods of TensorFlow's.

    Its loops yield arrays with `numpy()`.

    Source: `tf.data.Dataset`.
    """

    @classmethod
    def of(cls, node: data.Node) -> "Dataset":
        """Returns a dataset of this class."""
        return Dataset(node)

    def show(self, element: Nest) -> Nest:
        """Returns an element whose arrays have the method `numpy()`."""
        return data.map_arrays(as_element, element)

    def reduce(self, *args: Any, **kwargs: Any) -> Nest:
        """Returns the state after `state = reduce_func(state, element)` for every element."""
        return self.show(super().reduce(*args, **kwargs))

    def cardinality(self) -> Any:
        """Returns the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        return as_element(np.asarray(super().cardinality()))

    # Sources

    @classmethod
    def counter(
        cls, start: int = 0, step: int = 1, dtype: DTypeLike = np.int64, name: str | None = None
    ) -> data.Dataset:
        """Makes an endless dataset of `start`, `start + step`, ... as scalars of a dtype."""
        start, step = checked_int("counter: start", start), checked_int("counter: step", step)
        number = np.dtype(dtype).type
        return cls.range(1).repeat().enumerate().map(lambda i, _: number(start + i * step))

    @classmethod
    def random(
        cls,
        seed: int | None = None,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> data.Dataset:
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
        start = data.drawn_seed() if seed is None else checked_int("random: seed", seed, minimum=0)

        def numbers() -> Iterator[np.int64]:
            generator = np.random.default_rng(start)
            while True:
                yield from generator.integers(2**32, size=256)

        endless = cls.from_generator(numbers, output_signature=data.TensorSpec((), np.int64))
        return Dataset(endless.node).assert_cardinality(data.INFINITE_CARDINALITY)

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[data.Dataset],
        weights: Sequence[float] | np.ndarray | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> data.Dataset:
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
            seed = checked_int("sample_from_datasets: seed", seed, minimum=0)

        def draw(random: np.random.Generator, *streams: data.Stream) -> Iterator[Nest]:
            left = shares.copy()
            while left.any():
                number = int(random.choice(len(streams), p=left / left.sum()))
                try:
                    yield next(streams[number])
                except StopIteration:
                    if stop_on_empty_dataset:
                        return
                    left[number] = 0

        def count(*sizes: int) -> int:
            is_cut = stop_on_empty_dataset and any(size >= 0 for size in sizes)
            return data.UNKNOWN_CARDINALITY if is_cut else data.combined(sizes, sum)

        label = f"sample_from_datasets({tuple(shares.tolist())}, {seed})"
        return cls.of(data.Drawn(nodes, draw, label, count, data.drawn_seed(), seed))

    @classmethod
    def choose_from_datasets(
        cls,
        datasets: Sequence[data.Dataset],
        choice_dataset: data.Dataset,
        stop_on_empty_dataset: bool = True,
        name: str | None = None,
    ) -> data.Dataset:
        """Takes each element from the dataset whose number `choice_dataset` gives."""
        nodes = _nodes("choose_from_datasets", [choice_dataset, *datasets])

        def choose(choices: data.Stream, *streams: data.Stream) -> Iterator[Nest]:
            for choice in choices:
                number = int(np.asarray(choice))
                if not 0 <= number < len(streams):
                    raise InvalidValueError(
                        f"choose_from_datasets: choice_dataset has {number}, but there are"
                        f" {len(streams)} datasets."
                    )
                try:
                    yield next(streams[number])
                except StopIteration:
                    if stop_on_empty_dataset:
                        return

        return cls.of(data.Generated(nodes, choose, "choose_from_datasets"))

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> data.Dataset:
        """Keeps the elements before the first for which `predicate` returns False."""
        check_type("take_while: predicate", predicate, Callable, "a function")
        holds = functools.partial(data.call, predicate)
        generate = functools.partial(itertools.takewhile, holds)
        return self.of(data.Generated((self.node,), generate, "take_while"))

    def unique(self, name: str | None = None) -> data.Dataset:
        """Keeps each element where it comes first."""
        return self.of(data.Generated((self.node,), _unique, "unique"))

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[[Any, Any], data.Dataset],
        window_size: int | None = None,
        window_size_func: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> data.Dataset:
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
            window_size = checked_int("group_by_window: window_size", window_size, minimum=1)
        key_of = functools.partial(data.call, key_func)

        def size_of(key: int) -> int:
            size = window_size_func(np.int64(key)) if window_size_func else window_size
            return int(np.asarray(size))

        def generate(elements: data.Stream) -> Iterator[Nest]:
            held: dict[int, list[Nest]] = {}
            for element in elements:
                key = int(np.asarray(key_of(element)))
                group = held.setdefault(key, [])
                group.append(element)
                if len(group) >= size_of(key):
                    yield np.int64(key), self.of(data.RandomAccess(held.pop(key)))
            for key in sorted(held):
                yield np.int64(key), self.of(data.RandomAccess(held[key]))

        grouped = self.of(data.Generated((self.node,), generate, "group_by_window"))
        return grouped.flat_map(reduce_func)

    def scan(
        self,
        initial_state: Nest,
        scan_func: Callable[[Any, Any], tuple[Nest, Nest]],
        name: str | None = None,
    ) -> data.Dataset:
        """Applies a function that hands a state from one element to the next.

        Args:
            initial_state: Nest of arrays.
            scan_func: Function from a state and an element to the new state and an output.
            name: No effect.
        """
        check_type("scan: scan_func", scan_func, Callable, "a function")

        def generate(elements: data.Stream) -> Iterator[Nest]:
            state = initial_state
            for element in elements:
                result = scan_func(state, element)
                if type(result) not in (tuple, list) or len(result) != 2:
                    raise InvalidTypeError(
                        f"scan: scan_func returned {shown(result)}, expected (new_state,"
                        " output_element)."
                    )
                state, output = data.kept(tuple(result))
                yield output

        return self.of(data.Generated((self.node,), generate, "scan", lambda size: size))

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
    ) -> data.Dataset:
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

        def batch(bucket: Any, elements: data.Dataset) -> data.Dataset:
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

    def assert_cardinality(self, expected_cardinality: int) -> data.Dataset:
        """Says how many elements there are; a pass with another number raises an error at its end.

        Raises:
            InvalidValueError: in a pass that has more elements or fewer.

        Source: `tf.data.experimental.assert_cardinality`.
        """
        expected = checked_int("assert_cardinality: expected_cardinality", expected_cardinality)

        def generate(elements: data.Stream) -> Iterator[Nest]:
            count = 0
            for element in elements:
                count += 1
                if count > expected >= 0:
                    break
                yield element
            if count != expected >= 0:
                more = "more" if count > expected else f"only {count}"
                raise InvalidValueError(
                    f"assert_cardinality: expected {expected} elements, but the dataset has {more}."
                )

        label = f"assert_cardinality({expected})"
        return self.of(data.Generated((self.node,), generate, label, lambda size: expected))

    def ignore_errors(self, log_warning: bool = False, name: str | None = None) -> data.Dataset:
        """Leaves out the elements whose `map` or `filter` raises an error.

        Args:
            log_warning: Whether to log each error.
            name: No effect.

        Source: `tf.data.Dataset.ignore_errors`.
        """

        def generate(elements: data.Stream) -> Iterator[Nest]:
            while True:
                try:
                    yield next(elements)
                except StopIteration:
                    return
                except Exception as error:
                    if log_warning:
                        _log.warning("Dataset.ignore_errors: %s", error)

        return self.of(data.Generated((self.node,), generate, "ignore_errors"))

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Sequence[float] | np.ndarray,
        initial_dist: Sequence[float] | np.ndarray | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> data.Dataset:
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
        check_type("rejection_resample: class_func", class_func, Callable, "a function")
        if seed is not None:
            seed = checked_int("rejection_resample: seed", seed, minimum=0)
        target = _shares("target_dist", target_dist)
        initial = None if initial_dist is None else _shares("initial_dist", initial_dist)
        if initial is not None and (
            len(target) != len(initial) or bool(np.any((target > 0) & (initial == 0)))
        ):
            raise InvalidValueError(
                f"rejection_resample: target_dist is {target.tolist()} and initial_dist"
                f" {initial.tolist()}. Give as many classes in both, and an initial share to every"
                " class that you ask for."
            )

        def generate(random: np.random.Generator, elements: data.Stream) -> Iterator[Nest]:
            counts = np.zeros(len(target))
            for element in elements:
                number = int(np.asarray(data.call(class_func, element)))
                if not 0 <= number < len(target):
                    raise InvalidValueError(
                        f"rejection_resample: class_func returned {number}, but target_dist has"
                        f" {len(target)} classes."
                    )
                counts[number] += 1
                there = counts / counts.sum() if initial is None else initial
                # A class that has not come yet does not hold the others back.
                odds = np.divide(target, there, out=np.zeros_like(target), where=there > 0)
                if odds[number] and random.random() < odds[number] / odds.max():
                    yield np.int64(number), element

        label = f"rejection_resample({target_dist}, {initial_dist}, {seed})"
        count = lambda size: size if size <= 0 else data.UNKNOWN_CARDINALITY
        return self.of(data.Drawn((self.node,), generate, label, count, data.drawn_seed(), seed))

    def cache(self, filename: str = "", name: str | None = None) -> data.Dataset:
        """Keeps elements, so that everything before this is computed only once.

        Args:
            filename: Folder to keep them in, see `snapshot`; "" keeps them in memory.
            name: No effect.
        """
        return self.snapshot(filename) if filename else super().cache()

    def snapshot(
        self,
        path: str,
        compression: str | None = "AUTO",
        reader_func: Callable[[Any], data.Dataset] | None = None,
        shard_func: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> data.Dataset:
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

        def save(node: data.Node, elements: data.Stream, folder: str) -> Iterator[Nest]:
            return saved.saving(node, elements, folder, kind, shard_func, replaces=False)

        load = functools.partial(_loaded, reader_func=reader_func)
        return self.of(saved.Snapshot(self.node, os.fsdecode(path), save, load))

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
        for _ in saved.saving(self.node, elements, os.fsdecode(path), kind, shard_func, True):
            pass

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        element_spec: Nest = None,
        compression: str | None = None,
        reader_func: Callable[[Any], data.Dataset] | None = None,
        wait: bool = False,
    ) -> data.Dataset:
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
        return cls.of(_loaded(folder, reader_func, element_spec))

    def get_single_element(self, name: str | None = None) -> Nest:
        """Returns the only element.

        Raises:
            InvalidValueError: if there are none, or several.
        """
        elements = [*self.take(2)]
        if len(elements) != 1:
            raise InvalidValueError(
                f"get_single_element: the dataset {self.node.describe()} has"
                f" {'no elements' if not elements else 'more than one element'}, expected one."
            )
        return elements[0]


@final
class TextLineDataset(Dataset, data.TextLineDataset):
    """The lines of text files. Source: `tf.data.TextLineDataset`."""


@final
class TFRecordDataset(Dataset, data.TFRecordDataset):
    """The records of TFRecord files. Source: `tf.data.TFRecordDataset`."""


@final
class FixedLengthRecordDataset(Dataset, data.FixedLengthRecordDataset):
    """Records of one size. Source: `tf.data.FixedLengthRecordDataset`."""


@final
@dataclass(frozen=True)
class DatasetCreator(DistributedInput):
    """A function that makes the dataset of each worker, for `fit` and `evaluate`.

    Args:
        dataset_fn: Function from an `InputContext` to a dataset of per-replica batches.
        input_options: Options for distributing the dataset.

    Source: `tf.keras.utils.experimental.DatasetCreator`.
    """

    dataset_fn: Callable[..., Any]
    input_options: InputOptions | None = None

    def __post_init__(self) -> None:
        expected = "a function from an InputContext to a dataset"
        check_type("DatasetCreator: dataset_fn", self.dataset_fn, Callable, expected)

    def __call__(self) -> Any:
        """Distributes the dataset with the current strategy, in whose scope `fit` calls this."""
        strategy = get_strategy()
        dataset = strategy.distribute_datasets_from_function(self.dataset_fn, self.input_options)
        remote = strategy.extended.remote_steps
        return dataset if remote is None else remote.per_worker_dataset(strategy, dataset)


def _unique(elements: data.Stream) -> Iterator[Nest]:
    seen: set[Hashable] = set()
    for element in elements:
        leaves, tree = data.flatten(element)
        arrays = [np.asarray(data.as_array(leaf)) for leaf in leaves]
        key = (tree, *((a.dtype, a.shape, tuple(a.reshape(-1).tolist())) for a in arrays))
        if key not in seen:
            seen.add(key)
            yield element


def _shares(name: str, value: object) -> np.ndarray:
    """Returns the shares of classes, whose sum is 1.

    Raises:
        InvalidValueError: if they are not such numbers.
    """
    shares = np.asarray(value, np.float64)
    if shares.ndim != 1 or not (shares >= 0).all() or not np.isclose(shares.sum(), 1, atol=1e-5):
        raise InvalidValueError(
            f"rejection_resample: {name} is {shown(value)}, expected one number per class, none of"
            " them negative, whose sum is 1."
        )
    return shares


def _loaded(
    folder: str, reader_func: Callable[[Any], Any] | None, element_spec: Nest = None
) -> data.Node:
    """Returns the node that reads a folder."""
    node = saved.load(folder, element_spec)
    if reader_func is None:
        return node
    files = [Dataset(node.replace(files=(name,))) for name in node.files]
    read = reader_func(Dataset(data.RandomAccess(files)))
    if not isinstance(read, data.Dataset):
        raise InvalidTypeError(f"load: reader_func returned {shown(read)}, expected a Dataset.")
    return read.node


def _nodes(what: str, datasets: Sequence[Any]) -> tuple[data.Node, ...]:
    for number, dataset in enumerate(datasets):
        expected = "a Dataset. Make one of it with Dataset.from_source"
        check_type(f"{what}: dataset {number}", dataset, data.Dataset, expected)
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


# `tf.data.experimental`


def _method(name: str) -> Callable[..., Any]:
    """Returns the function of `tf.data.experimental` that stands for a method of datasets."""

    def transformation(*args: Any, **kwargs: Any) -> Callable[[data.Dataset], Any]:
        return lambda dataset: getattr(Dataset.from_source(dataset), name)(*args, **kwargs)

    transformation.__name__ = name
    transformation.__doc__ = f"For `Dataset.apply`: `dataset.{name}(...)`."
    return transformation


_METHODS = (
    "assert_cardinality bucket_by_sequence_length group_by_window ignore_errors rejection_resample"
    " scan snapshot take_while unbatch unique"
)
#: Functions of `tf.data.experimental` that stand for methods of datasets.
TRANSFORMATIONS = {
    **{name: _method(name) for name in _METHODS.split()},
    "enumerate_dataset": _method("enumerate"),
    "parallel_interleave": _method("interleave"),
}


def cardinality(dataset: data.Dataset) -> Any:
    """`tf.data.experimental.cardinality`: the method of the dataset."""
    return dataset.cardinality()


def get_single_element(dataset: data.Dataset) -> Any:
    """`tf.data.experimental.get_single_element`: the method of the dataset."""
    return Dataset(dataset.node).get_single_element()


def get_structure(dataset_or_iterator: Any) -> Any:
    """`tf.data.experimental.get_structure`: the `element_spec` of the dataset."""
    return dataset_or_iterator.element_spec


def get_next_as_optional(iterator: Any) -> Any:
    """`tf.data.experimental.get_next_as_optional`: the method of the iterator."""
    return iterator.get_next_as_optional()


class CsvDataset(Dataset):
    """Tuples of the columns of CSV files, whose fields contain no ends of lines.

    Source: `tf.data.experimental.CsvDataset`.
    """

    def __init__(
        self,
        filenames: Any,
        record_defaults: Sequence[Any],
        compression_type: str | None = None,
        buffer_size: int | None = None,
        header: bool = False,
        field_delim: str = ",",
        use_quote_delim: bool = True,
        na_value: str = "",
        select_cols: Sequence[int] | None = None,
    ) -> None:
        names = [filenames] if isinstance(filenames, str) else list(np.asarray(filenames).ravel())
        files = [TextLineDataset(name, compression_type).skip(int(header)) for name in names]
        options = (field_delim, use_quote_delim, na_value, select_cols)
        lines: Any = functools.reduce(Dataset.concatenate, files)
        lines = lines.filter(lambda line: len(np.asarray(line).item()) > 0)
        super().__init__(
            lines.map(lambda line: tuple(decode_csv(line, record_defaults, *options))).node
        )


def from_list(elements: list[Any], name: str | None = None) -> data.Dataset:
    """`tf.data.experimental.from_list`: a dataset of elements of one structure."""
    return Dataset.from_generator(lambda: iter(elements))


def choose_from_datasets(
    datasets: Sequence[data.Dataset],
    choice_dataset: data.Dataset,
    stop_on_empty_dataset: bool = False,
) -> data.Dataset:
    """`tf.data.experimental.choose_from_datasets`: goes on after the end of a dataset."""
    return Dataset.choose_from_datasets(datasets, choice_dataset, stop_on_empty_dataset)


def map_and_batch(
    map_func: Callable[..., Any],
    batch_size: int,
    num_parallel_batches: int | None = None,
    drop_remainder: bool = False,
    num_parallel_calls: int | None = None,
) -> Callable[[data.Dataset], data.Dataset]:
    """`tf.data.experimental.map_and_batch`: `map` and `batch`."""
    return lambda dataset: dataset.map(map_func, num_parallel_calls).batch(
        batch_size, drop_remainder
    )


def shuffle_and_repeat(
    buffer_size: int, count: int | None = None, seed: int | None = None
) -> Callable[[data.Dataset], data.Dataset]:
    """`tf.data.experimental.shuffle_and_repeat`: `shuffle` and `repeat`."""
    return lambda dataset: dataset.shuffle(buffer_size, seed).repeat(count)


def prefetch_to_device(
    device: object, buffer_size: int | None = None
) -> Callable[[data.Dataset], data.Dataset]:
    """`tf.data.experimental.prefetch_to_device`: `prefetch`; arrays stay on the host."""
    return lambda dataset: dataset.prefetch(1 if buffer_size is None else buffer_size)


def copy_to_device(
    target_device: object, source_device: object = "/cpu:0"
) -> Callable[[data.Dataset], data.Dataset]:
    """`tf.data.experimental.copy_to_device`: has no effect; arrays stay on the host."""
    return lambda dataset: dataset


def at(dataset: data.Dataset, index: int) -> Any:
    """`tf.data.experimental.at`: an element by its number."""
    return get_single_element(dataset.skip(int(index)).take(1))


def save(
    dataset: data.Dataset,
    path: str,
    compression: str | None = None,
    shard_func: Callable[..., Any] | None = None,
    checkpoint_args: object = None,
) -> None:
    """`tf.data.experimental.save`: the method of the dataset."""
    Dataset(dataset.node).save(path, compression, shard_func, checkpoint_args)


def pad_to_cardinality(
    cardinality: int, mask_key: str = "valid"
) -> Callable[[data.Dataset], data.Dataset]:
    """`tf.data.experimental.pad_to_cardinality`: adds elements of zeros at the end.

    Args:
        cardinality: Number of elements of the result.
        mask_key: Key of a value that is True in the elements, which are dicts, and False in those
            that are added.
    """

    def transformation(dataset: data.Dataset) -> data.Dataset:
        number, spec = int(dataset.cardinality()), dataset.element_spec
        if not 0 <= number <= cardinality or not isinstance(spec, dict) or mask_key in spec:
            raise InvalidValueError(
                f"tf.data.experimental.pad_to_cardinality({cardinality}): the dataset has {number}"
                f" elements {spec}, expected at most {cardinality} dicts without {mask_key!r}."
            )
        filler = {**jax.tree.map(_zeros, spec), mask_key: np.False_}
        more = Dataset.from_tensors(filler).repeat(cardinality - number)
        return dataset.map(lambda element: {**element, mask_key: np.True_}).concatenate(more)

    return transformation


def _zeros(spec: data.TensorSpec) -> np.ndarray:
    if spec.shape is None or None in spec.shape:
        raise InvalidValueError(
            f"tf.data.experimental.pad_to_cardinality: {spec} has unknown sizes. Map the elements"
            " to fixed shapes first."
        )
    return np.full(spec.shape, "" if spec.dtype.kind in "OU" else 0, spec.dtype)


def make_batched_features_dataset(
    file_pattern: Any,
    batch_size: int,
    features: Mapping[str, Any],
    reader: Callable[..., data.Dataset] | None = None,
    label_key: str | None = None,
    reader_args: Sequence[Any] | None = None,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    reader_num_threads: int | None = None,
    parser_num_threads: int | None = None,
    sloppy_ordering: bool = False,
    drop_final_batch: bool = False,
) -> data.Dataset:
    """`tf.data.experimental.make_batched_features_dataset`: batches of parsed `tf.train.Example`s.

    Args:
        file_pattern: Pattern of names of files, or a list of them.
        batch_size: Number of records of a batch.
        features: For each name its `tf.io.FixedLenFeature` or the like.
        reader: Function from the name of a file to a dataset of records; None means
            `TFRecordDataset`.
        label_key: Feature that becomes the second item of `(features, label)`.
        reader_args: More arguments of `reader`.
        num_epochs: Number of times the records come; None for no end.
        shuffle: Whether to shuffle files and records.
        shuffle_buffer_size: See `Dataset.shuffle`.
        shuffle_seed: Seed of both.
        prefetch_buffer_size: Number of batches to make ahead; None chooses it.
        reader_num_threads: Number of files that take turns; None means 1.
        parser_num_threads: Number of threads; None means 2.
        sloppy_ordering: No effect: the order depends on the seed only.
        drop_final_batch: Whether to drop a last batch that has fewer records.
    """
    if label_key is not None and label_key not in features:
        raise InvalidValueError(
            f"make_batched_features_dataset: label_key is {label_key!r}, expected one of"
            f" {sorted(features)}."
        )

    def read(name: Any) -> data.Dataset:
        return (reader or TFRecordDataset)(name, *(reader_args or ()))

    def parsed(records: object) -> Any:
        arrays = parse_example(records, features)
        return arrays if label_key is None else (arrays, arrays.pop(label_key))

    dataset = Dataset.list_files(file_pattern, shuffle, shuffle_seed)
    dataset = dataset.interleave(read, cycle_length=reader_num_threads or 1)
    if shuffle:
        dataset = dataset.shuffle(shuffle_buffer_size, shuffle_seed)
    dataset = dataset.repeat(num_epochs).batch(batch_size, drop_final_batch or num_epochs is None)
    return dataset.map(parsed, parser_num_threads or 2).prefetch(
        data.AUTOTUNE if prefetch_buffer_size is None else prefetch_buffer_size
    )
