"""Parts of Keras that need TensorFlow, without it: in `tf.keras`, and in Keras beside `tf`."""

import contextlib
import math
import os
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary import keras_bridge
from distributary._summaries import Summaries, has_tensorflow
from distributary.context import get_strategy
from distributary.errors import ContextError, InvalidTypeError, InvalidValueError, UnsupportedError
from distributary.keras_bridge import import_keras
from distributary.tensorflow import _arrays, _random, _text
from distributary.tensorflow._operations import (
    REQUIRED,
    Operation,
    array,
    bucket_of,
    host_array,
    keras_of_tensorflow,
    local_path,
    named,
    operations,
    plain_values,
    require_host,
    taking,
    text_of,
)

# Layers from words or ids to numbers. They compute on the host, mostly in `Dataset.map`, and return
# NumPy arrays. Inputs are arrays of any shape, lists, text and numbers; bytes count as UTF-8.
# Integers in results are int64.

_keras: Any = import_keras()
_Layer: Any = _keras.layers.Layer
_input = _keras.Input
_register = _keras.saving.register_keras_serializable("distributary")

Vocabulary: TypeAlias = Sequence[Any] | np.ndarray | str | os.PathLike[str]
"""Tokens, or the path of a file with one in each line."""

_MODES: Final = ("int", "one_hot", "multi_hot", "count", "tf_idf")
_STANDARDIZE: Final = ("lower_and_strip_punctuation", "lower", "strip_punctuation", None)
_SPLIT: Final = ("whitespace", "character", None)
_PUNCTUATION: Final = f"[{re.escape(string.punctuation)}]"
# Numbers in a table of a token that is not in it, and of masked tokens that are not counted.
_UNKNOWN, _DROPPED = -1, -2


def Input(  # noqa: N802
    shape: Sequence[int | None] | None = None,
    batch_size: int | None = None,
    dtype: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`tf.keras.Input`: also takes `tf.string` as its dtype."""
    is_text = dtype is not None and not isinstance(dtype, str) and np.dtype(dtype) == object
    return _input(shape, batch_size, "string" if is_text else dtype, *args, **kwargs)


@dataclass
class _Seen:
    """Tokens that `update_state` has seen: how often, in how many of how many documents."""

    tokens: Counter[Any] = field(default_factory=Counter)
    documents: Counter[Any] = field(default_factory=Counter)
    num_documents: int = 0


class _Lookup(_Layer):
    """A layer with a vocabulary, from tokens to numbers or back."""

    _has_text = True

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: object = None,
        oov_token: object = "[UNK]",
        vocabulary: Vocabulary | None = None,
        idf_weights: object = None,
        invert: bool = False,
        output_mode: str = "int",
        pad_to_max_tokens: bool = False,
        sparse: bool = False,
        encoding: str = "utf-8",
        name: str | None = None,
        salt: object = None,
        oov_method: str = "floormod",
        has_input_vocabulary: bool = False,
        vocabulary_size: int | None = None,
        trainable: bool = True,
        dtype: object = None,
    ) -> None:
        super().__init__(name=name)
        self.built, self.supports_jit = True, False
        what = type(self).__name__
        output_mode = {"binary": "multi_hot", "tf-idf": "tf_idf"}.get(output_mode, output_mode)
        _require_among(what, "output_mode", output_mode, _MODES)
        _require_among(what, "sparse", sparse, (False,))
        _require_among(what, "encoding", encoding.lower(), ("utf-8", "utf8"))
        for wrong, text in (
            (
                max_tokens is not None and max_tokens < 2,
                f"max_tokens is {max_tokens}, expected 2 or more",
            ),
            (pad_to_max_tokens and max_tokens is None, "pad_to_max_tokens=True needs max_tokens"),
            (num_oov_indices < 0, f"num_oov_indices is {num_oov_indices}, expected 0 or more"),
            (invert and output_mode != "int", f"output_mode is {output_mode!r}, but invert=True"),
        ):
            if wrong:
                raise InvalidValueError(f"{what}: {text}.")
        if salt is not None and num_oov_indices > 1:
            raise UnsupportedError(
                f"{what}: salt={salt!r} is not supported, because the buckets would be other ones"
                " than TensorFlow's. Leave it out, or use num_oov_indices=1."
            )
        self.max_tokens, self.pad_to_max_tokens = max_tokens, pad_to_max_tokens
        self.num_oov_indices, self.oov_method = num_oov_indices, oov_method
        self.mask_token, self.oov_token = mask_token, oov_token
        self.invert, self.output_mode = invert, output_mode
        self._is_static = has_input_vocabulary or vocabulary is not None
        self._num_outputs = vocabulary_size
        self._seen = _Seen()
        self._weights: np.ndarray | None = None
        # What a configuration holds: a file's tokens are saved beside it.
        is_file = vocabulary is None or isinstance(vocabulary, (str, os.PathLike))
        self._vocabulary = None if is_file else self._as_tokens(vocabulary)
        self._given_weights = None if idf_weights is None else np.asarray(idf_weights)
        self._set_tokens([])
        if vocabulary is not None:
            self.set_vocabulary(vocabulary, idf_weights)

    def __call__(self, inputs: object, **context: Any) -> Any:
        """Returns the numbers of tokens, or the tokens of numbers."""
        if isinstance(inputs, _keras.KerasTensor):
            return super().__call__(inputs, **context)
        return self.call(inputs)  # Keras would send the input to a device

    def call(self, inputs: object) -> Any:
        """Returns the numbers of tokens, or the tokens of numbers."""
        require_host(f"keras.layers.{type(self).__name__}", inputs)
        if not len(self._tokens):
            raise ContextError(
                f"{self.name} has no vocabulary. Call adapt first, or pass vocabulary=."
            )
        depth = self._depth()
        numbers = self._look_up(self._tokens_of(inputs))
        if depth is None:
            return host_array(numbers)
        numbers = np.atleast_1d(numbers)
        if self.output_mode == "one_hot":
            if numbers.ndim > 1 and numbers.shape[-1] == 1:
                numbers = numbers[..., 0]
            return host_array(numbers[..., None] == np.arange(depth), np.int64)
        rows = _rows(numbers)
        counts = np.zeros((len(rows), depth), np.int64)
        row, place = np.nonzero(rows >= 0)
        np.add.at(counts, (row, rows[row, place]), 1)
        counts = counts.reshape(*numbers.shape[:-1], depth)
        if self.output_mode == "tf_idf":
            return host_array(counts.astype(_keras.config.floatx()) * self._weights)
        return host_array(np.minimum(counts, 1) if self.output_mode == "multi_hot" else counts)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Returns the shape of results."""
        shape = tuple(input_shape)
        if self.output_mode == "int":
            return shape
        is_column = len(shape) > 1 and shape[-1] == 1
        is_kept = self.output_mode == "one_hot" and not is_column
        return (*(shape if is_kept else shape[:-1]), self._depth())

    def compute_output_spec(self, inputs: Any) -> Any:
        """Returns the shape and dtype of results."""
        dtype = "int64" if self.output_mode == "int" else _keras.config.floatx()
        if self.invert and self._has_text:
            dtype = "string"
        return _keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype)

    def adapt(self, data: Any, steps: int | None = None) -> None:
        """Makes the vocabulary from data: the tokens by falling frequency, then by falling order.

        Args:
            data: A dataset or another iterable of batches or examples, or an array, or a list.
            steps: How many batches to take, at most.
        """
        self.reset_state()
        if isinstance(data, (list, tuple, np.ndarray, jax.Array)):
            values = np.asarray(data)
            batches: Iterable[Any] = [values[:, None] if values.ndim == 1 else values]
        else:
            batches = data
        for number, batch in enumerate(batches):
            if steps is not None and number >= steps:
                break
            self.update_state(batch)
        self.finalize_state()

    def update_state(self, data: object) -> None:
        """Counts the tokens of a batch; one row is one document."""
        if self._is_static:
            raise InvalidValueError(
                f"{self.name} cannot adapt: it was made with a vocabulary. Leave out vocabulary=."
            )
        for row in _rows(self._tokens_of(data)):
            tokens = plain_values(row)
            self._seen.tokens.update(tokens)
            self._seen.documents.update(set(tokens))
            self._seen.num_documents += 1

    def finalize_state(self) -> None:
        """Makes the vocabulary from what `update_state` has counted."""
        if self._is_static or not self._seen.tokens:
            return
        counts = self._seen.tokens
        special = (self.mask_token, self.oov_token)
        ranked = sorted((t for t in counts if t not in special), key=lambda t: (counts[t], t))
        size = None if self.max_tokens is None else self.max_tokens - self._first
        tokens = ranked[::-1][:size]
        self._set_tokens(tokens)
        if self.output_mode == "tf_idf":
            num_with = np.array([self._seen.documents[token] for token in tokens])
            weights = np.log(1 + self._seen.num_documents / (1 + num_with))
            self._set_weights(weights, has_special=False)
        self.reset_state()
        self._record_size()

    def reset_state(self) -> None:
        """Forgets what `update_state` has counted; the vocabulary stays."""
        self._seen = _Seen()

    def set_vocabulary(self, vocabulary: Vocabulary, idf_weights: object = None) -> None:
        """Sets the vocabulary.

        Args:
            vocabulary: Tokens, with or without the special ones at their beginning, or the path of
                a file with one token in each line.
            idf_weights: A weight for each of them, in mode "tf_idf".

        Raises:
            InvalidValueError: if a token comes twice, or there are more than `max_tokens`.
        """
        if (idf_weights is not None) != (self.output_mode == "tf_idf"):
            raise InvalidValueError(
                f"{self.name}: idf_weights is {idf_weights!r}, but they belong to a vocabulary in"
                f" output_mode='tf_idf' only, and there always. output_mode is"
                f" {self.output_mode!r}."
            )
        if isinstance(vocabulary, str | os.PathLike):
            self._set_tokens(Path(local_path(vocabulary)).read_text("utf-8").splitlines())
            self._record_size()
            return
        words = self._as_tokens(vocabulary)
        listed, special = plain_values(words), self._special
        has_special = listed[: len(special)] == special
        tokens = listed[len(special) :] if has_special else listed
        self._check(tokens)
        self._set_tokens(tokens)
        self._record_size()
        if idf_weights is not None:
            weights = np.asarray(idf_weights)
            if weights.shape != words.shape:
                raise InvalidValueError(
                    f"{self.name}: idf_weights has shape {weights.shape}, expected a weight for"
                    f" each of the {len(words)} tokens."
                )
            self._set_weights(weights, has_special)

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[Any]:
        """Returns the tokens, each at the place of its number."""
        return (self._special if include_special_tokens else []) + plain_values(self._tokens)

    def vocabulary_size(self) -> int:
        """Returns the number of tokens, with the special ones."""
        return self._first + len(self._tokens)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of this layer, with a vocabulary that was one of them."""
        own = "max_tokens num_oov_indices mask_token oov_token invert output_mode pad_to_max_tokens"
        return (
            super().get_config()
            | named(self, own)
            | {
                "vocabulary": None if self._vocabulary is None else plain_values(self._vocabulary),
                "idf_weights": None
                if self._given_weights is None
                else self._given_weights.tolist(),
                "vocabulary_size": self._num_outputs,
            }
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Returns a layer with these arguments; a file of tokens cannot be one of them."""
        if isinstance(config.get("vocabulary"), str):
            raise InvalidValueError(
                f"{cls.__name__}: the configuration names the file {config['vocabulary']!r}, but a"
                " file that someone saved must not open others. Call set_vocabulary."
            )
        return cls(**config)

    def save_own_variables(self, store: Any) -> None:
        """Saves the weights of the tokens."""
        if self._weights is not None:
            store["idf_weights"] = self._weights

    def load_own_variables(self, store: Any) -> None:
        """Loads the weights of the tokens."""
        if self.output_mode == "tf_idf":
            self._weights = np.asarray(store["idf_weights"])

    def save_assets(self, dir_path: str) -> None:
        """Saves a vocabulary that is not in the configuration."""
        if self._vocabulary is None:
            text = "\n".join(map(str, self.get_vocabulary()))
            Path(dir_path, "vocabulary.txt").write_text(text, "utf-8")

    def load_assets(self, dir_path: str) -> None:
        """Loads a vocabulary that is not in the configuration."""
        if self._vocabulary is None:
            tokens = Path(dir_path, "vocabulary.txt").read_text("utf-8").splitlines()
            self._set_tokens(tokens[self._first :])
            self._record_size()

    def _tokens_of(self, inputs: object) -> np.ndarray:
        """Returns inputs as tokens, or as numbers if this layer goes back to tokens."""
        array = np.asarray(inputs)
        if self._has_text and not self.invert:
            if array.size and array.dtype.kind not in "USO":
                raise InvalidTypeError(
                    f"{self.name}: got an array of dtype {array.dtype}, expected text. Use"
                    " IntegerLookup for numbers."
                )
            return array.astype(object)
        if array.dtype.kind not in "biuf" or not np.all(array == np.floor(array)):
            raise InvalidTypeError(f"{self.name}: got {inputs!r}, expected integers.")
        return array.astype(np.int64)

    def _look_up(self, tokens: np.ndarray) -> Any:
        numbers = np.asarray(self._table.lookup(tokens))
        if self.invert:
            return numbers
        unknown = numbers == _UNKNOWN
        if not unknown.any():
            return numbers
        those = plain_values(tokens[unknown])
        if not self.num_oov_indices:
            raise InvalidValueError(
                f"{self.name}: {those[:5]} are not in the vocabulary, and num_oov_indices is 0. Use"
                " num_oov_indices=1 for a number of unknown tokens."
            )
        if self._has_text or self.oov_method == "farmhash":
            buckets = [bucket_of(str(one), self.num_oov_indices) for one in those]
        else:
            buckets = [one % self.num_oov_indices for one in those]
        numbers = numbers.copy()
        numbers[unknown] = self._first - self.num_oov_indices + np.asarray(buckets)
        return numbers

    @property
    def _special(self) -> list[Any]:
        has_mask = self.mask_token is not None and self.output_mode == "int"
        return [self.mask_token] * has_mask + [self.oov_token] * self.num_oov_indices

    @property
    def _first(self) -> int:
        """The number of the first token that is not special."""
        return len(self._special)

    def _depth(self) -> int | None:
        if self.output_mode == "int":
            return None
        return self.max_tokens if self.pad_to_max_tokens else self._num_outputs

    def _as_tokens(self, vocabulary: object) -> np.ndarray:
        if self._has_text:
            return np.array([text_of(one) for one in np.asarray(vocabulary).tolist()], object)
        return np.asarray(vocabulary).astype(np.int64)

    def _set_tokens(self, vocabulary: Sequence[Any]) -> None:
        tokens = self._as_tokens(vocabulary)
        keys, numbers = [*tokens], [*range(self._first, self._first + len(tokens))]
        if self.mask_token is not None:
            keys.insert(0, self.mask_token)
            numbers.insert(0, 0 if self.output_mode == "int" else _DROPPED)
        text = np.array(keys, object if self._has_text else np.int64)
        places = np.array(numbers, np.int64)
        pairs = (places, text) if self.invert else (text, places)
        one = self.num_oov_indices == 1
        unknown = self.oov_token if self.invert else self._first - 1 if one else _UNKNOWN
        initializer = _text.KeyValueTensorInitializer(pairs[0], pairs[1])
        self._tokens, self._table = tokens, _text.StaticHashTable(initializer, unknown)

    def _set_weights(self, weights: np.ndarray, has_special: bool) -> None:
        padded = weights.astype(_keras.config.floatx())
        if not has_special:
            padded = np.concatenate([np.full(self._first, padded.mean(), padded.dtype), padded])
        rest = (self.max_tokens or 0) - len(padded) if self.pad_to_max_tokens else 0
        self._weights = np.pad(padded, (0, rest))

    def _record_size(self) -> None:
        """Notes the number of tokens, which must not change where it is a size of results."""
        size = self.vocabulary_size()
        is_free = self.output_mode == "int" or self.pad_to_max_tokens
        if not is_free and self._num_outputs not in (None, size):
            raise ContextError(
                f"{self.name}: the new vocabulary has {size} tokens, but results have"
                f" {self._num_outputs} in output_mode={self.output_mode!r}. Use"
                " pad_to_max_tokens=True, or another layer."
            )
        self._num_outputs = size

    def _check(self, tokens: list[Any]) -> None:
        size = self._first + len(tokens)
        repeated = [token for token, count in Counter(tokens).items() if count > 1]
        reserved = {self.mask_token, self.oov_token if self.invert else None} - {None}
        for wrong, text in (
            (not tokens, "is empty"),
            (repeated, f"has tokens more than once: {repeated}"),
            (
                reserved & {*tokens},
                f"has {[*reserved]} elsewhere than in {self._special} at its beginning",
            ),
            (
                size > (self.max_tokens or size),
                f"has {size} tokens with the special ones, but max_tokens is {self.max_tokens}",
            ),
        ):
            if wrong:
                raise InvalidValueError(f"{self.name}: the vocabulary {text}.")


@final
@_register
class StringLookup(_Lookup):
    """Returns the numbers of words, or words of numbers with `invert=True`.

    With several `num_oov_indices`, an unknown word gets another one of them than in TensorFlow.

    Source: `tf.keras.layers.StringLookup`.
    """


@final
@_register
class IntegerLookup(_Lookup):
    """Returns the numbers of ids, or ids of numbers with `invert=True`.

    Source: `tf.keras.layers.IntegerLookup`.
    """

    _has_text = False

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: int | None = None,
        oov_token: int = -1,
        vocabulary: Vocabulary | None = None,
        vocabulary_dtype: str = "int64",
        **kwargs: Any,
    ) -> None:
        super().__init__(max_tokens, num_oov_indices, mask_token, oov_token, vocabulary, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of this layer, with a vocabulary that was one of them."""
        return super().get_config() | {"oov_method": self.oov_method}


@final
@_register
class TextVectorization(_Lookup):
    """Returns the numbers of the words of texts, a row for each text.

    A function for `standardize` gets an array of texts. One for `split` gets one text, of type
    `str`, and returns its tokens.

    Source: `tf.keras.layers.TextVectorization`.
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        standardize: str | Callable[[Any], Any] | None = "lower_and_strip_punctuation",
        split: str | Callable[[Any], Any] | None = "whitespace",
        ngrams: int | tuple[int, ...] | None = None,
        output_mode: str = "int",
        output_sequence_length: int | None = None,
        pad_to_max_tokens: bool = False,
        vocabulary: Vocabulary | None = None,
        *,
        ragged: bool = False,
        **kwargs: Any,
    ) -> None:
        what = type(self).__name__
        if not callable(standardize):
            _require_among(what, "standardize", standardize, _STANDARDIZE)
        if not callable(split):
            _require_among(what, "split", split, _SPLIT)
        if output_sequence_length is not None:
            _require_among(what, "output_mode with output_sequence_length", output_mode, ("int",))
        if ragged:
            raise UnsupportedError(
                f"{what}: ragged=True is not supported, because there are no ragged arrays. Results"
                " are padded with 0."
            )
        super().__init__(
            max_tokens,
            mask_token="",
            vocabulary=vocabulary,
            output_mode=output_mode,
            pad_to_max_tokens=pad_to_max_tokens,
            **kwargs,
        )
        self._standardize, self._split, self._ngrams = standardize, split, ngrams
        self._length = output_sequence_length

    def call(self, inputs: object) -> Any:
        """Returns the numbers of the words of texts."""
        numbers = super().call(inputs)
        if self._length is None:
            return numbers
        rest = max(0, self._length - numbers.shape[-1])
        cut = np.asarray(numbers)[..., : self._length]
        return host_array(np.pad(cut, [(0, 0)] * (cut.ndim - 1) + [(0, rest)]))

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Returns the shape of results."""
        shape = tuple(input_shape)
        if self._split is not None:
            shape = (*(shape[:-1] if len(shape) > 1 else shape), None)
        elif self._ngrams is not None:
            shape = (*shape[:-1], None)
        if self._length is not None:
            shape = (*shape[:-1], self._length)
        return super().compute_output_shape(shape)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of this layer, with a vocabulary that was one of them."""
        config = super().get_config() | {
            "standardize": self._standardize,
            "split": self._split,
            "ngrams": self._ngrams,
            "output_sequence_length": self._length,
        }
        for name in ("num_oov_indices", "mask_token", "oov_token", "invert"):
            del config[name]
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Returns a layer with these arguments."""
        restored = {
            name: _keras.saving.deserialize_keras_object(value)
            for name in ("standardize", "split")
            if isinstance(value := config.get(name), dict)
        }
        ngrams = config.get("ngrams")
        restored["ngrams"] = tuple(ngrams) if isinstance(ngrams, list) else ngrams
        return super().from_config(config | restored)

    def _tokens_of(self, inputs: object) -> np.ndarray:
        """Returns the tokens of texts, in rows that are padded with the mask token."""
        tokens = super()._tokens_of(inputs)
        texts: Any = np.array(plain_values(tokens.reshape(-1)), str).reshape(tokens.shape)
        if self._standardize in ("lower", "lower_and_strip_punctuation"):
            texts = _text.lower(texts)
        if self._standardize in ("strip_punctuation", "lower_and_strip_punctuation"):
            texts = _text.regex_replace(texts, _PUNCTUATION, "")
        if callable(self._standardize):
            texts = self._standardize(host_array(texts))
        texts = np.asarray(texts)
        if self._split is None:
            if self._ngrams is None:
                return texts.astype(object)
            rows, shape = [*_rows(texts)], texts.shape[:-1]
        else:
            if texts.ndim > 1 and texts.shape[-1] != 1:
                raise InvalidValueError(
                    f"{self.name}: texts have shape {texts.shape}, expected [n] or [n, 1]. Use"
                    " split=None for texts that are tokens already."
                )
            texts = texts[..., 0] if texts.ndim > 1 else texts
            rows, shape = [*map(self._words, plain_values(texts.reshape(-1)))], texts.shape
        if self._ngrams is not None:
            widths = range(1, self._ngrams + 1) if isinstance(self._ngrams, int) else self._ngrams
            rows = [_text.ngrams(row, [*widths]).tolist() for row in rows]
        length = max(map(len, rows), default=0)
        padded = [[*row, *[""] * (length - len(row))] for row in rows]
        return np.array(padded, object).reshape(*shape, length)

    def _words(self, text: str) -> list[str]:
        if callable(self._split):
            parts = np.asarray(self._split(text))
            return plain_values(np.asarray(parts.item()) if parts.ndim == 0 else parts)
        if self._split == "character":
            return [*text]
        # Bytes are split at ASCII's white space only, as in TensorFlow.
        return [word.decode() for word in text.encode().split()]


def _rows(values: np.ndarray) -> np.ndarray:
    """Returns values `[..., n]` as `[m, n]`."""
    shape = np.atleast_1d(values).shape
    return values.reshape(math.prod(shape[:-1]), shape[-1])


def _require_among(what: str, argument: str, value: object, known: Sequence[Any]) -> None:
    if value not in known:
        shown = ", ".join(map(repr, known))
        raise InvalidValueError(f"{what}: {argument} is {value!r}, expected one of {shown}.")


# Other parts of Keras.


class TensorBoard(_keras.callbacks.TensorBoard):
    """Writes with tensorboardX where TensorFlow is missing, also for a model without a strategy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not has_tensorflow():
            self._summary_module = Summaries()
            self.write_graph = False


@_keras.saving.register_keras_serializable("distributary")
class ConstantInitializer(_keras.initializers.Initializer):
    """Fills an array with as many numbers as it has places."""

    def __init__(self, value: list[Any]) -> None:
        self.value = value

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> Any:
        """Returns the array."""
        return _arrays.constant(self.value, dtype, tuple(shape))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of this initializer."""
        return {"value": self.value}


#: What replaces names of Keras, by the path of their module.
PARTS: Final[dict[str, dict[str, Any]]] = {
    "": {"Input": Input},
    ".callbacks": {"TensorBoard": TensorBoard},
    ".layers": {
        "Input": Input,
        "IntegerLookup": IntegerLookup,
        "StringLookup": StringLookup,
        "TextVectorization": TextVectorization,
    },
}


def complete(tensorflow: ModuleType) -> None:
    """Gives Keras these parts, and `tf` for its functions that make datasets, if it has no other.

    Layers may compute shapes from `tf.shape` of open sizes. Models get what steps that were written
    for Keras 2 use.

    Source: `keras.utils.image_dataset_from_directory` and others call TensorFlow.
    """
    keras_bridge.replace_shape_inference(_output_spec)
    _keras.Model.compiled_loss = compiled_loss
    _keras.Model.compiled_metrics = property(compiled_metrics)
    _keras.Model.distribute_strategy = property(distribute_strategy)
    if has_tensorflow():
        return
    keras_bridge.lazy_tensorflow.module = tensorflow
    for path, parts in PARTS.items():
        vars(sys.modules[f"keras{path}"]).update(parts)


def compiled_loss(self: Any, y: Any, y_pred: Any, sample_weight: Any = None, *rest: object) -> Any:
    """Returns the model's `compute_loss`."""
    return self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)


def compiled_metrics(self: Any) -> Any:
    """Returns an object that updates all metrics of a model; a mean is that of predictions."""

    def update_state(y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        for metric in self.metrics:
            values = (y_pred,) if type(metric) is _keras.metrics.Mean else (y, y_pred)
            metric.update_state(*values, sample_weight=sample_weight)

    return SimpleNamespace(update_state=update_state)


def distribute_strategy(self: Any) -> Any:
    """Returns the strategy of a model; without one, the current strategy."""
    return keras_bridge.strategy_of(self) or get_strategy()


# Sizes that stand for open ones; models mostly halve, split or pool them.
_SIZES = (96, 192)


def _output_spec(
    original: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Infers shapes also if JAX cannot with open sizes, such as those in values of `tf.shape`.

    The function then runs with two numbers in place of open sizes, and what differs is open.
    """
    try:
        return original(fn, *args, **kwargs)
    except Exception:
        leaves = _keras.tree.flatten((args, kwargs))
        if any(isinstance(x, _keras.KerasTensor) and None in x.shape for x in leaves):
            with contextlib.suppress(Exception):
                specs = (_with_size(size, original, fn, args, kwargs) for size in _SIZES)
                return _keras.tree.map_structure(_in_common, *specs)
        raise


def _with_size(size: int, original: Callable[..., Any], fn: Any, args: Any, kwargs: Any) -> Any:
    def closed(x: Any) -> Any:
        if not isinstance(x, _keras.KerasTensor):
            return x
        shape = [size if dim is None else dim for dim in x.shape]
        return _keras.KerasTensor(shape, x.dtype, x.sparse)

    args, kwargs = _keras.tree.map_structure(closed, (args, kwargs))
    return original(fn, *args, **kwargs)


def _in_common(a: Any, b: Any) -> Any:
    if not isinstance(a, _keras.KerasTensor):
        return a
    shape = [i if i == j else None for i, j in zip(a.shape, b.shape, strict=True)]
    return _keras.KerasTensor(shape, a.dtype, a.sparse)


# `tf.keras.backend`: its functions that have no other name; the others are in the tables.


def batch_get_value(tensors: Iterable[Any]) -> list[np.ndarray]:
    """`tf.keras.backend.batch_get_value`: copies as NumPy arrays."""
    return [get_value(tensor) for tensor in tensors]


def batch_set_value(tuples: Iterable[tuple[Any, Any]]) -> None:
    """`tf.keras.backend.batch_set_value`: assigns values to variables."""
    for variable, value in tuples:
        set_value(variable, value)


def concatenate(tensors: list[Array], axis: int = -1) -> Array:
    """`tf.keras.backend.concatenate`."""
    return _arrays.concat(tensors, axis)


def count_params(x: Array) -> int:
    """`tf.keras.backend.count_params`: the number of elements."""
    return x.size


def dtype(x: Array) -> str:
    """`tf.keras.backend.dtype`: the name of the dtype."""
    return x.dtype.name


def get_value(x: Any) -> np.ndarray:
    """`tf.keras.backend.get_value`: a copy as a NumPy array, a number for a scalar."""
    return np.array(array(x))[()]


def set_value(x: Any, value: ArrayLike) -> None:
    """`tf.keras.backend.set_value`: assigns a value to a variable, such as a learning rate."""
    x.assign(np.asarray(value, _keras.backend.standardize_dtype(x.dtype)))


def update(x: Any, new_x: Array) -> Any:
    """`tf.keras.backend.update`."""
    return x.assign(new_x)


def update_add(x: Any, increment: Array) -> Any:
    """`tf.keras.backend.update_add`."""
    return x.assign_add(increment)


def update_sub(x: Any, decrement: Array) -> Any:
    """`tf.keras.backend.update_sub`."""
    return x.assign_sub(decrement)


def variable(value: Array, dtype: DTypeLike | None = None) -> Any:
    """`tf.keras.backend.variable`: a Keras variable with `value`."""
    return _keras.Variable(value, dtype=dtype)


def permute_dimensions(x: ArrayLike, pattern: Sequence[int]) -> Array:
    """`tf.keras.backend.permute_dimensions`."""
    return jnp.transpose(x, pattern)


def relu(
    x: ArrayLike, alpha: float = 0.0, max_value: float | None = None, threshold: float = 0.0
) -> Array:
    """`tf.keras.backend.relu`."""
    return _keras.activations.relu(x, alpha, max_value, threshold)


def tile(x: ArrayLike, n: Sequence[int]) -> Array:
    """`tf.keras.backend.tile`."""
    return jnp.tile(x, n)


_SAME = (
    "abs cos equal exp greater greater_equal less less_equal maximum minimum not_equal round"
    " sigmoid sign sin sqrt square tanh"
)


def backend_names() -> dict[str, Any]:
    """Returns the names of `tf.keras.backend`."""
    return {
        **named(
            _keras.backend,
            "backend clear_session epsilon floatx get_uid image_data_format is_keras_tensor"
            " result_type set_epsilon set_floatx set_image_data_format standardize_dtype",
        ),
        **{name: _arrays.EVERYWHERE[name] for name in _SAME.split()},
        **taking(
            named(jnp, "log ndim transpose")
            | {
                "flatten": jnp.ravel,
                "hard_sigmoid": _keras.ops.hard_sigmoid,
                "int_shape": jnp.shape,
                "softplus": jax.nn.softplus,
                "softsign": jax.nn.soft_sign,
            },
            "x",
        ),
        **taking(
            named(jnp, "all any max mean min prod std sum var"), "x", axis=None, keepdims=False
        ),
        **taking(named(jnp, "argmax argmin expand_dims") | named(jax.nn, "softmax"), "x", axis=-1),
        **taking(named(jnp, "cumprod cumsum stack"), "x", axis=0),
        **taking(named(jnp, "ones_like zeros_like"), "x", dtype=None),
        **taking(named(jnp, "ones zeros"), shape=REQUIRED, dtype=None),
        **taking(
            named(_keras.ops, "categorical_crossentropy sparse_categorical_crossentropy"),
            "target",
            "output",
            from_logits=False,
            axis=-1,
        ),
        "arange": Operation(jnp.arange, "start", stop=None, step=1, dtype="int32"),
        "binary_crossentropy": Operation(
            _keras.ops.binary_crossentropy, "target", "output", from_logits=False
        ),
        "clip": Operation(jnp.clip, "x", "min_value", "max_value"),
        "cast_to_floatx": keras_of_tensorflow().backend.cast_to_floatx,
        "dot": Operation(jnp.dot, "x", "y"),
        "elu": Operation(jax.nn.elu, "x", alpha=1.0),
        "eye": Operation(jnp.eye, "size", dtype=None),
        "one_hot": Operation(jax.nn.one_hot, "indices", num_classes=REQUIRED),
        "pow": Operation(jnp.power, "x", "a"),
        "repeat_elements": Operation(jnp.repeat, "x", "rep", "axis"),
        "reshape": Operation(jnp.reshape, "x", shape=REQUIRED),
        "squeeze": Operation(jnp.squeeze, "x", axis=REQUIRED),
        "stop_gradient": Operation(jax.lax.stop_gradient, "variables"),
        "switch": Operation(jnp.where, "condition", "then_expression", "else_expression"),
        **operations(
            sys.modules[__name__],
            "concatenate count_params dtype get_value permute_dimensions relu set_value tile update"
            " update_add update_sub variable",
        ),
        **operations(_arrays, "cast constant shape"),
        **operations(_arrays, "l2_normalize"),
        "batch_get_value": batch_get_value,
        "batch_set_value": batch_set_value,
        "random_normal": Operation(_random.normal),
        "random_uniform": Operation(_random.uniform),
        "truncated_normal": Operation(_random.truncated_normal),
    }
