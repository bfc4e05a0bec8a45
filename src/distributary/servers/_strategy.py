"""The strategy of asynchronous training, with variables on parameter servers."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from distributary.checkpoint import RemoteStore
from distributary.context import InputContext, current_mode
from distributary.data import DistributedInput
from distributary.devices import Nest, make_abstract_mesh
from distributary.engine import Placement, counted
from distributary.errors import (
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
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
from distributary.servers._closures import current_trace
from distributary.servers._cluster_coordinator import ClusterCoordinator
from distributary.servers._partitioners import Shard, initial_shards, num_shards_of, sizes_of
from distributary.servers._per_worker import closure_number
from distributary.servers._processes import cluster_of
from distributary.servers._rows import SparseUpdate
from distributary.servers._sources import DistributedSource
from distributary.strategies import MISSING, RemoteSteps, Strategy, StrategyExtended
from distributary.tracing import push
from distributary.variables import (
    AggregatedVariable,
    ShardedVariable,
    Variable,
    colocated_with,
    initial_array,
    neighbor,
)


def _steps_of_model(model: Any, kind: str, strategy: Any) -> Callable[..., Any]:
    from distributary.servers._keras_steps import ServerSteps

    return ServerSteps(model, kind, strategy)


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
        self._coordinator: Any = None
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
        extended = StrategyExtended(self, placement, kind_of_variables=_ServerVariable)
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


class _ServerVariable(AggregatedVariable):
    """A variable on a parameter server."""

    _stores_array = False
    _place: Shard
    _first: Any = None  # the initial value, if it was computed to know the shape

    @classmethod
    def _new(cls, *args: Any, **kwargs: Any) -> Any:
        """Creates the result of `Variable(...)`: a `ShardedVariable` if it is to be divided."""
        options = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        strategy = current_mode().strategy
        beside, partitioner = neighbor(), strategy._variable_partitioner
        if isinstance(beside, Variable) or (beside is None and partitioner is None):
            return object.__new__(cls)
        name = options.pop("name", None) or "Variable"
        first, shape = options.pop("initial_value", None), options.pop("shape", None)
        dtype = options.get("dtype")
        whole = object.__new__(cls)
        if not callable(first) or shape is None or dtype is None:
            first = whole._first = initial_array(first, f"Variable {name!r}")
            shape, dtype = first.shape, first.dtype if dtype is None else dtype
        shape = tuple(shape)
        if beside is None:
            sizes = sizes_of(shape, num_shards_of(partitioner, shape, dtype))
            places: list[Any] = [None] * len(sizes)
        else:
            places, sizes = beside.variables, [shard.shape[0] for shard in beside]
            if shape[:1] != beside.shape[:1]:
                return whole
        if len(sizes) == 1:
            return whole
        shards = []
        for i, value in enumerate(initial_shards(first, shape, sizes)):
            with colocated_with(places[i]):
                shard = object.__new__(cls)
                cls.__init__(shard, value, name=f"{name}/part_{i}", **options)
            shards.append(shard)
        return ShardedVariable(shards, name)

    def __init__(self, initial_value: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(initial_value if self._first is None else self._first, *args, **kwargs)
        self._first = None

    @property
    def device(self) -> str:
        """Name of the device of the server that keeps the variable."""
        return f"/job:ps/replica:0/task:{self._place.server}/device:CPU:0"

    @property
    def _shards(self) -> list["_ServerVariable"]:
        return [self]

    @property
    def _remote_store(self) -> RemoteStore:
        store: RemoteStore = self._layout.strategy._cluster
        return store

    def _initial_state(self, initial: ArrayLike) -> Any:
        cluster = self._layout.strategy._cluster
        beside = getattr(neighbor(), "_place", None)
        self._place = cluster.create(np.asarray(initial, self._dtype), beside)
        return None

    @property
    def _value(self) -> Any:
        cluster = self._layout.strategy._cluster
        return jnp.asarray(cluster.read(self._place, self._shape, self._dtype))

    @_value.setter
    def _value(self, value: object) -> None:
        if value is not None:
            self._layout.strategy._cluster.assign(self._place, "assign", np.asarray(value))

    def _change_eager(self, kind: str, value: ArrayLike) -> None:
        self._layout.strategy._cluster.assign(self._place, kind, np.asarray(value, self._dtype))


# The arguments of `Variable`, in order.
_ARGUMENTS = tuple(inspect.signature(Variable.__init__).parameters)[1:]
