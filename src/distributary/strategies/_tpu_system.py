"""The TPU of a job: connects its hosts, and finds its devices."""

import jax

from distributary.cluster_resolver import (
    ClusterResolver,
    MultiWorker,
    TPUClusterResolver,
    place_of,
)
from distributary.devices import Topology, current_target, devices_of_all_hosts, replica_devices
from distributary.errors import ClusterError, DeviceError, check_type, pip_install
from distributary.job import connect
from distributary.options import CommunicationOptions
from distributary.strategies._job_devices import devices_of_all


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


def connect_workers(
    resolver: ClusterResolver, options: CommunicationOptions | None = None
) -> MultiWorker | None:
    """Connects the processes of a cluster; returns None if this process is the only one."""
    if current_target() is not None:  # this process stands for all hosts of the target
        return None
    place = place_of(resolver)
    if place is None:
        return None
    if not place.in_collective_group:
        raise ClusterError(
            f"This process is {place.name}, which does not train with the workers: it cannot"
            f" connect to them. Use MirroredStrategy or OneDeviceStrategy in the {place.name}."
        )
    connect(place, options or CommunicationOptions())
    return place


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
