"""Datasets of arrays and numbers in memory."""

from dataclasses import dataclass
from typing import final

import numpy as np
from jax.tree_util import PyTreeDef

from distributary.data._nodes import NumberedNode
from distributary.data._options import INFINITE_CARDINALITY
from distributary.data._structure import Block, TensorSpec, as_array, flatten, spec_of
from distributary.devices import Nest
from distributary.errors import InvalidValueError
from distributary.tracing import native


@final
@dataclass(frozen=True, eq=False)
class Slices(NumberedNode):
    """The rows of arrays.

    Attributes:
        leaves: NumPy arrays with the same number of rows.
        structure: Structure of an element.
    """

    leaves: tuple[np.ndarray, ...]
    structure: PyTreeDef
    batched = False
    in_memory = True

    def cardinality(self) -> int:
        return len(self.leaves[0])

    def row(self, number: int) -> Nest:
        # The element of an array of objects can be anything.
        rows = [leaf[number] for leaf in self.leaves]
        return self.structure.unflatten(
            [
                row if leaf.dtype.hasobject else native(row)
                for row, leaf in zip(rows, self.leaves, strict=True)
            ]
        )

    def rows(self, numbers: np.ndarray) -> Block:
        return self.structure.unflatten(
            [native(leaf.take(numbers, axis=0)) for leaf in self.leaves]
        )

    def part(self, start: int, count: int) -> Block:
        """Returns consecutive rows."""
        rows = slice(start, start + count)
        # A copy, because a batch may still be on its way when the user writes to the array.
        return self.structure.unflatten([native(leaf[rows].copy()) for leaf in self.leaves])

    def spec(self) -> Nest:
        specs = [TensorSpec(leaf.shape[1:], leaf.dtype.newbyteorder("=")) for leaf in self.leaves]
        return self.structure.unflatten(specs)

    def label(self) -> str:
        return f"slices({self.cardinality()})"


def slices(tensors: Nest) -> Slices:
    """Returns the node of `from_tensor_slices`."""
    leaves, tree = flatten(tensors)
    arrays = [np.asarray(as_array(leaf)) for leaf in leaves]
    if not arrays:
        raise InvalidValueError(
            f"from_tensor_slices: {tensors!r} holds no arrays. Pass an array or a nest of arrays,"
            " whose rows (dim 0) become the elements."
        )
    for array in arrays:
        if array.ndim == 0:
            raise InvalidValueError(
                f"from_tensor_slices: got the scalar {array.item()!r}, which has no rows. Use"
                " from_tensors for one element."
            )
    sizes = sorted({len(array) for array in arrays})
    if len(sizes) > 1:
        raise InvalidValueError(
            f"from_tensor_slices: the arrays have {sizes} rows (dim 0); all must have the same"
            " number."
        )
    return Slices(tuple(arrays), tree)


@final
@dataclass(frozen=True, eq=False)
class Range(NumberedNode):
    """Numbers at equal distances; endless if `stop` is None."""

    start: int
    stop: int | None
    step: int
    dtype: np.dtype
    batched = False
    in_memory = True
    pattern = "range({start}, {stop}, {step})"

    def cardinality(self) -> int:
        if self.stop is None:
            return INFINITE_CARDINALITY
        return len(range(self.start, self.stop, self.step))

    def row(self, number: int) -> np.generic:
        return self.dtype.type(self.start + number * self.step)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        return (self.start + numbers * self.step).astype(self.dtype)

    def spec(self) -> TensorSpec:
        return TensorSpec((), self.dtype)


@final
@dataclass(frozen=True, eq=False)
class Single(NumberedNode):
    """One element."""

    element: Nest
    in_memory = True
    pattern = "tensors"

    def cardinality(self) -> int:
        return 1

    def row(self, number: int) -> Nest:
        return self.element

    def spec(self) -> Nest:
        return spec_of(self.element)
