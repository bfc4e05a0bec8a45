"""`tf.lookup`: tables from words or numbers to numbers or words.

Lookups of text run on the host, for example in `Dataset.map`. Numbers are looked up in steps, too.
"""

from dataclasses import dataclass
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from distributary.errors import InvalidValueError, UnsupportedError
from distributary.tensorflow._host import (
    Element,
    bucket_of,
    host_array,
    local_path,
    plain_values,
    require_host,
    text_of,
)
from distributary.tensorflow.autograph import is_traced, plain


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
        with open(local_path(self.filename), encoding="utf-8") as file:
            lines = file.read().splitlines()[: self.vocab_size]
        key = self.key_index, self.key_dtype, 0
        value = self.value_index, self.value_dtype, self.value_index_offset
        return [
            (self._part(line, number, *key), self._part(line, number, *value))
            for number, line in enumerate(lines)
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

    def __init__(
        self,
        initializer: KeyValueTensorInitializer | TextFileInitializer,
        default_value: object,
        name: str | None = None,
        experimental_is_anonymous: bool = False,
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

    def __init__(
        self,
        key_dtype: DTypeLike,
        value_dtype: DTypeLike,
        default_value: Any,
        name: str = "MutableHashTable",
        checkpoint: bool = True,
        experimental_is_anonymous: bool = False,
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

    def __init__(
        self,
        key_dtype: DTypeLike,
        value_dtype: DTypeLike,
        default_value: object,
        empty_key: object,
        deleted_key: object,
        initial_num_buckets: int | None = None,
        name: str = "MutableDenseHashTable",
        checkpoint: bool = True,
        experimental_is_anonymous: bool = False,
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
