"""`tf.Variable`, and TensorFlow's methods of arrays and variables, such as `numpy()`."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np
from jax.typing import DTypeLike

from distributary.errors import InvalidValueError
from distributary.options import VariableAggregation, VariableSynchronization
from distributary.tensorflow._host import Element
from distributary.tensorflow._operations import array, converted
from distributary.tensorflow._programs import TensorShape
from distributary.variables import ArrayInput, ShardedVariable, Variable as _Variable


class _Arguments(type(_Variable)):  # type: ignore[misc]
    """Makes `Variable(...)` create a variable of distributary, which is an instance of it."""

    def __call__(
        cls,
        initial_value: ArrayInput | Callable[[], ArrayInput] | None = None,
        trainable: bool | None = None,
        validate_shape: bool = True,
        caching_device: object = None,
        name: str | None = None,
        variable_def: object = None,
        dtype: DTypeLike | None = None,
        import_scope: str | None = None,
        constraint: Callable[..., Any] | None = None,
        synchronization: VariableSynchronization | None = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | None = VariableAggregation.NONE,
        shape: Sequence[int | None] | None = None,
        experimental_enable_variable_lifting: bool = True,
    ) -> _Variable:
        if constraint is not None:
            raise InvalidValueError(
                f"tf.Variable: constraint is {getattr(constraint, '__name__', constraint)}, but"
                " optimizers of Keras apply only those of Keras variables. Call"
                " v.assign(constraint(v)) after the optimizer."
            )
        known: Any = None if shape is None or None in tuple(shape) else list(shape)
        if isinstance(initial_value, (int, float, complex, list, tuple)) and dtype is not None:
            initial_value = converted("tf.Variable", initial_value, dtype)
        return _Variable(initial_value, trainable, name, dtype, synchronization, aggregation, known)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Variable)


@final
class Variable(_Variable, metaclass=_Arguments):
    """Creates a `distributary.Variable` with the arguments of `tf.Variable`.

    `validate_shape`, `caching_device`, `variable_def`, `import_scope` and
    `experimental_enable_variable_lifting` have no effect. The dims of `shape` that are None have
    the sizes of the initial value, and keep them.

    Source: `tf.Variable`.
    """


# Of every slice of a variable, by its id and as long as it lives: the variable and the index.
_slices: dict[int, tuple[weakref.ref[Any], _Variable, Any]] = {}


def install() -> None:
    """Gives arrays and variables the methods."""
    kinds: tuple[Any, ...] = (jax.Array, jax.core.Tracer)
    jax.Array.numpy = _numpy  # type: ignore[attr-defined]
    for kind in (*kinds, Element, _Variable, ShardedVariable):
        kind.get_shape, kind.set_shape = _get_shape, _set_shape
    for kind in kinds:
        kind.assign = _assignment("set")
        kind.assign_add = _assignment("add")
        kind.assign_sub = _assignment("subtract")
    _Variable.__getitem__ = _slice  # type: ignore[method-assign, assignment]


def _numpy(array: jax.Array) -> np.ndarray:
    """Returns a copy as a NumPy array, or a number for a scalar, as TensorFlow does."""
    return np.array(array)[()]


def _get_shape(array: Any) -> TensorShape:
    return TensorShape(array.shape)


def _set_shape(array: Any, shape: Any) -> None:
    """Raises an error if an array has another shape; its own is always known."""
    if shape is not None:
        TensorShape(shape).assert_is_compatible_with(array.shape)


def _slice(variable: _Variable, index: Any) -> Any:
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
