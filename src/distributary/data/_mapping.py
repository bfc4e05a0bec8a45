"""Operations that call functions of the user, and that keep the results: map, filter and cache."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import jax
import numpy as np

from distributary.data._nodes import UNKNOWN_CARDINALITY, Node, SameElements
from distributary.data._sources import RandomAccess
from distributary.data._streams import IteratedStream, MadeRows, Path, Rows, Stream, is_peek
from distributary.data._structure import TensorSpec, flatten, num_rows, spec_of
from distributary.devices import Nest
from distributary.errors import check_takes

# The key of a cache for the elements of a complete pass; otherwise it holds rows by number.
_ALL = "all"


@final
@dataclass(frozen=True, eq=False)
class Map(Node):
    """The results of a function, in `num_threads` threads if that is not None."""

    input: Node
    fn: Callable[..., Any]
    num_threads: int | None
    in_memory = False

    def cardinality(self) -> int:
        return self.input.cardinality()

    def source(self) -> Rows | None:
        source = self.input.source() if self.num_threads is None else None
        if source is None:
            return None
        return MadeRows(lambda number: mapped(self.fn, source.row(number)))

    def order(self, path: Path) -> Stream:
        return self.input.order(path)

    def elements(self, path: Path) -> Stream:
        upstream = self.input.stream(path)
        if self.num_threads is None:
            return IteratedStream(map(partial(mapped, self.fn), upstream), upstream.advance)
        return _MappedInThreads(upstream, self.fn, self.num_threads)

    def spec(self) -> Nest:
        """Returns the spec of the first result; what counts the rows of a batch stays open."""
        if not self.trait("batched"):
            return super().spec()
        shapes = [spec.shape for spec in jax.tree.leaves(self.input.spec())]
        if not shapes or any(not shape or shape[0] is not None for shape in shapes):
            return super().spec()
        first = self.input.first()
        if not first:
            return super().spec()  # says that there is no element
        rows = (num_rows(first[0]),)

        def opened(spec: TensorSpec) -> TensorSpec:
            sizes = (None, *spec.shape[1:]) if spec.shape[:1] == rows else spec.shape
            return TensorSpec(sizes, spec.dtype)

        return jax.tree.map(opened, spec_of(mapped(self.fn, first[0])))

    def label(self) -> str:
        return f"map({_name(self.fn)})"


@final
@dataclass(frozen=True, eq=False)
class Filter(SameElements):
    """The elements for which a function returns True."""

    input: Node
    predicate: Callable[..., Any]
    in_memory = False

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size == 0 else UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        return IteratedStream(filter(partial(call, self.predicate), self.input.stream(path)))

    def label(self) -> str:
        return f"filter({_name(self.predicate)})"


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def call(fn: Callable[..., Any], element: Nest) -> Any:
    """Calls a user's function; the items of a tuple become its arguments, as in tf.data."""
    args = element if type(element) is tuple else (element,)
    try:
        return fn(*args)
    except TypeError:  # perhaps because it takes other arguments
        names = "x, y" if len(args) == 2 else ", ".join(f"x{i or ''}" for i in range(len(args)))
        check_takes("The dataset", fn, f"fn({names})")
        raise


def mapped(fn: Callable[..., Any], element: Nest) -> Nest:
    """Returns the result of a user's function. No later call changes its arrays.

    The function may write to its arrays again, so they are copied, unless it was given them.
    """
    result = call(fn, element)
    if result is element:
        return result
    leaves, tree = flatten(result)
    inputs = flatten(element)[0]
    known = {id(leaf) for leaf in inputs} | {id(getattr(leaf, "base", None)) for leaf in inputs}
    known.discard(id(None))
    for i, leaf in enumerate(leaves):
        is_array = isinstance(leaf, np.ndarray)
        if is_array and id(leaf) not in known and id(leaf.base) not in known:
            leaves[i] = leaf.copy()
    return tree.unflatten(leaves)


@final
class _MappedInThreads(Stream):
    """The results of a function that runs in `num_threads` threads, in order."""

    def __init__(self, upstream: Stream, fn: Callable[..., Any], num_threads: int) -> None:
        self._upstream = upstream
        self._fn = fn
        self._num_threads = num_threads
        # Its threads end when it is garbage collected, together with this stream.
        self._executor = ThreadPoolExecutor(num_threads, "distributary-map")
        self._running: list[Future[Any]] = []

    def __next__(self) -> Nest:
        while len(self._running) <= self._num_threads:
            try:
                element = next(self._upstream)
            except StopIteration:
                break
            self._running.append(self._executor.submit(mapped, self._fn, element))
        if not self._running:
            self._executor.shutdown(wait=False)
            raise StopIteration
        return self._running.pop(0).result()

    def advance(self, count: int) -> int:
        started = len(self._running[:count])
        del self._running[:count]
        return started + self._upstream.advance(count - started)


@final
@dataclass(frozen=True, eq=False)
class Cache(SameElements):
    """Elements kept in memory, either row by row or once a first pass is complete."""

    input: Node
    # Not an argument: a dataset rewritten for a worker or another order has other elements.
    cache: dict[Any, Any] = field(default_factory=dict, init=False)
    pattern = "cache"

    def source(self) -> Rows | None:
        source = self.input.source_in_order()
        if source is None:
            return None

        def row(number: int) -> Nest:
            try:
                return self.cache[number]
            except KeyError:
                element = self.cache[number] = source.row(number)
                return element

        return MadeRows(row)

    def elements(self, path: Path) -> Stream:
        if _ALL in self.cache:
            return RandomAccess(self.cache[_ALL]).stream(path)
        if is_peek(path):
            return self.input.stream(path)
        # Pass 0, because what is kept must not depend on which pass came first.
        return IteratedStream(self._kept(self.input.stream((0,))))

    def _kept(self, elements: Stream) -> Iterator[Nest]:
        kept = []
        for element in elements:
            kept.append(element)
            yield element
        self.cache[_ALL] = kept
