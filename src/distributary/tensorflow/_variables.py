"""`tf.Variable` with the arguments that only TensorFlow has."""

from collections.abc import Callable, Sequence
from typing import Any, final

from jax.typing import DTypeLike

from distributary.errors import InvalidValueError
from distributary.options import VariableAggregation, VariableSynchronization
from distributary.tensorflow._operations import converted
from distributary.variables import ArrayInput, Variable as _Variable


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
