"""Operations whose elements depend on those before them: windows, scans, mixtures."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from distributary._types import Nest
from distributary.data._nodes import Node, Random
from distributary.data._options import UNKNOWN_CARDINALITY, combined
from distributary.data._streams import IteratedStream, Path, Stream
from distributary.data._structure import as_array, flatten, kept
from distributary.errors import InvalidTypeError, InvalidValueError, shown


@final
@dataclass(frozen=True, eq=False)
class Generated(Node):
    """The elements that a generator makes of the streams of some datasets.

    `generate` keeps no state between passes. `count` returns the number of elements for that of the
    first dataset; `known` is the number if it does not depend on it.
    """

    parts: tuple[Node, ...]
    generate: Callable[..., Iterator[Nest]]
    text: str
    count: Callable[[int], int] | None = None
    known: int | None = None
    in_memory = False
    pattern = "{text}"

    def cardinality(self) -> int:
        if self.known is not None:
            return self.known
        size = self.parts[0].cardinality()
        if self.count is None:
            return size if size == 0 else UNKNOWN_CARDINALITY
        return self.count(size) if size >= 0 else size

    def elements(self, path: Path) -> Stream:
        return IteratedStream(self.generate(*(part.stream(path) for part in self.parts)))


@final
@dataclass(frozen=True, eq=False)
class Mixture(Random):
    """Elements of several datasets, each from one that is drawn."""

    parts: tuple[Node, ...]
    weights: tuple[float, ...]
    stop_on_empty: bool
    drawn: int
    seed: int | None = None
    pattern = "sample_from_datasets({weights}, {seed})"

    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        if self.stop_on_empty and any(size >= 0 for size in sizes):
            return UNKNOWN_CARDINALITY
        return combined(sizes, sum)

    def elements(self, path: Path) -> Stream:
        return IteratedStream(self._drawn(path))

    def _drawn(self, path: Path) -> Iterator[Nest]:
        random = np.random.default_rng(self.seed_of(path))
        streams = [part.stream(path) for part in self.parts]
        weights = np.array(self.weights)
        while weights.any():
            number = int(random.choice(len(streams), p=weights / weights.sum()))
            try:
                yield next(streams[number])
            except StopIteration:
                if self.stop_on_empty:
                    return
                weights[number] = 0

    def trait(self, name: Any) -> bool | None:
        return False if name == "alike" else super().trait(name)


def shares(name: str, given: object) -> tuple[float, ...]:
    """Returns the shares of classes, whose sum is 1.

    Raises:
        InvalidValueError: if they are not such numbers.
    """
    found = np.asarray(given, np.float64)
    if found.ndim != 1 or not (found >= 0).all() or not np.isclose(found.sum(), 1, atol=1e-5):
        raise InvalidValueError(
            f"rejection_resample: {name} is {shown(given)}, expected one number per class, none of"
            " them negative, whose sum is 1."
        )
    return tuple(found.tolist())


@final
@dataclass(frozen=True, eq=False)
class Resampled(Random):
    """Elements with their classes, of which some are left out so that classes have given shares."""

    input: Node
    class_of: Callable[[Nest], Any]
    target: tuple[float, ...]
    initial: tuple[float, ...] | None
    drawn: int
    seed: int | None = None
    in_memory = False
    pattern = "rejection_resample({target}, {initial}, {seed})"

    def __post_init__(self) -> None:
        wanted, there = self.target, self.initial
        if there is None:
            return
        if len(wanted) != len(there) or any(
            w and not h for w, h in zip(wanted, there, strict=True)
        ):
            raise InvalidValueError(
                f"rejection_resample: target_dist is {wanted} and initial_dist {there}. Give as"
                " many classes in both, and an initial share to every class that you ask for."
            )

    def cardinality(self) -> int:
        return self.input.cardinality() if self.input.cardinality() <= 0 else UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        return IteratedStream(self._kept(path))

    def _kept(self, path: Path) -> Iterator[Nest]:
        random = np.random.default_rng(self.seed_of(path))
        target = np.array(self.target)
        counts = np.zeros(len(target))
        for element in self.input.stream(path):
            number = int(np.asarray(self.class_of(element)))
            if not 0 <= number < len(target):
                raise InvalidValueError(
                    f"rejection_resample: class_func returned {number}, but target_dist has"
                    f" {len(target)} classes."
                )
            counts[number] += 1
            initial = counts / counts.sum() if self.initial is None else np.array(self.initial)
            # A class that has not come yet does not hold the others back.
            odds = np.divide(target, initial, out=np.zeros_like(target), where=initial > 0)
            if odds[number] and random.random() < odds[number] / odds.max():
                yield np.int64(number), element


def chosen(stop_on_empty: bool, choices: Stream, *streams: Stream) -> Iterator[Nest]:
    """Yields the next element of the stream that each choice numbers."""
    for choice in choices:
        number = int(np.asarray(choice))
        if not 0 <= number < len(streams):
            raise InvalidValueError(
                f"choose_from_datasets: choice_dataset has {number}, but there are {len(streams)}"
                " datasets."
            )
        try:
            yield next(streams[number])
        except StopIteration:
            if stop_on_empty:
                return


def unique(elements: Stream) -> Iterator[Nest]:
    """Yields each element where it comes first."""
    seen: set[Hashable] = set()
    for element in elements:
        leaves, tree = flatten(element)
        arrays = [np.asarray(as_array(leaf)) for leaf in leaves]
        key = (tree, *((a.dtype, a.shape, tuple(a.reshape(-1).tolist())) for a in arrays))
        if key not in seen:
            seen.add(key)
            yield element


def scanned(state: Nest, scan_func: Callable[..., Any], elements: Stream) -> Iterator[Nest]:
    """Yields the outputs of a function that also gives the state for its next call."""
    for element in elements:
        result = scan_func(state, element)
        if type(result) not in (tuple, list) or len(result) != 2:
            raise InvalidTypeError(
                f"scan: scan_func returned {shown(result)}, expected (new_state, output_element)."
            )
        state, output = kept(tuple(result))
        yield output


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


def groups(
    key_func: Callable[[Nest], Any], size_of: Callable[[int], int], elements: Stream
) -> Iterator[tuple[np.int64, Sequence[Nest]]]:
    """Yields keys and as many elements of that key as `size_of` says; at the end, what is left."""
    held: dict[int, list[Nest]] = {}
    for element in elements:
        key = int(np.asarray(key_func(element)))
        group = held.setdefault(key, [])
        group.append(element)
        if len(group) >= size_of(key):
            yield np.int64(key), held.pop(key)
    for key in sorted(held):
        yield np.int64(key), held[key]
