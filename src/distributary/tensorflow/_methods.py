"""TensorFlow's methods of arrays, such as `numpy()`, and `assign` of a variable's slice."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from distributary.tensorflow._host import Element
from distributary.tensorflow._operations import array
from distributary.tensorflow._programs import TensorShape
from distributary.variables import ShardedVariable, Variable

# Of every slice of a variable, by its id and as long as it lives: the variable and the index.
_slices: dict[int, tuple[weakref.ref[Any], Variable, Any]] = {}


def install() -> None:
    """Gives arrays and variables the methods."""
    kinds: tuple[Any, ...] = (jax.Array, jax.core.Tracer)
    jax.Array.numpy = _numpy  # type: ignore[attr-defined]
    for kind in (*kinds, Element, Variable, ShardedVariable):
        kind.get_shape, kind.set_shape = _get_shape, _set_shape
    for kind in kinds:
        kind.assign = _assignment("set")
        kind.assign_add = _assignment("add")
        kind.assign_sub = _assignment("subtract")
    Variable.__getitem__ = _slice  # type: ignore[method-assign, assignment]


def _numpy(array: jax.Array) -> np.ndarray:
    """Returns a copy as a NumPy array, or a number for a scalar, as TensorFlow does."""
    return np.array(array)[()]


def _get_shape(array: Any) -> TensorShape:
    return TensorShape(array.shape)


def _set_shape(array: Any, shape: Any) -> None:
    """Raises an error if an array has another shape; its own is always known."""
    if shape is not None:
        TensorShape(shape).assert_is_compatible_with(array.shape)


def _slice(variable: Variable, index: Any) -> Any:
    part = variable.value()[index]
    key = id(part)
    _slices[key] = weakref.ref(part, lambda _: _slices.pop(key, None)), variable, index
    return part


def _assignment(method: str) -> property:
    """Returns a method of arrays that changes the variable of which they are a slice.

    Args:
        method: The method of `array.at[index]`, such as `"add"`.
    """

    def bound(part: jax.Array) -> Callable[..., Any]:
        if id(part) not in _slices:
            raise AttributeError(
                "An array that is no slice of a variable never changes: keep what changes in a"
                " tf.Variable."
            )
        _, variable, index = _slices[id(part)]

        def assign(
            value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
        ) -> Any:
            return variable.assign(getattr(variable.value().at[index], method)(array(value)))

        return assign

    return property(bound)
