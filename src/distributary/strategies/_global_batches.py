"""Batches for steps of the global view, on the host: one at a time, or several, stacked.

With several workers, a batch that the replicas split evenly has only this worker's rows.
"""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from distributary.data import OwnRows, WorkerShare


class ReadAhead:
    """Batches, of which one can be read ahead to learn whether it is there.

    Args:
        begin: Begins a pass after a number of batches. Called when the first batch is needed,
            because Keras makes iterators that it does not use.
    """

    def __init__(self, begin: Callable[[int], Iterator[Any]]) -> None:
        self._begin = begin
        self._batches: Iterator[Any] | None = None
        self._ahead: list[Any] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.next_own()

    def is_at_end(self) -> bool:
        """Returns whether there is no batch left."""
        if not self._ahead:
            try:
                self._ahead.append(self.next_own())
            except StopIteration:
                self._batches = iter(())
        return not self._ahead

    def next_own(self) -> Any:
        """Returns the next batch; `OwnRows` if the replicas of several workers split it evenly."""
        if self._ahead:
            return self._ahead.pop()
        if self._batches is None:
            self._batches = self._begin(0)
        return next(self._batches)


@final
class DatasetBatches(ReadAhead):
    """The batches of a dataset, or the rows of them that a worker has read."""

    def __next__(self) -> Any:
        batch = self.next_own()
        return batch.rows if isinstance(batch, OwnRows) else batch

    def skip(self, count: int) -> None:
        """Begins the pass after so many batches."""
        self._batches = self._begin(count)


def next_own(batches: Any) -> Any:
    """Returns the next batch for a step, as `OwnRows` if the iterator knows this worker's rows."""
    return batches.next_own() if hasattr(batches, "next_own") else next(batches)


@final
class ArrayBatches:
    """Batches of NumPy arrays.

    Args:
        arrays: Arrays `[row, ...]` with the same number of rows.
        tree: Structure of a batch.
        batch_size: Number of rows of a global batch; the last one may have fewer.
        share: The place of this worker among all.
        begin: Begins a pass; returns the order of the rows, or None. Called when the first batch is
            needed, as by `DatasetBatches`.
    """

    def __init__(
        self,
        arrays: list[Any],
        tree: PyTreeDef,
        batch_size: int,
        share: WorkerShare,
        begin: Callable[[], np.ndarray | None],
    ) -> None:
        self._arrays = arrays
        self._tree = tree
        self._batch_size = batch_size
        self._share = share
        self._begin = begin
        self._num_rows = len(arrays[0])
        self._order: Any = None
        self._start = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.next_own(is_own=False)

    def next_own(self, is_own: bool = True) -> Any:
        """Returns the next batch; `OwnRows` if the replicas of several workers split it evenly."""
        if self._start >= self._num_rows:
            raise StopIteration
        return self._next(min(self._batch_size, self._num_rows - self._start), None, is_own)

    def skip(self, count: int) -> None:
        """Begins the pass after so many batches."""
        self._order = self._begin()
        self._start = count * self._batch_size

    def take(self, count: int) -> tuple[Any, int]:
        """Returns up to `count` full batches as one nest `[batch, row, ...]`, and their number."""
        count = min(count, (self._num_rows - self._start) // self._batch_size)
        return (self._next(self._batch_size, count, True), count) if count else (None, 0)

    def _next(self, size: int, count: int | None, is_own: bool) -> Any:
        """Returns the next batch, of `size` rows; if `count` is given, so many batches, stacked."""
        if self._start == 0:
            self._order = self._begin()
        rows = slice(self._start, self._start + size * (count or 1))
        self._start = rows.stop
        batches = (count, size) if count else (size,)
        order = None if self._order is None else self._order[rows].reshape(batches)
        is_own = is_own and self._share.num_workers > 1 and self._share.divides(size)
        kept = self._share.rows(size) if is_own else slice(None)
        at = (slice(None), kept) if count else kept

        def part(array: Any) -> Any:
            if order is not None:
                return array.take(order[at], axis=0)
            part = array[rows]
            if count:
                part = part.reshape(*batches, *array.shape[1:])
            return part[at] if is_own else part

        batch = jax.tree.unflatten(self._tree, [part(array) for array in self._arrays])
        return OwnRows(batch) if is_own else batch


def take_stacked(iterator: Any, count: int) -> Iterator[tuple[Any, int]]:
    """Yields up to `count` batches, stacked if their shapes are equal, each with their number."""
    if isinstance(iterator, ArrayBatches):
        stacked, taken = iterator.take(count)
        if taken:
            yield stacked, taken
        if taken == count:
            return
        count -= taken
    batches: list[Any] = []
    with contextlib.suppress(StopIteration):
        while len(batches) < count:
            batches.append(next_own(iterator))
    for _, run in itertools.groupby(batches, _shapes):
        several = list(run)
        yield jax.tree.map(_stack, *several), len(several)


def _shapes(batch: Any) -> object:
    leaves, tree = jax.tree.flatten(batch)
    return tree, [(np.shape(leaf), leaf.dtype) for leaf in leaves]


def _stack(*leaves: Any) -> Any:
    on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    return (np if on_host else jnp).stack(leaves)


# The global generators of NumPy and Python, which shuffle rows and batches.


def random_state() -> list[Any]:
    """Returns the state of the random numbers of NumPy and Python, for JSON."""
    _, key, *others = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    return [[np.asarray(key).tolist(), *others], [version, list(words), gauss]]


def set_random_state(state: list[Any]) -> None:
    """Goes back to what `random_state` has returned."""
    (key, *others), (version, words, gauss) = state
    np.random.set_state(("MT19937", np.array(key, np.uint32), *others))
    random.setstate((version, tuple(words), gauss))


def drawn_permutation(num_rows: int, extended: Any) -> np.ndarray:
    """Draws an order from NumPy's generator; with several workers, from that of the chief."""
    if extended.num_workers == 1:
        return np.random.permutation(num_rows)
    _, *state = np.random.get_state(legacy=True)
    parts = [np.asarray(part) for part in state[:2]]
    key, position = extended.from_chief(parts, "the order of the rows")
    generator = np.random.RandomState()
    generator.set_state(("MT19937", key, int(position), 0, 0.0))
    order = generator.permutation(num_rows)
    if extended.worker_number == 0:
        np.random.set_state(generator.get_state())
    return order


def share_random_state(extended: Any) -> None:
    """Gives the generator of Python the state of the chief's, on all workers."""
    if extended.num_workers > 1:
        version, state, _ = random.getstate()
        (of_chief,) = extended.from_chief([np.array(state)], "the order of the batches")
        random.setstate((version, tuple(of_chief.tolist()), None))
