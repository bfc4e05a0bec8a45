"""Operations whose elements depend on those before them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from distributary.data._nodes import Node, Random
from distributary.data._options import UNKNOWN_CARDINALITY
from distributary.data._streams import IteratedStream, Path, Stream
from distributary.devices import Nest


@dataclass(frozen=True, eq=False)
class Generated(Node):
    """The elements that a generator makes of the streams of some datasets.

    Attributes:
        parts: The datasets.
        generate: Makes the elements. Keeps no state between passes.
        text: Label.
        count: Returns the number of elements for the cardinalities of the datasets; without it, the
            number is unknown, unless the first dataset is empty.
    """

    parts: tuple[Node, ...]
    generate: Callable[..., Iterator[Nest]]
    text: str
    count: Callable[..., int] | None = None
    in_memory = False
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
