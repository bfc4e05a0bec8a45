"""The methods of a strategy for libraries, and the parts from which a strategy is assembled."""

import enum
import functools
import itertools
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary._late import libraries
from distributary.context import (
    InputContext,
    Mode,
    ValueContext,
    check_same_strategy,
    current_mode,
    entered,
    in_default_context,
    in_global_view,
    require_cross_replica,
)
from distributary.data import Batches, DistributedInput, Elements, WorkerShare, kept
from distributary.devices import (
    LOCAL_AXIS,
    REPLICA_AXIS,
    StepCounts,
    canonical_name,
    is_divided,
    local_copy,
    mesh_of_values,
    num_hosts,
    num_logical_devices,
    shard_spec,
    sharding_on,
    short_name,
    warn_of_untested,
)
from distributary.engine import RUN, UPDATE, Engine, Placement
from distributary.errors import (
    ContextError,
    InvalidTypeError,
    InvalidValueError,
    ReplicaMismatchError,
    UnsupportedError,
    check_type,
    checked_int,
    shown,
)
from distributary.job import Coworkers, consensus, spec_of
from distributary.launch import report_progress
from distributary.options import CommunicationOptions, InputOptions, InputReplicationMode, ReduceOp
from distributary.strategies._cross_replica import CrossReplica, broadcast, gather_nest
from distributary.strategies._distributed_dataset import DistributedDataset
from distributary.strategies._layout_rules import LayoutRules
from distributary.tracing import current_scope, in_role, push, script_line
from distributary.variables import (
    CrossDeviceOps,
    DistributedValues,
    IndexedSlices,
    Mirrored,
    NcclAllReduce,
    PerReplica,
    ShardedVariable,
    Variable,
    VariableComponent,
    VariableLayout,
    as_reduce_op,
    at_device,
    check_destinations,
    check_pairs,
    colocated_with,
    component_of_traced,
    default_cross_device_ops,
    flat_parts,
    local_results,
    map_leaves,
    only_device,
    reduce_nest,
    stack_components,
)

if TYPE_CHECKING:
    from distributary.cluster_resolver import MultiWorker

_log = logging.getLogger(__name__)
_alive: "weakref.WeakSet[Any]" = weakref.WeakSet()


def unused_strategies() -> list[Any]:
    """Returns the strategies of several replicas that exist and have not run a step yet."""
    strategies = [s for s in _alive if s.num_replicas_in_sync > 1 and not s.extended.engine.cache]
    return sorted(strategies, key=lambda s: -s.num_replicas_in_sync)


@final
class Sharded(enum.Enum):
    """What every device holds only a part of; the values are for people."""

    NOTHING = ""
    OPTIMIZER_STATE = "Keras optimizer state"
    PARAMETERS = "variables"
    IN_HOST = "variables (inside of each host)"

    @classmethod
    def of(cls, optimizer_state: bool, parameters: bool | str) -> "Sharded":
        """Returns the member for the arguments `experimental_shard_...` of strategies.

        Raises:
            InvalidValueError: if one is neither a bool nor, for the parameters, "host".
        """
        bools = (bool, np.bool_, type(None))
        if not isinstance(optimizer_state, bools):
            raise InvalidValueError(
                f"experimental_shard_optimizer_state is {optimizer_state!r}, expected True or"
                ' False. Only experimental_shard_parameters takes "host".'
            )
        if parameters == "host":
            return cls.IN_HOST
        if not isinstance(parameters, bools):
            raise InvalidValueError(
                f"experimental_shard_parameters is {parameters!r}, expected True, False or"
                ' "host", which divides variables over the devices of each host.'
            )
        if parameters:
            return cls.PARAMETERS
        return cls.OPTIMIZER_STATE if optimizer_state else cls.NOTHING

    def __bool__(self) -> bool:
        return self is not Sharded.NOTHING


class RemoteSteps(NamedTuple):
    """What a strategy whose steps run elsewhere offers to Keras.

    Attributes:
        of_model: Returns the `train_function`, `test_function` or `predict_function` for a model,
            `"train"`, `"test"` or `"predict"`, and the strategy.
        number: Returns a uint32 scalar that tells the step that is traced from others that read
            the same state, or None if there are no others. A step that runs again keeps it.
        per_worker_dataset: Returns the dataset from which every worker takes its batches, for a
            strategy and what its `distribute_datasets_from_function` returns.
    """

    of_model: Callable[[Any, str, Any], Callable[..., Any]]
    number: Callable[[], Any]
    per_worker_dataset: Callable[[Any, Any], Any]


# Smaller variables are whole on every device: their parts are not worth a gather.
_MIN_BYTES_IN_PARTS = 1 << 10


@final
class StrategyExtended:
    """The methods of a strategy for library authors; you reach them as `strategy.extended`.

    It is assembled from parts that it holds: the `placement` of replicas and variables, the
    `engine` that runs steps, and what combines the replicas' values, `combine`.

    Args:
        strategy: The strategy.
        placement: The devices, and where values lie on them.
        cross_device_ops: The reduction algorithm. None uses one XLA all-reduce of all arrays, or of
            one vector between the CPUs of several processes.
        options: Communication options.
        workers: The processes to which the devices belong, the same number of replicas for each;
            None for this process alone.
        kind_of_variables: Class of the variables, if they do not hold their value themselves.
        sharded: What every device holds only a part of.
        layout_rules: How variables of models are divided over the devices of a replica.

    Source: `tf.distribute.StrategyExtended`.
    """

    def __init__(
        self,
        strategy: Any,
        placement: Placement,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
        workers: "MultiWorker | None" = None,
        kind_of_variables: Any = None,
        sharded: Sharded = Sharded.NOTHING,
        layout_rules: LayoutRules | None = None,
    ) -> None:
        #: Whether this is the strategy outside of every scope.
        self.is_default = placement.mesh is None
        if not self.is_default:
            warn_of_untested("jax", jax.__version__)
        self._strategy = strategy
        self.placement = placement
        #: Further counts of the strategy, by name: each function returns a dataclass of numbers.
        self.statistics_sources: dict[str, Callable[[], Any]] = {}
        #: Number of processes, and the number of this one.
        self.num_workers = 1 if workers is None else workers.num_workers
        self.worker_number = 0 if workers is None else workers.worker_number or 0
        self._replicas_per_worker = placement.num_replicas // self.num_workers
        first_replica = self.worker_number * self._replicas_per_worker
        self._local_replicas = range(first_replica, first_replica + self._replicas_per_worker)
        self.step_counts = StepCounts()
        self._sharded = sharded
        #: How variables of Keras models are divided over the devices of a replica.
        self.layout_rules = layout_rules or LayoutRules(type(strategy).__name__)
        #: Whether `BatchNormalization` normalizes each replica's part of a batch by itself in
        #: Keras' `fit`, as in tf.distribute, which saves collectives. Set it before the
        #: first step. If False, the statistics are those of the whole batch, as on one device.
        self.experimental_batch_statistics_of_replicas = False
        #: What runs steps elsewhere than on devices of this process; None if nothing does.
        self.remote_steps: RemoteSteps | None = None
        self._has_told = False
        devices = placement.devices
        platform = devices[0].platform if devices else "cpu"
        ops = cross_device_ops or default_cross_device_ops(platform, self.num_workers)
        self.cross_device_ops = ops.for_devices(devices)
        self.options = options or CommunicationOptions()
        self._layout = VariableLayout(
            strategy,
            placement.num_replicas,
            placement.stacked is not None,
            placement.of_variables,
            placement.stacked,
            self.from_chief if self.num_workers > 1 else None,
            kind_of_variables,
        )
        self.engine = Engine(strategy, placement)
        self.combine = CrossReplica(strategy, placement, self.cross_device_ops, self.options)
        _alive.add(strategy)
        if not self.is_default:
            for library in libraries():
                library.strategy_created()
        if os.environ.get("DISTRIBUTARY_STATUS_FD") and not self.is_default:
            report_progress(self)

    # Devices

    @property
    def num_replicas(self) -> int:
        """Number of replicas; 1 for code that computes on the whole batch."""
        return 1 if in_global_view() else self.placement.num_replicas

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Canonical names of the devices of this process's replicas, in replica order.

        Raises:
            ContextError: for the default strategy, which leaves the device to JAX.
        """
        if self.is_default:
            raise ContextError(
                "The default strategy has no devices of its own: JAX places its values. Use"
                " OneDeviceStrategy or MirroredStrategy to choose devices."
            )
        return self.device_names()

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Canonical names of the devices that hold the variables; see `worker_devices`."""
        home = self.placement.home
        return self.worker_devices if home is None else tuple(map(canonical_name, home.device_set))

    @property
    def num_logical_devices(self) -> int:
        """Number of logical devices of each replica."""
        mesh = self.placement.mesh
        return 1 if mesh is None else num_logical_devices(mesh)

    @property
    def mesh(self) -> Any:
        """The devices on which programs run; None if JAX chooses the device."""
        return self.placement.mesh

    def variable_device(self) -> str:
        """Returns the canonical name of the device from which a variable is read."""
        return (self.device_names() if self.placement.home is None else self.parameter_devices)[0]

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False: batches of any shape work, and each new shape is compiled."""
        return False

    @property
    def should_checkpoint(self) -> bool:
        """True in the process that writes checkpoints."""
        return self.worker_number == 0

    should_save_summary = should_checkpoint

    @contextmanager
    def experimental_logical_device(self, logical_device_id: int) -> Iterator[None]:
        """Does nothing if replicas have one logical device; with several, you cannot choose one.

        Raises:
            InvalidValueError: if there is no such logical device, or if there are several.

        Source: `tf.distribute.TPUStrategy.extended.experimental_logical_device`.
        """
        self.check_logical_device(logical_device_id)
        yield

    def check_logical_device(self, logical_device_id: int) -> None:
        """Raises an error if the logical device does not exist, or is one of several."""
        count = self.num_logical_devices
        if not isinstance(logical_device_id, int) or not 0 <= logical_device_id < count:
            raise InvalidValueError(
                f"logical_device_id is {logical_device_id!r}, expected 0 to {count - 1}: the"
                f" replicas of {shown(self._strategy)} have {count} logical devices."
            )
        if count > 1:
            raise InvalidValueError(
                f"Nothing can be placed on logical device {logical_device_id} alone: the {count}"
                " logical devices of a replica run one program, which XLA partitions. Use"
                " experimental_split_to_logical_devices or"
                " experimental_replicate_to_logical_devices."
            )

    def device_names(self) -> tuple[str, ...]:
        """Returns the canonical names of the replicas' devices, or that of JAX's default device."""
        devices = self._local_devices() or (jax.local_devices()[0],)
        return tuple(canonical_name(device) for device in devices)

    def describe(self) -> str:
        """Describes the devices and the reduction in one line, for people."""
        devices = self._local_devices()
        names = ", ".join(short_name(device) for device in devices) or "JAX's default device"
        home = self.placement.home
        if home is not None:
            (device,) = home.device_set
            place = "on" if self.placement.storage is home else "in the host memory of"
            names += f", variables {place} {short_name(device)}"
        if self.num_replicas == 1:
            return f"1 replica on {names}{self._cores_text()}"
        platform = devices[0].platform
        reduction = self.cross_device_ops.describe(platform, self.num_workers, self.options)
        if self.num_workers > 1:
            names += f" of each of {self.num_workers} workers"
        if self._sharded:
            reduction += f"; {self._sharded.value} sharded"
        return f"{self.num_replicas} replicas on {names}{self._cores_text()}; {reduction}"

    def _cores_text(self) -> str:
        count = self.num_logical_devices
        return "" if count == 1 else f", each with {count - 1} more for its logical devices"

    def _local_devices(self) -> tuple[jax.Device, ...]:
        devices = self.placement.devices
        return devices[self._local_replicas.start : self._local_replicas.stop]

    def from_chief(self, values: list[np.ndarray], what: str) -> list[np.ndarray]:
        """Returns the chief's arrays on every worker.

        Args:
            values: Arrays of the same shapes and dtypes on all workers, which call this together.
            what: Name of the arrays, for people.

        Raises:
            WorkerMismatchError: if another worker does something else.
        """
        if self.num_workers == 1:
            return values
        return broadcast(values, what, self._layout.stacked)

    # Variables

    def variable_layout(self) -> VariableLayout:
        """Returns the layout of variables that are created in this strategy's scope."""
        return self._layout

    def created(self, name: str) -> None:
        """Says once that a new variable of ours is whole on every device, also for optax."""
        if self._sharded is Sharded.OPTIMIZER_STATE and not self._has_told:
            self._has_told = True
            _log.warning(
                "%s: variable %r is whole on every device. experimental_shard_optimizer_state"
                " divides the state of Keras optimizers, which take distributary.Variable, too. For"
                " the state of optax, create the strategy with experimental_shard_parameters=True.",
                script_line(),
                name,
            )

    def parameter_layout(
        self, shape: Sequence[int], dtype: Any, path: str | None = None, dim: int | None = None
    ) -> Any:
        """Returns the sharding of a variable of a model if it is stored in parts, else None.

        Args:
            shape: Shape of the variable.
            dtype: Its dtype.
            path: Its path, for `layout_rules`; None for a variable that is not of a model.
            dim: The dim along which its layer divides it over the devices of a replica.

        Raises:
            InvalidValueError: if a rule does not fit the variable.
        """
        if self.mesh is None:
            return None
        spec = P() if path is None else self.layout_rules.spec(path, shape, dim, self.mesh)
        num_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize
        divides = self._sharded in (Sharded.PARAMETERS, Sharded.IN_HOST)
        is_large = divides and num_bytes >= _MIN_BYTES_IN_PARTS
        return self._parts(shape, spec, is_large)

    def optimizer_layout(self, shape: Sequence[int], beside: Any = None) -> Any:
        """Returns the sharding of an optimizer's variable if it is stored in parts, else None.

        Args:
            shape: Shape of the variable.
            beside: Sharding of the variable to which it belongs, of the same shape; None if it
                belongs to none.
        """
        if self.mesh is None:
            return None
        is_same = isinstance(beside, NamedSharding) and beside == sharding_on(
            mesh_of_values(self.mesh), beside.spec
        )
        return self._parts(shape, beside.spec if is_same else P(), bool(self._sharded))

    def _parts(self, shape: Sequence[int], spec: P, over_replicas: bool) -> Any:
        if over_replicas:
            num_replicas, count = self.placement.num_replicas, num_hosts(self.mesh)
            if self._sharded is Sharded.IN_HOST and count > 1:
                spec = shard_spec(shape, num_replicas // count, spec, LOCAL_AXIS)
            else:
                spec = shard_spec(shape, num_replicas, spec)
        return sharding_on(mesh_of_values(self.mesh), spec) if is_divided(spec) else None

    def variable_created_in_scope(self, v: Any) -> bool:
        """Returns whether variable `v` belongs to this strategy.

        Raises:
            InvalidTypeError: if `v` is not a variable.
        """
        check_type("variable_created_in_scope: v", v, Variable, "a Variable")
        return v.distribute_strategy is self._strategy

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Creates variables on the devices of another variable of this strategy.

        Raises:
            ContextError: outside of this strategy's scope.
            InvalidValueError: if it is not a variable of this strategy.
        """
        if in_default_context() or current_mode().strategy is not self._strategy:
            raise ContextError(
                f"colocate_vars_with needs the scope of {shown(self._strategy)}: use it inside"
                " `with strategy.scope():`."
            )
        v = colocate_with_variable
        first = v.variables[0] if isinstance(v, ShardedVariable) else v
        if not isinstance(first, Variable) or not self.variable_created_in_scope(first):
            raise InvalidValueError(
                f"colocate_vars_with: {shown(v)} is not a variable of {shown(self._strategy)}."
            )
        with colocated_with(v):
            yield

    def value_container(self, value: Any) -> Any:
        """Returns the variable to which a component belongs, and anything else unchanged."""
        return value.variable if isinstance(value, VariableComponent) else value

    def read_var(self, v: Variable) -> Any:
        """Returns the value of a variable, aggregated for ON_READ."""
        return v.value()

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(var, *args, **kwargs)` for every copy of a variable.

        Args:
            var: A variable of this strategy.
            fn: Function that assigns to its first argument. It receives the component of the copy's
                replica for a `PerReplica` argument. It must write the same value to all copies of a
                mirrored variable.
            args: Further positional arguments.
            kwargs: Keyword arguments.
            group: False returns a tuple with one result per copy.

        Returns:
            The results of `fn`, as `Mirrored` if they are the same for all copies.

        Raises:
            InvalidValueError: if `var` is not a variable of this strategy.
            ReplicaDivergenceError: if copies of a mirrored variable would differ.

        Source: `tf.distribute.StrategyExtended.update`.
        """
        check_same_strategy(self._strategy, "extended.update")
        if not isinstance(var, Variable) or not self.variable_created_in_scope(var):
            raise InvalidValueError(
                f"extended.update: {shown(var)} is not a variable of {shown(self._strategy)}."
                " Create it inside `with strategy.scope():`."
            )
        arguments = (var, *args), dict(kwargs or {})
        if not in_default_context() and current_mode().role == "replica":
            return self._merge_call(
                lambda _, *a, **k: self.engine.run(fn, (a, k), UPDATE), *arguments
            )
        result = self.engine.run(fn, arguments, UPDATE)
        return result if group else map_leaves(local_results, result)

    # Running and combining

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Does the same as `Strategy.run`."""
        require_cross_replica(self._strategy, "call_for_each_replica")
        return self.engine.run(fn, (tuple(args), dict(kwargs or {})), RUN)

    def run_steps(self, fn: Callable[[Any], Any], iterator: Iterator[Any], num_steps: int) -> Any:
        """Runs `fn(element)` for the next elements of a distributed iterator, in one program.

        The same as `num_steps` times `run(fn, args=(next(iterator),))`, without the host's work for
        each step. Each step sees what the steps before it have assigned. Use it if your steps take
        less time than the host needs to start them. With convolutions on CPUs, which XLA runs
        slowly in a loop, and with the variables on another device, the steps run one by one.

        Args:
            fn: The step, a function of an element.
            iterator: Iterator over a distributed dataset. At its end, fewer steps are run.
            num_steps: Number of steps.

        Returns:
            The result of the last step, as of `run`.

        Raises:
            StopIteration: if no element is left.
            InvalidValueError: if `num_steps` is below 1.

        Source: `steps_per_execution` of Keras, for custom loops.
        """
        require_cross_replica(self._strategy, "run_steps")
        if num_steps < 1:
            raise InvalidValueError(f"run_steps: num_steps is {num_steps}, expected 1 or more.")
        elements = list(itertools.islice(iterator, num_steps))
        if not elements:
            raise StopIteration
        return self.engine.run_steps(fn, elements)

    def lower(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Lowers the program of `Strategy.run(fn, args, kwargs)`; returns a `jax.stages.Lowered`.

        `strategy.extended.lower(step, args).compile().as_text()` shows the collectives.
        """
        require_cross_replica(self._strategy, "lower")
        return self.engine.lower(fn, (tuple(args), dict(kwargs or {})), RUN)

    def reduce_to(
        self,
        reduce_op: Any,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines the values of all replicas and puts the result on `destinations`.

        Args:
            reduce_op: `ReduceOp` or its name.
            value: `PerReplica`, or a nest of them.
            destinations: A device string, or a value or variable; this stands for its devices.
            options: Overrides of the communication options.

        Returns:
            `Mirrored` if `destinations` has several devices, else the array. In a step or a
            `distributary.function`, the array stays on the replicas' devices until the end.

        Raises:
            ContextError: inside `run`.
            InvalidValueError: for unusable destinations.
            DeviceError: for a device that this process does not have.

        Source: `tf.distribute.StrategyExtended.reduce_to`.
        """
        return self.batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: Any,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combines several values in one collective; see `reduce_to`.

        Returns:
            The results, in the order of the pairs.

        Source: `tf.distribute.StrategyExtended.batch_reduce_to`.
        """
        require_cross_replica(self._strategy, "batch_reduce_to")
        op = as_reduce_op(reduce_op, "reduce_to")
        pairs = check_pairs("batch_reduce_to", value_destination_pairs)
        results = self.combine.reduce(op, [value for value, _ in pairs], None, options)
        return [
            self._at(result, destinations)
            for result, (_, destinations) in zip(results, pairs, strict=True)
        ]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies one value to all `destinations`.

        Returns:
            `Mirrored` if `destinations` has several devices, else the array. Python numbers are
            returned unchanged.

        Source: `tf.distribute.StrategyExtended.broadcast_to`.
        """
        require_cross_replica(self._strategy, "broadcast_to")
        if isinstance(tensor, (bool, int, float)):
            return tensor
        check_destinations(destinations)
        array = jnp.asarray(tensor)
        if _spans_replicas(destinations) and self.num_replicas > 1 and current_scope() is None:
            array = jax.device_put(array, self._layout.replicated)
        return self._at(array, destinations)

    def _at(self, value: Any, destinations: Any) -> Any:
        """Turns a value of all replicas into the result of `reduce_to` and `broadcast_to`."""
        if not _spans_replicas(destinations):
            device = only_device(destinations)
            return value if device is None else at_device(value, device)
        if self.num_replicas == 1 or isinstance(value, Mirrored):
            return value
        return Mirrored(value, self.num_replicas)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the local components, see `Strategy.experimental_local_results`."""
        if self.placement.stacked is None:
            return (value,)
        results = local_results(value)
        if self.num_workers > 1 and len(results) == self.num_replicas:
            # For an uneven batch, every worker has all parts.
            return results[self._local_replicas.start : self._local_replicas.stop]
        return results

    # Input

    def distribute_dataset(self, dataset: Any, options: InputOptions | None) -> Any:
        """Distributes a dataset, see `Strategy.experimental_distribute_dataset`."""
        options = _input_options(options)
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise UnsupportedError(
                "experimental_distribute_dataset splits global batches, of which there is one"
                " dataset per worker. For a dataset per replica use"
                " distribute_datasets_from_function."
            )
        if self.is_default:
            return dataset
        if isinstance(dataset, DistributedInput):
            raise InvalidTypeError(
                "experimental_distribute_dataset: the dataset is distributed already. Iterate over"
                " it, or distribute the dataset it was made from."
            )
        batches = Batches(dataset, self.worker_share(), coworkers=self.coworkers)
        return self._distributed_dataset(batches, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None
    ) -> Any:
        """Distributes datasets, see `Strategy.distribute_datasets_from_function`."""
        options = _input_options(options)
        per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
        if self.is_default:
            return dataset_fn(InputContext())
        if self.num_workers > 1 and per_replica:
            raise UnsupportedError(
                "distribute_datasets_from_function: InputReplicationMode.PER_REPLICA is for one"
                " worker. Use PER_WORKER: each step takes one element per replica."
            )
        num_replicas = self.num_replicas
        contexts = [InputContext(self.num_workers, self.worker_number, num_replicas)]
        if per_replica:
            contexts = [InputContext(num_replicas, i, num_replicas) for i in range(num_replicas)]
        elements = Elements(
            lambda: [dataset_fn(context) for context in contexts],
            self._replicas_per_worker,
            self.coworkers,
        )
        return self._distributed_dataset(elements, options)

    @functools.cached_property
    def coworkers(self) -> Any:
        """Connection between all workers for messages about their data; None for one worker."""
        job = consensus()
        if self.num_workers == 1 or job is None:
            return None
        return Coworkers(job, self._replicas_per_worker, self.placement.place_rows)

    def worker_share(self) -> Any:
        """Returns which replicas of a dataset's batches belong to this process."""
        return WorkerShare(self.num_workers, self.worker_number, self._replicas_per_worker)

    def _distributed_dataset(self, source: Any, options: InputOptions) -> Any:
        # Other processes can reach the parts only on devices.
        fetch = options.experimental_fetch_to_device is not False or self.num_workers > 1
        return DistributedDataset(
            source,
            self.placement if fetch else None,
            self.worker_share(),
            options.experimental_per_replica_buffer_size,
            self.step_counts,
        )

    def distribute_values(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Makes a `PerReplica`, see `Strategy.experimental_distribute_values_from_function`."""
        if self.placement.stacked is None:
            return kept(value_fn(ValueContext(0, 1)))
        values = [kept(value_fn(ValueContext(i, self.num_replicas))) for i in self._local_replicas]
        is_leaf = lambda x: x is None or isinstance(x, IndexedSlices)
        what = "experimental_distribute_values_from_function"
        parts, tree = flat_parts(what, values, is_leaf)
        columns = [list(column) for column in zip(*parts, strict=True)]
        return jax.tree.unflatten(tree, self._place_values(columns, tree))

    def _place_values(self, columns: list[list[Any]], tree: Any) -> list[PerReplica]:
        """Places the values of this process's replicas, and of all if their shapes differ."""
        values = [PerReplica(column) for column in columns]
        are_arrays = [all(map(_is_array_like, column)) for column in columns]
        specs: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in columns]
        if self.coworkers is not None:
            own_specs = [
                [spec_of(v) for v in column] if is_array else []
                for column, is_array in zip(columns, are_arrays, strict=True)
            ]
            facts = self.coworkers.job.agree(
                "experimental_distribute_values_from_function", lambda: [str(tree), own_specs]
            )
            for number, (other, _) in enumerate(facts):
                if other != facts[0][0]:
                    raise ReplicaMismatchError(
                        "experimental_distribute_values_from_function: value_fn gave"
                        f" {facts[0][0]} on worker 0 and {other} on worker {number}; the structures"
                        " must agree."
                    )
            for i in range(len(columns)):
                specs[i] = [(d, tuple(shape)) for _, rows in facts for d, shape in rows[i]]
        for i, value in enumerate(values):
            if not are_arrays[i]:
                continue
            if len(set(specs[i])) > 1:
                arrays = [np.asarray(local_copy(v)) for v in columns[i]]
                what = "experimental_distribute_values_from_function"
                values[i] = PerReplica(self.coworkers.gather(what, specs[i], arrays))
                continue
            stacked = stack_components(value)
            if stacked is not None and self._layout.stacked is not None:
                values[i] = self.placement.place_rows(stacked)
        return values

    # Called by `context`

    def _merge_call(
        self, merge_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        num_replicas = self.num_replicas

        scope = current_scope()
        if scope is not None:
            scope.merge_calls += 1
        shows_number = num_replicas > 1 and scope is not None and scope.replica is not None
        numbers = (int, float, complex, np.ndarray, np.generic)

        def merged(leaf: Any) -> Any:
            # Python may have made a number from that of the replica.
            is_own = shows_number and isinstance(leaf, numbers) and not isinstance(leaf, bool)
            if is_own:
                leaf = jnp.asarray(leaf)
            is_own |= any(isinstance(part, jax.core.Tracer) for part in jax.tree.leaves(leaf))
            if num_replicas > 1 and is_own and not isinstance(leaf, DistributedValues):
                return PerReplica.from_local(leaf, num_replicas)
            return leaf

        args, kwargs = map_leaves(merged, (args, kwargs))
        role = in_role("cross") if current_scope() is not None else nullcontext()
        with entered(Mode(self._strategy, "cross", is_global=in_global_view())), role:
            result = merge_fn(self._strategy, *args, **kwargs)
        return map_leaves(component_of_traced, result)

    def _all_reduce(self, reduce_op: Any, value: Any, options: CommunicationOptions | None) -> Any:
        op = as_reduce_op(reduce_op, "all_reduce")
        merged, num_replicas = self.options.merge(options), self.num_replicas
        reduced = reduce_nest(self.cross_device_ops, op, value, num_replicas, merged)
        scope = current_scope()
        if scope is None:
            return reduced
        scope.reduced_by.append(op.name)
        # Everything after a collective is computed where the variables lie.
        if self._layout.kind is not None:
            return jax.tree.map(push, reduced)
        if num_replicas == 1 and self.placement.home is not None:
            return jax.tree.map(lambda x: jax.lax.psum(x, REPLICA_AXIS), reduced)
        return reduced

    def reduce_gradients(self, reduce_op: ReduceOp, gradients: Sequence[Any]) -> list[Any]:
        """Combines the gradients of all replicas for an optimizer, inside `run`.

        If state is sharded, each gradient gets a sum of its own, which the program then
        scatters.
        """
        if not self._sharded:
            return list(self._all_reduce(reduce_op, list(gradients), None))
        ops, options = NcclAllReduce(), CommunicationOptions()
        return list(reduce_nest(ops, reduce_op, list(gradients), self.num_replicas, options))

    def _all_gather(self, value: Any, axis: Any, options: CommunicationOptions | None) -> Any:
        return gather_nest(value, checked_int("all_gather: axis", axis), self.num_replicas)


def _is_array_like(value: Any) -> bool:
    is_number = isinstance(value, (int, float, complex))
    return is_number or (hasattr(value, "dtype") and not isinstance(value, IndexedSlices))


def _input_options(options: InputOptions | None) -> InputOptions:
    check_type("options", options, InputOptions | None, "distributary.InputOptions")
    return options or InputOptions()


def _spans_replicas(destinations: Any) -> bool:
    if isinstance(destinations, (PerReplica, Mirrored)):
        return True
    return isinstance(destinations, Variable) and destinations._layout.mirrored
