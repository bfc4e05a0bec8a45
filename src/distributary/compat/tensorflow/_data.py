"""`tf.data`: datasets whose loops yield arrays with TensorFlow's method `numpy()`."""

from collections.abc import Callable, Sequence
from typing import Any, final

from distributary import data
from distributary.compat.tensorflow._host import as_element


class _OfTensorFlow(type(data.Dataset)):  # type: ignore[misc]
    """Makes every dataset an instance, because methods return `distributary.data.Dataset`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])


@final
class Dataset(data.Dataset, metaclass=_OfTensorFlow):
    """A `distributary.data.Dataset` whose loops yield arrays with `numpy()`.

    Source: `tf.data.Dataset`.
    """

    @classmethod
    def shows_arrays_by(cls) -> Callable[[Any], Any]:
        return as_element


@final
class TextLineDataset(data.TextLineDataset, metaclass=_OfTensorFlow):
    """A `distributary.data.TextLineDataset` whose loops yield arrays with `numpy()`.

    Source: `tf.data.TextLineDataset`.
    """

    @classmethod
    def shows_arrays_by(cls) -> Callable[[Any], Any]:
        return as_element


@final
class TFRecordDataset(data.TFRecordDataset, metaclass=_OfTensorFlow):
    """A `distributary.data.TFRecordDataset` whose loops yield arrays with `numpy()`.

    Source: `tf.data.TFRecordDataset`.
    """

    @classmethod
    def shows_arrays_by(cls) -> Callable[[Any], Any]:
        return as_element


def _method(name: str) -> Callable[..., Any]:
    """Returns the function of `tf.data.experimental` that stands for a method of datasets."""

    def transformation(*args: Any, **kwargs: Any) -> Callable[[data.Dataset], Any]:
        return lambda dataset: getattr(dataset, name)(*args, **kwargs)

    transformation.__name__ = name
    transformation.__doc__ = f"For `Dataset.apply`: `dataset.{name}(...)`."
    return transformation


assert_cardinality = _method("assert_cardinality")
bucket_by_sequence_length = _method("bucket_by_sequence_length")
enumerate_dataset = _method("enumerate")
group_by_window = _method("group_by_window")
ignore_errors = _method("ignore_errors")
parallel_interleave = _method("interleave")
scan = _method("scan")
take_while = _method("take_while")
unbatch = _method("unbatch")
unique = _method("unique")


def cardinality(dataset: data.Dataset) -> Any:
    """`tf.data.experimental.cardinality`: the method of the dataset."""
    return dataset.cardinality()


def get_single_element(dataset: data.Dataset) -> Any:
    """`tf.data.experimental.get_single_element`: the method of the dataset."""
    return dataset.get_single_element()


def get_structure(dataset_or_iterator: Any) -> Any:
    """`tf.data.experimental.get_structure`: the `element_spec` of the dataset."""
    return dataset_or_iterator.element_spec


def get_next_as_optional(iterator: Any) -> Any:
    """`tf.data.experimental.get_next_as_optional`: the method of the iterator."""
    return iterator.get_next_as_optional()


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
    return dataset.skip(int(index)).take(1).get_single_element()
