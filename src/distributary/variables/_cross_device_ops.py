"""Reduction algorithms that you can choose for a strategy."""

import abc
import copy
import functools
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from distributary.devices import (
    REPLICA_AXIS,
    Nest,
    dispatcher_for,
    host_groups,
    local_copy,
    num_logical_devices,
    resolve_device,
    uncommitted,
)
from distributary.errors import InvalidTypeError, InvalidValueError, ReplicaMismatchError, shown
from distributary.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from distributary.tracing import current_scope
from distributary.variables import _reductions as reductions
from distributary.variables._values import (
    IndexedSlices,
    Mirrored,
    PerReplica,
    component_arrays,
    map_leaves,
    stack_components,
)

# Destinations: the devices that the result of a reduction goes to.


def check_destinations(destinations: object) -> None:
    """Refuses values that name no device.

    Raises:
        InvalidValueError: for None, numbers, lists, tuples and an empty string.
    """
    unusable = destinations is None or isinstance(destinations, (int, list, tuple))
    if unusable or (isinstance(destinations, str) and not destinations):
        raise InvalidValueError(
            f"destinations is {shown(destinations)}, expected a device such as 'CPU:0', or a value"
            " or variable whose devices are meant."
        )


def at_device(value: Nest, device: jax.Device) -> Nest:
    """Moves a nest of arrays to one device; an array with a copy there becomes that copy."""

    def moved(leaf: jax.Array) -> jax.Array:
        if isinstance(leaf, jax.core.Tracer):
            return leaf
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
            for shard in leaf.addressable_shards:
                if shard.device == device:
                    return uncommitted(shard.data)
        return uncommitted(jax.device_put(local_copy(leaf), device))

    return jax.tree.map(moved, value)


def only_device(destinations: object) -> jax.Device | None:
    """Returns the one device that `destinations` names or lies on; None if it is not one.

    Also returns None in a step and in a `distributary.function`, which compute on their own
    devices.

    Raises:
        DeviceError: for a device that this process does not have.
    """
    if current_scope() is not None:
        return None
    if isinstance(destinations, (str, jax.Device)):
        return resolve_device(destinations)
    if isinstance(destinations, jax.core.Tracer):
        return None
    if isinstance(destinations, jax.Array):
        devices = destinations.devices()
        return next(iter(devices)) if len(devices) == 1 else None
    device = getattr(destinations, "device", None)  # a copy of a variable
    return device if isinstance(device, jax.Device) else None


# The algorithms


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
        reduce_op: ReduceOp | str,
        per_replica_value: Nest,
        destinations: object,
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
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Nest, object]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combines several values, in one collective if possible; see `reduce`."""
        op = reductions.as_reduce_op(reduce_op, "CrossDeviceOps.batch_reduce")
        pairs = [
            (_components_of(value), destinations)
            for value, destinations in check_pairs("batch_reduce", value_destination_pairs)
        ]
        options = options or CommunicationOptions()
        values = [value for value, _ in pairs]
        if not values:
            return []
        if len({(_mesh_of(value), value.num_replicas) for value in values}) > 1:
            return [self.reduce(op, value, destinations, options) for value, destinations in pairs]
        if values[0].num_replicas == 1:
            alone = functools.partial(_alone, op)
            results = [Mirrored(map_leaves(alone, value.values[0])) for value in values]
        elif all(value.form == "local" for value in values):
            return self.batch_reduce_implementation(op, pairs, options)
        else:
            results = self._reduce_outside(op, values, options)
        devices = [only_device(destinations) for _, destinations in pairs]
        return [
            result if device is None else Mirrored(at_device(result.value(), device))
            for result, device in zip(results, devices, strict=True)
        ]

    def broadcast(self, tensor: Nest, destinations: object) -> Mirrored:
        """Copies one value to all `destinations`."""
        check_destinations(destinations)
        return self.broadcast_implementation(tensor, destinations)

    @abc.abstractmethod
    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: object,
        options: CommunicationOptions,
    ) -> Any:
        """Combines one value inside a compiled step; returns an array or `Mirrored`."""

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, object]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Combines several values inside a compiled step, one by one unless overridden."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Nest, destinations: object) -> Mirrored:
        """Copies one value to all `destinations`."""
        device = only_device(destinations)
        if device is not None:
            return Mirrored(at_device(tensor, device))
        return Mirrored(tensor, len(getattr(destinations, "values", (None,))))

    def for_devices(self, devices: Sequence[jax.Device]) -> "CrossDeviceOps":
        """Returns this algorithm for replicas on `devices`, or, without any, on one device."""
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
        leaves: Sequence[jax.Array | IndexedSlices],
        num_replicas: int,
        options: CommunicationOptions,
    ) -> list[Any]:
        """Combines arrays and `IndexedSlices` inside a compiled step; for strategies."""
        if num_replicas == 1:
            return [_alone(op, leaf) for leaf in leaves]
        dense = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, IndexedSlices)]
        pairs = [(PerReplica.from_local(leaves[i], num_replicas),) * 2 for i in dense]
        reduced = self.batch_reduce_implementation(op, pairs, options) if pairs else []
        results = dict(zip(dense, reduced, strict=True))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, IndexedSlices):
                results[i] = _reduce_slices(op, leaf, num_replicas)
            elif isinstance(results[i], Mirrored):
                results[i] = results[i].value()
        return [results[i] for i in range(len(leaves))]

    def _reduce_outside(
        self, op: ReduceOp, values: list[PerReplica], options: CommunicationOptions
    ) -> list[Mirrored]:
        """Combines values outside of a compiled step, in a program of its own."""
        num_replicas = values[0].num_replicas
        results: dict[int, Any] = {}
        stacked: dict[int, Any] = {}
        for i, value in enumerate(values):
            if isinstance(value.values[0], IndexedSlices):
                results[i] = _concatenate_slices(op, value.values)
                continue
            rows = value if value.form == "stacked" else stack_components(value)
            if rows is None:
                text = lambda array: f"{array.dtype}{[*array.shape]}"
                raise ReplicaMismatchError(
                    "CrossDeviceOps.reduce: the components are"
                    f" {[jax.tree.map(text, part) for part in component_arrays(value)]}; all"
                    " replicas must agree. Give all values one shape and dtype first."
                )
            stacked[i] = reductions.check_reducible(rows.payload, "CrossDeviceOps.reduce")
        if stacked:
            mesh = _mesh_of(values[0])
            devices = () if mesh is None else tuple(mesh.devices.flat)
            # The first device of every replica, if replicas have several logical devices.
            ops = self.for_devices(() if mesh is None else devices[:: num_logical_devices(mesh)])
            program = reductions.over_replicas(
                lambda nests: ops.all_reduce(op, nests, num_replicas, options), mesh
            )
            reduced = dispatcher_for(devices).run(
                lambda: jax.jit(program)(list(stacked.values())), lambda arrays: arrays[0]
            )
            results.update(zip(stacked, reduced, strict=True))
        return [Mirrored(results[i], num_replicas) for i in range(len(values))]


def _components_of(value: Nest) -> PerReplica:
    if isinstance(value, PerReplica):
        return value
    return PerReplica((value.value() if isinstance(value, Mirrored) else value,))


def _mesh_of(value: PerReplica) -> Mesh | None:
    """Returns the mesh on which the components are; None if they are elsewhere."""
    leaves = jax.tree.leaves(value.payload) if value.form == "stacked" else []
    sharding = getattr(leaves[0], "sharding", None) if leaves else None
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, Mesh) and mesh.shape.get(REPLICA_AXIS) == value.num_replicas:
        return mesh
    return None


def _concatenate_slices(op: ReduceOp, parts: Sequence[IndexedSlices]) -> IndexedSlices:
    """Returns the rows of all replicas, put together on the host; their mean in floats."""
    rows = jnp.asarray(np.concatenate([np.asarray(part.values) for part in parts]))
    return IndexedSlices(
        rows / len(parts) if op is ReduceOp.MEAN else rows,
        jnp.asarray(np.concatenate([np.asarray(part.indices) for part in parts])),
        parts[0].dense_shape,
    )


def check_pairs(what: str, pairs: object) -> Sequence[tuple[Any, Any]]:
    """Returns pairs of a value and its destinations after checking them."""
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    ):
        raise InvalidTypeError(
            f"{what}: value_destination_pairs is {pairs!r}, expected a list of (value,"
            " destinations) pairs."
        )
    for _, destinations in pairs:
        check_destinations(destinations)
    return pairs


def _alone(op: ReduceOp, leaf: Any) -> Any:
    """Returns what the only replica gets for its value: a mean of integers is in floats."""
    if op is ReduceOp.SUM:
        return leaf
    if isinstance(leaf, IndexedSlices):
        return _reduce_slices(op, leaf, 1)
    array = reductions.check_reducible(leaf, "all_reduce")
    return reductions.reduce_arrays(op, [array], 1, lambda parts: parts)[0]


def _reduce_slices(op: ReduceOp, slices: IndexedSlices, num_replicas: int) -> IndexedSlices:
    values = slices.values / num_replicas if op is ReduceOp.MEAN else slices.values
    return IndexedSlices(
        reductions.all_gather(values, 0, num_replicas),
        reductions.all_gather(slices.indices, 0, num_replicas),
        slices.dense_shape,
    )


class _Summing(CrossDeviceOps):
    """Base class of algorithms that sum arrays over the replicas."""

    # The replicas of every host, if there are several hosts with several replicas each.
    _hosts: reductions.Groups = ()
    # Whether these hosts are slices of TPUs.
    _are_slices = False
    # Text of `describe`.
    _pattern = "{collectives} over {transport}, {packs}"
    # Name of its collectives without options, for people.
    _without_options = "XLA all-reduce"
    # Adds the arrays of all replicas where they are gathered; None adds them one by one.
    _accumulate: reductions.Accumulate | None = None

    def __init__(self, num_packs: int = 1) -> None:
        if isinstance(num_packs, bool) or not isinstance(num_packs, int) or num_packs < 0:
            raise InvalidValueError(
                f"{type(self).__name__}: num_packs is {num_packs!r}, expected an int >= 0; 1 sends"
                " all gradients in one collective, 0 each in its own."
            )
        #: Number of packs of arrays, each a collective of its own; 0 for one pack per array.
        self.num_packs = num_packs

    def for_devices(self, devices: Sequence[jax.Device]) -> CrossDeviceOps:
        if not devices:
            return ReductionToOneDevice(accumulation_fn=self._accumulate)
        hosts = host_groups(devices)
        if hosts == self._hosts:
            return self
        bound = copy.copy(self)
        bound._hosts = hosts
        bound._are_slices = bool(hosts) and devices[0].platform == "tpu"
        return bound

    def _sum(
        self, arrays: list[jax.Array], num_replicas: int, options: CommunicationOptions
    ) -> list[jax.Array]:
        """Sums arrays over the replicas."""

        def add(arrays: list[jax.Array]) -> list[jax.Array]:
            if options.implementation is CommunicationImplementation.RING:
                return [reductions.ring(array, num_replicas) for array in arrays]
            if groups := self._levels(options):
                return reductions.two_level(arrays, groups)
            return self._collective(arrays, num_replicas)

        if options.bytes_per_pack:
            packs = reductions.packs_by_bytes(arrays, options.bytes_per_pack)
        elif self.num_packs != 1:
            packs = reductions.packs_by_count(arrays, self.num_packs)
        else:
            return add(arrays)
        return reductions.sum_in_packs(arrays, add, packs)

    def _collective(self, arrays: list[jax.Array], num_replicas: int) -> list[jax.Array]:
        """Sums arrays unless options choose another way."""
        return reductions.all_reduce(arrays)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: object,
        options: CommunicationOptions,
    ) -> Any:
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, object]],
        options: CommunicationOptions,
    ) -> list[Any]:
        num_replicas = value_destination_pairs[0][0].num_replicas
        arrays = [
            reductions.check_reducible(value.payload, "all_reduce")
            for value, _ in value_destination_pairs
        ]
        scope = current_scope()
        # An uneven batch joins collectives by hand, so the algorithm would change nothing.
        uneven = scope is not None and scope.uneven is not None
        add = lambda parts: self._sum(parts, num_replicas, options)
        return reductions.reduce_arrays(
            reduce_op, arrays, num_replicas, reductions.all_reduce if uneven else add
        )

    def _levels(self, options: CommunicationOptions) -> reductions.Groups:
        """Returns the groups that reduce first among themselves; () if there are none."""
        chosen = self._are_slices if options.hierarchical is None else options.hierarchical
        return self._hosts if chosen else ()

    def describe(
        self, platform: str, num_workers: int = 1, options: CommunicationOptions | None = None
    ) -> str:
        return self._pattern.format(
            collectives=self._collectives(options or CommunicationOptions()),
            platform=platform,
            transport={"gpu": "NCCL", "cuda": "NCCL", "rocm": "RCCL", "tpu": "ICI"}.get(
                platform, "shared memory" if num_workers == 1 else "gloo"
            ),
            packs={0: "one per tensor", 1: "one per dtype"}.get(
                self.num_packs, f"{self.num_packs} packs"
            ),
        )

    def _collectives(self, options: CommunicationOptions) -> str:
        if options.implementation is CommunicationImplementation.RING:
            return "XLA reduce-scatter and all-gather"
        if groups := self._levels(options):
            return (
                f"XLA reduce-scatter in groups of {len(groups[0])}, all-reduce across them and"
                " all-gather"
            )
        return self._without_options


@final
class NcclAllReduce(_Summing):
    """An XLA all-reduce of each gradient, where it is ready; XLA combines them.

    On NVIDIA GPUs, NCCL carries them out.
    The default of `MirroredStrategy`. It works on every device; only the transport differs.

    Args:
        num_packs: Number of collectives the gradients are divided into; 0 gives each its own.

    Source: `tf.distribute.NcclAllReduce`.
    """


@final
class CollectiveAllReduce(_Summing):
    """One XLA all-reduce of one vector per dtype, which gloo carries out between processes.

    The default of `MultiWorkerMirroredStrategy` on CPUs. Some vectors are exchanged whole instead:
    all of them between two replicas, and those up to 512 KiB with more. Replicas swap in pairs,
    each adds both vectors, and all have the same bits.

    Source: `CollectiveAllReduce` of `tf.distribute`.
    """

    _pattern = "{collectives} over gloo, one vector per dtype"
    _without_options = "exchanges between pairs, or XLA all-reduce,"

    def _collective(self, arrays: list[jax.Array], num_replicas: int) -> list[jax.Array]:
        return reductions.all_reduce_of_vectors(arrays)


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

    _pattern = "hierarchical XLA all-reduce, inside groups and across them, on {platform}"

    def _collective(self, arrays: list[jax.Array], num_replicas: int) -> list[jax.Array]:
        groups = self._hosts or reductions.neighbors(num_replicas)
        return reductions.two_level(arrays, groups) if groups else reductions.all_reduce(arrays)


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

    _pattern = "all-gather and addition in replica order on {platform}"

    def __init__(
        self, reduce_to_device: object = None, accumulation_fn: reductions.Accumulate | None = None
    ) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise InvalidTypeError(
                f"ReductionToOneDevice: accumulation_fn is {shown(accumulation_fn)}, expected a"
                " function from a list of arrays to their sum."
            )
        super().__init__()
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = self._accumulate = accumulation_fn

    def _sum(
        self, arrays: list[jax.Array], num_replicas: int, options: CommunicationOptions
    ) -> list[jax.Array]:
        # Options have no effect: the order is the point.
        return [
            reductions.add_rows(lax.all_gather(array, REPLICA_AXIS), self._accumulate)
            for array in arrays
        ]


def default_cross_device_ops(platform: str, num_workers: int) -> CrossDeviceOps:
    """Returns the algorithm of a strategy that was given none.

    Args:
        platform: Platform of the devices.
        num_workers: Number of processes.
    """
    over_gloo = platform == "cpu" and num_workers > 1
    return CollectiveAllReduce() if over_gloo else NcclAllReduce()


def reduce_nest(
    ops: CrossDeviceOps, op: ReduceOp, tree: Nest, num_replicas: int, options: CommunicationOptions
) -> Nest:
    """Combines all arrays of a nest together, inside a compiled step; None stays None."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, IndexedSlices))
    arrays = [
        leaf if isinstance(leaf, IndexedSlices) else reductions.check_reducible(leaf, "all_reduce")
        for leaf in leaves
    ]
    return jax.tree.unflatten(structure, ops.all_reduce(op, arrays, num_replicas, options))
