"""`tf.data`: datasets whose loops yield arrays with TensorFlow's method `numpy()`."""

import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, final

import jax
import numpy as np
from numpy.typing import DTypeLike

from distributary import data
from distributary.data import (
    Drawn,
    Generated,
    Node,
    RandomAccess,
    Stream,
    as_array,
    call,
    combined,
    drawn_seed,
    flatten,
    kept,
    map_arrays,
)
from distributary.devices import Nest
from distributary.errors import InvalidTypeError, InvalidValueError, check_type, checked_int, shown
from distributary.tensorflow import _saved_data as saved
from distributary.tensorflow._host import as_element

_log = logging.getLogger(__name__)


class Dataset(data.Dataset):
    """A `distributary.data.Dataset` with the other methods of TensorFlow's.

    Its loops yield arrays with `numpy()`.

    Source: `tf.data.Dataset`.
    """

    @classmethod
    def of(cls, node: Node) -> "Dataset":
        """Returns a dataset of this class."""
        return Dataset(node)

    def show(self, element: Nest) -> Nest:
        """Returns an element whose arrays have the method `numpy()`."""
        return map_arrays(as_element, element)

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
        start = drawn_seed() if seed is None else checked_int("random: seed", seed, minimum=0)

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

        def draw(random: np.random.Generator, *streams: Stream) -> Iterator[Nest]:
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
            return data.UNKNOWN_CARDINALITY if is_cut else combined(sizes, sum)

        label = f"sample_from_datasets({tuple(shares.tolist())}, {seed})"
        return cls.of(Drawn(nodes, draw, label, count, drawn_seed(), seed))

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

        def choose(choices: Stream, *streams: Stream) -> Iterator[Nest]:
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

        return cls.of(Generated(nodes, choose, "choose_from_datasets"))

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> data.Dataset:
        """Keeps the elements before the first for which `predicate` returns False."""
        check_type("take_while: predicate", predicate, Callable, "a function")
        holds = functools.partial(call, predicate)
        generate = functools.partial(itertools.takewhile, holds)
        return self.of(Generated((self.node,), generate, "take_while"))

    def unique(self, name: str | None = None) -> data.Dataset:
        """Keeps each element where it comes first."""
        return self.of(Generated((self.node,), _unique, "unique"))

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
        key_of = functools.partial(call, key_func)

        def size_of(key: int) -> int:
            size = window_size_func(np.int64(key)) if window_size_func else window_size
            return int(np.asarray(size))

        def generate(elements: Stream) -> Iterator[Nest]:
            held: dict[int, list[Nest]] = {}
            for element in elements:
                key = int(np.asarray(key_of(element)))
                group = held.setdefault(key, [])
                group.append(element)
                if len(group) >= size_of(key):
                    yield np.int64(key), self.of(RandomAccess(held.pop(key)))
            for key in sorted(held):
                yield np.int64(key), self.of(RandomAccess(held[key]))

        grouped = self.of(Generated((self.node,), generate, "group_by_window"))
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

        def generate(elements: Stream) -> Iterator[Nest]:
            state = initial_state
            for element in elements:
                result = scan_func(state, element)
                if type(result) not in (tuple, list) or len(result) != 2:
                    raise InvalidTypeError(
                        f"scan: scan_func returned {shown(result)}, expected (new_state,"
                        " output_element)."
                    )
                state, output = kept(tuple(result))
                yield output

        return self.of(Generated((self.node,), generate, "scan", lambda size: size))

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

        def generate(elements: Stream) -> Iterator[Nest]:
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
        return self.of(Generated((self.node,), generate, label, lambda size: expected))

    def ignore_errors(self, log_warning: bool = False, name: str | None = None) -> data.Dataset:
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

        return self.of(Generated((self.node,), generate, "ignore_errors"))

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

        def generate(random: np.random.Generator, elements: Stream) -> Iterator[Nest]:
            counts = np.zeros(len(target))
            for element in elements:
                number = int(np.asarray(call(class_func, element)))
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
        return self.of(Drawn((self.node,), generate, label, count, drawn_seed(), seed))

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

        def save(node: Node, elements: Stream, folder: str) -> Iterator[Nest]:
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


def _unique(elements: Stream) -> Iterator[Nest]:
    seen: set[Hashable] = set()
    for element in elements:
        leaves, tree = flatten(element)
        arrays = [np.asarray(as_array(leaf)) for leaf in leaves]
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
) -> Node:
    """Returns the node that reads a folder."""
    node = saved.load(folder, element_spec)
    if reader_func is None:
        return node
    files = [Dataset(node.replace(files=(name,))) for name in node.files]
    read = reader_func(Dataset(RandomAccess(files)))
    if not isinstance(read, data.Dataset):
        raise InvalidTypeError(f"load: reader_func returned {shown(read)}, expected a Dataset.")
    return read.node


def _nodes(what: str, datasets: Sequence[Any]) -> tuple[Node, ...]:
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
