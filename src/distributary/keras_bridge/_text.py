"""Text stays on the host: functional models compute there, and other uses are refused.

Keras converts all inputs to arrays of JAX, which has no text. The layers that take text, such as
`StringLookup` of `distributary.compat.tensorflow`, compute with NumPy.
"""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from distributary.errors import InvalidTypeError, shown

FUNCTIONAL = "keras.src.models.functional.Functional"


def convert_inputs(
    original: Callable[..., Any], self: Any, flat_inputs: Iterable[Any]
) -> list[Any]:
    """Leaves text on the host."""
    if not _has_text(self):
        flat_inputs = list(flat_inputs)
        require_numbers("A model", flat_inputs)
        return original(self, flat_inputs)
    return [
        value
        if value is None
        else _text(value, len(symbolic.shape), symbolic.shape[-1:] == (1,))
        if symbolic.dtype == "string"
        else keras.ops.convert_to_tensor(value, symbolic.dtype, symbolic.sparse)
        for value, symbolic in zip(flat_inputs, self.inputs, strict=True)
    ]


def _text(value: object, ndim: int, is_column: bool) -> np.ndarray:
    """Returns text as an array; adds or removes a last dim of 1, as Keras does for numbers."""
    text = np.asarray(value)
    if text.ndim == ndim + 1 and text.shape[-1] == 1:
        return text[..., 0]
    return text[..., None] if is_column and text.ndim == ndim - 1 else text


def adjust_input_rank(original: Callable[..., Any], self: Any, flat_inputs: list[Any]) -> list[Any]:
    """Accepts one example without the dim of the batch, as in `Dataset.map`."""
    is_example = _has_text(self) and all(
        value is None or value.shape == symbolic.shape[1:]
        for value, symbolic in zip(flat_inputs, self.inputs, strict=True)
    )
    return flat_inputs if is_example else original(self, flat_inputs)


def require_numbers(what: str, data: object) -> None:
    """Raises an error if arrays in memory hold text."""
    for leaf in keras.tree.flatten(data):
        # DataFrames and Series of pandas have several
        dtypes = getattr(leaf, "dtypes", getattr(leaf, "dtype", ()))
        dtypes = dtypes if isinstance(dtypes, Iterable) else [dtypes]
        columns = zip(getattr(leaf, "columns", [getattr(leaf, "name", None)]), dtypes, strict=False)
        text = [name for name, dtype in columns if getattr(dtype, "kind", "-") in "USO"]
        if text:
            where = "" if text[0] is None else f" in column {text[0]!r}"
            raise InvalidTypeError(
                f"{what} is given {shown(leaf)} with strings or objects{where}, which cannot go to"
                " a device. Map them to numbers first: dataset.map(lambda text: layer(text)), with"
                " a layer such as keras.layers.StringLookup or TextVectorization outside of the"
                " model, or column.astype('category').cat.codes."
            )


def _has_text(model: Any) -> bool:
    return any(symbolic.dtype == "string" for symbolic in model.inputs)
