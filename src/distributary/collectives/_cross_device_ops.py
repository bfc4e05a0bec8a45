"""Reduction algorithms that you can choose for a strategy."""

import abc
import copy
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    NamedSharding,
    PartitionSpec as P,
)

from distributary.collectives import _algorithms as algorithms
from distributary.collectives._destinations import at_device, check_destinations, only_device
from distributary.collectives._reduce_op import (
    Array,
    ReduceOp,
    as_reduce_op,
    check_reducible,
    reduce_arrays,
)
from distributary.dispatch import dispatcher_for
from distributary.errors import InvalidTypeError, InvalidValueError, ReplicaMismatchError
from distributary.options import CommunicationImplementation, CommunicationOptions
from distributary.topology import REPLICA_AXIS, host_groups, num_logical_devices
from distributary.tracing import current_scope
from distributary.values import (
    IndexedSlices,
    Mirrored,
    PerReplica,
    stack_components,
)


class CrossDeviceOps(abc.ABC):
    """Base class of the algorithms that combine values of the replicas.

    Subclasses implement `reduce_implementation` and may override `batch_reduce_implementation`
    and `broadcast_implementation`. These run inside the compiled step. There `per_replica_value`
    stands for the value of every replica, and its `values` are the components of all replicas (an
    all-gather). You may use `jax.lax` collectives over the axis `"replica"` on
    `per_replica_value.payload`, which is this replica's component.

    Source: `tf.distribute.CrossDeviceOps`.
    """

    def reduce(
        self,
        reduce_op: Any,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines one value.

        Args:
            reduce_op: `ReduceOp` or its name.
            per_replica_value: `PerReplica` whose components agree in shape and dtype; any other
                value counts as the only component.
            destinations: Destination of the result: a device, value or variable; not None.
            options: Communication options.

        Returns:
            `Mirrored` with the result: a copy on every replica's device, or the only one on the
            device that `destinations` names.

        Raises:
            DeviceError: if `destinations` names a device that this process does not have.
        """
        return self.batch_reduce(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce(
        self,
        reduce_op: Any,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combines several values, in one collective if possible; see `reduce`."""
        op = as_reduce_op(reduce_op, "CrossDeviceOps.batch_reduce")
        pairs = _check_pairs(value_destination_pairs)
        options = options or CommunicationOptions()
        wrapped = [_components_of(value) for value, _ in pairs]
        if not wrapped:
            return []
        if len(wrapped) > 1 and len({_mesh_of(value) for value in wrapped}) > 1:
            return [
                self.reduce(op, value, destinations, options)
                for value, (_, destinations) in zip(wrapped, pairs, strict=True)
            ]
        if wrapped[0].num_replicas > 1 and all(value.form == "local" for value in wrapped):
            return self.batch_reduce_implementation(
                op, list(zip(wrapped, (d for _, d in pairs), strict=True)), options
            )
        if wrapped[0].num_replicas == 1:
            results = [Mirrored(value.values[0]) for value in wrapped]
        else:
            results = self._reduce_outside(op, wrapped, options)
        devices = [only_device(destinations) for _, destinations in pairs]
        return [
            result if device is None else Mirrored(at_device(result.value(), device))
            for result, device in zip(results, devices, strict=True)
        ]

    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """Copies one value to all `destinations`."""
        check_destinations(destinations)
        return self.broadcast_implementation(tensor, destinations)

    @abc.abstractmethod
    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Combines one value inside a compiled step; returns an array or `Mirrored`."""

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Combines several values inside a compiled step, one by one unless overridden."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Mirrored:
        """Copies one value to all `destinations`."""
        device = only_device(destinations)
        if device is not None:
            return Mirrored(at_device(tensor, device))
        return Mirrored(tensor, len(getattr(destinations, "values", (None,))))

    def for_devices(self, devices: Sequence[jax.Device]) -> "CrossDeviceOps":
        """Returns this algorithm for replicas on `devices`; for strategies."""
        return self

    def describe(
        self, platform: str, num_workers: int = 1, options: CommunicationOptions | None = None
    ) -> str:
        """Returns a phrase that tells people which collective runs.

        Args:
            platform: Platform of the devices.
            num_workers: Number of processes.
            options: Communication options.
        """
        return f"{type(self).__name__} on {platform}"

    def all_reduce(
        self,
        op: ReduceOp,
        leaves: Sequence[Any],
        num_replicas: int,
        options: CommunicationOptions,
    ) -> list[Any]:
        """Combines arrays and `IndexedSlices` inside a compiled step; for strategies."""
        if num_replicas == 1:
            return [_alone(op, leaf) for leaf in leaves]
        dense = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, IndexedSlices)}
        pairs = [(PerReplica.from_local(x, num_replicas),) * 2 for x in dense.values()]
        reduced = [
            result.value() if isinstance(result, Mirrored) else result
            for result in (self.batch_reduce_implementation(op, pairs, options) if pairs else [])
        ]
        results = dict(zip(dense, reduced, strict=True))
        return [
            results[i] if i in results else _reduce_slices(op, leaf, num_replicas)
            for i, leaf in enumerate(leaves)
        ]

    def _reduce_outside(
        self, op: ReduceOp, values: list[PerReplica], options: CommunicationOptions
    ) -> list[Mirrored]:
        """Combines values outside of a compiled step, in a program of its own."""
        num_replicas = values[0].num_replicas
        results: dict[int, Any] = {}
        stacked: dict[int, Any] = {}
        for i, value in enumerate(values):
            if isinstance(value.values[0], IndexedSlices):
                results[i] = _concatenate_slices(op, value)
                continue
            rows = value if value.form == "stacked" else stack_components(value)
            if rows is None:
                raise ReplicaMismatchError(
                    "CrossDeviceOps.reduce: the components have shapes"
                    f" {[getattr(v, 'shape', v) for v in value.values]}; all replicas must agree."
                    " Reduce each replica's value to one shape first."
                )
            stacked[i] = check_reducible(rows.payload, "CrossDeviceOps.reduce")
        mesh, _ = _mesh_of(values[0])
        devices = () if mesh is None else tuple(mesh.devices.flat)
        # The first device of every replica, if replicas have several logical devices.
        ops = self.for_devices(devices[:: 1 if mesh is None else num_logical_devices(mesh)])

        def total(rows: list[Array]) -> list[Array]:
            if mesh is None:
                return self._reduce_rows(op, rows, options)
            return jax.shard_map(
                lambda local: ops.all_reduce(op, [x[0] for x in local], num_replicas, options),
                mesh=mesh,
                in_specs=P(REPLICA_AXIS),
                out_specs=P(),
                check_vma=False,
            )(rows)

        if stacked:
            reduced = dispatcher_for(devices).run(
                lambda: jax.jit(total)(list(stacked.values())), lambda arrays: arrays[0]
            )
            results.update(zip(stacked, reduced, strict=True))
        return [Mirrored(results[i], num_replicas) for i in range(len(values))]

    def _reduce_rows(
        self, op: ReduceOp, rows: list[Array], options: CommunicationOptions
    ) -> list[Array]:
        """Combines arrays `[replica, *shape]` that lie on one device."""
        num_replicas = rows[0].shape[0]
        reduced = jax.vmap(
            lambda local: self.all_reduce(op, local, num_replicas, options), axis_name=REPLICA_AXIS
        )(rows)
        return [copies[0] for copies in reduced]


def _components_of(value: Any) -> PerReplica:
    if isinstance(value, PerReplica):
        return value
    return PerReplica((value.value() if isinstance(value, Mirrored) else value,))


def _mesh_of(value: PerReplica) -> tuple[Any, int]:
    """Returns the mesh the components lie on and the number of replicas.

    The mesh is None if they lie elsewhere.
    """
    leaves = jax.tree.leaves(value.payload) if value.form == "stacked" else []
    sharding = getattr(leaves[0], "sharding", None) if leaves else None
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        if mesh.shape.get(REPLICA_AXIS) == value.num_replicas:
            return mesh, value.num_replicas
    return None, value.num_replicas


def _concatenate_slices(op: ReduceOp, value: PerReplica) -> IndexedSlices:
    parts = value.values
    rows = np.concatenate([np.asarray(part.values) for part in parts])
    return IndexedSlices(
        jnp.asarray(rows / len(parts) if op is ReduceOp.MEAN else rows, rows.dtype),
        jnp.asarray(np.concatenate([np.asarray(part.indices) for part in parts])),
        parts[0].dense_shape,
    )


def _check_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    ):
        raise InvalidTypeError(
            f"batch_reduce: value_destination_pairs is {pairs!r}, expected a list of (value,"
            " destinations) pairs."
        )
    for _, destinations in pairs:
        check_destinations(destinations)
    return [(value, destinations) for value, destinations in pairs]


def _alone(op: ReduceOp, leaf: Any) -> Any:
    if isinstance(leaf, IndexedSlices):
        return leaf
    return reduce_arrays(op, [leaf], 1, lambda parts: parts)[0]


def _reduce_slices(op: ReduceOp, slices: IndexedSlices, num_replicas: int) -> IndexedSlices:
    values = slices.values / num_replicas if op is ReduceOp.MEAN else slices.values
    return IndexedSlices(
        algorithms.all_gather(values, 0, num_replicas),
        algorithms.all_gather(slices.indices, 0, num_replicas),
        slices.dense_shape,
    )


class _Summing(CrossDeviceOps):
    """Base class of algorithms that sum arrays over the replicas."""

    # The replicas of every host, if there are several hosts with several replicas each.
    _hosts: algorithms.Groups = ()
    # Whether these hosts are slices of TPUs.
    _are_slices = False
    # Name of its collectives without options, for people.
    _without_options = "XLA all-reduce"

    def for_devices(self, devices: Sequence[jax.Device]) -> CrossDeviceOps:
        hosts = host_groups(devices)
        if hosts == self._hosts:
            return self
        bound = copy.copy(self)
        bound._hosts = hosts
        bound._are_slices = bool(hosts) and devices[0].platform == "tpu"
        return bound

    @abc.abstractmethod
    def _sum(self, num_replicas: int, options: CommunicationOptions) -> algorithms.Sum:
        """Returns the collective for this many replicas."""

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        num_replicas = value_destination_pairs[0][0].num_replicas
        arrays = [
            check_reducible(value.payload, "all_reduce") for value, _ in value_destination_pairs
        ]
        scope = current_scope()
        # An uneven batch joins collectives by hand, so the algorithm would change nothing.
        uneven = scope is not None and scope.uneven is not None
        add = algorithms.all_reduce if uneven else self._sum(num_replicas, options)
        return reduce_arrays(reduce_op, arrays, num_replicas, add)

    def _reduce_rows(
        self, op: ReduceOp, rows: list[Array], options: CommunicationOptions
    ) -> list[Array]:
        return reduce_arrays(
            op, rows, rows[0].shape[0], lambda parts: [self._add_rows(part) for part in parts]
        )

    def _add_rows(self, rows: Array) -> Array:
        return algorithms.add_rows(rows)

    def _with_options(
        self, add: algorithms.Sum, num_replicas: int, options: CommunicationOptions
    ) -> algorithms.Sum:
        if options.implementation is CommunicationImplementation.RING:
            add = algorithms.ring(num_replicas)
        elif groups := self._levels(options):
            add = algorithms.two_level(groups)
        if options.bytes_per_pack:
            add = algorithms.in_packs(add, algorithms.packs_by_bytes(options.bytes_per_pack))
        return add

    def _levels(self, options: CommunicationOptions) -> algorithms.Groups:
        """Returns the groups that reduce first among themselves; () if there are none."""
        chosen = self._are_slices if options.hierarchical is None else options.hierarchical
        return self._hosts if chosen else ()

    def _collectives(self, options: CommunicationOptions | None) -> str:
        options = options or CommunicationOptions()
        if options.implementation is CommunicationImplementation.RING:
            return "XLA reduce-scatter and all-gather"
        if groups := self._levels(options):
            return (
                f"XLA reduce-scatter in groups of {len(groups[0])}, all-reduce across them and"
                " all-gather"
            )
        return self._without_options


def _check_num_packs(name: str, num_packs: int) -> int:
    if isinstance(num_packs, bool) or not isinstance(num_packs, int) or num_packs < 0:
        raise InvalidValueError(
            f"{name}: num_packs is {num_packs!r}, expected an int >= 0; 1 sends all gradients in"
            " one collective, 0 each in its own."
        )
    return num_packs


@final
class NcclAllReduce(_Summing):
    """One XLA all-reduce of all gradients, which NCCL carries out on NVIDIA GPUs.

    The default of `MirroredStrategy`. It works on every device; only the transport differs.

    Args:
        num_packs: Number of collectives the gradients are divided into; 0 gives each its own.

    Source: `tf.distribute.NcclAllReduce`.
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs: int = _check_num_packs("NcclAllReduce", num_packs)

    def _sum(self, num_replicas: int, options: CommunicationOptions) -> algorithms.Sum:
        add = self._with_options(algorithms.all_reduce, num_replicas, options)
        if options.bytes_per_pack or self.num_packs == 1:
            return add
        return algorithms.in_packs(add, algorithms.packs_by_count(self.num_packs))

    def describe(
        self, platform: str, num_workers: int = 1, options: CommunicationOptions | None = None
    ) -> str:
        transport = {"gpu": "NCCL", "cuda": "NCCL", "rocm": "RCCL", "tpu": "ICI"}.get(
            platform, "shared memory" if num_workers == 1 else "gloo"
        )
        packs = {0: "one per tensor", 1: "one per dtype"}.get(
            self.num_packs, f"{self.num_packs} packs"
        )
        return f"{self._collectives(options)} over {transport}, {packs}"


@final
class CollectiveAllReduce(_Summing):
    """One XLA all-reduce of one vector per dtype, which gloo carries out between processes.

    The default of `MultiWorkerMirroredStrategy` on CPUs. Some vectors are exchanged whole instead:
    all of them between two replicas, and those up to 512 KiB with more. Replicas swap in pairs,
    each adds both vectors, and all have the same bits.

    Source: `CollectiveAllReduce` of `tf.distribute`.
    """

    _without_options = "exchanges between pairs, or XLA all-reduce,"

    def _sum(self, num_replicas: int, options: CommunicationOptions) -> algorithms.Sum:
        return self._with_options(algorithms.all_reduce_of_vectors, num_replicas, options)

    def describe(
        self, platform: str, num_workers: int = 1, options: CommunicationOptions | None = None
    ) -> str:
        return f"{self._collectives(options)} over gloo, one vector per dtype"


@final
class HierarchicalCopyAllReduce(_Summing):
    """Reduce-scatter inside groups of replicas, all-reduce across the groups, all-gather inside.

    With several hosts that have several replicas each, the groups are the hosts, or the slices of
    TPUs. On one host they are neighbors: with four replicas, (0, 1) and (2, 3), and across them
    (0, 2) and (1, 3). With a prime number of replicas there are no groups, and the algorithm is one
    all-reduce.

    Args:
        num_packs: Number of packs the gradients are divided into; 0 gives each its own.

    Source: `tf.distribute.HierarchicalCopyAllReduce`.
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs: int = _check_num_packs("HierarchicalCopyAllReduce", num_packs)

    def _sum(self, num_replicas: int, options: CommunicationOptions) -> algorithms.Sum:
        groups = self._hosts or algorithms.neighbours(num_replicas)
        add = algorithms.two_level(groups) if groups else algorithms.all_reduce
        add = self._with_options(add, num_replicas, options)
        if options.bytes_per_pack or self.num_packs == 1:
            return add
        return algorithms.in_packs(add, algorithms.packs_by_count(self.num_packs))

    def describe(
        self, platform: str, num_workers: int = 1, options: CommunicationOptions | None = None
    ) -> str:
        return f"hierarchical XLA all-reduce, inside groups and across them, on {platform}"


@final
class ReductionToOneDevice(_Summing):
    """A sum in replica order: every device gathers all values and adds them itself.

    All devices run one program, so there is no single reducing device. The numbers are those of a
    reduction on one device followed by a broadcast, the same bit for bit on every replica, in one
    collective instead of two. It needs memory for the values of all replicas.

    Args:
        reduce_to_device: Accepted for compatibility; there is no single reducing device.
        accumulation_fn: From the list of the replicas' arrays to their sum; None adds them.

    Source: `tf.distribute.ReductionToOneDevice`.
    """

    def __init__(
        self,
        reduce_to_device: Any = None,
        accumulation_fn: Callable[[list[Array]], Array] | None = None,
    ) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise InvalidTypeError(
                f"ReductionToOneDevice: accumulation_fn is {accumulation_fn!r}, expected a function"
                " from a list of arrays to their sum."
            )
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    def _sum(self, num_replicas: int, options: CommunicationOptions) -> algorithms.Sum:
        return algorithms.gather_and_add(self.accumulation_fn)

    def _add_rows(self, rows: Array) -> Array:
        return algorithms.add_rows(rows, self.accumulation_fn)

    def describe(
        self, platform: str, num_workers: int = 1, options: CommunicationOptions | None = None
    ) -> str:
        return f"all-gather and addition in replica order on {platform}"


def default_cross_device_ops(platform: str, num_workers: int) -> CrossDeviceOps:
    """Returns the algorithm of a strategy that was given none.

    Args:
        platform: Platform of the devices.
        num_workers: Number of processes.
    """
    over_gloo = platform == "cpu" and num_workers > 1
    return CollectiveAllReduce() if over_gloo else NcclAllReduce()


def reduce_nest(
    ops: CrossDeviceOps, op: ReduceOp, tree: Any, num_replicas: int, options: CommunicationOptions
) -> Any:
    """Combines all arrays of a nest together, inside a compiled step."""
    leaves, structure = jax.tree.flatten(
        tree, is_leaf=lambda x: x is None or isinstance(x, IndexedSlices)
    )
    arrays = [
        leaf if isinstance(leaf, IndexedSlices) else check_reducible(leaf, "all_reduce")
        for leaf in leaves
    ]
    return jax.tree.unflatten(structure, ops.all_reduce(op, arrays, num_replicas, options))
