"""Datasets of other libraries, recognized by their classes without importing them."""

import itertools
from collections.abc import Callable, Iterator, Sized
from typing import Any

import jax

from distributary.data._nodes import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Node
from distributary.data._sources import Iterated, Once, OneShot, RandomAccess
from distributary.devices import Nest
from distributary.errors import InvalidTypeError, InvalidValueError, described


def node_of(source: Any, what: str) -> Node:
    """Returns the node of a dataset of this or another library, or of any Python iterable.

    Args:
        source: A dataset of ours, tf.data, grain, torch, Hugging Face or Keras, or any iterable.
        what: Start of error messages about it: the function and the origin of `source`.

    Raises:
        InvalidTypeError: if it cannot be iterated over.
    """
    if isinstance(getattr(source, "node", None), Node):
        return source.node
    for package, names, convert in _LIBRARIES:
        if _is_of(source, package, *names):
            return convert(source)
    is_iterable = hasattr(source, "__iter__")
    has_numbers = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if isinstance(source, (list, tuple)) or (has_numbers and not is_iterable):
        return RandomAccess(source)
    if not is_iterable:
        raise InvalidTypeError(
            f"{what} {described(source)}, which cannot be iterated. Expected"
            " an iterable of batches, such as a distributary.data.Dataset."
        )
    if hasattr(source, "__next__"):
        return Once(OneShot(source))
    return Iterated(lambda: iter(source), _length_of(source), type(source).__name__)


def _length_of(source: Sized) -> int:
    try:
        return len(source)
    except TypeError:
        return UNKNOWN_CARDINALITY


def _is_of(value: object, package: str, *names: str) -> bool:
    """Returns whether one of a value's classes is from a package and has one of these names."""
    return any(
        cls.__name__ in names and cls.__module__.split(".")[0] == package
        for cls in type(value).__mro__
    )


def _from_tf_data(source: Any) -> Node:
    for spec in jax.tree.leaves(source.element_spec):
        if _is_of(spec, "tensorflow", "SparseTensorSpec", "RaggedTensorSpec"):
            raise InvalidTypeError(
                f"The tf.data.Dataset yields {spec}; sparse and ragged tensors have no JAX"
                " counterpart. Map them with tf.sparse.to_dense or to_tensor first."
            )
    start = lambda: iter(source.as_numpy_iterator())
    return Iterated(start, int(source.cardinality()), "tf.data.Dataset")


def _from_torch_loader(source: Any) -> Node:
    if getattr(source, "batch_size", None) is None and source.batch_sampler is None:
        raise InvalidValueError(
            "The torch DataLoader has batch_size=None, so it yields single examples. Give it the"
            " global batch size."
        )
    return _from_torch_iterable(source, "torch DataLoader", batched=True)


def _from_torch_iterable(
    source: Any, name: str = "IterableDataset", batched: bool | None = None
) -> Node:
    return Iterated(lambda: map(_from_torch, source), _length_of(source), name, batched=batched)


def _from_torch(value: Any) -> Nest:
    """Converts torch tensors of a nest to NumPy arrays, and its lists, from collate, to tuples."""
    if isinstance(value, dict):
        return {key: _from_torch(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_from_torch, value))
    if isinstance(value, (list, tuple)):
        return tuple(map(_from_torch, value))
    return value.detach().cpu().numpy() if _is_of(value, "torch", "Tensor") else value


def _from_grain_map(source: object) -> Node:
    def present(item: Nest | None) -> Nest:
        if item is None:
            raise InvalidValueError(
                "The grain MapDataset leaves out elements, as filter does, so its elements do not"
                " have fixed numbers. Pass dataset.to_iter_dataset()."
            )
        return item

    return RandomAccess(source, present)


def _iterated(source: Any, package: str = "") -> Node:
    name = f"{package} {type(source).__name__}".strip()
    return Iterated(lambda: iter(source), UNKNOWN_CARDINALITY, name)


def is_hugging_face(source: object) -> bool:
    """Returns whether a value is a dataset of the library `datasets`."""
    return _is_of(source, "datasets", "Dataset", "IterableDataset")


def _from_hugging_face(source: Any) -> Node:
    arrays = source.with_format("numpy")
    if not hasattr(source, "__len__"):
        return _iterated(arrays)
    return RandomAccess(arrays, getitems=lambda numbers: _columns(arrays[numbers.tolist()]))


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


def _from_py_dataset(source: Any) -> Node:
    count = source.num_batches

    def start() -> Iterator[Any]:
        source.on_epoch_begin()
        for number in itertools.count() if count is None else range(count):
            yield source[number]
        source.on_epoch_end()

    size = INFINITE_CARDINALITY if count is None else int(count)
    return Iterated(start, size, type(source).__name__, batched=True)


# Package, names of classes, and the function that makes a node of their objects.
_LIBRARIES: tuple[tuple[str, tuple[str, ...], Callable[[Any], Node]], ...] = (
    # First, because these are datasets of torch, too, where torch is installed.
    ("datasets", ("Dataset", "IterableDataset"), _from_hugging_face),
    ("tensorflow", ("DatasetV2",), _from_tf_data),
    ("torch", ("DataLoader",), _from_torch_loader),
    ("torch", ("IterableDataset",), _from_torch_iterable),
    ("torch", ("Dataset",), lambda source: RandomAccess(source, _from_torch, False)),
    ("grain", ("MapDataset",), _from_grain_map),
    ("grain", ("IterDataset", "DataLoader"), lambda source: _iterated(source, "grain")),
    ("keras", ("PyDataset",), _from_py_dataset),
)
