"""Operations on several datasets: one after the other, side by side, in turns."""

import abc
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from jax.tree_util import PyTreeDef

from distributary._types import Nest
from distributary.datasets._nodes import Node, Random
from distributary.datasets._numbered_rows import ChainedRows, Rows, ZippedRows
from distributary.datasets._options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from distributary.datasets._prefetch import Prefetched
from distributary.datasets._streams import Chained, Path, Stream
from distributary.datasets._structure import Block, TensorSpec, flatten, num_rows, some_rows
from distributary.errors import InvalidValueError


class _OfParts(Node):
    """Base class of operations on datasets whose rows can be numbered together."""

    parts: tuple[Node, ...]

    def source(self) -> Rows | None:
        found = []
        for part in self.parts:
            source = part.source_in_order()
            if source is None:
                return None
            found.append(source)
        return self.together(found)

    @abc.abstractmethod
    def together(self, sources: Sequence[Rows]) -> Rows:
        """Returns the rows of all parts under common numbers."""


@final
@dataclass(frozen=True, eq=False)
class Concatenate(_OfParts):
    """The elements of one dataset after the elements of another."""

    parts: tuple[Node, ...]
    pattern = "concatenate"

    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        for unusual in (INFINITE_CARDINALITY, UNKNOWN_CARDINALITY):
            if unusual in sizes:
                return unusual
        return sum(sizes)

    def together(self, sources: Sequence[Rows]) -> Rows:
        return ChainedRows(sources)

    def elements(self, path: Path) -> Stream:
        def nth(number: int) -> Stream | None:
            return self.parts[number].stream(path) if number < len(self.parts) else None

        return Chained(nth)

    def spec(self) -> Nest:
        return functools.reduce(_common_spec, [part.spec() for part in self.parts])


def _common_spec(first: Nest, second: Nest) -> Nest:
    leaves, tree = flatten(first)
    others, own = flatten(second)
    if own != tree:
        raise InvalidValueError(
            f"concatenate: the first dataset has elements of structure {tree}, another has {own};"
            " all must have the same structure."
        )
    merged = []
    for spec, other in zip(leaves, others, strict=True):
        if spec.dtype != other.dtype or len(spec.shape) != len(other.shape):
            raise InvalidValueError(
                f"concatenate: {spec} and {other} must have the same dtype and number of dims."
                " Convert one of the datasets with map."
            )
        shape = [a if a == b else None for a, b in zip(spec.shape, other.shape, strict=True)]
        merged.append(TensorSpec(tuple(shape), spec.dtype))
    return tree.unflatten(merged)


@final
@dataclass(frozen=True, eq=False)
class Zip(_OfParts):
    """Elements of several datasets side by side."""

    parts: tuple[Node, ...]
    structure: PyTreeDef
    pattern = "zip"

    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        finite = [size for size in sizes if size >= 0]
        if UNKNOWN_CARDINALITY in sizes:
            return UNKNOWN_CARDINALITY
        return min(finite) if finite else INFINITE_CARDINALITY

    def together(self, sources: Sequence[Rows]) -> Rows:
        return ZippedRows(sources, self.structure)

    def elements(self, path: Path) -> Stream:
        return _Zipped([part.stream(path) for part in self.parts], self.structure)

    def spec(self) -> Nest:
        return self.structure.unflatten([part.spec() for part in self.parts])


@final
class _Zipped(Stream):
    def __init__(self, upstreams: Sequence[Stream], tree: PyTreeDef) -> None:
        self._upstreams = upstreams
        self._tree = tree

    def __next__(self) -> Nest:
        return self._tree.unflatten([next(upstream) for upstream in self._upstreams])

    def block(self, count: int) -> Block | None:
        blocks = [upstream.block(count) for upstream in self._upstreams]
        if any(block is None for block in blocks):
            return None
        size = min(num_rows(block) for block in blocks)
        blocks = [some_rows(block, slice(size)) for block in blocks]
        return self._tree.unflatten(blocks)

    def advance(self, count: int) -> int:
        return min(upstream.advance(count) for upstream in self._upstreams)


@final
@dataclass(frozen=True, eq=False)
class Interleave(Random):
    """Elements of the datasets that a function makes, in turns."""

    input: Node
    make: Callable[..., Node]
    cycle_length: int
    block_length: int
    read_ahead: bool
    drawn: int
    seed: int | None = None
    in_memory = False
    pattern = "interleave({cycle_length}, {block_length})"

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size == 0 else UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        return _Interleaved(self._streams(path), self.cycle_length, self.block_length)

    def _streams(self, path: Path) -> Iterator[Stream]:
        depth = max(self.block_length, 2)
        for number, element in enumerate(self.input.stream(path)):
            stream = self.make(element).with_drawn(self.seed_of(()), number).stream(path)
            yield Prefetched(stream, depth) if self.read_ahead else stream

    def first_part(self) -> list[Node]:
        """Returns a list with the dataset of the first element; an empty one if there is none."""
        return [self.make(element) for element in self.input.first()]

    def is_batched(self) -> bool | None:
        return next((part.is_batched() for part in self.first_part()), None)

    def makes_arrays(self) -> bool:
        return all(part.makes_arrays() for part in self.first_part())


@final
class _Interleaved(Stream):
    """Elements of several streams in turns.

    Args:
        make: The streams.
        cycle_length: Number of streams that take turns.
        block_length: Number of elements that a stream gives before it is the next one's turn.
    """

    def __init__(self, make: Iterator[Stream], cycle_length: int, block_length: int) -> None:
        self._make = make
        self._cycle_length = cycle_length
        self._block_length = block_length
        self._open: list[Stream | None] = [None] * cycle_length
        self._ended = False
        self._at = 0
        self._given = 0

    def __next__(self) -> Nest:
        while not self._ended or any(stream is not None for stream in self._open):
            current = self._open[self._at]
            if current is None:
                current = self._open[self._at] = self._next_stream()
            if current is None:
                self._turn()
                continue
            for element in current:
                self._given += 1
                if self._given == self._block_length:
                    self._turn()
                return element
            # The place stays empty until its next turn, as in tf.data.
            self._open[self._at] = None
            self._turn()
        raise StopIteration

    def _next_stream(self) -> Stream | None:
        stream = None if self._ended else next(self._make, None)
        self._ended = stream is None
        return stream

    def _turn(self) -> None:
        self._at = (self._at + 1) % self._cycle_length
        self._given = 0
