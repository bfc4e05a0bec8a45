"""Datasets of other libraries, recognized by their classes without importing them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from distributary.datasets._nodes import Node
from distributary.datasets._options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from distributary.datasets._sources import Iterated, Once, OneShot, RandomAccess
from distributary.errors import InvalidTypeError, InvalidValueError


def foreign(source: Any, what: str) -> Node:
    """Returns a source of the elements of another library's dataset, or of a Python iterable.

    Args:
        source: A tf.data, grain, torch, Hugging Face or Keras dataset, or any iterable.
        what: Start of error messages about it: the function and the origin of `source`.

    Raises:
        InvalidTypeError: if it cannot be iterated over.
    """
    for is_one, convert in _LIBRARIES:
        if is_one(source):
            return convert(source)
    if not hasattr(source, "__iter__"):
        if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            return RandomAccess(source, _same, None)
        raise InvalidTypeError(
            f"{what} {source!r}, a {type(source).__name__}, which cannot be iterated. Expected an"
            " iterable of batches, such as a distributary.data.Dataset."
        )
    if hasattr(source, "__next__"):
        return Once(OneShot(source))
    name = type(source).__name__
    try:
        count = len(source)
    except TypeError:
        count = UNKNOWN_CARDINALITY
    if isinstance(source, (list, tuple)):
        return RandomAccess(source, _same, None)
    return Iterated(lambda: iter(source), _numbered, count, name)


def _same(item: Any) -> Any:
    return item


def _numbered(item: Any, number: int) -> Any:
    return item


def is_class_of(value: Any, package: str, *names: str) -> bool:
    """Returns whether one of a value's classes is from a package and has one of these names."""
    return any(
        cls.__name__ in names and cls.__module__.split(".")[0] == package
        for cls in type(value).__mro__
    )


# tf.data


def _is_tf_data(source: Any) -> bool:
    return is_class_of(source, "tensorflow", "DatasetV2")


def _from_tf_data(source: Any) -> Node:
    for spec in jax.tree.leaves(source.element_spec):
        if is_class_of(spec, "tensorflow", "SparseTensorSpec", "RaggedTensorSpec"):
            raise InvalidTypeError(
                f"The tf.data.Dataset yields {spec}; sparse and ragged tensors have no JAX"
                " counterpart. Map them with tf.sparse.to_dense or to_tensor first."
            )
    start = lambda: iter(source.as_numpy_iterator())
    return Iterated(start, _numbered, int(source.cardinality()), "tf.data.Dataset")


# torch


def _is_torch_loader(source: Any) -> bool:
    return is_class_of(source, "torch", "DataLoader")


def _from_torch_loader(source: Any) -> Node:
    if getattr(source, "batch_size", None) is None and source.batch_sampler is None:
        raise InvalidValueError(
            "The torch DataLoader has batch_size=None, so it yields single examples. Give it the"
            " global batch size."
        )
    try:
        count = len(source)
    except TypeError:
        count = UNKNOWN_CARDINALITY
    convert = lambda item, _: from_torch(item)
    return Iterated(lambda: iter(source), convert, count, "torch DataLoader", batched=True)


def _is_torch_dataset(source: Any) -> bool:
    return is_class_of(source, "torch", "Dataset") and hasattr(source, "__getitem__")


def _from_torch_dataset(source: Any) -> Node:
    return RandomAccess(source, from_torch, False)


def from_torch(value: Any) -> Any:
    """Converts torch tensors of a nest to NumPy arrays, and its lists, from collate, to tuples."""
    if isinstance(value, dict):
        return {key: from_torch(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(from_torch, value))
    if isinstance(value, (list, tuple)):
        return tuple(map(from_torch, value))
    if is_class_of(value, "torch", "Tensor"):
        return value.detach().cpu().numpy()
    return value


# grain


def _is_grain_map(source: Any) -> bool:
    return is_class_of(source, "grain", "MapDataset")


def _from_grain_map(source: Any) -> Node:
    def present(item: Any) -> Any:
        if item is None:
            raise InvalidValueError(
                "The grain MapDataset leaves out elements, as filter does, so its elements do not"
                " have fixed numbers. Pass dataset.to_iter_dataset()."
            )
        return item

    return RandomAccess(source, present, None)


def _is_grain_iterable(source: Any) -> bool:
    return is_class_of(source, "grain", "IterDataset", "DataLoader")


def _from_grain_iterable(source: Any) -> Node:
    name = f"grain {type(source).__name__}"
    return Iterated(lambda: iter(source), _numbered, UNKNOWN_CARDINALITY, name)


# Hugging Face


def is_hugging_face(source: Any) -> bool:
    """Returns whether a value is a dataset of the library `datasets`."""
    return is_class_of(source, "datasets", "Dataset", "IterableDataset")


def _from_hugging_face(source: Any) -> Node:
    arrays = source.with_format("numpy")
    if not hasattr(source, "__len__"):
        return Iterated(lambda: iter(arrays), _numbered, UNKNOWN_CARDINALITY, "IterableDataset")
    rows: Callable[[np.ndarray], Any] = lambda numbers: _columns(arrays[numbers.tolist()])
    return RandomAccess(arrays, _same, None, rows)


def _columns(block: dict[str, Any]) -> dict[str, Any]:
    for name, column in block.items():
        kind = getattr(getattr(column, "dtype", None), "kind", "")
        if kind == "O" and len(column) and hasattr(column[0], "shape"):
            shapes = sorted({item.shape for item in column})
            raise InvalidValueError(
                f"The column {name!r} holds arrays of shapes {shapes[:4]}; the arrays of a batch"
                " must agree. Map them to one shape first."
            )
    return block


# Keras


def _is_py_dataset(source: Any) -> bool:
    return is_class_of(source, "keras", "PyDataset")


def _from_py_dataset(source: Any) -> Node:
    count = source.num_batches

    def start() -> Iterator[Any]:
        source.on_epoch_begin()
        number = 0
        while count is None or number < count:
            yield source[number]
            number += 1
        source.on_epoch_end()

    size = INFINITE_CARDINALITY if count is None else int(count)
    return Iterated(start, _numbered, size, type(source).__name__, batched=True)


_LIBRARIES: tuple[tuple[Callable[[Any], bool], Callable[[Any], Node]], ...] = (
    (_is_tf_data, _from_tf_data),
    (_is_torch_loader, _from_torch_loader),
    (_is_torch_dataset, _from_torch_dataset),
    (_is_grain_map, _from_grain_map),
    (_is_grain_iterable, _from_grain_iterable),
    (is_hugging_face, _from_hugging_face),
    (_is_py_dataset, _from_py_dataset),
)
