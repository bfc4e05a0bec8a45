"""Operations: functions with TensorFlow's arguments, which call other functions; host arrays.

The arrays of strings, tables of words and Python functions are NumPy's, as in `Dataset.map`, and
have TensorFlow's method `numpy()`.
"""

import contextlib
import functools
import hashlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol, TypeAlias, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.devices import Nest, inside_jax_trace
from distributary.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingPackageError,
    UnsupportedError,
    shown,
)
from distributary.keras_bridge import import_keras
from distributary.tensorflow.autograph import check_when_run, is_traced, plain
from distributary.tracing import native
from distributary.variables import IndexedSlices


class _Variable(Protocol):
    """A variable of distributary or Keras."""

    def __jax_array__(self) -> jax.Array: ...


TensorLike: TypeAlias = ArrayLike | _Variable | Sequence[Any]
"""A value that TensorFlow would convert to a tensor."""

Axes: TypeAlias = int | tuple[int, ...] | None
"""Numbers of dims; all of them by default."""

Gradient: TypeAlias = Array | IndexedSlices
"""What a tape returns for one source that has an influence."""

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


#: The default of an argument that has none.
REQUIRED: Any = inspect.Parameter.empty


@final
class Operation:
    """A function of TensorFlow, defined by a call of another function.

    Args:
        call: The function to call. Without names of arguments, its own are TensorFlow's, but for
            `name`, and the annotations in its signature say how they are converted: see
            `_CONVERSIONS`.
        *tensors: Names of TensorFlow's arguments that are arrays; they are passed by position.
        **options: The other arguments with their defaults; they are passed by name.
    """

    def __init__(self, call: Callable[..., Any], *tensors: str, **options: Any) -> None:
        self._call, self._tensors, self._options = call, tensors, options

    def function(self, name: str) -> Callable[..., Any]:
        """Returns the function, with TensorFlow's name and arguments."""
        if self._tensors or self._options:
            call, parameters = self._by_name, self._parameters()
            text = f"`{name}`, computed by `{self._call.__name__}` of JAX or Keras."
        else:
            call = self._call
            parameters = list(inspect.signature(call).parameters.values())
            text = call.__doc__ or ""
        has_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        shown = [p.replace(annotation=p.empty) for p in parameters]
        if not any(p.name == "name" for p in parameters):  # otherwise it is not the last
            kind = inspect.Parameter.KEYWORD_ONLY if has_rest else _ANYWHERE
            shown.append(inspect.Parameter("name", kind, default=None))
        signature = inspect.Signature(shown)
        is_pure = self._call.__module__.startswith(("jax.", "numpy", _PURE))

        def operation(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}{signature}: {error}") from None
            bound.apply_defaults()
            values = bound.arguments
            if len(shown) > len(parameters):
                del values["name"]
            arrays = [values[p.name] for p in parameters if p.annotation in _TENSORS]
            is_known = is_pure and inside_jax_trace() and _has_sizes(arrays, values)
            with jax.ensure_compile_time_eval() if is_known else contextlib.nullcontext():
                for p in parameters:
                    convert, value = _CONVERSIONS.get(p.annotation, _option), values[p.name]
                    is_rest = p.kind is p.VAR_POSITIONAL
                    values[p.name] = tuple(map(convert, value)) if is_rest else convert(value)
                result = call(*bound.args, **bound.kwargs)
                return jax.tree.map(host_array, result) if is_known else result

        operation.__name__ = operation.__qualname__ = name.rpartition(".")[2]
        operation.__doc__ = text
        operation.__signature__ = signature  # type: ignore[attr-defined]
        return operation

    def _parameters(self) -> list[inspect.Parameter]:
        """Returns the parameters for TensorFlow's arguments."""
        make = functools.partial(inspect.Parameter, kind=_ANYWHERE)
        options = [
            make(name, default=default, annotation=DTypeLike if name == "dtype" else object)
            for name, default in self._options.items()
        ]
        return [*(make(name, annotation=TensorLike) for name in self._tensors), *options]

    def _by_name(self, *values: Any) -> Any:
        count = len(self._tensors)
        options = dict(zip(self._options, values[count:], strict=True))
        call = self._call
        if any(map(is_text, values[:count])):  # on the host, where NumPy's functions are the same
            of_numpy = getattr(np, call.__name__, call)
            call = lambda *args, **options: host_array(of_numpy(*args, **options))
        return call(*values[:count], **options)


# The module of functions that draw no random numbers.
_PURE = "distributary.tensorflow._arrays"


def _has_sizes(arrays: Nest, values: Nest) -> bool:
    """Returns whether arguments are arrays of the host, such as `tf.shape`, and other known values.

    What a step computes of them stays known, so that it can be a size, too.

    Args:
        arrays: The arguments that are arrays.
        values: All arguments.
    """
    sizes = [x for x in jax.tree.leaves(arrays) if isinstance(x, Element)]
    others = [x for x in jax.tree.leaves(values) if hasattr(x, "__jax_array__") or is_traced(x)]
    return any(x.dtype.kind in "biuf" for x in sizes) and not others


_ANYWHERE = inspect.Parameter.POSITIONAL_OR_KEYWORD


_F = TypeVar("_F", bound=Callable[..., Any])


def without_effect(names: str, before: str = "") -> Callable[[_F], _F]:
    """Gives a function arguments of TensorFlow that have no effect, which are None by default.

    Args:
        names: The arguments, such as "swap_memory name".
        before: The argument that comes after them; by default, they are the last ones.
    """

    def decorate(function: _F) -> _F:
        parameters = [*inspect.signature(function).parameters.values()]
        place = [*(p.name for p in parameters), ""].index(before)
        ignored = names.split()
        parameters[place:place] = [
            inspect.Parameter(name, _ANYWHERE, default=None) for name in ignored
        ]
        signature = inspect.Signature(parameters)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= place and kwargs.keys().isdisjoint(ignored):
                return function(*args, **kwargs)
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}(): {error}") from None
            return function(**{name: v for name, v in given.items() if name not in ignored})

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def taking(
    functions: Mapping[str, Callable[..., Any]], *tensors: str, **options: Any
) -> dict[str, Operation]:
    """Returns the operations that call functions, all of them with the same arguments."""
    return {name: Operation(call, *tensors, **options) for name, call in functions.items()}


def named(source: object, names: str) -> dict[str, Any]:
    """Returns objects of a module by their names, such as "abs cos"; `print_` is `print`."""
    return {name.removesuffix("_"): getattr(source, name) for name in names.split()}


def operations(module: ModuleType, names: str) -> dict[str, Any]:
    """Returns functions of a module as operations."""
    return {name: Operation(value) for name, value in named(module, names).items()}


def tensor(value: TensorLike) -> Any:
    """Converts an argument for a function of JAX: variables become arrays, and lists one array.

    Numbers stay numbers, so that they get the dtype of the arrays they are combined with. Text
    becomes an array on the host.
    """
    if is_text(value):
        return host_array(value)
    if isinstance(value, IndexedSlices):
        return value.to_dense()
    if isinstance(value, (list, tuple)):
        is_leaf = lambda one: isinstance(one, IndexedSlices)
        return jnp.asarray(jax.tree.map(tensor, list(value), is_leaf=is_leaf))
    return native(value) if isinstance(value, np.ndarray) else plain(value)


def array(value: TensorLike, dtype: DTypeLike | None = None) -> jax.Array:
    """Converts an argument to a JAX array."""
    result = tensor(value)
    return result if is_text(result) else jnp.asarray(result, canonical(dtype))


def converted(what: str, value: Any, dtype: DTypeLike | None) -> jax.Array:
    """Converts an argument to a dtype as TensorFlow does.

    NumPy's arrays get any dtype, Python's numbers one that holds their kind, as floats hold whole
    numbers, and arrays and variables keep their own.

    Raises:
        InvalidTypeError: if the dtype is another one.
    """
    if dtype is None:
        return array(value)
    wanted, fits = canonical(dtype), True
    if is_text(value) or wanted.kind in "OUS":
        fits = is_text(value) and wanted.kind in "OUS"
    elif isinstance(value, (jax.Array, Element)) or hasattr(value, "__jax_array__"):
        fits = array(value).dtype == wanted
    elif isinstance(value, (*_NUMBERS, list, tuple)) and not isinstance(value, np.generic):
        kinds = {type(leaf) for leaf in jax.tree.leaves(value)}
        numbers = [kind for kind in kinds if issubclass(kind, (*_NUMBERS, np.generic))]
        fits = all(_kind(kind) <= _kind(wanted) for kind in numbers)
        if fits and len(numbers) == len(kinds):
            value = np.array(value, wanted)  # an error for numbers that are too large
    if not fits:
        raise InvalidTypeError(
            f"{what}: got {shown(value)}, expected {wanted.name}. Convert numbers with tf.cast."
        )
    return array(value, dtype)


_NUMBERS = (bool, int, float, complex)


def _kind(dtype: Any) -> int:
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    return next(i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind))


def _arrays(values: Sequence[TensorLike]) -> list[jax.Array]:
    return [array(value) for value in values]


def _gradient(value: Any) -> Gradient:
    return value if isinstance(value, IndexedSlices) else array(value)


def _gradients(values: Sequence[Any]) -> list[Gradient | None]:
    return [None if value is None else _gradient(value) for value in values]


def with_values(gradient: Gradient, change: Callable[[Array], Array]) -> Any:
    """Returns a gradient with other numbers; those of rows stay rows."""
    if isinstance(gradient, IndexedSlices):
        values = change(gradient.values)
        return IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return change(gradient)


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


_TENSORS = (Array, ArrayLike, TensorLike, list[Array], Gradient, list[Gradient | None])
# Conversions of arguments by the annotation of the parameter; `_option` for all others.
_CONVERSIONS: dict[Any, Callable[[Any], Any]] = {
    Any: lambda value: value,
    Array: array,
    ArrayLike: tensor,
    ArrayLike | None: lambda value: None if value is None else tensor(value),
    TensorLike: tensor,
    list[Array]: _arrays,
    Gradient: _gradient,
    list[Gradient | None]: _gradients,
    Shape: _shape,
    DTypeLike: canonical,
    DTypeLike | None: canonical,
}


@final
class Text(str):
    """Text, which is bytes in TensorFlow, so that programs decode it."""

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Returns the text."""
        return str(self)


@final
class Bytes(bytes):
    """Bytes as records and files have them."""

    def numpy(self) -> bytes:
        """Returns the bytes."""
        return bytes(self)


@final
class Element(np.ndarray):
    """An array on the host, such as one that a loop over a dataset yields."""

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(super().__getitem__(index), self.dtype).view(Element)

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __repr__(self) -> str:
        return repr(np.asarray(self)).replace("array", "Element", 1)

    def numpy(self) -> Any:
        """Returns a copy as a NumPy array, or a number or text for a scalar, as TensorFlow does."""
        copy = np.array(self)[()]
        return Text(copy) if isinstance(copy, str) else copy


def as_element(value: object) -> object:
    """Returns an array, number or bytes in a form with the method `numpy()`."""
    if type(value) is bytes:
        return Bytes(value)
    return host_array(value) if isinstance(value, (np.ndarray, np.generic, bool)) else value


def of_host(functions: Mapping[str, Any]) -> dict[str, Any]:
    """Returns functions whose results have the method `numpy()`; other objects stay."""

    def shown(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(function)(
            lambda *args, **kwargs: jax.tree.map(as_element, function(*args, **kwargs))
        )

    return {
        name: shown(value) if inspect.isfunction(value) else value
        for name, value in functions.items()
    }


def host_array(value: object, dtype: Any = None) -> np.ndarray:
    """Returns a value as an array on the host.

    Args:
        value: An array, a number, text, or a nest of lists.
        dtype: The dtype; `tf.string` keeps text.
    """
    first = value
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    # Dtype S would drop zero bytes at the end, and NumPy cannot read subclasses of bytes.
    array = np.asarray(value, object if isinstance(first, bytes) else None)
    is_text = dtype is None or np.dtype(dtype).kind == "O"
    return (array if is_text else array.astype(dtype)).view(Element)


def is_text(value: object) -> bool:
    """Returns whether a value is text, or an array of it."""
    if isinstance(value, (list, tuple)):
        return bool(value) and is_text(value[0])
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind != "O":
            return value.dtype.kind in "US"
        value = next(iter(np.ravel(value).tolist()), None)
    return isinstance(value, (str, bytes))


def text_of(value: object) -> str:
    """Returns one text; bytes are UTF-8."""
    return value.decode() if isinstance(value, bytes) else str(value)


def require_host(what: str, *values: Any) -> None:
    """Raises an error in a step, where values are known only when it runs."""
    if any(map(is_traced, jax.tree.leaves(values))):
        raise UnsupportedError(
            f"{what}: the value is computed in a step, where there is no text and no Python. Call"
            f" {what} in Dataset.map, or outside of the step."
        )


def local_path(path: Any) -> str:
    """Returns a path of the file system, which may be text, bytes or an array of one of them.

    Raises:
        UnsupportedError: for the address of an object store.
    """
    text = os.fsdecode(path.item() if isinstance(path, (np.ndarray, np.generic)) else path)
    if "://" in text:
        raise UnsupportedError(
            f"tf.io.gfile: {text!r} is in an object store. Mount it as a folder, or use fsspec."
        )
    return text


def package(what: str, module: str, package: str) -> ModuleType:
    """Imports and returns a module of a package that is optional.

    Args:
        what: What needs it, for the message.
        module: The module.
        package: The package as pip knows it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingPackageError(f"{what} needs {package}: pip install {package}") from None


def bucket_of(text: str, num_buckets: int) -> int:
    """Returns a number below `num_buckets` that depends on the text alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % num_buckets


def plain_values(values: np.ndarray) -> list[Any]:
    """Returns keys or values as Python's; text as `str`."""
    return [text_of(v) if isinstance(v, (bytes, str)) else v for v in values.tolist()]


def require(condition: ArrayLike, message: str | None, text: str) -> None:
    """Raises an error with one of two texts unless all of a condition holds, also in a step."""
    holds, error = jnp.all(jnp.asarray(condition)), InvalidValueError(message or text)
    if is_traced(holds):
        check_when_run(holds, error)
    elif not holds:
        raise error
