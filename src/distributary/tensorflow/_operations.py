"""Operations: functions with TensorFlow's arguments, which call other functions."""

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.keras_bridge import import_keras
from distributary.tensorflow._host import host_array, is_text
from distributary.tracing import native


class _Variable(Protocol):
    """A variable of distributary or Keras."""

    def __jax_array__(self) -> jax.Array: ...


TensorLike: TypeAlias = ArrayLike | _Variable | Sequence[Any]
"""A value that TensorFlow would convert to a tensor."""

Axes: TypeAlias = int | tuple[int, ...] | None
"""Numbers of dims; all of them by default."""

Shape: TypeAlias = tuple[int, ...] | np.ndarray
"""Sizes of dims; an array is what `tf.shape` returns."""


@functools.cache
def keras_of_tensorflow() -> ModuleType:
    """Imports and returns what TensorFlow calls `tf.keras`, which `import keras` alone is not.

    Source: `tensorflow.keras`.
    """
    keras = import_keras()
    try:
        return importlib.import_module("keras._tf_keras.keras")
    except ModuleNotFoundError:  # the name is private; Keras itself lacks the older names only
        return keras


@functools.cache
def resolve(path: str) -> Any:
    """Returns the object with a full name such as `"jax.numpy.sum"`; "tf_keras" is `tf.keras`.

    The first name of Keras imports it, to run on JAX.

    Raises:
        AttributeError: if the module has no such name.
        MissingPackageError: if the name is one of Keras and Keras is not installed.
    """
    top, *names = path.split(".")
    if top == "tf_keras":
        found = keras_of_tensorflow()
    else:
        found = import_keras() if top == "keras" else importlib.import_module(top)
    module = found.__name__
    for name in names:
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
        found = getattr(found, name)
        module = f"{module}.{name}"
    return found


@final
@dataclass(frozen=True)
class Operation:
    """A function of TensorFlow, defined by a call of another function.

    Args:
        target: Full name of the function to call.
        arguments: Names of the arguments that are arrays, which are passed by position, and after a
            semicolon the other arguments, with TensorFlow's defaults, which are passed by name:
            `"input_tensor;axis=None,keepdims=False"`. A name after a colon is the name in the other
            function: `"features;alpha=0.2:negative_slope"`. "" if the function has TensorFlow's
            arguments, but for `name`. The annotations in its signature then say how they are
            converted, see `_CONVERSIONS`.
    """

    target: str
    arguments: str = ""

    def function(self, name: str) -> Callable[..., Any]:
        """Returns the function, with TensorFlow's name and arguments."""
        if self.arguments:
            call, parameters = self._call_by_other_names()
            text = f"`{name}`, computed by `{self.target}`."
        else:
            call = resolve(self.target)
            parameters = list(inspect.signature(call).parameters.values())
            text = call.__doc__
        has_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        shown = [p.replace(annotation=p.empty) for p in parameters]
        if not any(p.name == "name" for p in parameters):  # otherwise it is not the last
            shown.append(_parameter("name=None", inspect.Parameter.empty, has_rest))
        signature = inspect.Signature(shown)

        def operation(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}{signature}: {error}") from None
            bound.apply_defaults()
            given = bound.arguments
            if len(shown) > len(parameters):
                del given["name"]
            for p in parameters:
                convert, value = _CONVERSIONS.get(p.annotation, _option), given[p.name]
                is_rest = p.kind is p.VAR_POSITIONAL
                given[p.name] = tuple(map(convert, value)) if is_rest else convert(value)
            return call(*bound.args, **bound.kwargs)

        operation.__name__ = operation.__qualname__ = name.rpartition(".")[2]
        operation.__doc__ = text
        operation.__signature__ = signature  # type: ignore[attr-defined]
        return operation

    def _call_by_other_names(self) -> tuple[Callable[..., Any], list[inspect.Parameter]]:
        """Returns a call of the target, and the parameters for TensorFlow's arguments."""
        tensors, _, options = self.arguments.partition(";")
        parameters = [_parameter(tensor, TensorLike) for tensor in tensors.split(",") if tensor]
        num_tensors, passed_as = len(parameters), []
        for option in options.split(",") if options else ():
            text, _, other = option.partition(":")
            own = _parameter(text, DTypeLike if text.startswith("dtype") else object)
            parameters.append(own)
            passed_as.append(other or own.name)

        def call(*given: Any) -> Any:
            named = dict(zip(passed_as, given[num_tensors:], strict=True))
            named.pop("name", None)
            return resolve(self.target)(*given[:num_tensors], **named)

        return call, parameters


def _parameter(text: str, annotation: object, only_by_name: bool = False) -> inspect.Parameter:
    """Returns a parameter written as in a table. Without a default, the argument is required."""
    name, _, default = text.partition("=")
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY if only_by_name else inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=ast.literal_eval(default) if default else inspect.Parameter.empty,
        annotation=annotation,
    )


def tensor(value: TensorLike) -> Any:
    """Converts an argument for a function of JAX: variables become arrays, and lists one array.

    Numbers stay numbers, so that they get the dtype of the arrays they are combined with. Text
    becomes an array on the host.
    """
    if is_text(value):
        return host_array(value)
    if isinstance(value, (list, tuple)):
        return jnp.asarray(jax.tree.map(tensor, list(value)))
    return native(value) if isinstance(value, np.ndarray) else plain(value)


def plain(value: object) -> Any:
    """Returns the array of a variable, and anything else unchanged."""
    if isinstance(value, (jax.Array, np.ndarray)) or not hasattr(value, "__jax_array__"):
        return value
    return value.__jax_array__()


def array(value: TensorLike, dtype: DTypeLike | None = None) -> jax.Array:
    """Converts an argument to a JAX array."""
    made = tensor(value)
    return made if is_text(made) else jnp.asarray(made, canonical(dtype))


def _arrays(values: Sequence[TensorLike | None]) -> list[jax.Array | None]:
    return [None if value is None else array(value) for value in values]


def _option(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else plain(value)


def _shape(value: object) -> Any:
    value = _option(value)
    # NumPy's numbers: those of a JAX array have no value while a step is traced.
    is_known = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return np.asarray(value) if is_known else value


def canonical(dtype: DTypeLike | None) -> Any:
    """Returns a dtype in the width that JAX uses: 32 bits unless `jax_enable_x64` is set."""
    return None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)


# Conversions of arguments by the annotation of the parameter; `_option` for all others.
_CONVERSIONS: dict[Any, Callable[[Any], Any]] = {
    Any: lambda value: value,
    Array: array,
    ArrayLike: tensor,
    TensorLike: tensor,
    list[Array]: _arrays,
    list[Array | None]: _arrays,
    Shape: _shape,
    DTypeLike: canonical,
    DTypeLike | None: canonical,
}
