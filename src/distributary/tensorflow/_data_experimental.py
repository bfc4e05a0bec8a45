"""`tf.data.experimental`: functions for datasets."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from distributary import data
from distributary.errors import InvalidValueError
from distributary.tensorflow._data import Dataset, TextLineDataset, TFRecordDataset
from distributary.tensorflow._examples import decode_csv, parse_example


def _method(name: str) -> Callable[..., Any]:
    """Returns the function of `tf.data.experimental` that stands for a method of datasets."""

    def transformation(*args: Any, **kwargs: Any) -> Callable[[data.Dataset], Any]:
        return lambda dataset: getattr(Dataset.from_source(dataset), name)(*args, **kwargs)

    transformation.__name__ = name
    transformation.__doc__ = f"For `Dataset.apply`: `dataset.{name}(...)`."
    return transformation


assert_cardinality = _method("assert_cardinality")
bucket_by_sequence_length = _method("bucket_by_sequence_length")
enumerate_dataset = _method("enumerate")
group_by_window = _method("group_by_window")
ignore_errors = _method("ignore_errors")
parallel_interleave = _method("interleave")
rejection_resample = _method("rejection_resample")
scan = _method("scan")
snapshot = _method("snapshot")
take_while = _method("take_while")
unbatch = _method("unbatch")
unique = _method("unique")


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
