"""Datasets and values of which every worker has its own."""

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from distributary.data import DatasetIterator
from distributary.devices import Nest
from distributary.errors import (
    ContextError,
    InvalidTypeError,
    OutOfRangeError,
    UnsupportedError,
    shown,
)
from distributary.servers._closures import current_trace
from distributary.servers._messages import leaves_of, shapes_of, structs_of
from distributary.servers._sources import as_maker
from distributary.tracing import current_scope, outside_of_trace


@final
class PerWorkerDataset:
    """A dataset of which every worker makes its own. Pass `iter(dataset)` to scheduled functions.

    Source: `tf.distribute.coordinator.PerWorkerValues` of `create_per_worker_dataset`.
    """

    def __init__(self, new_source: Callable[[], "RemoteSource"]) -> None:
        self._new_source = new_source

    def __iter__(self) -> "PerWorkerIterator":
        if current_scope() is not None:
            raise ContextError(
                "A per-worker dataset is iterated inside a function that is traced. Call iter()"
                " outside, and pass the iterator to schedule."
            )
        return PerWorkerIterator(self._new_source())

    def keras_adapter(self, arguments: dict[str, Any]) -> Any:
        """Returns the data adapter for `fit`, `evaluate` or `predict`.

        Args:
            arguments: Their other arguments for data, and `steps_per_epoch`.
        """
        from distributary.servers._keras_steps import PerWorkerAdapter

        return PerWorkerAdapter(self, arguments)


class _OfWorkers:
    """An argument of a scheduled function that stands for the data of the worker running it."""

    def __init__(self, source: "RemoteSource") -> None:
        if not isinstance(source, RemoteSource):
            raise InvalidTypeError(
                f"{type(self).__name__}: got {shown(source)}. Use what create_per_worker_value or"
                " create_per_worker_dataset of a ClusterCoordinator returns."
            )
        self.source = source


@final
class PerWorkerValues(_OfWorkers):
    """A value of which every worker has its own, made by `create_per_worker_value`.

    As an argument of a scheduled function, it stands for the value of the worker that runs it.

    Source: `tf.distribute.coordinator.PerWorkerValues`.
    """


@final
class PerWorkerIterator(_OfWorkers):
    """The workers' iterators over their datasets, as an argument of scheduled functions."""

    def __iter__(self) -> "PerWorkerIterator":
        if current_trace() is not None:  # a loop would never end
            raise ContextError(
                "A scheduled function loops over the iterator of a per-worker dataset. The function"
                " is traced before the number of batches is known. Call next(iterator), and"
                " schedule the function for every batch."
            )
        return self

    def __next__(self) -> Any:
        return self.source.take()

    @property
    def element_spec(self) -> Any:
        """A nest of the `jax.ShapeDtypeStruct`s of the first worker's next batch."""
        return self.source.element_spec

    def get_next(self) -> Any:
        """Returns the next batch of the worker; call it inside a scheduled function."""
        return self.source.take()


def experimental_get_current_worker_index() -> Any:
    """Returns the number of the worker that runs the scheduled function, an int32 scalar.

    Raises:
        ContextError: outside of a function that is traced for `ClusterCoordinator.schedule`.

    Source: `tf.distribute.coordinator.experimental_get_current_worker_index`, which returns an
        int64 and also works in dataset functions.
    """
    trace = current_trace()
    if trace is None:
        raise ContextError(
            "experimental_get_current_worker_index was called outside of a scheduled function."
            " Call it inside the function that is given to ClusterCoordinator.schedule."
        )
    return trace.take("index", 0, jax.ShapeDtypeStruct((), np.int32))


def closure_number() -> Any:
    """Returns the number of the closure that runs the scheduled function, a uint32 scalar.

    A closure that runs again keeps its number. Outside of a scheduled function, returns None.
    """
    trace = current_trace()
    if trace is None:
        return None
    return trace.take("closure", 0, jax.ShapeDtypeStruct((), np.uint32))


@final
@dataclass(eq=False)
class RemoteSource:
    """A handle to data of which every worker has its own.

    Args:
        kind: `"next"` for batches of datasets that workers make, `"fed"` for batches that the
            coordinator sends them, `"value"` for values. In a trace, `"bound"` stands for a source
            among the arguments of the closure.
        number: The number by which workers know it. For `"bound"`, its position among those
            arguments.
        peek: Returns the shapes and dtypes of the next data, and their structure.
        feed: The feed that makes the data, if the coordinator sends it.
    """

    kind: str
    number: int
    peek: Callable[[], tuple[list[Any], Any]]
    feed: "Feed | None" = None

    @functools.cached_property
    def _seen(self) -> tuple[list[Any], Any]:
        return self.peek()

    @functools.cached_property
    def signature(self) -> Any:
        """Key that is equal for two sources if one trace of a function serves both."""
        specs, tree = self._seen
        return self.kind, tuple([(s.shape, s.dtype) for s in specs]), tree

    def bound(self, place: int) -> "RemoteSource":
        """Returns the source that stands in a trace for all sources with this signature."""
        return RemoteSource("bound", place, lambda: self._seen)

    def take(self) -> Any:
        """Returns the data as tracers, inside a function that is being traced."""
        trace = current_trace()
        if trace is None:
            raise UnsupportedError(
                "The batches of a per-worker dataset are on the workers. Call next(iterator) inside"
                " a function, and schedule it with the iterator as an argument."
            )
        return trace.take(self.kind, self.number, self.element_spec, self.feed)

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of the first worker's next data, as of the first time it was asked."""
        specs, tree = self._seen
        return jax.tree.unflatten(tree, specs)


@final
class Feed:
    """Batches that the coordinator makes and sends to the workers.

    Args:
        number: See `RemoteSource`.
        dataset: An iterable of batches, or a function that returns one: each worker has an iterator
            of its own. Or an iterator in this process, of which each element goes to one closure.
    """

    def __init__(self, number: int, dataset: object) -> None:
        self.number = number
        self._dataset = dataset
        self._iterators: dict[int, Peekable] = {}
        self._lock = threading.Lock()

    def next(self, worker: int) -> list[np.ndarray]:
        """Returns the leaves of the next batch for a worker.

        Raises:
            OutOfRangeError: after the last batch.
        """
        return leaves_of(self._iterator(worker).next())

    @functools.cached_property
    def seen(self) -> tuple[list[Any], Any]:
        """The shapes and dtypes of the first batch that was looked at, and its structure."""
        with outside_of_trace():
            element = self._iterator(0).peek()
        return structs_of(shapes_of(leaves_of(element))), jax.tree.structure(element)

    def _iterator(self, worker: int) -> "Peekable":
        of_all = isinstance(self._dataset, DatasetIterator)
        with self._lock:
            key = 0 if of_all else worker
            if key not in self._iterators:
                name = (
                    "iterator that was given to schedule, or captured by the function,"
                    if of_all
                    else "dataset of a worker"
                )
                self._iterators[key] = Peekable(as_maker(self._dataset), name)
            return self._iterators[key]


@final
class Peekable:
    """An iterator that can show its next batch without taking it.

    Args:
        make: Returns the iterable. It is called only when the first batch is needed: a worker that
            comes back is told of all earlier datasets, and most of them are no longer used.
        name: Name of the iterable, for messages.
    """

    def __init__(self, make: Callable[[], Any], name: str = "dataset of a worker") -> None:
        self._make = make
        self._name = name
        self._iterator: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self._lock = threading.RLock()

    def peek(self) -> Any:
        """Returns the next batch without taking it."""
        with self._lock:
            element = self.next()
            self.put_back(element)
            return element

    def put_back(self, element: Nest) -> None:
        """Puts back the element that was taken last, so that it comes next again."""
        with self._lock:
            if isinstance(self._iterator, DatasetIterator):  # which others may use, too
                self._iterator.put_back(element)
            else:
                self._ahead.append(element)

    def next(self) -> Any:
        """Takes the next batch.

        Raises:
            OutOfRangeError: after the last batch.
        """
        with self._lock:
            if self._ahead:
                return self._ahead.pop()
            if self._iterator is None:
                self._iterator = iter(self._make())
            try:
                return next(self._iterator)
            except StopIteration:
                raise OutOfRangeError(f"The {self._name} has ended.") from None
