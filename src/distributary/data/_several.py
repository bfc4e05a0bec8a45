"""Operations on several datasets: one after the other, side by side, in turns, in any other way."""

import abc
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
from jax.tree_util import PyTreeDef

from distributary.data._nodes import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Node,
    Random,
    Trait,
    combined,
)
from distributary.data._prefetch import Prefetched
from distributary.data._streams import (
    Chained,
    ChainedRows,
    IteratedStream,
    Path,
    Rows,
    Stream,
    ZippedRows,
)
from distributary.data._structure import Block, TensorSpec, flatten, num_rows, some_rows
from distributary.devices import Nest
from distributary.errors import InvalidValueError


class _OfParts(Node):
    """Base class of operations on datasets whose rows can be numbered together."""

    parts: tuple[Node, ...]

    @abc.abstractmethod
    def together(self, sources: Sequence[Rows]) -> Rows:
        """Returns the rows of all parts under common numbers."""

    def source(self) -> Rows | None:
        sources = [part.source_in_order() for part in self.parts]
        known = [source for source in sources if source is not None]
        return self.together(known) if len(known) == len(sources) else None


@final
@dataclass(frozen=True, eq=False)
class Concatenate(_OfParts):
    """The elements of one dataset after the elements of another."""

    parts: tuple[Node, ...]
    pattern = "concatenate"

    def cardinality(self) -> int:
        return combined([part.cardinality() for part in self.parts], sum)

    def together(self, sources: Sequence[Rows]) -> Rows:
        return ChainedRows(sources, [part.cardinality() for part in self.parts])

    def elements(self, path: Path) -> Stream:
        def nth(number: int) -> Stream | None:
            return self.parts[number].stream(path) if number < len(self.parts) else None

        return Chained(nth)

    def spec(self) -> Nest:
        return functools.reduce(common_spec, [part.spec() for part in self.parts])


def common_spec(first: Nest, second: Nest, what: str = "concatenate") -> Nest:
    """Returns the spec of elements of both kinds.

    Raises:
        InvalidValueError: if they differ in more than sizes.
    """
    leaves, tree = flatten(first)
    others, pytree = flatten(second)
    if pytree != tree:
        raise InvalidValueError(
            f"{what}: the first elements have structure {tree}, others have {pytree}; all must have"
            " the same structure."
        )
    merged = []
    for spec, other in zip(leaves, others, strict=True):
        if spec.dtype != other.dtype or len(spec.shape) != len(other.shape):
            raise InvalidValueError(
                f"{what}: {spec} and {other} must have the same dtype and number of dims. Convert"
                " the elements with map."
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
        return IteratedStream(self._in_turns(self._streams(path)))

    def _in_turns(self, streams: Iterator[Stream]) -> Iterator[Nest]:
        places: list[Stream | None] = [None] * self.cycle_length
        while True:
            for i in range(self.cycle_length):
                stream = places[i] = places[i] or next(streams, None)
                count = 0
                for element in itertools.islice(stream or (), self.block_length):
                    count += 1
                    yield element
                if count < self.block_length:
                    places[i] = None  # until its next turn, as in tf.data
            if not any(places):
                if (stream := next(streams, None)) is None:
                    return
                places[0] = stream

    def _streams(self, path: Path) -> Iterator[Stream]:
        depth = max(self.block_length, 2)
        for number, element in enumerate(self.input.stream(path)):
            stream = self.make(element).with_drawn(self.seed_of(()), number).stream(path)
            yield Prefetched(stream, depth) if self.read_ahead else stream

    def first_part(self) -> list[Node]:
        """Returns a list with the dataset of the first element; an empty one if there is none."""
        return [self.make(element) for element in self.input.first()]

    def trait(self, name: Trait) -> bool | None:
        if name in ("batched", "own_arrays"):
            return next((part.trait(name) for part in self.first_part()), None)
        return super().trait(name)


@dataclass(frozen=True, eq=False)
class Generated(Node):
    """The elements that a generator makes of the streams of some datasets.

    Attributes:
        parts: The datasets.
        generate: Makes the elements. Keeps no state between passes.
        text: Label.
        count: Returns the number of elements for the cardinalities of the datasets; without it, the
            number is unknown, unless the first dataset is empty.
        in_memory: See `Node`; None if `generate` is no code of the user.
    """

    parts: tuple[Node, ...]
    generate: Callable[..., Iterator[Nest]]
    text: str
    count: Callable[..., int] | None = None
    in_memory: bool | None = field(default=False, kw_only=True)
    pattern = "{text}"

    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        if self.count is None:
            return sizes[0] if sizes[0] == 0 else UNKNOWN_CARDINALITY
        return self.count(*sizes)

    def elements(self, path: Path) -> Stream:
        return IteratedStream(self.generate(*(part.stream(path) for part in self.parts)))


@final
@dataclass(frozen=True, eq=False)
class Drawn(Generated, Random):
    """Elements of which some are chosen at random; `generate` gets a generator of numbers first."""

    drawn: int = 0
    seed: int | None = None

    def elements(self, path: Path) -> Stream:
        random = np.random.default_rng(self.seed_of(path))
        return IteratedStream(self.generate(random, *(part.stream(path) for part in self.parts)))


def windows(
    size: int, shift: int, stride: int, drop_remainder: bool, elements: Stream
) -> Iterator[Sequence[Nest]]:
    """Yields lists of `size` elements; a window begins `shift` elements after the one before."""
    span = (size - 1) * stride + 1
    held: list[Nest] = []
    while True:
        held += itertools.islice(elements, span - len(held))
        if not held or (drop_remainder and len(held) < span):
            return
        yield held[::stride]
        if len(held) < shift:
            held += itertools.islice(elements, shift - len(held))
        del held[:shift]
