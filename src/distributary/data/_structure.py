"""Elements: nests of arrays, how to stack them, and their specs."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from numpy.exceptions import ComplexWarning

from distributary.devices import Nest
from distributary.errors import InvalidTypeError, InvalidValueError, a_kind
from distributary.tracing import native

Array: TypeAlias = np.ndarray | jax.Array
Block: TypeAlias = Nest
"""A stack of elements. Dim 0 of its arrays counts them."""


@final
@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of an array.

    Args:
        shape: Sizes of the dims, None for an unknown size; or None for an unknown number of dims.
        dtype: NumPy dtype; object for strings and bytes.
        name: No effect.

    Source: `tf.TensorSpec`.
    """

    shape: Any
    dtype: Any = "float32"
    name: str | None = None

    def __post_init__(self) -> None:
        if self.shape is not None:
            object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    @classmethod
    def from_spec(cls, spec: Any, name: str | None = None) -> "TensorSpec":
        """Makes the spec of anything that has a shape and a dtype."""
        return cls(spec.shape, spec.dtype, name or getattr(spec, "name", None))

    @classmethod
    def from_tensor(cls, tensor: object, name: str | None = None) -> "TensorSpec":
        """Makes the spec of an array."""
        return cls.from_spec(tensor, name)

    def is_compatible_with(self, spec_or_tensor: Any) -> bool:
        """Returns whether an array, or some array of a spec, is one of this spec."""
        other = spec_or_tensor if hasattr(spec_or_tensor, "shape") else np.asarray(spec_or_tensor)
        return np.dtype(other.dtype) == self.dtype and self.accepts(other)

    def accepts(self, array: Any) -> bool:
        """Returns whether an array, or some array of a spec, has this shape."""
        if self.shape is None or array.shape is None:
            return True
        sizes = zip(self.shape, array.shape, strict=False)
        same = len(self.shape) == len(array.shape)
        return same and all(a == b or None in (a, b) for a, b in sizes)


def flatten(element: Nest) -> tuple[list[Any], PyTreeDef]:
    """Returns the leaves and the structure of an element; lists are arrays, as in tf.data."""
    return jax.tree.flatten(element, is_leaf=lambda value: type(value) is list)


def map_arrays(fn: Callable[[Array], Any], element: Nest) -> Nest:
    """Converts every leaf of an element to an array and applies `fn` to it."""
    leaves, tree = flatten(element)
    return tree.unflatten([fn(as_array(leaf)) for leaf in leaves])


def kept(element: Nest) -> Nest:
    """Returns an element that stays as it is: its NumPy arrays, also those in lists, are copies.

    Generators and functions often yield the same array again and again, with new content. What a
    program takes is kept, too: it may read the memory of a NumPy array after the call.
    """
    return _each_array(_own_copy, element)


def read_only(element: Nest) -> Nest:
    """Returns an element whose NumPy arrays cannot be written to, but share its memory.

    It is made of arrays that come again in the next pass, or that belong to the user.
    """
    return _each_array(_read_only_view, element)


def writable(element: Nest) -> Nest:
    """Returns an element with copies of the arrays that `read_only` has protected."""
    return _each_array(_writable, element)


def _own_copy(array: np.ndarray) -> np.ndarray:
    return native(array.copy())


def _read_only_view(array: np.ndarray) -> np.ndarray:
    array = array.view()
    array.flags.writeable = False
    return array


def _writable(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable else array.copy()


def _each_array(change: Callable[[np.ndarray], np.ndarray], element: Nest) -> Nest:
    """Changes the NumPy arrays of an element; its containers are new ones."""
    if isinstance(element, np.ndarray):
        return change(element)
    if isinstance(element, (np.generic, int, float, str, bytes)):
        return element
    kind = type(element)
    if kind is tuple or kind is list:  # JAX takes longer
        return kind([_each_array(change, part) for part in element])
    if kind is dict:
        return {key: _each_array(change, part) for key, part in element.items()}
    return jax.tree.map(lambda x: change(x) if isinstance(x, np.ndarray) else x, element)


def stopped(what: str) -> RuntimeError:
    """Returns the error for code of the user that raises `StopIteration`: it would end the data."""
    return RuntimeError(
        f"The dataset: {what} raised StopIteration, as next() does at the end of an iterator. Catch"
        " it, or pass next() a default."
    )


def as_array(leaf: object) -> Any:
    """Returns a leaf of an element as a NumPy array; arrays of JAX stay where they are.

    Raises:
        InvalidTypeError: for leaves that are not data.
        InvalidValueError: for lists of lists of different lengths.
    """
    if isinstance(leaf, (np.ndarray, jax.Array)) or hasattr(leaf, "as_numpy_iterator"):
        return leaf  # the latter is a dataset: a window of another one
    if isinstance(leaf, bytes):  # dtype S would drop zero bytes at the end
        return np.array(leaf, dtype=object)
    if isinstance(leaf, list) and leaf and all(isinstance(item, bytes) for item in leaf):
        return np.array(leaf, dtype=object)
    check_dense(leaf)
    try:
        array = np.asarray(leaf)
    except ValueError as error:
        raise InvalidValueError(
            f"A dataset holds the ragged list {_short(leaf)}; arrays must be rectangular. Pad it,"
            " or yield its rows as elements and use padded_batch."
        ) from error
    if array.dtype == object and array.ndim == 0:
        raise InvalidTypeError(
            f"A dataset holds {_short(leaf)}, {a_kind(type(leaf))}. Elements are nests (tuple,"
            " dict, namedtuple, or a dataclass registered with jax.tree_util.register_dataclass)"
            " of arrays, numbers and strings."
        )
    return array


def check_dense(leaf: object) -> None:
    """Checks that a leaf is not a sparse matrix.

    Raises:
        InvalidTypeError: for a sparse matrix, of SciPy for example, that NumPy takes for one
            object.
    """
    if hasattr(leaf, "toarray") and not hasattr(leaf, "__array__"):
        raise InvalidTypeError(
            f"A dataset holds the sparse matrix {_short(leaf)}, but its arrays must be dense. Pass"
            " matrix.toarray(). If that is too large, yield its rows from a generator, as"
            " matrix[i].toarray()[0]."
        )


def stack(elements: Sequence[Nest]) -> Block:
    """Stacks elements of equal structure, shapes and dtypes into one nest `[element, ...]`.

    Raises:
        InvalidValueError: if structures or shapes differ.
        InvalidTypeError: if dtypes differ.
    """
    columns, tree = columns_of(elements)
    return tree.unflatten([_stack_leaves(column) for column in columns])


def columns_of(elements: Sequence[Nest]) -> tuple[list[tuple[Any, ...]], PyTreeDef]:
    """Returns for every leaf its values in all elements, and the structure that they share."""
    rows, trees = zip(*map(flatten, elements), strict=True)
    for number, tree in enumerate(trees):
        if tree != trees[0]:
            raise InvalidValueError(
                f"batch: element {number} of the batch has structure {tree}, the first one has"
                f" {trees[0]}; all elements of a dataset must have the same structure."
            )
    return list(zip(*rows, strict=True)), trees[0]


def _stack_leaves(column: Sequence[Any]) -> np.ndarray:
    kind = type(column[0])
    is_scalar = kind in (int, float, bool) or issubclass(kind, np.generic)
    if is_scalar and all(type(value) is kind for value in column):
        return np.asarray(column)
    arrays = [_on_host(leaf) for leaf in column]
    first = arrays[0]
    for number, array in enumerate(arrays):
        if array.shape != first.shape:
            raise InvalidValueError(
                f"batch: element {number} of the batch has shape {array.shape}, the first one has"
                f" {first.shape}; the arrays of a batch must agree. Use padded_batch to fill them"
                " up, or map them to one shape first."
            )
        if array.dtype != first.dtype and array.dtype.kind not in "US":
            raise InvalidTypeError(
                f"batch: element {number} of the batch has dtype {array.dtype}, the first one has"
                f" {first.dtype}. Convert them in map, or in the generator."
            )
    return np.stack(arrays)


def _on_host(leaf: object) -> np.ndarray:
    if isinstance(leaf, jax.core.Tracer):
        raise InvalidTypeError(
            "batch: an element holds a value of the function that is being traced, but datasets"
            " make batches on the host. Compute with the value after the batch:"
            " for x in dataset.batch(n): x * value."
        )
    return np.asarray(as_array(leaf))


def pad_and_stack(elements: Sequence[Nest], shapes: Nest, values: Nest) -> Block:
    """Stacks arrays of different sizes, padded at the end of every dim.

    Args:
        elements: Elements of equal structure, with arrays of equal `ndim`.
        shapes: For every leaf the sizes to pad to, None for the largest in the batch; or None.
        values: For every leaf the padding value, or one value for all; None for 0 and "".
    """
    columns, tree = columns_of(elements)
    per_leaf_shapes = _per_leaf(shapes, tree, "padded_shapes", are_shapes=True)
    per_leaf_values = _per_leaf(values, tree, "padding_values")
    return tree.unflatten(map(_pad_and_stack_leaves, columns, per_leaf_shapes, per_leaf_values))


def _pad_and_stack_leaves(
    column: Sequence[Any], shape: Sequence[int | None] | None, value: object
) -> np.ndarray:
    arrays = [_on_host(leaf) for leaf in column]
    if len(ndims := {array.ndim for array in arrays}) > 1:
        raise InvalidValueError(
            f"padded_batch: arrays of a batch have {sorted(ndims)} dims; they may differ only in"
            " size. Reshape them with map first."
        )
    largest = tuple(map(max, zip(*(array.shape for array in arrays), strict=True)))
    shape = largest if shape is None else shape
    if len(shape) != len(largest):
        raise InvalidValueError(
            f"padded_batch: padded_shapes has {tuple(shape)} for an array of {len(largest)} dims."
            " Give one size per dim, or None for the largest one in the batch."
        )
    sizes = zip(shape, largest, strict=True)
    target = tuple(most if size in (None, -1) else size for size, most in sizes)
    if any(most > size for most, size in zip(largest, target, strict=True)):
        raise InvalidValueError(
            f"padded_batch: padded_shapes asks for {target}, but the batch holds an array of"
            f" shape {largest}. Choose larger sizes, or None for the largest one in the batch."
        )
    if value is None:
        value = "" if arrays[0].dtype.kind in "UO" else 0
    dtype = arrays[0].dtype
    if dtype.kind in "iub" and not _holds(dtype, value):
        raise InvalidTypeError(
            f"padded_batch: padding_values has {value!r} for arrays of {dtype}. Give a number that"
            " the dtype holds, or convert the arrays with map."
        )
    result = np.full((len(arrays), *target), value, dtype)
    for number, array in enumerate(arrays):
        result[number, ...][tuple(map(slice, array.shape))] = array
    return result


def _holds(dtype: np.dtype, value: object) -> bool:
    try:
        return bool(np.array(value, dtype) == value) and np.asarray(value).dtype.kind != "U"
    except (TypeError, ValueError, OverflowError):  # as of NaN
        return False


def _per_leaf(nest: Nest, tree: PyTreeDef, name: str, are_shapes: bool = False) -> Sequence[Any]:
    """Returns `nest` for every leaf: it may be None, one value for all, or a nest."""

    def is_leaf(value: Any) -> bool:
        is_shape = are_shapes and isinstance(value, (tuple, list))
        return value is None or (
            is_shape
            and all(s is None or isinstance(s, int) or getattr(s, "shape", 0) == () for s in value)
        )

    leaves, treedef = jax.tree.flatten(nest, is_leaf=is_leaf)
    if jax.tree_util.treedef_is_leaf(treedef):
        return [nest] * tree.num_leaves
    if len(leaves) != tree.num_leaves:
        raise InvalidValueError(
            f"padded_batch: {name} has structure {treedef}, but the elements have {tree}. Give one"
            " value for all arrays, or a nest like the elements."
        )
    return leaves


def join(blocks: Sequence[Block]) -> Block:
    """Joins consecutive blocks, or row numbers, into one.

    Raises:
        InvalidValueError: if the shapes of their rows differ.
    """

    def joined(*parts: Any) -> np.ndarray:
        shapes = sorted({np.shape(part)[1:] for part in parts if not isinstance(part, range)})
        if len(shapes) > 1:
            raise InvalidValueError(
                f"batch: elements have shapes {shapes}; the arrays of a batch must agree. Use"
                " padded_batch to fill them up."
            )
        return np.concatenate(parts)

    return blocks[0] if len(blocks) == 1 else jax.tree.map(joined, *blocks)


def some_rows(block: Block, part: slice) -> Block:
    """Returns consecutive rows of a block."""
    return jax.tree.map(lambda array: array[part], block)


def num_rows(block: Block) -> int:
    """Returns the number of elements of a block, which is the same in all of its arrays.

    Raises:
        InvalidValueError: if its arrays have different numbers of rows, or no rows.
    """
    leaves = jax.tree.leaves(block)
    sizes = {np.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) != 1 or sizes == {()}:
        shapes = [np.shape(leaf) for leaf in leaves]
        raise InvalidValueError(
            f"A dataset holds the batch of shapes {shapes}; all arrays of a batch must have the"
            " same number of rows (dim 0)."
        )
    ((size,),) = sizes
    return int(size)


def specs_of(element: Nest) -> Nest:
    """Returns the specs of an element's arrays."""
    return map_arrays(lambda array: TensorSpec(array.shape, array.dtype), element)


def batched_spec(spec: Nest, num_rows: int | None) -> Nest:
    """Returns the specs of a stack of `num_rows` elements."""
    return jax.tree.map(lambda row: TensorSpec((num_rows, *row.shape), row.dtype), spec)


def conform(element: Nest, signature: Nest, number: int) -> Nest:
    """Converts an element to the dtypes of a signature.

    Floats may lose digits and whole numbers may become floats, as in NumPy. Any other conversion
    must leave all values unchanged.

    Raises:
        InvalidTypeError: if its structure differs, or a value does not fit the dtype.
        InvalidValueError: if a shape differs.

    Source: `tf.data.Dataset.from_generator`, which also cuts off what does not fit.
    """
    specs, tree = flatten(signature)
    try:  # what stands where the signature has a spec is one array, also a tuple
        leaves = tree.flatten_up_to(element)
    except ValueError:
        raise InvalidTypeError(
            f"from_generator: element {number} has structure {flatten(element)[1]}, but"
            f" output_signature has {tree}. Yield elements of that structure, or change"
            " output_signature."
        ) from None
    arrays = []
    for leaf, spec in zip(leaves, specs, strict=True):
        array = as_array(leaf)
        converted = _converted(array, spec.dtype)
        if converted is None:
            raise InvalidTypeError(
                f"from_generator: element {number} is {_short(leaf)} with dtype {array.dtype}, but"
                f" output_signature has {spec.dtype}. Yield values of that dtype, or change"
                " output_signature."
            )
        if not spec.accepts(converted):
            raise InvalidValueError(
                f"from_generator: element {number} has shape {array.shape}, but output_signature"
                f" has {spec.shape}. In output_signature, a size that varies is None."
            )
        arrays.append(converted)
    return jax.tree.unflatten(tree, arrays)


def _converted(array: Array, dtype: np.dtype) -> Array | None:
    """Returns the array with a dtype; None if its values do not fit."""
    is_text = array.dtype.kind in "OUS"
    if is_text or dtype.kind in "OUS":
        return array if is_text and dtype.kind in "OUS" else None
    if array.dtype == dtype:
        return array
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", ComplexWarning)
        converted = array.astype(dtype)
    # Rounding to fewer digits is allowed: the signature asks for it.
    may_round = jnp.issubdtype(dtype, np.inexact) and (
        jnp.issubdtype(dtype, np.complexfloating) or array.dtype.kind != "c"
    )
    return converted if may_round or bool(np.all(converted == array)) else None


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
