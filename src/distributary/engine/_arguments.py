"""Arguments and results of functions: which of them are data, and what identifies a program."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distributary.datasets import DatasetIterator
from distributary.engine._cache import WeakIdentity
from distributary.errors import ContextError, InvalidTypeError
from distributary.topology import is_left_over
from distributary.values import DistributedValues, IndexedSlices, same_structure
from distributary.variables import Variable

__all__ = [
    "inside_jax",
    "is_dynamic",
    "placed_struct_of",
    "signature_of",
    "split_result",
    "struct_of",
    "traced",
]

# The key of one argument in the cache: cheap to make and to compare.

# Types of arrays that are not tracers. JAX checks in Python whether an object is an array.
_array_types: set[type] = set()


def signature_of(leaf: Any, what: str) -> Any:
    """Returns the key of an argument; if keys are equal, the same program can be used.

    The key of an array is its shape and dtype, that of a Python number its type. Everything else is
    static: hashable objects are compared by value, others by identity. The key does not keep an
    object alive if it can be referenced weakly.
    """
    kind = type(leaf)
    if kind in _array_types or isinstance(leaf, jax.Array):
        if kind not in _array_types:
            if isinstance(leaf, jax.core.Tracer):
                raise traced(leaf, what)
            _array_types.add(kind)
        aval = leaf.aval
        # Arrays of random keys have no weak types.
        return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
    if isinstance(leaf, (np.ndarray, np.generic)):
        if leaf.dtype.kind in "OUSV" and not _is_extension(leaf.dtype):
            raise InvalidTypeError(
                f"{what}: an argument is a NumPy array of dtype {leaf.dtype}; arrays of strings or"
                " objects cannot go to a device. Map them to numbers first."
            )
        return leaf.shape, leaf.dtype
    if kind in (int, float, complex):
        return kind
    if isinstance(leaf, Variable):
        return leaf._handle
    if kind in (bool, str, bytes) or leaf is None:
        return kind, leaf
    if kind is DatasetIterator:  # every call looks at the elements that it gives
        return kind
    try:
        hash(leaf)
    except TypeError:
        hashable = False
    else:
        hashable = True
    try:
        return weakref.ref(leaf) if hashable else WeakIdentity(leaf)
    except TypeError:
        pass
    if not hashable:
        raise InvalidTypeError(
            f"{what}: an argument is {leaf!r}, a {kind.__name__}, which is neither an array nor"
            " hashable. Pass arrays, numbers, nests of them, or objects to which a compiled step"
            " can be keyed."
        )
    return kind, leaf


def _is_extension(dtype: Any) -> bool:
    """Returns whether a dtype that NumPy shows as void is one of JAX's, such as bfloat16."""
    return dtype.kind == "V" and dtype.names is None and jnp.issubdtype(dtype, jnp.number)


def is_dynamic(leaf: Any) -> bool:
    """Returns whether an argument is data, rather than part of the program."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)) and (
        not isinstance(leaf, bool)
    )


def split_result(result: Any, what: str) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the arrays of a function's result, and a function that rebuilds it from their values.

    Python numbers, strings and variables are part of the program and are returned unchanged.

    Raises:
        InvalidTypeError: for anything else that is not an array.
    """
    leaves, tree = jax.tree.flatten(
        result, is_leaf=lambda x: isinstance(x, (DistributedValues, IndexedSlices))
    )
    arrays: list[Any] = []
    slots: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, (Variable, bool, int, float, complex, str, bytes)):
            slots.append(("static", leaf))
        elif isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            slots.append(("array", None))
            arrays.append(leaf)
        elif isinstance(leaf, (DistributedValues, IndexedSlices)):
            inner, inner_tree = jax.tree.flatten(leaf)
            slots.append(("tree", inner_tree))
            arrays += inner
        else:
            raise InvalidTypeError(
                f"{what}: the function returned {leaf!r}, a {type(leaf).__name__}. It is compiled,"
                " so it can return arrays, numbers, strings, None, variables and nests of them."
            )

    if all(kind == "array" for kind, _ in slots):
        is_array = same_structure(tree, jax.tree.structure(0))

        def rebuild_arrays(values: Sequence[Any], wrap: Callable[[Any], Any] | None = None) -> Any:
            if is_array:
                return values[0] if wrap is None else wrap(values[0])
            return jax.tree.unflatten(tree, values if wrap is None else map(wrap, values))

        return arrays, rebuild_arrays

    def rebuild(values: Sequence[Any], wrap: Callable[[Any], Any] = lambda value: value) -> Any:
        remaining = iter(values)
        parts = []
        for kind, content in slots:
            if kind == "static":
                parts.append(content)
            elif kind == "array":
                parts.append(wrap(next(remaining)))
            else:
                own = [next(remaining) for _ in range(content.num_leaves)]
                parts.append(wrap(jax.tree.unflatten(content, own)))
        return jax.tree.unflatten(tree, parts)

    return arrays, rebuild


def placed_struct_of(leaf: Any) -> Any:
    """Returns shape, dtype and place of an array; a Python number is returned unchanged."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.aval.weak_type
        )
    return struct_of(leaf) if hasattr(leaf, "dtype") else leaf


def struct_of(leaf: Any) -> Any:
    """Returns shape and dtype of an array or number, without its place."""
    if hasattr(leaf, "dtype") and not isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def traced(value: Any, what: str) -> ContextError:
    """Returns the error for a traced value that is passed to a program."""
    if not is_left_over(value):
        return inside_jax(what)
    return ContextError(
        f"{what} was given {value!r}, which an earlier step has left in a list, an attribute or a"
        " global variable. Values of a step exist only while it is traced. Return what you need"
        " later, or assign it to a distributary.Variable."
    )


def inside_jax(what: str) -> ContextError:
    """Returns the error for a program that is called while JAX traces something else."""
    return ContextError(
        f"{what} was called inside jax.jit, jax.grad or another JAX transformation. Compile the"
        " outer function with distributary.function instead, and differentiate inside the step."
    )
