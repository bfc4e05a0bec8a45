"""`tf.io`: files of the operating system, and records of named features, `tf.train.Example`.

They run outside of steps, for example in `Dataset.map`.
"""

import base64
import csv
import functools
import glob as globs
import io
import math
import os
import shutil
import threading
import types
import wave
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from distributary.data import framed
from distributary.errors import InvalidTypeError, InvalidValueError, UnsupportedError, shown
from distributary.tensorflow._objects import SparseTensor, sparse_rows
from distributary.tensorflow._operations import (
    Element,
    array,
    host_array,
    local_path,
    package,
    without_effect,
)

_Path = str | os.PathLike[str]


def matching_files(pattern: _Path | list[_Path], name: str | None = None) -> Any:
    """`tf.io.matching_files`: the sorted paths that fit a pattern, or one of several."""
    return host_array(np.array(sorted(glob(pattern)), str))


def read_file(filename: _Path, name: str | None = None) -> bytes:
    """`tf.io.read_file`: outside of steps, for example in `Dataset.map`."""
    return Path(local_path(filename)).read_bytes()


def write_file(filename: _Path, contents: bytes | str, name: str | None = None) -> None:
    """`tf.io.write_file`: makes the folder if there is none."""
    path, data = Path(local_path(filename)), np.asarray(contents, object).item()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


@final
@dataclass(frozen=True)
class TFRecordOptions:
    """`tf.io.TFRecordOptions`: the compression of a `TFRecordWriter`; the rest has no effect."""

    compression_type: str | None = None
    flush_mode: object = None
    input_buffer_size: object = None
    output_buffer_size: object = None
    window_bits: object = None
    compression_level: int | None = None
    compression_method: object = None
    mem_level: object = None
    compression_strategy: object = None


@final
class TFRecordWriter:
    """Writes records to a file that `tf.data.TFRecordDataset` reads.

    Args:
        path: Path of the file.
        options: `TFRecordOptions`, or "GZIP", "ZLIB" or "".

    Source: `tf.io.TFRecordWriter`.
    """

    def __init__(self, path: _Path, options: TFRecordOptions | str | None = None) -> None:
        if not isinstance(options, TFRecordOptions):
            options = TFRecordOptions(options)
        kind, level = options.compression_type or "", options.compression_level
        if kind not in ("", "GZIP", "ZLIB"):
            raise UnsupportedError(
                f"tf.io.TFRecordWriter: compression_type is {kind!r}, expected GZIP, ZLIB or none."
            )
        self._file: Any = open(local_path(path), "wb")  # noqa: SIM115  (`close` is ours)
        level = 6 if level is None else level
        self._packer = zlib.compressobj(level, wbits=31 if kind == "GZIP" else 15) if kind else None

    def write(self, record: bytes) -> None:
        """Writes a record."""
        data = framed(record)
        self._file.write(data if self._packer is None else self._packer.compress(data))

    def flush(self) -> None:
        """Hands everything to the operating system."""
        if self._packer is not None:
            self._file.write(self._packer.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._packer is not None and not self._file.closed:
            self._file.write(self._packer.flush())
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@final
class GFile:
    """`tf.io.gfile.GFile`: a file, opened when it is used, of bytes if the mode contains "b".

    It has the other methods of Python's files, too.
    """

    def __init__(self, name: _Path, mode: str = "r") -> None:
        #: The path and the mode.
        self.name, self.mode = local_path(name), mode
        self._opened: IO[Any] | None = None

    def _file(self) -> IO[Any]:
        if self._opened is None or self._opened.closed:
            self._opened = open(self.name, self.mode)  # noqa: SIM115  (`close` is ours)
        return self._opened

    def size(self) -> int:
        """Returns the number of bytes."""
        return os.path.getsize(self.name)

    def seekable(self) -> bool:
        """Returns whether `seek` works."""
        return self._file().seekable()

    def read(self, n: int = -1) -> Any:
        """Returns the next `n` bytes or characters, or all."""
        return self._file().read(n)

    def readline(self) -> Any:
        """Returns the next line."""
        return self._file().readline()

    def readlines(self) -> list[Any]:
        """Returns all lines that follow."""
        return self._file().readlines()

    def seek(self, offset: int | None = None, whence: int = 0, position: int | None = None) -> None:
        """Goes to a place in the file."""
        self._file().seek(position if offset is None else offset, whence)  # type: ignore[arg-type]

    def tell(self) -> int:
        """Returns the place in the file."""
        return self._file().tell()

    def write(self, file_content: object) -> None:
        """Writes bytes or text."""
        self._file().write(file_content)

    def flush(self) -> None:
        """Hands everything to the operating system."""
        self._file().flush()

    def close(self) -> None:
        """Closes the file."""
        if self._opened is not None:
            self._opened.close()

    def next(self) -> Any:
        """Returns the next line."""
        return next(self._file())

    __next__ = next

    def __iter__(self) -> Iterator[Any]:
        return self._file()

    def __enter__(self) -> IO[Any]:
        return self._file()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def copy(src: _Path, dst: _Path, overwrite: bool = False) -> None:
    """`tf.io.gfile.copy`: raises `FileExistsError` unless you pass `overwrite=True`."""
    if not overwrite and os.path.exists(local_path(dst)):
        raise FileExistsError(f"tf.io.gfile.copy: {dst} exists. Pass overwrite=True to replace it.")
    shutil.copyfile(local_path(src), local_path(dst))


def exists(path: _Path) -> bool:
    """`tf.io.gfile.exists`."""
    return os.path.exists(local_path(path))


def glob(pattern: _Path | list[_Path]) -> list[str]:
    """`tf.io.gfile.glob`: the paths that fit a pattern, or one of several."""
    patterns = pattern if isinstance(pattern, (list, tuple)) else [pattern]
    return [path for one in patterns for path in sorted(globs.glob(local_path(one)))]


def isdir(path: _Path) -> bool:
    """`tf.io.gfile.isdir`."""
    return os.path.isdir(local_path(path))


def join(path: _Path, *paths: _Path) -> str:
    """`tf.io.gfile.join`."""
    return os.path.join(path, *paths)


def listdir(path: _Path) -> list[str]:
    """`tf.io.gfile.listdir`: the names in a folder."""
    return sorted(os.listdir(local_path(path)))


def makedirs(path: _Path) -> None:
    """`tf.io.gfile.makedirs`: a folder and those above it; it may exist."""
    os.makedirs(local_path(path), exist_ok=True)


def mkdir(path: _Path) -> None:
    """`tf.io.gfile.mkdir`."""
    os.mkdir(local_path(path))


def remove(path: _Path) -> None:
    """`tf.io.gfile.remove`: a file."""
    os.remove(local_path(path))


def rename(src: _Path, dst: _Path, overwrite: bool = False) -> None:
    """`tf.io.gfile.rename`: raises `FileExistsError` unless you pass `overwrite=True`."""
    if not overwrite and os.path.exists(local_path(dst)):
        raise FileExistsError(f"tf.io.gfile.rename: {dst} exists. Pass overwrite=True.")
    os.replace(local_path(src), local_path(dst))


def rmtree(path: _Path) -> None:
    """`tf.io.gfile.rmtree`: a folder and everything in it."""
    shutil.rmtree(local_path(path))


def stat(path: _Path) -> Any:
    """`tf.io.gfile.stat`: with `length` and `mtime_nsec`."""
    status = os.stat(local_path(path))
    return types.SimpleNamespace(
        length=status.st_size,
        mtime_nsec=status.st_mtime_ns,
        is_directory=os.path.isdir(local_path(path)),
    )


def walk(
    top: _Path, topdown: bool = True, onerror: Callable[[OSError], Any] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """`tf.io.gfile.walk`."""
    return os.walk(local_path(top), topdown, onerror)


def get_registered_schemes() -> list[str]:
    """`tf.io.gfile.get_registered_schemes`: paths of the operating system only."""
    return [""]


class DecodedWav(NamedTuple):
    """The result of `tf.audio.decode_wav`: numbers from -1 to 1, and how many a second has."""

    audio: np.ndarray
    sample_rate: np.ndarray


def decode_wav(
    contents: Any, desired_channels: int = -1, desired_samples: int = -1, name: str | None = None
) -> DecodedWav:
    """`tf.audio.decode_wav`: `[samples, channels]` in float32."""
    with wave.open(io.BytesIO(host_array(contents).item())) as file:
        if file.getsampwidth() != 2:
            raise InvalidValueError(
                f"tf.audio.decode_wav: samples have {8 * file.getsampwidth()} bits, expected 16."
            )
        frames = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        samples = frames.reshape(-1, file.getnchannels()).astype(np.float32) / 2**15
        rate = file.getframerate()
    if desired_channels != -1:  # the last channel stands for those that are not there
        samples = samples[:, [min(k, samples.shape[1] - 1) for k in range(desired_channels)]]
    if desired_samples != -1:
        samples = samples[:desired_samples]
        samples = np.pad(samples, [(0, desired_samples - len(samples)), (0, 0)])
    return DecodedWav(host_array(samples), host_array(rate, np.int32))


# The fields of messages by their numbers in `tensorflow/core/example/*.proto` and, as far as arrays
# of numbers use it, `tensorflow/core/framework/tensor.proto`. Those with `*` have several values.
_FIELDS: dict[str, dict[int, str]] = {
    "BytesList": {1: "value bytes *"},
    "FloatList": {1: "value float *"},
    "Int64List": {1: "value int64 *"},
    "Feature": {1: "bytes_list BytesList", 2: "float_list FloatList", 3: "int64_list Int64List"},
    "Features": {1: "feature Features.FeatureEntry *"},
    "Features.FeatureEntry": {1: "key string", 2: "value Feature"},
    "Example": {1: "features Features"},
    "FeatureList": {1: "feature Feature *"},
    "FeatureLists": {1: "feature_list FeatureLists.FeatureListEntry *"},
    "FeatureLists.FeatureListEntry": {1: "key string", 2: "value FeatureList"},
    "SequenceExample": {1: "context Features", 2: "feature_lists FeatureLists"},
    "TensorShapeProto": {2: "dim TensorShapeProto.Dim *"},
    "TensorShapeProto.Dim": {1: "size int64"},
    "TensorProto": {
        1: "dtype int32",
        2: "tensor_shape TensorShapeProto",
        4: "tensor_content bytes",
    },
}
#: The messages of `tf.train`.
MESSAGES = [name for name in _FIELDS if "." not in name and not name.startswith("Tensor")]


def message_type(name: str) -> Any:
    """Returns the protobuf class `tf.train.{name}`, one of `MESSAGES`."""
    with _making_messages:  # or threads would get different classes
        return _messages()[name]


_making_messages = threading.Lock()


@functools.cache
def _messages() -> dict[str, Any]:
    """Makes the protobuf classes, by their names in `tf.train`."""
    descriptors = package("tf.train", "google.protobuf.descriptor_pb2", "protobuf")
    file = descriptors.FileDescriptorProto(
        name="distributary/example.proto", package="tensorflow", syntax="proto3"
    )
    made: dict[str, Any] = {}
    for name, fields in _FIELDS.items():
        outer, _, own_name = name.rpartition(".")
        made[name] = (made[outer].nested_type if outer else file.message_type).add(name=own_name)
        if own_name.endswith("Entry"):
            made[name].options.map_entry = True
        for number, text in fields.items():
            field_name, kind, *several = text.split()
            field = made[name].field.add(name=field_name, number=number)
            field.label = field.LABEL_REPEATED if several else field.LABEL_OPTIONAL
            if kind in _FIELDS:
                field.type, field.type_name = field.TYPE_MESSAGE, f".tensorflow.{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind.upper()}")
    made["Feature"].oneof_decl.add(name="kind")
    for field in made["Feature"].field:
        field.oneof_index = 0
    pool = package("tf.train", "google.protobuf.descriptor_pool", "protobuf").DescriptorPool()
    pool.Add(file)
    factory = package("tf.train", "google.protobuf.message_factory", "protobuf")
    types = [pool.FindMessageTypeByName(f"tensorflow.{proto.name}") for proto in file.message_type]
    return {one.name: factory.GetMessageClass(one) for one in types}


@final
@dataclass(frozen=True)
class FixedLenFeature:
    """A feature with as many values as `shape` has.

    Args:
        shape: Shape of the array.
        dtype: Dtype; `tf.string` for bytes.
        default_value: What a record without the feature has; None makes that an error.

    Source: `tf.io.FixedLenFeature`.
    """

    shape: Sequence[int]
    dtype: DTypeLike
    default_value: ArrayLike | None = None


@final
@dataclass(frozen=True)
class FixedLenSequenceFeature:
    """A feature with any number of arrays of a shape; `parse_example` pads the shorter ones.

    Args:
        shape: Shape of one array.
        dtype: Dtype; `tf.string` for bytes.
        allow_missing: Whether a record may be without the feature.
        default_value: What to pad with; None means 0 or empty bytes.

    Source: `tf.io.FixedLenSequenceFeature`.
    """

    shape: Sequence[int]
    dtype: DTypeLike
    allow_missing: bool = False
    default_value: Any = None


@final
@dataclass(frozen=True)
class VarLenFeature:
    """A feature with any number of values, which becomes a `tf.SparseTensor`.

    Args:
        dtype: Dtype; `tf.string` for bytes.

    Source: `tf.io.VarLenFeature`.
    """

    dtype: DTypeLike


@without_effect("example_names name")
def parse_single_example(serialized: object, features: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the features of a serialized `tf.train.Example`, as arrays.

    Args:
        serialized: Bytes of one record.
        features: For each name a `FixedLenFeature`, `FixedLenSequenceFeature` or `VarLenFeature`.

    Raises:
        InvalidValueError: if the record is not an Example, a feature is missing or has another
            number of values.
        InvalidTypeError: if a feature has values of another type.

    Source: `tf.io.parse_single_example`.
    """
    arrays = _parsed(bytes_of(serialized), features)
    return {key: _single(array, features[key]) for key, array in arrays.items()}


@without_effect("example_names name")
def parse_example(serialized: object, features: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the features of a batch of serialized records `[n]`, with n as dim 0.

    Otherwise like `parse_single_example`.

    Source: `tf.io.parse_example`.
    """
    rows = [_parsed(bytes_of(one), features) for one in np.asarray(serialized, object).reshape(-1)]
    return {key: _stacked([row[key] for row in rows], features[key]) for key in features}


@without_effect("example_name name")
def parse_single_sequence_example(
    serialized: object,
    context_features: Mapping[str, Any] | None = None,
    sequence_features: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the features of a serialized `tf.train.SequenceExample`, as arrays.

    Args:
        serialized: Bytes of one record.
        context_features: For each name a `FixedLenFeature` or `VarLenFeature`.
        sequence_features: For each name a `FixedLenSequenceFeature`.

    Returns:
        The features of the context, and the sequences `[step, *shape]`.

    Raises:
        InvalidValueError: if the record is not a SequenceExample, a feature is missing or has
            another number of values.
        InvalidTypeError: if a feature has values of another type.

    Source: `tf.io.parse_single_sequence_example`.
    """
    contexts, sequences = context_features or {}, sequence_features or {}
    if not contexts and not sequences:
        raise InvalidValueError(
            "parse_sequence_example: context_features and sequence_features are empty. Give one."
        )
    record = _message("SequenceExample", bytes_of(serialized))
    context, lists = record.context.feature, record.feature_lists.feature_list
    arrays = {key: _values(key, context.get(key), feature) for key, feature in contexts.items()}
    arrays = {key: _single(array, contexts[key]) for key, array in arrays.items()}
    return arrays, {key: _sequence(key, lists.get(key), f) for key, f in sequences.items()}


@without_effect("example_names name")
def parse_sequence_example(
    serialized: object,
    context_features: Mapping[str, Any] | None = None,
    sequence_features: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the features of a batch of serialized records `[n]`, with n as dim 0.

    Otherwise like `parse_single_sequence_example`. Shorter sequences are padded, and the third
    result has the length of each.

    Source: `tf.io.parse_sequence_example`.
    """
    contexts, sequences = context_features or {}, sequence_features or {}
    rows = [
        parse_single_sequence_example(one, contexts, sequences)
        for one in np.asarray(serialized, object).reshape(-1)
    ]
    columns = {key: [row[1][key] for row in rows] for key in sequences}
    values = lambda one: one.values if isinstance(one, SparseTensor) else one
    return (
        {key: _stacked([values(row[0][key]) for row in rows], contexts[key]) for key in contexts},
        {key: _stacked(column, sequences[key]) for key, column in columns.items()},
        {key: np.array([len(one) for one in column]) for key, column in columns.items()},
    )


def _sequence(key: str, message: Any, feature: Any) -> np.ndarray:
    if not isinstance(feature, FixedLenSequenceFeature):
        raise InvalidTypeError(
            f"parse_sequence_example: sequence {key!r} is described by {shown(feature)}, expected"
            " FixedLenSequenceFeature(shape, dtype)."
        )
    if message is None and not feature.allow_missing:
        raise InvalidValueError(
            f"parse_sequence_example: a record has no sequence {key!r}. Give its"
            " FixedLenSequenceFeature allow_missing=True."
        )
    step = FixedLenFeature(feature.shape, feature.dtype)
    steps = [] if message is None else [_values(key, one, step) for one in message.feature]
    shape = (len(steps), *feature.shape)
    return np.array(steps, feature.dtype).reshape(shape)


def _single(array: np.ndarray, feature: object) -> Any:
    if not isinstance(feature, VarLenFeature):
        return array
    places = np.arange(len(array), dtype=np.int64)
    return SparseTensor(places[:, None], array, np.array([len(array)], np.int64))


def _stacked(arrays: list[np.ndarray], feature: Any) -> Any:
    if isinstance(feature, VarLenFeature):
        return sparse_rows(arrays)
    longest = max((array.shape for array in arrays), default=())
    if isinstance(feature, FixedLenFeature):
        return np.stack(arrays)
    default = feature.default_value
    if default is None:
        default = b"" if np.dtype(feature.dtype) == object else 0
    result = np.full((len(arrays), *longest), default, feature.dtype)
    for row, values in zip(result, arrays, strict=True):
        row[: len(values)] = values
    return result


def bytes_of(serialized: object) -> bytes:
    """Returns the bytes of a record or file, outside of steps."""
    value = serialized.item() if isinstance(serialized, np.ndarray) else serialized
    if not isinstance(value, bytes):
        raise InvalidTypeError(
            f"parse_example: got {shown(serialized)}, expected the bytes of a record. Parse"
            " outside of steps, for example in Dataset.map."
        )
    return value


def _bytes_or_text(value: object) -> bytes:
    text = value.item() if isinstance(value, np.ndarray) else value
    return text.encode() if isinstance(text, str) else bytes_of(value)


def _parsed(record: bytes, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
    messages = _message("Example", record).features.feature
    return {key: _values(key, messages.get(key), feature) for key, feature in features.items()}


def _message(kind: str, record: bytes) -> Any:
    try:
        return message_type(kind).FromString(record)
    except Exception as error:  # DecodeError is a class of the protobuf that is installed
        raise InvalidValueError(
            f"parse_example: a record of {len(record)} bytes is not a tf.train.{kind}."
        ) from error


def _values(key: str, message: Any, feature: object) -> np.ndarray:
    if isinstance(feature, VarLenFeature):
        feature = FixedLenSequenceFeature((), feature.dtype, allow_missing=True)
    if not isinstance(feature, (FixedLenFeature, FixedLenSequenceFeature)):
        raise InvalidTypeError(
            f"parse_example: feature {key!r} is described by {shown(feature)}. Use"
            " FixedLenFeature, VarLenFeature, or FixedLenSequenceFeature(shape, dtype,"
            " allow_missing=True)."
        )
    dtype = np.dtype(feature.dtype)
    is_sequence = isinstance(feature, FixedLenSequenceFeature)
    kind = None if message is None else message.WhichOneof("kind")
    if kind is None:
        if isinstance(feature, FixedLenSequenceFeature):
            default: Any = np.zeros((0, *feature.shape)) if feature.allow_missing else None
        else:
            default = feature.default_value
        if default is None:
            raise InvalidValueError(
                f"parse_example: a record has no feature {key!r}. Give FixedLenFeature a"
                " default_value, or FixedLenSequenceFeature allow_missing=True."
            )
        missing = np.asarray(default, dtype)
        return missing if is_sequence else np.broadcast_to(missing, tuple(feature.shape))
    expected = {"O": "bytes_list", "f": "float_list"}.get(dtype.kind, "int64_list")
    if kind != expected:
        raise InvalidTypeError(
            f"parse_example: feature {key!r} has the kind {kind}, but {dtype} needs {expected}."
        )
    values = getattr(message, kind).value
    shape = (-1, *feature.shape) if is_sequence else tuple(feature.shape)
    size = math.prod(feature.shape)
    if len(values) != size and not (is_sequence and len(values) % size == 0):
        raise InvalidValueError(
            f"parse_example: feature {key!r} has {len(values)} values, but its shape"
            f" {tuple(feature.shape)} has {size}."
        )
    return np.array(values, dtype).reshape(shape)


def decode_raw(
    input_bytes: object,
    out_type: DTypeLike,
    little_endian: bool = True,
    fixed_length: int | None = None,
    name: str | None = None,
) -> np.ndarray:
    """`tf.io.decode_raw`: the bytes of a string as numbers, `[n]`."""
    dtype = np.dtype(out_type).newbyteorder("<" if little_endian else ">")
    data = _bytes_or_text(input_bytes)
    if fixed_length is not None:
        data = data[:fixed_length].ljust(fixed_length, b"\0")
    return np.frombuffer(data, dtype).astype(out_type)


def decode_base64(input: object, name: str | None = None) -> bytes:
    """`tf.io.decode_base64`: of the alphabet for the web; padding may be missing."""
    text = _bytes_or_text(input)
    return base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4))


def encode_base64(input: object, pad: bool = False, name: str | None = None) -> bytes:
    """`tf.io.encode_base64`: in the alphabet for the web."""
    text = base64.urlsafe_b64encode(_bytes_or_text(input))
    return text if pad else text.rstrip(b"=")


def decode_compressed(bytes: object, compression_type: str = "", name: str | None = None) -> Any:
    """`tf.io.decode_compressed`: of "GZIP" or "ZLIB"."""
    return zlib.decompress(bytes_of(bytes), wbits=47) if compression_type else bytes_of(bytes)


def decode_csv(
    records: object,
    record_defaults: Sequence[Any],
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    select_cols: Sequence[int] | None = None,
    name: str | None = None,
) -> list[Any]:
    """`tf.io.decode_csv`: the columns of lines of text, each in the dtype of its default."""
    lines = host_array(records)
    texts = [one.decode() if isinstance(one, bytes) else one for one in lines.reshape(-1).tolist()]
    quote = {} if use_quote_delim else {"quoting": csv.QUOTE_NONE}
    rows = [*csv.reader(texts, delimiter=field_delim, **quote)]  # type: ignore[arg-type]
    picked = range(len(record_defaults)) if select_cols is None else select_cols
    for row in rows:
        if len(row) <= max(picked) or (select_cols is None and len(row) != len(record_defaults)):
            raise InvalidValueError(
                f"tf.io.decode_csv: a line has {len(row)} fields, expected"
                f" {len(record_defaults)}: {row}."
            )
    return [
        _column([row[k] for row in rows], default, na_value, lines.shape)
        for k, default in zip(picked, record_defaults, strict=True)
    ]


def _column(fields: list[str], default: Any, na_value: str, shape: tuple[int, ...]) -> Any:
    is_dtype = isinstance(default, (type, np.dtype))
    is_required = is_dtype or np.size(default) == 0
    dtype = np.dtype(default) if is_dtype else np.asarray(default).dtype
    dtype = np.dtype({"f8": "f4", "i8": "i4"}.get(dtype.str[1:], dtype))
    missing = [field in ("", na_value) for field in fields]
    if is_required and any(missing):
        raise InvalidValueError(
            f"tf.io.decode_csv: line {missing.index(True)} lacks a field that has no default."
        )
    fill = "" if is_required else str(np.ravel(default)[0])
    values = [fill if gone else field for field, gone in zip(fields, missing, strict=True)]
    text = np.array(values, str).reshape(shape)
    return host_array(text if dtype.kind in "USO" else text.astype(dtype))


# Numbers of `tensorflow/core/framework/types.proto`.
_TENSOR_DTYPES = {
    "float32": 1, "float64": 2, "int32": 3, "uint8": 4, "int16": 5, "int8": 6, "int64": 9,
    "bool": 10, "uint16": 17, "float16": 19, "uint32": 22, "uint64": 23,
}  # fmt: skip


def serialize_tensor(tensor: Any, name: str | None = None) -> bytes:
    """`tf.io.serialize_tensor`: the bytes of an array of numbers, as TensorFlow writes them."""
    values = np.asarray(tensor if hasattr(tensor, "dtype") else array(tensor))
    if values.dtype.name not in _TENSOR_DTYPES:
        raise InvalidTypeError(
            f"tf.io.serialize_tensor: an array of dtype {values.dtype}, expected numbers. Put text"
            " into tf.train.BytesList as it is."
        )
    message = message_type("TensorProto")(
        dtype=_TENSOR_DTYPES[values.dtype.name],
        tensor_content=np.ascontiguousarray(values).tobytes(),
    )
    message.tensor_shape.SetInParent()
    for size in values.shape:
        message.tensor_shape.dim.add(size=size)
    return bytes(message.SerializeToString(deterministic=True))


def parse_tensor(serialized: object, out_type: DTypeLike, name: str | None = None) -> np.ndarray:
    """`tf.io.parse_tensor`: the array that `serialize_tensor` wrote, here or with TensorFlow."""
    message = message_type("TensorProto").FromString(bytes_of(serialized))
    dtype = np.dtype(out_type)
    if message.dtype != _TENSOR_DTYPES.get(dtype.name) or (
        not message.tensor_content and math.prod(d.size for d in message.tensor_shape.dim)
    ):
        names = {number: name for name, number in _TENSOR_DTYPES.items()}
        raise InvalidTypeError(
            f"tf.io.parse_tensor: the bytes hold {names.get(message.dtype, 'something else')},"
            f" expected an array of {dtype.name}."
        )
    shape = [dim.size for dim in message.tensor_shape.dim]
    return np.frombuffer(message.tensor_content, dtype).reshape(shape).view(Element)
