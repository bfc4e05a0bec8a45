"""Distributed datasets: they take global batches and give each replica, or `fit`, its part."""

import collections
import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from distributary._late import no_attribute
from distributary._threads import Prefetched
from distributary.data import (
    INFINITE_CARDINALITY,
    DistributedInput,
    Node,
    OwnRows,
    PassIterator,
    StepData,
    TensorSpec,
    WorkerBatch,
    WorkerShare,
    split_rows,
)
from distributary.devices import (
    JobEvent,
    Loop,
    Nest,
    StepCounts,
    job_programs,
    local_copy,
    progress,
)
from distributary.engine import Placement
from distributary.errors import InvalidValueError, warn
from distributary.job import AgreedSteps, Ready, signature
from distributary.tracing import at_end, refuse_in_trace
from distributary.variables import PerReplica, flat_parts, stack_components


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


Array: TypeAlias = np.ndarray | jax.Array
Given: TypeAlias = WorkerBatch | list[Nest]
"""A worker's data for a step: its rows of a global batch, or one element per replica."""

# What people look for in a distributed dataset, and where it is.
_ELSEWHERE = {
    "batch map shuffle repeat take skip prefetch cache filter unbatch padded_batch": (
        "Call it on the dataset before strategy.experimental_distribute_dataset(dataset)."
    ),
    "get_next": "Write iterator = iter(dataset), and next(iterator).",
}


@final
@dataclass(frozen=True)
class PerReplicaSpec:
    """Specs of the components of a `PerReplica`, in replica order.

    Source: `tf.distribute`'s `PerReplicaSpec`.
    """

    value_specs: tuple[Any, ...]


@final
class DistributedDataset(DistributedInput):
    """Batches for the replicas of a strategy; made by `experimental_distribute_dataset`.

    Each step gives you a nest like the batch, with a `PerReplica` in place of every array. With one
    replica, you get the arrays themselves. Each `iter()` starts over if the source can.

    A thread makes the batches and puts them on the devices ahead of the step that needs them.
    `InputOptions.experimental_per_replica_buffer_size` of them wait while the next one is made.

    Args:
        source: The batches, or the elements of the replicas.
        placer: Puts them on devices; None leaves them on the host.
        share: Number of replicas here and elsewhere.
        depth: Number of batches that wait ahead of the step while the next one is made. With 0,
            each batch is made when you ask for it.
        counts: Counts the steps.

    Source: `tf.distribute.DistributedDataset`.
    """

    def __init__(
        self,
        source: StepData,
        placer: Placement | None,
        share: WorkerShare,
        depth: int,
        counts: StepCounts,
    ) -> None:
        self._source = source
        self._placer = placer
        #: Number of replicas here and elsewhere.
        self.share = share
        self._depth = max(depth, source.prefetch_depth) if depth else 0
        self.counts = counts
        self._num_passes = 0

    if not TYPE_CHECKING:  # or type checkers accept any name

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("A DistributedDataset", name, _ELSEWHERE, dir(type(self)))

    @property
    def cardinality(self) -> int:
        """Number of steps, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        return self._source.cardinality()

    @property
    def element_spec(self) -> Nest:
        """Nest of `PerReplicaSpec`, or of `TensorSpec` with one replica.

        Dim 0 is None if some parts of a batch may have fewer rows than others. It is known only if
        every batch has the same number of rows, divisible by the number of replicas, and no worker
        can run out of batches before the others.
        """
        share = self.share
        # A worker that runs out of data gets parts without rows.
        may_end = self._source.coworkers is not None and self.cardinality != INFINITE_CARDINALITY

        def distributed(spec: TensorSpec) -> TensorSpec | PerReplicaSpec:
            size = spec.shape[0] if spec.shape else None
            if self._source.is_global:
                size = size // share.num_replicas if size and share.divides(size) else None
            if may_end:
                size = None
            shape = (size, *spec.shape[1:]) if spec.shape else ()
            parts = [TensorSpec(shape, spec.dtype)] * share.replicas_per_worker
            return parts[0] if share.num_replicas == 1 else PerReplicaSpec(tuple(parts))

        return jax.tree.map(distributed, self._source.spec())

    def reduce(self, initial_state: Nest, reduce_func: Callable[[Any, Any], Any]) -> Nest:
        """Returns the state after `state = reduce_func(state, element)` for every step's values."""
        return functools.reduce(reduce_func, self, initial_state)

    def __iter__(self) -> "DistributedIterator":
        _check_not_traced()
        once = self._source.once
        if once is not None and once.started:
            warn(
                f"The distributed dataset {once.iterator!r} is a generator or iterator: it"
                " continues where it stopped, which may be its end. For several epochs, distribute"
                " something that starts over, such as a list or an object with __iter__."
            )
        self._num_passes += 1
        return DistributedIterator(self, self._num_passes - 1, self._distribute, _per_replica)

    @property
    def seeds(self) -> list[int]:
        """Seeds that the dataset has drawn because none were given; none of several datasets."""
        is_one = len(self._source.nodes) == 1
        return self._source.node().drawn_seeds() if is_one else []

    def go_on(self, passes: int, seeds: list[int]) -> None:
        """Continues as if so many passes had been made, with seeds that were drawn then."""
        self._num_passes += passes
        if seeds and len(seeds) == len(self.seeds):
            self._source.set_node(self._source.node().with_drawn_seeds(seeds))

    def global_batches(self, skip: int = 0) -> "DistributedIterator":
        """Returns an iterator over global batches, which are nests of arrays.

        With several workers, it yields `OwnRows` if the parts of all replicas are equal. The pass
        starts after `skip` batches.
        """
        self._num_passes += 1
        batches = DistributedIterator(self, self._num_passes - 1, self._rows, self._rows)
        if skip and len(self._source.nodes) == 1:
            batches.set_state({**batches.get_state(), "position": skip})
        elif skip:
            collections.deque(itertools.islice(batches, skip), maxlen=0)
        return batches

    # For the iterator

    def num_examples(self, values: Nest) -> int:
        """Returns the number of rows that the replicas of this process have in a step's values."""
        leaf = _first_leaf(values)
        if not isinstance(leaf, PerReplica):
            return int(np.shape(leaf)[0]) if np.ndim(leaf) else 1
        if leaf.form != "stacked":
            return sum(len(_first_leaf(part)) for part in leaf.values)
        rows = _first_leaf(leaf.payload).shape
        return self.share.replicas_per_worker * (rows[1] if len(rows) > 1 else 1)

    def _distribute(self, batch: Given) -> Nest:
        """Returns the values of a step."""
        num_replicas = self.share.replicas_per_worker
        if self.share.num_replicas == 1:
            rows = batch.rows if isinstance(batch, WorkerBatch) else batch[0]
            return rows if self._placer is None else self._placer.place_alone(rows)
        if isinstance(batch, WorkerBatch):
            if batch.sizes[0] == batch.sizes[-1] and self._placer is not None:
                size = batch.sizes[0]
                place = self._placer.place_rows

                def placed(rows: Array) -> PerReplica:
                    stacked = rows.reshape(num_replicas, size, *rows.shape[1:])
                    return place(PerReplica.from_stacked(stacked, num_replicas))

                return jax.tree.map(placed, batch.rows)
            batch = split_rows(batch.rows, batch.sizes)
        parts, tree = flat_parts("The dataset", batch)
        columns = zip(*parts, strict=True)
        return jax.tree.unflatten(tree, [self._column(list(column)) for column in columns])

    def _rows(self, batch: Given) -> Nest:
        """Returns the rows of a step: of all replicas, or `OwnRows`."""
        if isinstance(batch, WorkerBatch):
            rows, num_parts = batch.rows, len(batch.sizes)
        else:
            joined = lambda *parts: np.concatenate([local_copy(part) for part in parts])
            rows, num_parts = jax.tree.map(joined, *batch), len(batch)
        return rows if num_parts == self.share.num_replicas else OwnRows(rows)

    def _column(self, parts: list[Any]) -> PerReplica:
        value = PerReplica(parts)
        if self._placer is None:
            return value
        stacked = stack_components(value)
        if stacked is None:
            return PerReplica(list(map(self._placer.place_alone, value.values)))
        return self._placer.place_rows(stacked)


def _check_not_traced() -> None:
    refuse_in_trace(
        InvalidValueError(
            "A distributed dataset was iterated inside Strategy.run or ClusterCoordinator.schedule,"
            " or beside a GradientTape in a distributary.function. There it would give only one"
            " batch, while the code is traced. Iterate outside and pass the batches to run."
        )
    )


def _first_leaf(nest: Nest) -> Any:
    # Called in every step; jax.tree.leaves takes several times as long.
    while isinstance(nest, (tuple, list, dict)):
        nest = next(iter(nest.values())) if isinstance(nest, dict) else nest[0]
    return nest


def _ready(place: Callable[[Given], Any], batch: Given) -> Ready:
    """Returns this worker's data for a step, placed as if all workers had the same shapes."""
    if isinstance(batch, WorkerBatch):
        leaves, tree = jax.tree.flatten(batch.rows)
        shapes = [
            tuple((leaf.dtype, (size, *leaf.shape[1:])) for leaf in leaves) for size in batch.sizes
        ]
        parts = functools.partial(split_rows, batch.rows, batch.sizes)
    else:
        flat, tree = flat_parts("The dataset", batch)
        shapes = [tuple((leaf.dtype, leaf.shape) for leaf in leaves) for leaves in flat]
        parts = functools.partial(iter, batch)
    values = place(batch) if shapes.count(shapes[0]) == len(shapes) else None
    return Ready(signature(tree, tuple(shapes)), tree, parts, values)


def _per_replica(parts: list[Nest]) -> Nest:
    """Returns the values of an uneven step, from the parts of all replicas."""
    return jax.tree.map(lambda *components: PerReplica(components), *parts)


_NEXT = JobEvent("the next step of a distributed dataset")


@final
class DistributedIterator(PassIterator, DistributedInput):
    """An iterator over a `DistributedDataset`.

    Args:
        dataset: The dataset.
        number: Number of the pass.
        place: Turns a worker's data for a step into the values of the step.
        join: Does the same for the parts of all replicas, if their shapes differ between workers.

    Source: `tf.distribute.DistributedIterator`.
    """

    def __init__(
        self,
        dataset: DistributedDataset,
        number: int,
        place: Callable[[Given], Any],
        join: Callable[[list[Nest]], Any],
    ) -> None:
        super().__init__(number)
        self._dataset = dataset
        self._place = place
        self._join = join
        self._agreed: AgreedSteps | None = None
        self._loop = Loop(dataset.counts)
        self._steps: Any = None  # an iterator, perhaps `Prefetched`, once the pass has begun

    def current_node(self) -> Node:
        return self._dataset._source.node()

    def __next__(self) -> Any:
        _check_not_traced()
        if self._dataset.share.num_workers > 1:
            job_programs.begin(_NEXT)
        if self._steps is None:
            self._start(self._dataset._source.stream((self._number,)))
        try:
            values = self._take() if self._agreed is None else self._agreed.next(self._take)
        except StopIteration:
            raise at_end() from None
        self._position += 1
        self._loop.batch_is_there()
        if self._join is _per_replica:  # otherwise it is `fit` that iterates, and counts itself
            num_examples = self._dataset.num_examples(values)
            self._dataset.counts.num_examples += num_examples
            if progress.is_watched:
                progress.add(1, num_examples)
        return values

    def _take(self) -> Any:
        """Returns this worker's data for the next step."""
        if isinstance(self._steps, Prefetched):
            return self._steps.next_or_wait(self._loop.waiting)
        return self._loop.wait_for(next, self._steps)

    def _start(self, stream: Iterator[Given]) -> None:
        source, place = self._dataset._source, self._place
        if source.coworkers is not None:
            self._agreed = AgreedSteps(
                source.coworkers, self._pass_name(), self._position, source.spec, self._join
            )
            place = functools.partial(_ready, place)
        self._steps = map(place, stream)
        # One more batch is being made.
        depth = self._dataset._depth and self._dataset._depth + 1
        once = source.once
        if once is not None:
            # Batches that its thread has read, and nobody has taken, are left for the next
            # iterator.
            if depth:
                once.read_ahead(depth)
        elif depth:
            in_memory = all(node.trait("in_memory") for node in source.nodes)
            self._steps = Prefetched(self._steps, depth, in_memory)

    def _pass_name(self) -> str:
        return f"pass {self._number + 1} of {self._dataset._source.place}"

    def next(self) -> Any:
        """Returns `next(iterator)`."""
        return next(self)

    @property
    def element_spec(self) -> Nest:
        """Specs of the values, see `DistributedDataset.element_spec`."""
        return self._dataset.element_spec

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to the position of an iterator over the same dataset, also from another process.

        You then get the same remaining batches, even with another prefetch depth. The passes that
        you begin afterwards are those that would have come next there.

        Raises:
            InvalidValueError: if the state belongs to another dataset.
        """
        source = self._dataset._source
        source.set_node(self.take_state(state))
        self._dataset._num_passes = self._number + 1
        stream = source.stream((self._number,))
        advance, coworkers = stream.advance, source.coworkers
        if coworkers is not None:
            where = f"position {self._position} of {self._pass_name()}"
            job = coworkers.job
            advance = lambda count: max(job.agree(where, lambda: stream.advance(count)))
        self.go_to_position(advance)
        self.close()
        self._start(stream)

    def close(self) -> None:
        """Ends the thread that reads ahead, and puts the iterator at its end."""
        steps, self._steps = self._steps, iter(())
        self._agreed = None
        if isinstance(steps, Prefetched):
            steps.close()
