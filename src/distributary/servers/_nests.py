"""Batches as arrays, and their structure as JSON, with which workers describe their data."""

from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import DTypeLike

from distributary.devices import Nest
from distributary.errors import InvalidTypeError
from distributary.servers._messages import JSON, WireError, aligned_empty
from distributary.variables import PerReplica


def leaves_of(value: Nest) -> list[np.ndarray]:
    """Returns copies of the leaves of a nest, with the dtypes that JAX has for them."""
    return [copy_of(leaf) for leaf in jax.tree.leaves(value)]


def copy_of(array: ArrayLike, dtype: DTypeLike | None = None) -> np.ndarray:
    """Copies an array, so that its owner can write to it again before the step runs.

    Args:
        array: An array or number.
        dtype: Dtype of the copy; None for the one that JAX has for it.

    Raises:
        InvalidTypeError: for strings, objects and random keys.
    """
    if isinstance(array, jax.Array) and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise InvalidTypeError(
            f"A step is given random keys, dtype {array.dtype}, which do not travel to workers."
            " Give it jax.random.key_data(keys), and call jax.random.wrap_key_data in the step."
        )
    values = np.asarray(array)
    if values.dtype.kind in "OUS":
        raise InvalidTypeError(
            f"A step is given an array of dtype {values.dtype}; strings and objects do not travel"
            " to workers. Map them to numbers first, in the dataset."
        )
    copy = aligned_empty(
        values.shape, np.dtype(dtype or jax.dtypes.canonicalize_dtype(values.dtype))
    )
    copy[...] = values
    return copy


def shapes_of(arrays: list[Any]) -> list[tuple[list[int], str]]:
    """Returns the shape and the name of the dtype of each array."""
    return [(list(array.shape), str(array.dtype)) for array in arrays]


def structs_of(shapes: JSON) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes that `shapes_of` has described."""
    return [jax.ShapeDtypeStruct(tuple(sizes), jax.numpy.dtype(dtype)) for sizes, dtype in shapes]


def nest_of(value: Nest) -> JSON:
    """Describes the structure of a nest of tuples, lists, dicts with str keys and `PerReplica`.

    Raises:
        InvalidTypeError: if it has other containers.
    """
    if value is None:
        return None
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return ["dict", [[key, nest_of(one)] for key, one in value.items()]]
    if type(value) in (tuple, list):
        return [type(value).__name__, [nest_of(one) for one in value]]
    if isinstance(value, PerReplica):
        return ["replicas", [nest_of(one) for one in value.values]]
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(value)):
        return "leaf"
    raise InvalidTypeError(
        f"The batches of a per-worker dataset have a {type(value).__name__}. Expected arrays in"
        " tuples, lists and dicts with str keys: what a worker tells the coordinator of its data"
        " names no other classes."
    )


def tree_of(nest: JSON) -> Any:
    """Returns the `PyTreeDef` that `nest_of` has described.

    Raises:
        WireError: if the description is invalid.
    """
    try:
        return jax.tree.structure(_value_of(nest), is_leaf=lambda value: value is _LEAF)
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise WireError(f"A worker describes its data as {nest!r}"[:500]) from error


def _value_of(nest: JSON) -> Any:
    if nest is None:
        return None
    if nest == "leaf":
        return _LEAF
    kind, items = nest
    if kind == "dict":
        return {key: _value_of(one) for key, one in items}
    return {"tuple": tuple, "list": list, "replicas": PerReplica}[kind]([*map(_value_of, items)])


_LEAF = object()
