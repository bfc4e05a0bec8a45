"""Text, on the host: `tf.strings`, and `tf.lookup`: tables from words or numbers to such.

Bytes in arrays count as UTF-8. Numbers are looked up in steps, too.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from distributary.errors import InvalidValueError, UnsupportedError
from distributary.tensorflow._operations import (
    Element,
    bucket_of,
    host_array,
    local_path,
    plain_values,
    require_host,
    text_of,
    without_effect,
)
from distributary.tensorflow.autograph import is_traced, plain


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


# `tf.lookup`. Lookups of text run on the host, for example in `Dataset.map`.


@final
class TextFileIndex:
    """`tf.lookup.TextFileIndex`: what stands for the whole line, and for its number."""

    WHOLE_LINE: Final = -2
    LINE_NUMBER: Final = -1


@final
@dataclass
class KeyValueTensorInitializer:
    """Keys and values in memory.

    Source: `tf.lookup.KeyValueTensorInitializer`.
    """

    keys: Any
    values: Any
    key_dtype: DTypeLike | None = None
    value_dtype: DTypeLike | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        keys, values = np.asarray(self.keys), np.asarray(self.values)
        if keys.shape != values.shape:
            raise InvalidValueError(
                f"KeyValueTensorInitializer: {keys.size} keys, but {values.size} values; expected"
                " a value for each key."
            )
        self.key_dtype = _dtype_of(keys, self.key_dtype)
        self.value_dtype = _dtype_of(values, self.value_dtype)

    def pairs(self) -> list[tuple[Any, Any]]:
        """Returns the keys and values."""
        return [*zip(_flat(self.keys), _flat(self.values), strict=True)]


@final
@dataclass
class TextFileInitializer:
    """Keys and values in the lines of a file.

    Source: `tf.lookup.TextFileInitializer`.
    """

    filename: str
    key_dtype: DTypeLike
    key_index: int
    value_dtype: DTypeLike
    value_index: int
    vocab_size: int | None = None
    delimiter: str = "\t"
    name: str | None = None
    value_index_offset: int = 0

    def __post_init__(self) -> None:
        self.key_dtype = np.dtype(self.key_dtype)
        self.value_dtype = np.dtype(self.value_dtype)

    def pairs(self) -> list[tuple[Any, Any]]:
        """Returns the keys and values."""
        text = Path(local_path(self.filename)).read_text("utf-8")
        key = self.key_index, self.key_dtype, 0
        value = self.value_index, self.value_dtype, self.value_index_offset
        return [
            (self._part(line, number, *key), self._part(line, number, *value))
            for number, line in enumerate(text.splitlines()[: self.vocab_size])
        ]

    def _part(self, line: str, number: int, index: int, dtype: Any, offset: int) -> Any:
        if index == TextFileIndex.LINE_NUMBER:
            return number + offset
        text = line if index == TextFileIndex.WHOLE_LINE else line.split(self.delimiter)[index]
        return text if np.dtype(dtype).kind == "O" else np.dtype(dtype).type(text).item()


class _Table:
    """A table of Python, with TensorFlow's methods."""

    def __init__(self, key_dtype: Any, value_dtype: Any, default: object, name: str | None) -> None:
        #: Dtypes of keys and values.
        self.key_dtype, self.value_dtype = np.dtype(key_dtype), np.dtype(value_dtype)
        #: The name.
        self.name = name or type(self).__name__
        #: The value of keys that are not there.
        self.default_value: Any = text_of(default) if self._has_text else np.asarray(default).item()
        self._entries: dict[Any, Any] = {}

    @property
    def _has_text(self) -> bool:
        return self.value_dtype.kind == "O"

    def size(self, name: str | None = None) -> Any:
        """Returns the number of keys, int64 `[]`."""
        return host_array(len(self._entries), np.int64)

    def lookup(self, keys: object, name: str | None = None) -> Any:
        """Returns the values of keys, in the same shape; the default where there is none."""
        require_host(f"tf.lookup.{type(self).__name__}", keys)
        entries = [self._value_of(key) for key in _flat(keys)]
        values = np.array(entries, str if self._has_text else self.value_dtype)
        return host_array(values.reshape(np.asarray(keys).shape))

    def _value_of(self, key: object) -> Any:
        return self._entries.get(key, self.default_value)

    def __getitem__(self, keys: object) -> Any:
        return self.lookup(keys)

    def export(self, name: str | None = None) -> tuple[Any, Any]:
        """Returns all keys and their values."""
        return host_array([*self._entries]), host_array([*self._entries.values()])


@final
class StaticHashTable(_Table):
    """A table that does not change.

    Args:
        initializer: A `KeyValueTensorInitializer` or a `TextFileInitializer`.
        default_value: The value of keys that are not there.
        name: Name of the table.
        experimental_is_anonymous: No effect.

    Raises:
        InvalidValueError: if a key has two values.

    Source: `tf.lookup.StaticHashTable`.
    """

    @without_effect("experimental_is_anonymous")
    def __init__(
        self,
        initializer: KeyValueTensorInitializer | TextFileInitializer,
        default_value: object,
        name: str | None = None,
    ) -> None:
        super().__init__(initializer.key_dtype, initializer.value_dtype, default_value, name)
        for key, value in initializer.pairs():
            if self._entries.setdefault(key, value) != value:
                raise InvalidValueError(
                    f"tf.lookup.StaticHashTable: key {key!r} has the values"
                    f" {self._entries[key]!r} and {value!r}; expected one."
                )

    def lookup(self, keys: object, name: str | None = None) -> Any:
        """Returns the values of keys, in the same shape; the default where there is none."""
        array = plain(keys)
        if not is_traced(array) or self._has_text:
            return super().lookup(array)
        known = sorted(self._entries)
        if not known:
            return jnp.full(array.shape, self.default_value, self.value_dtype)
        keys_, values = jnp.asarray(known), jnp.asarray([self._entries[key] for key in known])
        place = jnp.clip(jnp.searchsorted(keys_, array), 0, len(known) - 1)
        dtype = jax.dtypes.canonicalize_dtype(self.value_dtype)
        return jnp.where(keys_[place] == array, values[place], self.default_value).astype(dtype)


@final
class StaticVocabularyTable(_Table):
    """A table of the numbers of words, with buckets for words that are not in it.

    The bucket of a word is another one than in TensorFlow, unless there is one bucket only.

    Args:
        initializer: An initializer with numbers from 0 as values.
        num_oov_buckets: Number of buckets after them.
        lookup_key_dtype: No effect.
        name: Name of the table.
        experimental_is_anonymous: No effect.

    Source: `tf.lookup.StaticVocabularyTable`.
    """

    def __init__(
        self,
        initializer: KeyValueTensorInitializer | TextFileInitializer | None,
        num_oov_buckets: int,
        lookup_key_dtype: DTypeLike | None = None,
        name: str | None = None,
        experimental_is_anonymous: bool = False,
    ) -> None:
        key_dtype = lookup_key_dtype if initializer is None else initializer.key_dtype
        super().__init__(object if key_dtype is None else key_dtype, np.int64, -1, name)
        if num_oov_buckets < 1:
            raise InvalidValueError(
                f"tf.lookup.StaticVocabularyTable: num_oov_buckets is {num_oov_buckets}, expected 1"
                " or more. Use StaticHashTable to give unknown words a default."
            )
        self._num_buckets = int(num_oov_buckets)
        self._entries.update([] if initializer is None else initializer.pairs())
        if sorted(self._entries.values()) != list(range(len(self._entries))):
            raise InvalidValueError(
                "tf.lookup.StaticVocabularyTable: the values are not the numbers 0, 1, 2, ..., so"
                " buckets after them would be ambiguous. Use TextFileIndex.LINE_NUMBER as values."
            )

    def _value_of(self, key: object) -> Any:
        if key in self._entries:
            return self._entries[key]
        return len(self._entries) + bucket_of(str(key), self._num_buckets)

    def size(self, name: str | None = None) -> Any:
        """Returns the number of keys and buckets, int64 `[]`."""
        return host_array(len(self._entries) + self._num_buckets, np.int64)


class _Changing(_Table):
    def insert(self, keys: object, values: object, name: str | None = None) -> None:
        """Sets the values of keys."""
        require_host(f"tf.lookup.experimental.{type(self).__name__}", keys, values)
        self._entries.update(zip(_flat(keys), _flat(values), strict=True))

    def remove(self, keys: object, name: str | None = None) -> None:
        """Removes keys; it does not matter whether they are there."""
        for key in _flat(keys):
            self._entries.pop(key, None)

    def get_state(self) -> dict[str, Any]:
        """Returns the content, for checkpoints."""
        return {"keys": [*self._entries], "values": [*self._entries.values()]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over the content of a checkpoint."""
        self._entries = dict(zip(state["keys"], state["values"], strict=True))


@final
class MutableHashTable(_Changing):
    """A table that changes, on the host.

    Source: `tf.lookup.experimental.MutableHashTable`.
    """

    @without_effect("checkpoint experimental_is_anonymous")
    def __init__(
        self,
        key_dtype: DTypeLike,
        value_dtype: DTypeLike,
        default_value: Any,
        name: str = "MutableHashTable",
    ) -> None:
        if np.ndim(default_value):
            raise UnsupportedError(
                "tf.lookup.experimental.MutableHashTable: default_value has shape"
                f" {np.shape(default_value)}, expected a scalar. Keep rows in a tf.Variable, and"
                " their numbers in the table."
            )
        super().__init__(key_dtype, value_dtype, default_value, name)

    def lookup(  # type: ignore[override]  # as in TensorFlow
        self, keys: object, dynamic_default_values: Any = None, name: str | None = None
    ) -> Any:
        """Returns the values of keys, in the same shape.

        Args:
            keys: The keys.
            dynamic_default_values: Values, in the same shape, for keys that are not there; None
                takes the default of the table.
            name: No effect.
        """
        values = super().lookup(keys)
        if dynamic_default_values is None:
            return values
        is_known = np.array([key in self._entries for key in _flat(keys)], bool)
        is_known = is_known.reshape(np.asarray(keys).shape)
        return np.where(is_known, values, dynamic_default_values).view(Element)


@final
class DenseHashTable(_Changing):
    """A table that changes, on the host.

    Source: `tf.lookup.experimental.DenseHashTable`.
    """

    @without_effect("checkpoint experimental_is_anonymous")
    def __init__(
        self,
        key_dtype: DTypeLike,
        value_dtype: DTypeLike,
        default_value: object,
        empty_key: object,
        deleted_key: object,
        initial_num_buckets: int | None = None,
        name: str = "MutableDenseHashTable",
    ) -> None:
        super().__init__(key_dtype, value_dtype, default_value, name)
        self._reserved = {*_flat([empty_key, deleted_key])}

    def insert(self, keys: object, values: object, name: str | None = None) -> None:
        """Sets the values of keys.

        Raises:
            InvalidValueError: for the two keys that mark empty places.
        """
        if self._reserved & {*_flat(keys)}:
            raise InvalidValueError(
                f"tf.lookup.experimental.DenseHashTable: {keys!r} contains empty_key or"
                f" deleted_key, {self._reserved}."
            )
        super().insert(keys, values)

    insert_or_assign = insert
    erase = _Changing.remove


def _flat(values: Any) -> list[Any]:
    """Returns the keys or values in an array as Python's."""
    return plain_values(np.asarray(values).reshape(-1))


def _dtype_of(values: np.ndarray, dtype: DTypeLike | None) -> np.dtype[Any]:
    if dtype is not None:
        return np.dtype(dtype)
    return np.dtype(object) if values.dtype.kind in "USO" else values.dtype
