"""Operations whose TensorFlow arguments a table maps to those of another function."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary.compat.tensorflow._resolving import resolve


@final
@dataclass(frozen=True)
class Operation:
    """A function of TensorFlow in terms of another one.

    Args:
        target: Full name of the function that is called.
        tensors: Names of the arguments that are arrays, in order; they are passed by position.
        options: Names of the others, with TensorFlow's defaults: `"axis=0 keepdims=False"`. They
            are passed by name, by the one after a colon if there is one:
            `"alpha=0.2:negative_slope"`.
    """

    target: str
    tensors: str
    options: str = ""

    def function(self, name: str) -> Callable[..., Any]:
        """The function, with TensorFlow's name and arguments."""
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

        def operation(*args: Any, **kwargs: Any) -> Any:
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
    """The default that stands in a table; without one, the argument must be given."""
    known = {"": inspect.Parameter.empty, "True": True, "False": False, "None": None}
    if text in known:
        return known[text]
    return float(text) if "." in text else int(text)


def tensor(value: Any) -> Any:
    """An argument as functions of JAX take it: variables become arrays, and lists one array.

    Numbers stay numbers, so that they take the dtype of what they are combined with.
    """
    if isinstance(value, (list, tuple)):
        return jnp.asarray(jax.tree.map(tensor, list(value)))
    return plain(value)


def plain(value: Any) -> Any:
    """The array that a variable stands for; anything else as it is."""
    if isinstance(value, (jax.Array, np.ndarray)) or not hasattr(value, "__jax_array__"):
        return value
    return value.__jax_array__()


def array(value: Any, dtype: Any = None) -> jax.Array:
    """An argument as an array of JAX."""
    return jnp.asarray(tensor(value), canonical(dtype))


def _option(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else plain(value)


def canonical(dtype: Any) -> Any:
    """A dtype in the width that JAX has: 32 bits unless `jax_enable_x64` is set."""
    return None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
