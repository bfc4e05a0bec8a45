"""Operations that a table defines, by mapping TensorFlow's arguments to another function's."""

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from distributary.compat.tensorflow._resolving import resolve


class _Variable(Protocol):
    """A variable of distributary or Keras."""

    def __jax_array__(self) -> jax.Array: ...


TensorLike: TypeAlias = ArrayLike | _Variable | Sequence[Any]
"""A value that TensorFlow would convert to a tensor."""

Axes: TypeAlias = int | Sequence[int] | None
"""Numbers of dims; all of them by default."""

Shape: TypeAlias = Sequence[int] | np.ndarray
"""Sizes of dims; an array is what `tf.shape` returns."""


@final
@dataclass(frozen=True)
class Operation:
    """A function of TensorFlow, defined by a call of another function.

    Args:
        target: Full name of the function to call.
        tensors: Names of the arguments that are arrays, in order. They are passed by position.
        options: Names of the other arguments, with TensorFlow's defaults, such as
            `"axis=0 keepdims=False"`. They are passed by name. A name after a colon is the name in
            the other function: `"alpha=0.2:negative_slope"`.
    """

    target: str
    tensors: str
    options: str = ""

    def function(self, name: str) -> Callable[..., Any]:
        """Returns the function, with TensorFlow's name and arguments."""
        tensors = self.tensors.split()
        options = [_Option.parse(option) for option in self.options.split()]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature(
            [
                *(inspect.Parameter(tensor, kind) for tensor in tensors),
                *(inspect.Parameter(o.name, kind, default=o.default) for o in options),
                inspect.Parameter("name", kind, default=None),
            ]
        )

        def operation(*args: Any, **kwargs: Any) -> jax.Array:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}{signature}: {error}") from None
            bound.apply_defaults()
            given = bound.arguments
            passed = {o.passed_as: _option(given[o.name]) for o in options}
            if "dtype" in passed:
                passed["dtype"] = canonical(passed["dtype"])
            return resolve(self.target)(*(tensor(given[t]) for t in tensors), **passed)

        operation.__name__ = operation.__qualname__ = name.rpartition(".")[2]
        operation.__doc__ = f"`{name}`, computed by `{self.target}`."
        operation.__signature__ = signature  # type: ignore[attr-defined]
        return operation


@final
@dataclass(frozen=True)
class _Option:
    name: str
    default: Any
    passed_as: str

    @classmethod
    def parse(cls, text: str) -> "_Option":
        text, _, passed_as = text.partition(":")
        name, _, default = text.partition("=")
        return cls(name, _literal(default), passed_as or name)


def _literal(text: str) -> Any:
    """Returns the default written in a table. An argument without a default is required."""
    return ast.literal_eval(text) if text else inspect.Parameter.empty


def tensor(value: TensorLike) -> Any:
    """Converts an argument for a function of JAX: variables become arrays, and lists one array.

    Numbers stay numbers, so that they get the dtype of the arrays they are combined with.
    """
    if isinstance(value, (list, tuple)):
        return jnp.asarray(jax.tree.map(tensor, list(value)))
    return plain(value)


def plain(value: object) -> Any:
    """Returns the array of a variable, and anything else unchanged."""
    if isinstance(value, (jax.Array, np.ndarray)) or not hasattr(value, "__jax_array__"):
        return value
    return value.__jax_array__()


def array(value: TensorLike, dtype: DTypeLike | None = None) -> jax.Array:
    """Converts an argument to a JAX array."""
    return jnp.asarray(tensor(value), canonical(dtype))


def _option(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else plain(value)


def canonical(dtype: DTypeLike | None) -> Any:
    """Returns a dtype in the width that JAX uses: 32 bits unless `jax_enable_x64` is set."""
    return None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
