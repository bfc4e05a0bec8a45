"""The strategy of asynchronous training, and the object that schedules closures on its workers."""

import contextlib
import functools
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, final

import jax

from distributary._threads import call_when_collected
from distributary.context import InputContext
from distributary.data import DatasetIterator, DistributedInput
from distributary.devices import Nest, make_abstract_mesh
from distributary.engine import (
    Placement,
    ProgramCache,
    counted,
    is_dynamic,
    signature_of,
    struct_of,
)
from distributary.errors import (
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    a_kind,
    check_takes,
    shown,
    warn,
)
from distributary.options import (
    InputOptions,
    InputReplicationMode,
    RecoveryOptions,
    ReduceOp,
    RunOptions,
)
from distributary.servers._messages import (
    Message,
    copy_of,
    leaves_of,
    nest_of,
    shapes_of,
    structs_of,
    tree_of,
)
from distributary.servers._plans import Plan, current_trace, plan_of
from distributary.servers._processes import cluster_of
from distributary.servers._queue import Closure, ClosureQueue, Key, RemoteValue, Workers
from distributary.servers._rows import SparseUpdate
from distributary.servers._sources import (
    DistributedSource,
    Feed,
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    RemoteSource,
    UnknownMakerError,
    closure_number,
    distributed_by,
)
from distributary.servers._statistics import CoordinatorStatistics, lines_of, serve_metrics
from distributary.servers._variables import ServerVariable
from distributary.strategies import MISSING, RemoteSteps, Strategy, StrategyExtended
from distributary.tracing import push


def _steps_of_model(model: Any, kind: str, strategy: Any) -> Callable[..., Any]:
    from distributary.servers._keras_steps import ServerSteps

    return ServerSteps(model, kind, strategy, ClusterCoordinator(strategy))


@final
class ParameterServerStrategy(Strategy):
    """Training with variables on servers, and workers that do not wait for each other.

    Pass the strategy to a `ClusterCoordinator`, and schedule functions on the workers with it.

    Args:
        cluster_resolver: A cluster resolver that names the workers and servers, each a process
            with a `Server`. Or a cluster in this process: `local_cluster(workers=2, ps=2)`.
        variable_partitioner: Function that divides large variables into shards. It is called with
            the `shape` and `dtype` of every variable created in the scope, and returns the number
            of shards along every dim, which must be 1 for all dims but dim 0. A variable that is
            divided becomes a `ShardedVariable`; its shards, named `<name>/part_<i>`, are placed
            on the servers in turn.
        sparse_update: What an update does to the rows of a table that a step has not looked up, if
            only rows are pushed. With "exact", these rows change as the optimizer changes them for
            a gradient of zero, as on one device; if that changes anything, servers update the
            whole table. With "lazy", they do not change, so the moments of Adam and momentum do
            not decay (LazyAdam).
        recovery_options: When to give up lost workers and servers.

    Raises:
        InvalidTypeError: if `cluster_resolver` is neither a cluster resolver nor a cluster, or
            `variable_partitioner` is not callable.
        InvalidValueError: if there are no workers or no servers, this process is not the chief, or
            `sparse_update` has another value.
        ClusterError: if tasks do not connect in time, or have other versions of packages.

    Source: `tf.distribute.ParameterServerStrategy`.
    """

    _needs_servers = True

    def __init__(
        self,
        cluster_resolver: object,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        sparse_update: SparseUpdate = "exact",
        recovery_options: RecoveryOptions | None = None,
    ) -> None:
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise InvalidTypeError(
                f"ParameterServerStrategy: variable_partitioner is {variable_partitioner!r},"
                " expected None or a function of shape and dtype, such as"
                " experimental.partitioners.MinSizePartitioner(max_shards=2)."
            )
        if sparse_update not in ("exact", "lazy"):
            raise InvalidValueError(
                f"ParameterServerStrategy: sparse_update is {sparse_update!r}, expected 'exact' or"
                " 'lazy'."
            )
        self._cluster_resolver = cluster_resolver
        cluster = cluster_of(cluster_resolver)
        self._cluster = cluster.open(recovery_options or RecoveryOptions())
        self._coordinator: ClusterCoordinator | None = None
        self._variable_partitioner = variable_partitioner
        self._sparse_update: SparseUpdate = sparse_update
        self._has_warned = False
        count = cluster.devices_per_worker
        device = jax.local_devices(backend="cpu")[0]
        placement = (
            Placement.on_workers(device, make_abstract_mesh(count))
            if count > 1
            else Placement.on_one_device(device)
        )
        extended = StrategyExtended(self, placement, kind_of_variables=ServerVariable)
        per_worker = lambda owner, data: ClusterCoordinator(owner).create_per_worker_dataset(data)
        # The steps of one worker come one after another, as those of one device.
        number = closure_number if len(cluster.workers) > 1 else lambda: None
        extended.remote_steps = RemoteSteps(_steps_of_model, number, per_worker)
        super().__init__(extended)

    @property
    def cluster_resolver(self) -> Any:
        """The cluster resolver or cluster that the strategy was created with."""
        return self._cluster_resolver

    @property
    def num_workers(self) -> int:
        """Number of workers; each runs a step of its own at a time."""
        return len(self._cluster.cluster.workers)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` on the worker that runs the surrounding scheduled function.

        If workers have several devices, `fn` runs once per device, as in `Strategy.run`. Each
        device gets its own part of `PerReplica` arguments, such as batches of distributed
        datasets. Outside of a scheduled function, `fn` runs in this process, with a warning.

        Source: `tf.distribute.ParameterServerStrategy.run`.
        """
        if current_trace() is None and not self._has_warned:
            self._has_warned = True
            warn(
                "ParameterServerStrategy.run was called outside of a scheduled function, so the"
                " coordinator computes it, and no worker. To use the workers, call it in a function"
                " that is given to ClusterCoordinator.schedule."
            )
        return super().run(fn, args, kwargs, options)

    def reduce(
        self, reduce_op: ReduceOp | str, value: Nest, axis: int | Sequence[int] | None = MISSING
    ) -> Nest:
        """Reduces like `Strategy.reduce`; servers do the computation that follows the result."""
        result = super().reduce(reduce_op, value, axis)
        return result if current_trace() is None else jax.tree.map(push, result)

    def experimental_distribute_dataset(  # type: ignore[override]
        self, dataset: object, options: InputOptions | None = None
    ) -> DistributedSource:
        """Splits the batches of a dataset over the replicas of a worker.

        Pass the result to `create_per_worker_dataset`. Every worker makes a `DistributedDataset`
        from it.

        Args:
            dataset: A dataset as for `Strategy.experimental_distribute_dataset`, or a function that
                returns one. Workers call the function themselves.
            options: Input options.

        Source: `tf.distribute.ParameterServerStrategy.experimental_distribute_dataset`.
        """
        if isinstance(dataset, DistributedInput):
            raise InvalidTypeError(
                "experimental_distribute_dataset: the dataset is distributed already. Give it to"
                " create_per_worker_dataset."
            )
        return self._distributed(dataset, False, options)

    def distribute_datasets_from_function(  # type: ignore[override]
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> DistributedSource:
        """Distributes a dataset of per-replica batches over the replicas of a worker.

        Pass the result to `create_per_worker_dataset`.

        Args:
            dataset_fn: Function from an `InputContext` to an iterable of per-replica batches. Every
                step takes one batch per replica of a worker. Workers do not divide the batches
                among them: every worker's context says that it is the only input pipeline.
            options: Input options.

        Source: `tf.distribute.ParameterServerStrategy.distribute_datasets_from_function`.
        """
        check_takes("distribute_datasets_from_function", dataset_fn, "dataset_fn(context)")
        return self._distributed(dataset_fn, True, options)

    def _distributed(
        self, dataset: object, of_replicas: bool, options: InputOptions | None
    ) -> DistributedSource:
        options = options or InputOptions()
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise UnsupportedError(
                "InputReplicationMode.PER_REPLICA is not supported for the workers of"
                f" {shown(self)}. Use PER_WORKER: each step takes one element per replica."
            )
        depth = options.experimental_per_replica_buffer_size
        return DistributedSource(dataset, self.num_replicas_in_sync, of_replicas, depth)

    def __repr__(self) -> str:
        cluster, count = self._cluster.cluster, self.num_replicas_in_sync
        devices = "" if count == 1 else f" with {count} devices each"
        workers = counted(len(cluster.workers), "worker")
        servers = counted(len(cluster.servers), "parameter server")
        return f"<ParameterServerStrategy: {workers}{devices}, {servers}>"


@final
class ClusterCoordinator:
    """A scheduler of functions on the workers of a `ParameterServerStrategy`.

    Each strategy has one: calling this again with the same strategy returns the same object.

    Args:
        strategy: The strategy.

    Raises:
        InvalidTypeError: if `strategy` is not a `ParameterServerStrategy`.

    Source: `tf.distribute.coordinator.ClusterCoordinator`.
    """

    def __new__(cls, strategy: Any) -> "ClusterCoordinator":
        if not isinstance(strategy, ParameterServerStrategy):
            raise InvalidTypeError(
                f"ClusterCoordinator: strategy is {shown(strategy)}, expected a"
                " ParameterServerStrategy."
            )
        if strategy._coordinator is None:
            strategy._coordinator = super().__new__(cls)
            strategy._coordinator._start(strategy)
        return strategy._coordinator

    def _start(self, strategy: "ParameterServerStrategy") -> None:
        self._strategy = strategy
        self._cluster = strategy._cluster
        self._queue = ClosureQueue(self._cluster.options.max_closure_losses, self._cluster.finish)
        self._functions = ProgramCache("ClusterCoordinator.schedule")
        self._function_numbers = itertools.count()
        self._source_numbers = itertools.count()
        # Keyed by the `id` of the iterator, which its feed keeps alive.
        self._shared: weakref.WeakValueDictionary[int, Feed] = weakref.WeakValueDictionary()
        # Collected objects, from any thread, that the workers have not yet been told to forget.
        self._gone: deque[Key] = deque()
        self._has_warned_of_feeding = False
        self._warned_of_rows: set[str] = set()
        # The thread that schedules a function traces it; the threads below trace other shapes.
        self._tracing = threading.RLock()
        # The threads hold no reference to the coordinator, so that they end with it.
        add_plan = weakref.WeakMethod(self._add_plan)
        session, queue = self._cluster, self._queue
        workers = Workers(session, queue, lambda *args: add_plan()(*args))  # type: ignore[misc]

        def collect() -> CoordinatorStatistics:
            counts = {f"num_{name}": number for name, number in queue.counts().items()}
            return CoordinatorStatistics(
                **counts, workers=workers.statistics(), servers=session.statistics()
            )

        end_metrics = serve_metrics(os.environ, lambda: lines_of("coordinator", collect()))
        strategy.extended.statistics_sources["coordinator"] = collect

        def end(error: Exception) -> None:
            queue.end(error)
            end_metrics()

        session.watch(end, queue.at_rest)
        self._workers = workers
        self._collect = collect
        call_when_collected(self, session.close)

    @property
    def strategy(self) -> "ParameterServerStrategy":
        """The strategy whose workers run the functions."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedules a call of `fn` on one of the workers, and returns at once.

        The function is traced here, in the scope of the strategy. When it assigns variables, their
        servers apply the change exactly once per closure.

        Args:
            fn: Function of arrays, numbers, `PerWorkerValues`, and iterators made by
                `iter(per_worker_dataset)` or `iter(dataset)`. Python side effects happen once per
                trace. With an iterator over a dataset, each closure receives the next element.
            args: Positional arguments of `fn`.
            kwargs: Keyword arguments of `fn`.

        Returns:
            A `RemoteValue` that will hold the result.

        Raises:
            InvalidTypeError: if `fn` is not callable, `args` is not a tuple, or an argument
                contains strings.
            InvalidValueError: if an argument is a `RemoteValue`.
            UnsupportedError: if `fn` calls back into Python, or its updates cannot be split over
                the servers.
            Exception: the first error of an earlier closure, raised once. Closures that were still
                queued are cancelled.
            UnavailableError: if there is no worker for too long, or workers keep ending while they
                run one closure.
            PSUnavailableError: if a server is lost; raised by every later call, too.
            CoordinatorReplacedError: if another coordinator uses the cluster; raised by every
                later call, too.

        Source: `tf.distribute.coordinator.ClusterCoordinator.schedule`.
        """
        if not callable(fn):
            raise InvalidTypeError(f"schedule: fn is {shown(fn)}, expected a function.")
        if not isinstance(args, (tuple, list, type(None))):
            raise InvalidTypeError(
                f"schedule: args is {a_kind(type(args))}, expected a tuple of the arguments of"
                f" {shown(fn)}. A single one needs a comma: args=(x,)."
            )
        leaves, tree = jax.tree.flatten((tuple(args or ()), dict(kwargs or {})))
        if any(isinstance(leaf, RemoteValue) for leaf in leaves):
            raise InvalidValueError(
                "schedule: an argument is a RemoteValue, which one worker has computed and another"
                " may not have. Pass remote_value.fetch()."
            )
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, DatasetIterator):
                leaves[i] = PerWorkerIterator(self._source_of(leaf))
        sources = [leaf.source for leaf in leaves if isinstance(leaf, _OF_WORKERS)]
        dynamic = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]
        arrays = [leaves[i] for i in dynamic]
        key = tree, tuple([_signature_of(leaf) for leaf in leaves])
        for i in dynamic:
            leaves[i] = None  # `call` keeps the other arguments, but not the arrays
        call = functools.update_wrapper(functools.partial(_call, fn, leaves, dynamic, tree), fn)
        function = self._function(fn, call, key, arrays)
        copies = [copy_of(a, aval.dtype) for a, aval in zip(arrays, function.avals, strict=True)]
        return self._queue.put(function, copies, call, sources)

    def join(self) -> None:
        """Waits until all closures have ended.

        Raises:
            Exception: the same errors as `schedule`.
        """
        self._queue.join()

    def done(self) -> bool:
        """Returns whether all closures have ended; raises the same errors as `join`."""
        return self._queue.is_done()

    def fetch(self, val: Nest) -> Nest:
        """Waits for the `RemoteValue`s in a nest, and returns the nest with their values."""
        return jax.tree.map(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val
        )

    def statistics(self) -> CoordinatorStatistics:
        """Returns the numbers counted so far about closures, workers and servers.

        Raises:
            PSUnavailableError: if a server is lost.
        """
        return self._collect()

    def create_per_worker_dataset(self, dataset_fn: object) -> "PerWorkerDataset":
        """Creates a dataset that every worker makes for itself.

        Each worker goes through all of its batches, so shuffle and repeat the dataset.

        Args:
            dataset_fn: Function without arguments that returns an iterable of batches, or an
                iterable that can be iterated several times at once. You can also pass the result
                of the strategy's `experimental_distribute_dataset` or
                `distribute_datasets_from_function`, or a function that returns such a result; that
                function is called in this process.

        Source: `tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset`.
        """
        return PerWorkerDataset(lambda: self._new_dataset(dataset_fn))

    def create_per_worker_value(self, value_fn: Callable[[], Any]) -> PerWorkerValues:
        """Creates a value that every worker computes for itself; pass it to scheduled functions.

        Args:
            value_fn: Function without arguments that returns a nest of arrays.
        """
        number = self._new_source("value", value_fn)
        if number is None:
            number = next(self._source_numbers)
            values = [value_fn() for _ in self._cluster.cluster.workers]
            messages = [
                Message("source", {"number": number, "nest": nest_of(value)}, leaves_of(value))
                for value in values
            ]
            self._workers.with_one(lambda one: one.set_up(("source", number), messages))
        return PerWorkerValues(self._of_workers("value", number))

    def _new_dataset(self, dataset_fn: object) -> RemoteSource:
        dataset_fn = distributed_by(dataset_fn, self._strategy)
        number = self._new_source("next", dataset_fn)
        if number is not None:
            return self._of_workers("next", number)
        return Feed(next(self._source_numbers), dataset_fn).source()

    def _source_of(self, iterator: DatasetIterator) -> RemoteSource:
        """Returns the source that sends the elements of an iterator of this process to workers."""
        with self._tracing:
            new = Feed(next(self._source_numbers), iterator)
            return self._shared.setdefault(id(iterator), new).source()

    def _of_workers(self, kind: str, number: int) -> RemoteSource:
        """Returns a source of data that the workers keep for as long as the source is in use."""
        source = RemoteSource(kind, number, functools.partial(self._peek, number))
        self._forget_when_collected(source, ("source", number))
        return source

    def _forget_when_collected(self, owner: object, key: Key) -> None:
        weakref.finalize(owner, self._gone.append, key).atexit = False

    def _forget(self) -> None:
        """Tells the workers to forget the objects that have been collected."""
        keys = set()
        with contextlib.suppress(IndexError):  # raised when empty; other threads may empty it, too
            while True:
                keys.add(self._gone.popleft())
        if keys:
            self._workers.remove_setup(keys)

    def _new_source(self, kind: str, maker: object) -> int | None:
        """Makes the workers call `maker`; returns its number, or None if they do not have it."""
        self._forget()
        number = next(self._source_numbers)
        try:
            described = self._cluster.cluster.describe(maker)
            message = Message("source", {"kind": kind, "number": number, "maker": described})
            messages = self._for_all(message)
            reply = self._workers.with_one(lambda one: one.set_up(("source", number), messages))
            if reply.kind == "unknown maker":
                raise UnknownMakerError(reply.fields["why"])
        except UnknownMakerError as error:
            if not self._has_warned_of_feeding:
                self._has_warned_of_feeding = True
                warn(
                    f"The coordinator makes the data of {maker!r} and sends it to the workers,"
                    f" because {error}. Workers make it themselves, and faster, if you pass a"
                    " function of a module beside the script, or one at the top level of the"
                    " script, above the line that creates the strategy."
                )
            return None
        return number

    def _for_all(self, message: Message) -> list[Message]:
        return [message] * len(self._cluster.cluster.workers)

    def _peek(self, number: int) -> tuple[list[Any], Any]:
        """Returns the shapes and dtypes of a worker's next data, and their structure."""
        message = Message("peek", {"number": number})
        fields = self._workers.with_one(lambda one: one.call(message)).fields
        return structs_of(fields["shapes"]), tree_of(fields["nest"])

    # Functions

    def _function(
        self, fn: Any, call: Callable[..., Any], key: Any, arrays: Sequence[Any]
    ) -> "_Function":
        with self._tracing:
            versions = self._functions.programs_of(fn)
            function: _Function | None = versions.get(key)
            # If a variable was collected, its name may now mean another one.
            if function is None or any(c() is None for plan in function.plans for c in plan.cells):
                self._forget()
                avals = [struct_of(array) for array in arrays]
                name = getattr(fn, "__qualname__", None) or repr(fn)
                function = _Function(next(self._function_numbers), name, avals)
                self._forget_when_collected(function, ("function", function.number))
                self._trace(function, call, None)
                self._functions.note_trace(fn, versions, key)
                versions[key] = function
        return function

    def _add_plan(self, closure: Closure, shapes: list[Any]) -> None:
        """Traces the function of a closure again, for data of new shapes."""
        function = closure.function
        num_data = len(shapes) - len(function.avals)
        self._trace(function, closure.call, structs_of(shapes[:num_data]))

    def _trace(
        self, function: "_Function", call: Callable[..., Any], data: list[Any] | None
    ) -> None:
        """Traces a function and sends the plan to the workers."""
        with self._tracing, self._strategy.scope():
            plan = plan_of(
                call,
                function.avals,
                data,
                self._cluster.shards_of,
                self._strategy._sparse_update,
                self._strategy.num_replicas_in_sync,
                self._source_of,
            )
            number = len(function.plans)
            taken = [[(s.kind, s.number) for s in one.sources] for one in (*function.plans, plan)]
            if taken[0] != taken[-1]:  # workers have taken the data before they know its shapes
                raise UnsupportedError(
                    f"{function.name} takes {len(taken[0])} elements of iterators and values for"
                    f" data of one shape, and {len(taken[-1])} or others for data of another."
                    " Take the same in every step, whatever the shape of the data."
                )
            function.plans.append(plan)
        for name in plan.refusals.keys() - self._warned_of_rows:
            self._warned_of_rows.add(name)
            warn(
                f"Rows of variable {name!r} are looked up, but all of it travels in every step:"
                f" {plan.refusals[name]}. Only rows travel of a variable that is read by"
                " table[ids], jnp.take or embedding_lookup alone, with ids that depend on no"
                " variable."
            )
        self._cluster.add_updates(plan.updates)
        leaves = [leaf for source in plan.sources for leaf in source.leaves]
        fields = {
            "function": function.number,
            "sources": [(s.kind, s.number, len(s.leaves)) for s in plan.sources],
            "shapes": shapes_of([*leaves, *function.avals]),
            "plan": astuple(plan.worker),
            "number": number,
        }
        programs = [program.content for program in plan.programs]
        message = Message("plan", fields, plan.constants, programs)
        self._workers.add_setup(("function", function.number), self._for_all(message))


_OF_WORKERS = (PerWorkerIterator, PerWorkerValues)


def _signature_of(leaf: object) -> Any:
    if isinstance(leaf, _OF_WORKERS):
        return leaf.source.signature
    return signature_of(leaf, "ClusterCoordinator.schedule")


def _call(
    fn: Callable[..., Any],
    static: Sequence[Any],
    dynamic: Sequence[int],
    tree: jax.tree_util.PyTreeDef,
    *arrays: Any,
) -> Any:
    """Calls `fn` with arrays at the positions in `dynamic` among the leaves of its arguments."""
    parts = list(static)
    numbers = itertools.count()
    for i, leaf in enumerate(static):
        if isinstance(leaf, _OF_WORKERS):
            bound = leaf.source.bound(next(numbers))
            is_value = isinstance(leaf, PerWorkerValues)
            parts[i] = bound.take() if is_value else PerWorkerIterator(bound)
    for i, array in zip(dynamic, arrays, strict=True):
        parts[i] = array
    args, kwargs = jax.tree.unflatten(tree, parts)
    return fn(*args, **kwargs)


@final
@dataclass(slots=True, weakref_slot=True)
class _Function:
    """The part shared by all closures with the same function and arguments of the same signature.

    It does not keep the Python function alive; the closures that need the function do.

    Attributes:
        number: The number by which workers know it.
        name: The name shown in messages.
        avals: Shapes and dtypes of the arrays among the arguments.
        plans: The plans, each for other shapes of the data.
    """

    number: int
    name: str
    avals: list[Any]
    plans: list[Plan] = field(default_factory=list)

    def feeds_of(self, sources: Sequence[RemoteSource]) -> list[Feed]:
        """Returns the feeds whose data is sent with a closure that has these sources."""
        bound = [sources[s.number] if s.kind == "bound" else s for s in self.plans[0].sources]
        return [source.feed for source in bound if source.feed is not None]
