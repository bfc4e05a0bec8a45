"""Messages between the tasks of a cluster, and their encoding as bytes.

    prefix    magic, version, bytes of the header, bytes of the whole message
    header    JSON: kind, fields, dtype and shape of every array, bytes of every blob
    buffers   the arrays and then the blobs, each padded to a multiple of 64 bytes

Numbers are little-endian. A message contains no code until the receiver deserializes a blob.

A message travels in chunks of 1 MiB, which gRPC sends several times as fast as those of 64 MiB. A
chunk holds the number of the request, the number of bytes that follow in later chunks, and bytes of
the message. The chunks of a message are sent one right after the other.
"""

import builtins
import json
import math
import struct
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Final, TypeAlias, TypeVar, final

import jax
import ml_dtypes
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import DTypeLike

from distributary.devices import Nest
from distributary.errors import DistributaryError, InvalidTypeError
from distributary.variables import PerReplica

_T = TypeVar("_T")
JSON: TypeAlias = Any  # bool, int, float, str, None, and lists and dicts with str keys of these
Buffer: TypeAlias = "bytes | bytearray | memoryview"

_HEAD = struct.Struct("<QQ")
# Room for 1 MiB of data and its header: a second chunk would wait until the first one is sent.
_CONTENT_BYTES = (1 << 20) + (1 << 14)
MAX_CHUNK_BYTES = _HEAD.size + _CONTENT_BYTES
_PREFIX = struct.Struct("<4sHxxIxxxxQ")
_MAGIC = b"dstr"
_VERSION = 1
# On CPUs, XLA uses an array without a copy if its address is a multiple of this.
ALIGNMENT: Final = 64
_MAX_NDIM = 32
# The limits of a message, checked before anything is allocated for it.
MAX_MESSAGE_BYTES = 1 << 30
MAX_HEADER_BYTES = 1 << 20  # of its JSON
MAX_BUFFERS = 1 << 14  # arrays and blobs

_DTYPES: Final = {
    np.dtype(name).name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128", ml_dtypes.bfloat16),
    )
}
_NAMES: Final = {
    dtype: name for name, dtype in _DTYPES.items()
}  # dtype.name takes 100 times longer
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_DECODER = json.JSONDecoder()


class WireError(DistributaryError, ValueError):
    """A malformed message that was received, or one that cannot be sent."""


@final
@dataclass(frozen=True, slots=True)
class Message:
    """A request or a reply.

    Args:
        kind: Kind of the request or reply.
        fields: Small values, by name.
        arrays: NumPy or JAX arrays, of the dtypes that JAX has for numbers. Do not write to an
            array once it is in a message: it is not copied before it is sent, and a received one
            may be shared.
        blobs: Bytes, such as a serialized program.
    """

    kind: str
    fields: dict[str, JSON] = field(default_factory=dict)
    arrays: list[np.ndarray] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)


def encode(message: Message) -> list[Buffer]:
    """Encodes a message as buffers to send one after the other; those of arrays are views.

    Args:
        message: The message. Arrays that are not contiguous or not in native byte order are
            copied.

    Raises:
        WireError: if a dtype cannot be sent, the fields are not JSON, or the message exceeds the
            limits.
    """
    arrays = [_native(array) for array in message.arrays]
    where = f"The message {message.kind!r}"
    content_of_header = {
        "kind": message.kind,
        "fields": message.fields,
        "arrays": [(_NAMES[array.dtype], array.shape) for array in arrays],
        "blobs": [len(blob) for blob in message.blobs],
    }
    try:
        header = _ENCODER.encode(content_of_header).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(
            f"The fields of a message {message.kind!r} are not JSON: {error}"
        ) from error
    # As bytes, because a memoryview cannot hold bfloat16.
    contents: list[Buffer] = [array.reshape(-1).view(np.uint8).data for array in arrays]
    contents += message.blobs
    sizes = [len(content) for content in contents]
    num_bytes = _PREFIX.size + len(header)
    num_bytes += _padding(num_bytes) + sum(size + _padding(size) for size in sizes)
    _check_limit(where, "bytes of JSON", len(header), MAX_HEADER_BYTES)
    _check_limit(where, "arrays and blobs", len(sizes), MAX_BUFFERS)
    _check_limit(where, "bytes", num_bytes, MAX_MESSAGE_BYTES)
    start = _PREFIX.pack(_MAGIC, _VERSION, len(header), num_bytes) + header
    buffers: list[Buffer] = []
    for content in [start, *contents]:
        buffers.append(content)
        if padding := _padding(len(content)):
            buffers.append(bytes(padding))
    return buffers


def decode(buffer: Buffer) -> Message:
    """Decodes the message in a buffer.

    Args:
        buffer: All bytes of the message.

    Returns:
        The message. Its arrays are read-only views of the buffer; its blobs are copies.

    Raises:
        WireError: if the buffer holds anything other than one message within the limits.
    """
    view = memoryview(buffer).cast("B").toreadonly()
    if len(view) < _PREFIX.size:
        raise WireError(f"A message has {len(view)} bytes, expected {_PREFIX.size} or more.")
    magic, version, header_bytes, num_bytes = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise WireError(
            f"A message begins with {magic!r}, expected {_MAGIC!r}: the sender is not distributary."
        )
    if version != _VERSION:
        raise WireError(
            f"A message has version {version} of the protocol, this process speaks {_VERSION}."
            " Install the same version of distributary for all tasks."
        )
    _check_limit("A message", "bytes of JSON", header_bytes, MAX_HEADER_BYTES)
    _check_limit("A message", "bytes", len(view), MAX_MESSAGE_BYTES)
    end = _PREFIX.size + header_bytes
    if num_bytes != len(view) or end > num_bytes:
        raise WireError(
            f"A message says that it has {num_bytes} bytes, of which {end} of the header, but"
            f" {len(view)} came."
        )
    try:
        header: Any = _DECODER.decode(str(view[_PREFIX.size : end], "utf-8"))
        kind, fields = header["kind"], header["fields"]
        if not (isinstance(kind, str) and isinstance(fields, dict)):
            raise TypeError("kind or fields have another type")
        arrays = [(_DTYPES[name], _shape(shape)) for name, shape in header["arrays"]]
        blob_sizes = [_size(size) for size in header["blobs"]]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise WireError(
            f"The header of a message cannot be read: {type(error).__name__}: {error}"[:500]
        ) from error
    start = end + _padding(end)
    num_buffers = len(arrays) + len(blob_sizes)
    _check_limit("A message", "arrays and blobs", num_buffers, MAX_BUFFERS)
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in arrays] + blob_sizes
    # This also checks the shapes, before anything is made of them.
    expected = start + sum(size + _padding(size) for size in sizes)
    if expected != len(view):
        raise WireError(
            f"The arrays and blobs of a message {kind!r} need {expected} bytes, but it has"
            f" {len(view)}."
        )
    contents = []
    for size in sizes:
        contents.append(view[start : start + size])
        start += size + _padding(size)
    return Message(
        kind,
        fields,
        [_array(content, *spec) for content, spec in zip(contents, arrays, strict=False)],
        [bytes(content) for content in contents[len(arrays) :]],
    )


def split(number: int, buffers: Sequence[Buffer]) -> Iterator[bytes]:
    """Yields the chunks of a message.

    Args:
        number: The number of the request. A reply has the number of its request.
        buffers: The message.
    """
    remaining = sum(map(len, buffers))
    parts: list[Buffer] = []
    room = _CONTENT_BYTES
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view) >= room:
            remaining -= _CONTENT_BYTES
            yield b"".join((_HEAD.pack(number, remaining), *parts, view[:room]))
            view = view[room:]
            parts, room = [], _CONTENT_BYTES
        if view:
            parts.append(view)
            room -= len(view)
    if parts:
        yield b"".join((_HEAD.pack(number, 0), *parts))


@final
class Assembly:
    """The receiving end of `split`: puts chunks together, one message at a time."""

    def __init__(self) -> None:
        self._number = 0
        self._remaining = 0
        self._message = np.empty(0, np.uint8)

    def add(self, chunk: bytes) -> tuple[int, Buffer] | None:
        """Adds a chunk; returns the number and bytes of the message if it is complete, else None.

        Raises:
            WireError: if the chunk is malformed, or not the next one of its message.
        """
        content = memoryview(chunk)[_HEAD.size :]
        if not 0 < len(content) <= _CONTENT_BYTES:
            raise WireError(
                f"A chunk has {len(chunk)} bytes, expected {_HEAD.size + 1} to {MAX_CHUNK_BYTES}."
            )
        number, remaining = _HEAD.unpack_from(chunk)
        if not self._remaining:
            num_bytes = len(content) + remaining
            _check_limit("A message", "bytes", num_bytes, MAX_MESSAGE_BYTES)
            if not remaining:
                return number, content
            self._number, self._message = number, aligned_empty((num_bytes,), np.dtype(np.uint8))
        elif (number, remaining + len(content)) != (self._number, self._remaining):
            raise WireError(
                f"A chunk of message {number} with {remaining} bytes to follow came in the middle"
                f" of message {self._number}, of which {self._remaining} bytes were missing."
            )
        end = len(self._message) - remaining
        self._message[end - len(content) : end] = np.frombuffer(content, np.uint8)
        self._remaining = remaining
        if remaining:
            return None
        message, self._message = self._message, np.empty(0, np.uint8)
        return number, message.data


def from_json(kind: type[_T], value: JSON) -> _T:
    """Returns the dataclass that `dataclasses.astuple` has turned into lists, sent as JSON.

    Args:
        kind: The dataclass. Its fields are JSON, dataclasses, and lists and tuples of these.
        value: The lists.
    """
    types_of_fields = typing.get_type_hints(kind).values()
    return kind(*(_with_type(*pair) for pair in zip(types_of_fields, value, strict=True)))


def _with_type(kind: object, value: JSON) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return from_json(kind, value)
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case builtins.list:
            return [_with_type(arguments[0], item) for item in value]
        case builtins.tuple:
            return tuple(map(_with_type, arguments, value))
        case types.UnionType:  # a type or None
            return None if value is None else _with_type(arguments[0], value)
    return value


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array that XLA can use without a copy. It takes memory only where written to."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _native(array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)  # does not copy a JAX array on a CPU
    if array.dtype in _NAMES and array.flags.c_contiguous:
        return array
    dtype = array.dtype.newbyteorder("=")
    if dtype not in _NAMES:
        raise WireError(
            f"An array of dtype {array.dtype} cannot be sent; expected one of {', '.join(_DTYPES)}."
        )
    # Not np.ascontiguousarray, which turns a scalar into a vector.
    return np.asarray(array, dtype, order="C")


def _shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > _MAX_NDIM:
        raise ValueError(f"{shape!r} is not a shape")
    sizes = tuple(_size(size) for size in shape)
    # NumPy refuses such a shape even if the array is empty.
    if math.prod(max(size, 1) for size in sizes) >= 1 << 59:
        raise ValueError(f"{shape!r} is too large")
    return sizes


def _size(size: object) -> int:
    if type(size) is not int or not 0 <= size < 1 << 59:
        raise ValueError(f"{size!r} is not a size")
    return size


def _array(content: memoryview, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    array = np.frombuffer(content, np.uint8)
    if dtype.kind == "b" and array.max(initial=0) > 1:
        raise WireError("An array of bools has a byte that is neither 0 nor 1.")
    return array.view(dtype).reshape(shape)


def _padding(num_bytes: int) -> int:
    return -num_bytes % ALIGNMENT


def _check_limit(where: str, what: str, number: int, limit: int) -> None:
    if number > limit:
        raise WireError(f"{where} has {number} {what}, expected {limit} or fewer.")


# Batches as arrays, and their structure as JSON, with which workers describe their data.


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
