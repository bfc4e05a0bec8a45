"""`tf.strings`: text, on the host; bytes in arrays count as UTF-8."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from distributary.errors import InvalidValueError, UnsupportedError
from distributary.tensorflow._host import Element, bucket_of, host_array, require_host, text_of


def _each(what: str, change: Callable[[str], Any], value: object, dtype: Any = None) -> Any:
    require_host(f"tf.strings.{what}", value)
    texts = host_array(value)
    flat = [change(text_of(one)) for one in texts.reshape(-1).tolist()]
    return np.array(flat, dtype if flat or dtype else "U1").reshape(texts.shape).view(Element)


def lower(input: object, encoding: str = "", name: str | None = None) -> Any:
    """`tf.strings.lower`."""
    return _each("lower", str.lower if encoding else _ascii(str.lower), input)


def upper(input: object, encoding: str = "", name: str | None = None) -> Any:
    """`tf.strings.upper`."""
    return _each("upper", str.upper if encoding else _ascii(str.upper), input)


def _ascii(change: Callable[[str], str]) -> Callable[[str], str]:
    """Returns a change of ASCII letters only, which is what TensorFlow's default means."""
    return lambda text: "".join(change(c) if c.isascii() else c for c in text)


def strip(input: object, name: str | None = None) -> Any:
    """`tf.strings.strip`."""
    return _each("strip", str.strip, input)


def length(input: object, unit: str = "BYTE", name: str | None = None) -> Any:
    """`tf.strings.length`."""
    count = len if unit == "UTF8_CHAR" else lambda text: len(text.encode())
    return _each("length", count, input, np.int32)


def substr(input: object, pos: int, len: int, unit: str = "BYTE", name: str | None = None) -> Any:
    """`tf.strings.substr`: of one place and length for all."""
    first, size = int(pos), int(len)

    def part(text: str) -> str:
        whole: Any = text if unit == "UTF8_CHAR" else text.encode()
        start = first if first >= 0 else first + whole.__len__()
        if not 0 <= start <= whole.__len__():
            raise InvalidValueError(f"tf.strings.substr: {text!r} has no place {first}.")
        return text_of(whole[start : start + size])

    return _each("substr", part, input)


def regex_replace(
    input: object, pattern: str, rewrite: str, replace_global: bool = True, name: str | None = None
) -> Any:
    r"""`tf.strings.regex_replace`: by Python's `re`; `\1` and `\0` in `rewrite` are groups."""
    regex, text = re.compile(text_of(pattern)), re.sub(r"\\0", r"\\g<0>", text_of(rewrite))
    return _each("regex_replace", lambda one: regex.sub(text, one, int(not replace_global)), input)


def regex_full_match(input: object, pattern: str, name: str | None = None) -> Any:
    """`tf.strings.regex_full_match`: by Python's `re`."""
    regex = re.compile(text_of(pattern))
    return _each("regex_full_match", lambda one: regex.fullmatch(one) is not None, input, bool)


def split(input: Any, sep: str | None = None, maxsplit: int = -1, name: str | None = None) -> Any:
    """`tf.strings.split`: of one text; the words of several have different numbers."""
    require_host("tf.strings.split", input)
    text = host_array(input)
    if text.ndim:
        raise UnsupportedError(
            f"tf.strings.split: got an array of shape {text.shape}, but there are no ragged"
            " arrays. Split one text at a time in Dataset.map, and pad with padded_batch."
        )
    return host_array(np.array(text_of(text.item()).split(sep or None, maxsplit), str))


def bytes_split(input: object, name: str | None = None) -> Any:
    """`tf.strings.bytes_split`: of one text, characters that are a byte each."""
    return host_array(np.array(list(text_of(host_array(input).item())), str))


def join(inputs: Sequence[Any], separator: str = "", name: str | None = None) -> Any:
    """`tf.strings.join`: element by element."""
    require_host("tf.strings.join", *inputs)
    arrays = np.broadcast_arrays(*(host_array(one) for one in inputs))
    rows = zip(*(array.reshape(-1).tolist() for array in arrays), strict=True)
    joined = [separator.join(map(text_of, row)) for row in rows]
    return host_array(np.array(joined, str).reshape(arrays[0].shape))


def reduce_join(
    inputs: object,
    axis: int | None = None,
    keepdims: bool = False,
    separator: str = "",
    name: str | None = None,
) -> Any:
    """`tf.strings.reduce_join`: over all elements by default."""
    texts = host_array(inputs)
    flat = texts.reshape(-1) if axis is None else np.moveaxis(texts, axis, -1)
    joined = np.array(
        [separator.join(map(text_of, row)) for row in flat.reshape(-1, flat.shape[-1]).tolist()],
        str,
    ).reshape(flat.shape[:-1])
    if keepdims:
        joined = joined.reshape([1] * texts.ndim) if axis is None else np.expand_dims(joined, axis)
    return host_array(joined)


def ngrams(
    data: object,
    ngram_width: int | Sequence[int],
    separator: str = " ",
    pad_values: str | tuple[str, str] | None = None,
    padding_width: int | None = None,
    preserve_short_sequences: bool = False,
    name: str | None = None,
) -> Any:
    """`tf.strings.ngrams`: of one row of texts.

    Args:
        data: Texts `[n]`.
        ngram_width: Number of texts to join, or several numbers.
        separator: Text between them.
        pad_values: Text to put before and after the row, or one for each side.
        padding_width: How often, at most; None means one less than the width.
        preserve_short_sequences: Whether a row that is too short for every width is joined as a
            whole.
        name: No effect.
    """
    require_host("tf.strings.ngrams", data)
    texts = [text_of(text) for text in _row("ngrams", data)]
    widths = [ngram_width] if isinstance(ngram_width, int) else [*ngram_width]
    left, right = (
        (pad_values, pad_values) if isinstance(pad_values, str) else pad_values or ("", "")
    )
    joined: list[str] = []
    for width in widths:
        most = width - 1 if padding_width is None else min(padding_width, width - 1)
        count = 0 if pad_values is None else most
        padded = [left] * count + texts + [right] * count
        grams = zip(*(padded[i:] for i in range(width)), strict=False)
        joined += map(separator.join, grams)
    if preserve_short_sequences and texts and not joined:
        joined = [separator.join(texts)]
    return host_array(np.array(joined, str))


def _row(what: str, data: object) -> list[Any]:
    rows = host_array(data)
    if rows.ndim != 1:
        raise InvalidValueError(
            f"tf.strings.{what}: data has shape {rows.shape}, expected one row. Several rows would"
            " give rows of different lengths: use Dataset.map."
        )
    return list(rows.tolist())


def format_(
    template: str,
    inputs: object,
    placeholder: str = "{}",
    summarize: int = 3,
    name: str | None = None,
) -> Any:
    """`tf.strings.format`: arrays as NumPy prints them."""
    require_host("tf.strings.format", inputs)
    values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    for value in values:
        shown = np.array2string(np.asarray(value), threshold=2 * summarize, edgeitems=summarize)
        template = template.replace(placeholder, shown, 1)
    return host_array(template)


def as_string(
    input: object,
    precision: int = -1,
    scientific: bool = False,
    shortest: bool = False,
    width: int = -1,
    fill: str = "",
    name: str | None = None,
) -> Any:
    """`tf.strings.as_string`."""
    require_host("tf.strings.as_string", input)
    values = host_array(input)
    kind = "e" if scientific else "g" if shortest else "f"
    layout = f"{fill}{'' if width < 0 else width}{'' if precision < 0 else f'.{precision}'}"

    def shown(value: object) -> str:
        if isinstance(value, (bool, str, bytes)):
            return text_of(value).lower() if isinstance(value, bool) else text_of(value)
        return format(value, layout + kind if isinstance(value, float) else layout)

    flat = [shown(value) for value in values.reshape(-1).tolist()]
    return host_array(np.array(flat, str).reshape(values.shape))


def to_number(input: object, out_type: DTypeLike = np.float32, name: str | None = None) -> Any:
    """`tf.strings.to_number`."""
    require_host("tf.strings.to_number", input)
    return host_array(input).astype(str).astype(out_type)


def to_hash_bucket(input: object, num_buckets: int, name: str | None = None) -> Any:
    """`tf.strings.to_hash_bucket`: other buckets than TensorFlow's, the same in every process."""

    def bucket(text: str) -> int:
        return bucket_of(text, num_buckets)

    return _each("to_hash_bucket", bucket, input, np.int64)
