"""Synchronous training on TPUs, with one or several cores per replica."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from distributary.cluster_resolver import ClusterResolver, MultiWorker, TPUClusterResolver
from distributary.devices import (
    DeviceAssignment,
    Topology,
    devices_of_all_hosts,
    replica_devices,
)
from distributary.errors import (
    ClusterError,
    ContextError,
    DeviceError,
    InvalidValueError,
    UnsupportedError,
    check_type,
    pip_install,
    shown,
)
from distributary.programs import constrained, spec_of_split
from distributary.strategies._base import Strategy
from distributary.strategies._extended import Sharded
from distributary.strategies._layout_rules import LayoutRules
from distributary.strategies._multi_worker import connect_workers, devices_of_all, extended_of_job

# The TPU of a job: connects its hosts, and finds its devices.


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterResolver,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    make_master_device_default: bool = True,
    cluster_device_filters: object = None,
) -> None:
    """Connects this process to the others of its job; all of them call it.

    Call it at the beginning of the program, before you compute anything with JAX. If you do not
    call it, strategies that span processes connect them.

    Args:
        cluster_spec_or_resolver: A resolver, which also knows which task this process is.
        job_name: No effect, as the others: the resolver knows the task.
        task_index: No effect.
        protocol: No effect.
        make_master_device_default: No effect.
        cluster_device_filters: No effect.

    Raises:
        ClusterError: if a process does not start in time, or the processes do not fit together.
        BackendStartedError: if JAX has already computed something.
        InvalidTypeError: for anything but a resolver.

    Source: `tf.config.experimental_connect_to_cluster`; there, one program controls all processes.
    """
    check_type(
        "experimental_connect_to_cluster: cluster_spec_or_resolver",
        cluster_spec_or_resolver,
        ClusterResolver,
        "a ClusterResolver, which knows the cluster and which of its tasks this process is",
    )
    connect_workers(cluster_spec_or_resolver)


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> Topology:
    """Starts JAX on the TPU and returns its topology; all hosts call it.

    Args:
        cluster_resolver: Knows where the hosts are. None asks the environment, then the metadata
            server, and uses only this host if they know of no TPU.

    Returns:
        The topology of the TPU devices of all hosts, one per core.

    Raises:
        DeviceError: if JAX has no TPU here.
        ClusterError: if a host does not start in time, or the hosts do not fit together.

    Source: `tf.tpu.experimental.initialize_tpu_system`.
    """
    resolver, why = resolver_or_local(cluster_resolver, "initialize_tpu_system")
    place = connect_workers(resolver)
    return Topology.of_devices(tpu_devices(place, "initialize_tpu_system", why))


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Removes all compiled programs from memory. The process keeps the devices until it ends.

    Args:
        cluster_resolver: Accepted for compatibility.

    Source: `tf.tpu.experimental.shutdown_tpu_system`, which also removes them.
    """
    del cluster_resolver
    jax.clear_caches()


def resolver_or_local(resolver: ClusterResolver | None, who: str) -> tuple[ClusterResolver, str]:
    """Returns the resolver, or one of this host alone if none is given and there is no cluster.

    Returns:
        The resolver, and the reason why no cluster was found.
    """
    if resolver is not None:
        example = "a ClusterResolver such as distributary.cluster_resolver.TPUClusterResolver()"
        check_type(f"{who}: the cluster resolver", resolver, ClusterResolver, example)
        return resolver, ""
    local = TPUClusterResolver()
    try:
        local.cluster_spec()
    except ClusterError as error:
        return TPUClusterResolver("local"), f" {error}"
    return local, ""


def tpu_devices(place: MultiWorker | None, who: str, why: str = "") -> tuple[jax.Device, ...]:
    """Returns the TPU devices of all hosts, host by host.

    Raises:
        DeviceError: if there are none.
    """
    if place is not None:
        devices = devices_of_all(place)
    else:
        devices = devices_of_all_hosts() or replica_devices(None)
    if devices[0].platform != "tpu":
        raise DeviceError(
            f"{who}: there is no TPU here. JAX was asked for TPU devices and has"
            f" {len(devices)} {devices[0].platform.upper()} devices; a TPU host needs"
            f" `{pip_install('tpu')}`.{why} To try a program on other devices, describe them with"
            " distributary.tpu.experimental.Topology.of_devices and pass a DeviceAssignment."
        )
    return devices


# The strategy

_log = logging.getLogger(__name__)


@final
class TPUStrategy(Strategy):
    """One replica per core of a TPU, or per block of cores, with variables mirrored on all of them.

    Run the same program on every host of the TPU. In tf.distribute, one program controls all hosts
    instead. Each host is a worker, with the same rules as in `MultiWorkerMirroredStrategy`.

    With several cores per replica, a step can split its arrays over them with
    `experimental_split_to_logical_devices`. XLA then partitions the computation and adds the
    communication that it needs. Every core holds whole variables, unless
    `experimental_layout_map` divides them.

    Args:
        tpu_cluster_resolver: Knows where the hosts are and which one this is. None asks the
            environment, then the metadata server, and uses only this host if they know of no TPU.
        experimental_device_assignment: The cores of every replica; None makes every core a replica.
            If its topology comes from `Topology.of_devices`, it can consist of any devices.
        experimental_spmd_xla_partitioning: Accepted for compatibility. The cores of a replica
            always run one program that XLA partitions.
        experimental_shard_optimizer_state: Whether every replica holds and updates only one part of
            the state of Keras optimizers; see `MirroredStrategy`.
        experimental_shard_parameters: Whether every replica holds only one part of the variables of
            Keras models and optimizers; see `MirroredStrategy`.
        experimental_layout_map: The variables of Keras models that the cores of a replica divide;
            see `MirroredStrategy`. None leaves variables whole on every core.

    Raises:
        DeviceError: if there is no TPU.
        ClusterError: if a host does not start in time, or the hosts do not fit together.
        BackendStartedError: with several hosts, if JAX has already computed something.
        InvalidTypeError: for arguments of another type.
        InvalidValueError: for assignments in which hosts have different numbers of replicas.
        UnsupportedError: for assignments in which a replica spans hosts.

    Source: `tf.distribute.TPUStrategy`.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        experimental_shard_optimizer_state: bool = False,
        experimental_shard_parameters: bool | str = False,
        experimental_layout_map: Mapping[str, Any] | str | None = None,
    ) -> None:
        del experimental_spmd_xla_partitioning
        sharded = Sharded.of(experimental_shard_optimizer_state, experimental_shard_parameters)
        assignment = experimental_device_assignment
        what = "TPUStrategy: experimental_device_assignment"
        check_type(what, assignment, DeviceAssignment | None, "a DeviceAssignment")
        num_cores = 1 if assignment is None else assignment.num_cores_per_replica
        resolver = tpu_cluster_resolver
        if resolver is None and assignment is not None and assignment.topology.num_tasks == 1:
            resolver = TPUClusterResolver("local")
        self._cluster_resolver, why = resolver_or_local(resolver, "TPUStrategy")
        place = connect_workers(self._cluster_resolver)
        devices: Sequence[jax.Device] | Sequence[Sequence[jax.Device]]
        if assignment is None:
            devices = tpu_devices(place, "TPUStrategy", why)
        else:
            devices = _devices_of(assignment, place, why)
        rules = LayoutRules("TPUStrategy", experimental_layout_map, num_cores)
        rules.check_mesh(len(devices))
        super().__init__(extended_of_job(self, place, devices, None, sharded, rules))
        _log.info("Using %r", self)

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Cluster resolver of this strategy."""
        return self._cluster_resolver

    def experimental_split_to_logical_devices(
        self, tensor: object, partition_dimensions: Sequence[int]
    ) -> Any:
        """Splits an array of a step over the logical devices of its replica.

        XLA also partitions everything that is computed from it, as far as it finds that useful.
        Values do not change.

        Args:
            tensor: An array inside `run`.
            partition_dimensions: Number of equal parts into which each dim is split.

        Returns:
            The array.

        Raises:
            ContextError: outside of `run` and `fit`.
            InvalidValueError: if there is not one number per dim, a dim cannot be split equally, or
                the product is not the number of logical devices per replica.

        Source: `tf.distribute.TPUStrategy.experimental_split_to_logical_devices`.
        """
        array = _traced(tensor, "experimental_split_to_logical_devices")
        parts = list(partition_dimensions)
        return constrained(
            array, self._extended.mesh, spec_of_split(self._extended.mesh, array.shape, parts)
        )

    def experimental_replicate_to_logical_devices(self, tensor: object) -> Any:
        """Gives every logical device of a replica a whole copy of an array of its step.

        Args:
            tensor: An array inside `run`.

        Returns:
            The array.

        Raises:
            ContextError: outside of `run` and `fit`.

        Source: `tf.distribute.TPUStrategy.experimental_replicate_to_logical_devices`.
        """
        array = _traced(tensor, "experimental_replicate_to_logical_devices")
        return constrained(array, self._extended.mesh, P())

    def experimental_assign_to_logical_device(self, tensor: object, logical_device_id: int) -> Any:
        """Returns the array; raises an error with several logical devices, which run one program.

        Args:
            tensor: An array inside `run`.
            logical_device_id: Number of the logical device.

        Returns:
            The array, if the replicas have one logical device.

        Raises:
            InvalidValueError: if there is no such logical device, or if there are several, as in
                TensorFlow with `experimental_spmd_xla_partitioning=True`.

        Source: `tf.distribute.TPUStrategy.experimental_assign_to_logical_device`.
        """
        self._extended.check_logical_device(logical_device_id)
        return tensor


def _traced(tensor: object, who: str) -> Any:
    array = jnp.asarray(tensor)
    if not isinstance(array, jax.core.Tracer):
        raise ContextError(
            f"{who}: got {shown(tensor)} outside of a step. Call it in the function given to"
            " Strategy.run, or in a layer of a model, on an array that is computed there."
        )
    return array


def _devices_of(
    assignment: DeviceAssignment, place: MultiWorker | None, why: str
) -> list[list[jax.Device]]:
    """Returns the devices of every replica."""
    topology = assignment.topology
    if not topology.has_devices:
        topology = Topology.of_devices(tpu_devices(place, "TPUStrategy", why))
    devices = [[topology.jax_device(at) for at in cores] for cores in assignment.core_assignment]
    num_workers = 1 if place is None else place.num_workers
    if num_workers > 1:
        _check_hosts(devices, num_workers)
    this_process = jax.process_index()
    # This checks that they are of one kind, and that CPU devices have enough threads.
    replica_devices([d for group in devices for d in group if d.process_index == this_process])
    return devices


def _check_hosts(devices: list[list[jax.Device]], num_workers: int) -> None:
    """Checks that no replica spans hosts, and that each host has equally many, in host order."""
    for replica, cores in enumerate(devices):
        hosts = sorted({device.process_index for device in cores})
        if len(hosts) > 1:
            raise UnsupportedError(
                f"TPUStrategy: replica {replica} has cores on the hosts {hosts}. A host feeds its"
                " own replicas, so each must lie on one; choose a computation_shape that fits."
            )
    hosts = [cores[0].process_index for cores in devices]
    if hosts != sorted(list(range(num_workers)) * (len(devices) // num_workers)):
        raise InvalidValueError(
            f"TPUStrategy: the replicas lie on the hosts {hosts}, expected as many on each of the"
            f" {num_workers} hosts, and host by host."
        )
