"""`tf.train.Example` and `tf.io.parse_example`: records of named features; images of files.

They run outside of steps, for example in `Dataset.map`.
"""

import base64
import csv
import io
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from distributary.errors import InvalidTypeError, InvalidValueError, shown
from distributary.tensorflow._composites import SparseTensor, sparse_rows
from distributary.tensorflow._host import Element, host_array, package
from distributary.tensorflow._operations import array
from distributary.tensorflow._training import message_type


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


def parse_single_example(
    serialized: object,
    features: Mapping[str, Any],
    example_names: object = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Returns the features of a serialized `tf.train.Example`, as arrays.

    Args:
        serialized: Bytes of one record.
        features: For each name a `FixedLenFeature`, `FixedLenSequenceFeature` or `VarLenFeature`.
        example_names: No effect.
        name: No effect.

    Raises:
        InvalidValueError: if the record is not an Example, a feature is missing or has another
            number of values.
        InvalidTypeError: if a feature has values of another type.

    Source: `tf.io.parse_single_example`.
    """
    arrays = _parsed(_bytes(serialized), features)
    return {key: _single(array, features[key]) for key, array in arrays.items()}


def parse_example(
    serialized: object,
    features: Mapping[str, Any],
    example_names: object = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Returns the features of a batch of serialized records `[n]`, with n as dim 0.

    Otherwise like `parse_single_example`.

    Source: `tf.io.parse_example`.
    """
    rows = [_parsed(_bytes(one), features) for one in np.asarray(serialized, object).reshape(-1)]
    return {key: _stacked([row[key] for row in rows], features[key]) for key in features}


def parse_single_sequence_example(
    serialized: object,
    context_features: Mapping[str, Any] | None = None,
    sequence_features: Mapping[str, Any] | None = None,
    example_name: object = None,
    name: str | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the features of a serialized `tf.train.SequenceExample`, as arrays.

    Args:
        serialized: Bytes of one record.
        context_features: For each name a `FixedLenFeature` or `VarLenFeature`.
        sequence_features: For each name a `FixedLenSequenceFeature`.
        example_name: No effect.
        name: No effect.

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
    record = _message("SequenceExample", _bytes(serialized))
    context, lists = record.context.feature, record.feature_lists.feature_list
    arrays = {key: _values(key, context.get(key), feature) for key, feature in contexts.items()}
    arrays = {key: _single(array, contexts[key]) for key, array in arrays.items()}
    return arrays, {key: _sequence(key, lists.get(key), f) for key, f in sequences.items()}


def parse_sequence_example(
    serialized: object,
    context_features: Mapping[str, Any] | None = None,
    sequence_features: Mapping[str, Any] | None = None,
    example_names: object = None,
    name: str | None = None,
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
    return (
        {key: _stacked([_whole(row[0][key]) for row in rows], contexts[key]) for key in contexts},
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


def _whole(parsed: object) -> Any:
    return parsed.values if isinstance(parsed, SparseTensor) else parsed


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


def _bytes(serialized: object) -> bytes:
    value = serialized.item() if isinstance(serialized, np.ndarray) else serialized
    if not isinstance(value, bytes):
        raise InvalidTypeError(
            f"parse_example: got {shown(serialized)}, expected the bytes of a record. Parse"
            " outside of steps, for example in Dataset.map."
        )
    return value


def _bytes_or_text(value: object) -> bytes:
    text = value.item() if isinstance(value, np.ndarray) else value
    return text.encode() if isinstance(text, str) else _bytes(value)


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


def decode_image(
    contents: object,
    channels: int | None = None,
    dtype: DTypeLike = np.uint8,
    name: str | None = None,
    expand_animations: bool = True,
) -> np.ndarray:
    """`tf.io.decode_image`: `[height, width, channels]`, by Pillow.

    Other decoders of JPEG can differ by a few levels. Images have 8 bits per channel; `channels`
    is 1, 3 or 4, or 0 for what the file has. Of animations you get the first frame.
    """
    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    image = package("tf.image", "PIL.Image", "pillow").open(io.BytesIO(_bytes(contents)))
    mode = modes.get(channels or len(image.getbands()))
    if (channels and mode is None) or image.mode.startswith("I"):
        raise InvalidValueError(
            f"decode_image: channels is {channels} for an image of mode {image.mode}; expected 0,"
            " 1, 3 or 4 channels of 8 bits."
        )
    pixels = np.asarray(image.convert(mode or "RGB"))
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    wanted = np.dtype(dtype)
    return pixels if wanted == np.uint8 else (pixels / 255).astype(wanted)


def decode_jpeg(contents: object, channels: int = 0, **options: object) -> np.ndarray:
    """`tf.io.decode_jpeg`: like `decode_image`; the other options have no effect."""
    return decode_image(contents, channels)


def decode_bmp(contents: object, channels: int = 0, name: str | None = None) -> np.ndarray:
    """`tf.io.decode_bmp`: like `decode_image`."""
    return decode_image(contents, channels)


def decode_gif(contents: object, name: str | None = None) -> np.ndarray:
    """`tf.io.decode_gif`: the first frame, `[1, height, width, 3]`."""
    return decode_image(contents, 3)[None]


def decode_png(
    contents: object, channels: int = 0, dtype: DTypeLike = np.uint8, name: str | None = None
) -> np.ndarray:
    """`tf.io.decode_png`: like `decode_image`."""
    return decode_image(contents, channels, dtype)


def decode_and_crop_jpeg(
    contents: object, crop_window: Sequence[int], channels: int = 0, **options: object
) -> np.ndarray:
    """`tf.io.decode_and_crop_jpeg`: like `decode_jpeg`, and a part `[y, x, height, width]`."""
    top, left, height, width = (int(number) for number in crop_window)
    return decode_image(contents, channels)[top : top + height, left : left + width]


def is_jpeg(contents: object, name: str | None = None) -> bool:
    """`tf.io.is_jpeg`."""
    return _bytes(contents).startswith(b"\xff\xd8\xff")


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
    return zlib.decompress(_bytes(bytes), wbits=47) if compression_type else _bytes(bytes)


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
    message = message_type("TensorProto").FromString(_bytes(serialized))
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


def encode_jpeg(image: ArrayLike, quality: int = 95, **options: object) -> bytes:
    """`tf.io.encode_jpeg`: the bytes of an image of uint8; the other options have no effect."""
    return _encoded(image, "JPEG", quality=quality)


def encode_png(image: ArrayLike, compression: int = -1, name: str | None = None) -> bytes:
    """`tf.io.encode_png`: the bytes of an image of uint8."""
    return _encoded(image, "PNG")


def _encoded(image: ArrayLike, kind: str, **options: Any) -> bytes:
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8:
        raise InvalidTypeError(
            f"An image of dtype {pixels.dtype} cannot be encoded, expected uint8. Use"
            " tf.image.convert_image_dtype(image, tf.uint8)."
        )
    pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    file = io.BytesIO()
    package("tf.image", "PIL.Image", "pillow").fromarray(pixels).save(file, kind, **options)
    return file.getvalue()
