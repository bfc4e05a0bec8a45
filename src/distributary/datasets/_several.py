"""Operations on several datasets: one after the other, side by side, in turns."""

import abc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from distributary.datasets._elements import PrefetchedStream
from distributary.datasets._nodes import Node, Random, with_drawn
from distributary.datasets._options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from distributary.datasets._order_streams import Chained
from distributary.datasets._rows import ChainedRows
from distributary.datasets._streams import Interleaved, Numbers, Path, Rows, Stream, Zipped
from distributary.datasets._structure import Block, TensorSpec, flatten, unflatten
from distributary.errors import InvalidValueError


class _OfParts(Node):
    """Base class of operations on datasets whose rows can be numbered together."""

    parts: tuple[Node, ...]

    def source(self) -> Rows | None:
        sources = [part.source() for part in self.parts if part.is_identity()]
        found = [source for source in sources if source is not None]
        return self.together(found) if len(found) == len(self.parts) else None

    @abc.abstractmethod
    def together(self, sources: Sequence[Rows]) -> Rows:
        """Returns the rows of all parts under common numbers."""

    def order(self, path: Path) -> Stream:
        return Numbers(self.cardinality())

    def is_identity(self) -> bool:
        return self.source() is not None

    def is_batched(self) -> bool | None:
        answers = {part.is_batched() for part in self.parts}
        return answers.pop() if len(answers) == 1 else None


@final
@dataclass(frozen=True, eq=False)
class Concatenate(_OfParts):
    """The elements of one dataset after the elements of another."""

    parts: tuple[Node, ...]

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

        return Chained(nth, False)

    def spec(self) -> Any:
        first, *others = [part.spec() for part in self.parts]
        for other in others:
            first = _common_spec(first, other)
        return first

    def label(self) -> str:
        return "concatenate"


def _common_spec(first: Any, second: Any) -> Any:
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
            )
        shape = [a if a == b else None for a, b in zip(spec.shape, other.shape, strict=True)]
        merged.append(TensorSpec(tuple(shape), spec.dtype))
    return unflatten(tree, merged)


@final
class _ZippedRows:
    def __init__(self, sources: Sequence[Rows], tree: Any) -> None:
        self._sources = sources
        self._tree = tree

    def __len__(self) -> int:
        return min(len(source) for source in self._sources)

    def row(self, number: int) -> Any:
        return unflatten(self._tree, [source.row(number) for source in self._sources])

    def rows(self, numbers: np.ndarray) -> Block:
        return unflatten(self._tree, [source.rows(numbers) for source in self._sources])


@final
@dataclass(frozen=True, eq=False)
class Zip(_OfParts):
    """Elements of several datasets side by side."""

    parts: tuple[Node, ...]
    tree: Any

    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        finite = [size for size in sizes if size >= 0]
        if UNKNOWN_CARDINALITY in sizes:
            return UNKNOWN_CARDINALITY
        return min(finite) if finite else INFINITE_CARDINALITY

    def together(self, sources: Sequence[Rows]) -> Rows:
        return _ZippedRows(sources, self.tree)

    def elements(self, path: Path) -> Stream:
        return Zipped([part.stream(path) for part in self.parts], self.tree)

    def spec(self) -> Any:
        return unflatten(self.tree, [part.spec() for part in self.parts])

    def label(self) -> str:
        return "zip"


@final
@dataclass(frozen=True, eq=False)
class Interleave(Random):
    """Elements of the datasets that a function makes, in turns."""

    input: Node
    make: Callable[..., Node]
    cycle_length: int
    block_length: int
    threads: int | None
    drawn: int
    seed: int | None = None

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size == 0 else UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        return Interleaved(self._streams(path), self.cycle_length, self.block_length)

    def _streams(self, path: Path) -> Iterator[Stream]:
        depth = max(self.block_length, 2)
        for number, element in enumerate(self.input.stream(path)):
            stream = with_drawn(self.make(element), self.seed_of(()), number).stream(path)
            yield stream if self.threads is None else PrefetchedStream(stream, depth)

    def first(self) -> Node | None:
        """Returns the dataset of the first element."""
        for element in itertools.islice(self.input.stream((0,)), 1):
            return self.make(element)
        return None

    def is_batched(self) -> bool | None:
        first = self.first()
        return None if first is None else first.is_batched()

    def label(self) -> str:
        return f"interleave({self.cycle_length}, {self.block_length})"
