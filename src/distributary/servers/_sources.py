"""Datasets and values of which every worker has its own, and the functions that make them.

Workers get functions by name and never as code.

The coordinator describes a function at the top level of a module by the names of the module and the
function. A worker takes the function of that name from its own copy of the program. A worker in the
same process gets the function itself. If a function cannot be described, the coordinator calls it
and feeds the workers.
"""

import functools
import importlib
import importlib.machinery
import inspect
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import numpy as np

from distributary.context import InputContext
from distributary.data import Batches, DatasetIterator, DistributedInput, Elements, WorkerShare
from distributary.devices import Nest, StepCounts
from distributary.errors import (
    ContextError,
    DistributaryError,
    InvalidTypeError,
    OutOfRangeError,
    UnsupportedError,
    shown,
)
from distributary.servers._messages import JSON, leaves_of, shapes_of, structs_of
from distributary.servers._plans import current_trace
from distributary.strategies import DistributedDataset
from distributary.tracing import current_scope, outside_of_trace

_MAIN, _MAIN_COPY = "__main__", "__mp_main__"  # the second name is that of multiprocessing
_INSTALLED = ("site-packages", "dist-packages")


class UnknownMakerError(DistributaryError, LookupError):
    """A function that cannot be described, or that a worker does not have; the text says why."""


@final
@dataclass(frozen=True, slots=True)
class DistributedSource(DistributedInput):
    """A recipe for a dataset with a batch for each replica of a worker.

    When the coordinator iterates over it, it makes such a dataset in the coordinator's process.

    Args:
        dataset: The dataset, or a function that makes it.
        num_replicas: Number of replicas of a worker.
        of_replicas: True if `dataset` is a function from an `InputContext` to a dataset whose
            elements belong to one replica each and must not be split.
        depth: Number of batches that a thread makes ahead; 0 for no thread.
    """

    dataset: Any
    num_replicas: int
    of_replicas: bool
    depth: int

    def __call__(self) -> DistributedDataset:
        """Makes the dataset, which yields `PerReplica`s of arrays if there are several replicas."""
        share = WorkerShare(1, 0, self.num_replicas)
        if self.of_replicas:
            context = InputContext(num_replicas_in_sync=self.num_replicas)
            source: Any = Elements(lambda: [self.dataset(context)], self.num_replicas)
        else:
            source = Batches(as_maker(self.dataset)(), share)
        return DistributedDataset(source, None, share, self.depth, StepCounts())

    def __iter__(self) -> Iterator[Any]:
        return iter(self())

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of an element; see `DistributedDataset.element_spec`."""
        return self().element_spec


class ScriptEndError(BaseException):
    """The end of a script that a worker runs for its definitions, where the chief's work begins."""


_state = threading.local()


def is_reimporting() -> bool:
    """Returns whether this thread is running the main script again, for its definitions."""
    return getattr(_state, "is_reimporting", False)


def as_maker(value: object) -> Callable[[], Any]:
    """Returns a function that returns data, given such a function or the data itself."""
    return value if callable(value) else lambda: value


def distributed_by(maker: object, strategy: Any) -> Any:
    """Calls a function that distributes a dataset with the strategy, and returns the result.

    Workers could not call it, as they do not have the strategy. Any other `maker` is returned
    unchanged.

    Args:
        maker: A function, or data.
        strategy: The strategy.
    """
    maker = _plain(maker)
    if not isinstance(maker, types.FunctionType):
        return maker
    try:
        used = inspect.getclosurevars(maker)
    except ValueError:  # the function names a variable that has no value yet
        return maker
    if not any(value is strategy for value in (*used.globals.values(), *used.nonlocals.values())):
        return maker
    dataset = maker()
    return dataset if isinstance(dataset, DistributedSource) else maker


def describe(maker: Any) -> JSON:
    """Describes a function by its name, its module, and its arguments if it is a `partial`.

    Raises:
        UnknownMakerError: if it is not a function at the top level of a module, or its arguments
            are not JSON.
    """
    if isinstance(maker, DistributedSource):
        return {
            **describe(maker.dataset),
            "distributed": [maker.num_replicas, maker.of_replicas, maker.depth],
        }
    args, kwargs = [], {}
    if isinstance(maker, functools.partial):
        maker, args, kwargs = maker.func, list(maker.args), dict(maker.keywords)
    maker = _plain(maker)
    if not isinstance(maker, types.FunctionType):
        raise UnknownMakerError(f"it is not a function, but a {type(maker).__name__}")
    module, name = maker.__module__, maker.__qualname__
    if _attribute(sys.modules.get(module), name) is not maker:
        raise UnknownMakerError(f"{name} is not at the top level of a module")
    try:
        is_json = json.loads(json.dumps([args, kwargs])) == [args, kwargs]
    except (TypeError, ValueError):
        is_json = False
    if not is_json:
        raise UnknownMakerError(f"the arguments of {name} are not JSON: {args}, {kwargs}")
    return {"module": module, "name": name, "args": args, "kwargs": kwargs}


def find(description: JSON) -> Callable[[], Any]:
    """Returns the function that another process has described.

    It finds only functions of the main script, of modules in the script's folder and of its
    package. A description must not be a way to call anything else.

    Raises:
        UnknownMakerError: if there is no such function here.
        Exception: any error that a module raises when it is imported.
    """
    module_name, name = description["module"], description["name"]
    module = sys.modules[_MAIN] if module_name == _MAIN else _import(module_name)
    function = _attribute(module, name)
    reason = ""
    if function is None and module_name == _MAIN:
        # The script may not have reached it yet: Server.join() can come before other definitions.
        module, reason = _main_copy()
        function = _attribute(module, name)
    if not isinstance(function, types.FunctionType) or (
        function.__module__.replace(_MAIN_COPY, _MAIN),
        function.__qualname__,
    ) != (module_name, name):
        raise UnknownMakerError(f"a worker has no function {name} in {module_name}{reason}")
    maker = functools.partial(function, *description["args"], **description["kwargs"])
    how = description.get("distributed")
    return maker if how is None else DistributedSource(maker, *how)


def _attribute(module: types.ModuleType | None, qualified_name: str) -> Any:
    value = module
    for name in qualified_name.split("."):
        value = getattr(value, name, None)
    return _plain(value)


def _plain(function: object) -> Any:
    """Returns the Python function of a compiled one: data is made without compiling."""
    return getattr(function, "python_function", function)


def _import(name: str) -> types.ModuleType:
    main = sys.modules[_MAIN]
    package = (main.__package__ or "").partition(".")[0]
    try:
        if not package or name.partition(".")[0] != package:
            _check_is_beside(main, name)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UnknownMakerError(f"a worker cannot import {name}: {error}") from error


def _check_is_beside(main: types.ModuleType, name: str) -> None:
    folder = Path(getattr(main, "__file__", None) or "/nowhere").resolve().parent
    # Finds the module without running it.
    spec = importlib.machinery.PathFinder.find_spec(name.partition(".")[0], [str(folder)])
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    if not places or any(part in str(place) for place in places for part in _INSTALLED):
        raise UnknownMakerError(
            f"{name} is not a module in the folder {folder} of a worker's script: write a function"
            " in the script that calls it"
        )


@functools.cache
def _main_copy() -> tuple[types.ModuleType, str]:
    """Runs the main script under another name; returns it, and for messages where it stopped."""
    main = sys.modules[_MAIN]
    file = getattr(main, "__file__", None)
    if file is None:
        raise UnknownMakerError("a worker has no script")
    module = types.ModuleType(_MAIN_COPY)
    module.__file__, module.__package__ = file, main.__package__
    sys.modules[_MAIN_COPY] = module  # as multiprocessing does, whose children look for it
    _state.is_reimporting = True
    try:
        exec(compile(Path(file).read_bytes(), file, "exec"), vars(module))
    except (Exception, ScriptEndError, SystemExit) as error:
        return module, f" above the line that raises {type(error).__name__}: {error}"
    finally:
        _state.is_reimporting = False
    return module, ""


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
        from distributary.servers._keras_data import PerWorkerAdapter

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

    def source(self) -> RemoteSource:
        """Returns a handle to the batches."""
        return RemoteSource("fed", self.number, lambda: self.seen, self)

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
