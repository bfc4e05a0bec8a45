"""The work of the host: strings, tables of words, Python functions, and records as text.

Their arrays are NumPy's, as in `Dataset.map`, and have TensorFlow's method `numpy()`.
"""

import functools
import hashlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from distributary.errors import InvalidValueError, MissingPackageError, UnsupportedError
from distributary.tensorflow.autograph import check_when_run, is_traced


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
        return value.dtype.kind in "US" or (value.dtype.kind == "O" and _is_text_of(value))
    return isinstance(value, (str, bytes))


def _is_text_of(objects: Any) -> bool:
    first = next(iter(np.ravel(objects).tolist()), None)
    return isinstance(first, (str, bytes))


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
