"""Operations that stack elements to batches, and split batches into rows."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from distributary.data._nodes import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Node
from distributary.data._streams import Path, Picked, Pieces, Stream
from distributary.data._structure import (
    Block,
    TensorSpec,
    batched_spec,
    flatten,
    join,
    num_rows,
    pad_and_stack,
    some_rows,
    stack,
)
from distributary.devices import Nest


@final
@dataclass(frozen=True, eq=False)
class Batch(Node):
    """Elements stacked, `size` at a time; padded to one shape if `padding` is given."""

    input: Node
    size: int
    drop_remainder: bool
    padding: tuple[Nest, Nest] | None = None
    batched = True
    own_arrays = True

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count < 0:
            return count
        return count // self.size if self.drop_remainder else -(-count // self.size)

    def elements(self, path: Path) -> "BatchedStream":
        return BatchedStream(self.input.stream(path), self)

    def spec(self) -> Nest:
        spec = self.input.spec()
        if self.padding is not None:
            spec = jax.tree.map(lambda s: TensorSpec((None,) * len(s.shape), s.dtype), spec)
        return batched_spec(spec, self.size if self.drop_remainder else None)

    def label(self) -> str:
        name = "batch" if self.padding is None else "padded_batch"
        return f"{name}({self.size}, drop_remainder={self.drop_remainder})"


@final
class BatchedStream(Stream):
    """Elements, `size` at a time.

    Args:
        upstream: The elements.
        batch: The operation.
    """

    def __init__(self, upstream: Stream, batch: Batch) -> None:
        self._upstream = upstream
        self._size = batch.size
        self._drop_remainder = batch.drop_remainder
        # None stacks elements of equal shape.
        self._stack: Callable[[Sequence[Nest]], Block] | None = None
        if batch.padding is not None:
            shapes, values = batch.padding
            self._stack = partial(pad_and_stack, shapes=shapes, values=values)

    def __next__(self) -> Block:
        if self._stack is not None:
            return self.part(slice)[0]
        batch = self._upstream.block(self._size)
        if batch is None or (self._drop_remainder and num_rows(batch) < self._size):
            raise StopIteration
        return batch

    def part(self, bounds: Callable[[int], slice]) -> tuple[Block, int]:
        """Returns some rows of the next batch, and the number of rows in the whole batch.

        Args:
            bounds: Returns the wanted rows for the size of the batch. The other rows are not
                fetched, where the source allows that.
        """
        items: Any
        make: Callable[[Any], Block]
        if isinstance(self._upstream, Picked) and self._stack is None:
            items, make = self._upstream.numbers(self._size), self._upstream.rows
        else:
            items = list(itertools.islice(self._upstream, self._size))
            make = self._stack or stack
        size = 0 if items is None else len(items)
        if not size or (self._drop_remainder and size < self._size):
            raise StopIteration
        wanted = items[bounds(size)]
        # Without any row, the first one tells the structure and the shapes.
        block = make(wanted) if len(wanted) else some_rows(make(items[:1]), slice(0))
        return block, size

    def advance(self, count: int) -> int:
        skipped = self._upstream.advance(count * self._size)
        whole, rest = divmod(skipped, self._size)
        return whole + (rest > 0 and not self._drop_remainder)


@final
@dataclass(frozen=True, eq=False)
class Unbatch(Node):
    """The rows of batches."""

    input: Node
    batched = False
    pattern = "unbatch"

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        return _Unbatched(map(_BatchRows.of, self.input.stream(path)))

    def spec(self) -> Nest:
        return jax.tree.map(lambda s: TensorSpec(s.shape[1:], s.dtype), self.input.spec())


@final
@dataclass(frozen=True)
class _BatchRows:
    """A batch as a sequence of its rows."""

    leaves: list[Any]
    tree: PyTreeDef
    rows: range

    @staticmethod
    def of(batch: Nest) -> "_BatchRows":
        leaves, tree = flatten(batch)
        leaves = [leaf if hasattr(leaf, "shape") else np.asarray(leaf) for leaf in leaves]
        return _BatchRows(leaves, tree, range(num_rows(leaves)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: int | slice) -> Any:
        leaves = [leaf[which] for leaf in self.leaves]
        if isinstance(which, slice):
            return _BatchRows(leaves, self.tree, self.rows[which])
        return self.tree.unflatten(leaves)


@final
class _Unbatched(Pieces):
    def joined(self, parts: list[_BatchRows]) -> Block:
        return join([part.tree.unflatten(part.leaves) for part in parts])
