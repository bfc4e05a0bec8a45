"""Synchronous training on several machines, and what every strategy that spans them shares."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from distributary.cluster_resolver import (
    ClusterResolver,
    MultiWorker,
    TFConfigClusterResolver,
    place_of,
)
from distributary.context import get_replica_context
from distributary.devices import current_target, devices_of_all_hosts, replica_devices
from distributary.engine import Placement
from distributary.errors import ClusterError, check_type
from distributary.job import connect, share_compilation
from distributary.launch import refuse_job
from distributary.options import CommunicationOptions
from distributary.strategies._base import Strategy
from distributary.strategies._extended import Sharded, StrategyExtended
from distributary.strategies._layout_rules import LayoutRules

_log = logging.getLogger(__name__)


@final
class MultiWorkerMirroredStrategy(Strategy):
    """One replica per device of every worker of a cluster, with variables mirrored on all of them.

    Run the same program on every worker. Create the strategy before you compute anything with JAX:
    it waits until all workers have started, and connects them.

    Every worker has to do the same things with the strategy in the same order. If only one worker
    does something (printing, saving values that it has read), it must not call `run`, `reduce` or
    `gather` for it.

    When a worker is lost, the others end within two seconds, with a line on stderr that names it
    and the exit code `WorkerLostError.exit_code`. Their next step raises `WorkerLostError`; a
    process that does something else, or waits in a collective, is ended. The workers leave the
    program together: one that has finished waits for the others.

    Args:
        cluster_resolver: Knows where the workers are and which one this is; None reads `TF_CONFIG`.
            Without a cluster, this is a `MirroredStrategy` of this machine.
        communication_options: Options for combining gradients. `timeout_seconds` is also the time
            to wait for the other workers at the start (two minutes if it is None). A worker that is
            silent for `heartbeat_timeout_seconds` counts as lost.
        experimental_shard_optimizer_state: Whether every device of the cluster holds and updates
            only one part of the state of Keras optimizers; see `MirroredStrategy`. All workers then
            have to read this state together, and `communication_options` apply to everything except
            the gradients of optimizers.
        experimental_shard_parameters: Whether every device of the cluster holds only one part of
            the variables of Keras models and optimizers; see `MirroredStrategy`. The same rules
            apply, also to the variables of models. `"host"` divides them over the devices of each
            host, whose parts together are a whole copy, so weights do not travel between hosts.
        experimental_model_parallel: Number of devices of each replica, which lie on one worker and
            divide the layers of Keras models; see `MirroredStrategy`.
        experimental_layout_map: The variables that they divide; see `MirroredStrategy`.

    Raises:
        ClusterError: if a worker does not start in time, its port is taken, or the workers do not
            fit together.
        BackendStartedError: if JAX has already computed something.
        InvalidTypeError: for arguments of another type.
        InvalidValueError: if the cluster or the task is wrong, or if the cluster has parameter
            servers.

    Source: `tf.distribute.MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        experimental_shard_optimizer_state: bool = False,
        experimental_shard_parameters: bool | str = False,
        experimental_model_parallel: int | None = None,
        experimental_layout_map: Mapping[str, Any] | str | None = "auto",
    ) -> None:
        options = communication_options
        check_type(
            "MultiWorkerMirroredStrategy: cluster_resolver",
            cluster_resolver,
            ClusterResolver | None,
            "a ClusterResolver such as distributary.cluster_resolver.TFConfigClusterResolver()",
        )
        check_type(
            "MultiWorkerMirroredStrategy: communication_options",
            options,
            CommunicationOptions | None,
            "distributary.experimental.CommunicationOptions",
        )
        rules = LayoutRules(
            "MultiWorkerMirroredStrategy", experimental_layout_map, experimental_model_parallel
        )
        self._cluster_resolver = cluster_resolver or TFConfigClusterResolver()
        devices = devices_of_all_hosts()  # of the machine for which the program is compiled
        spec = self._cluster_resolver.cluster_spec() if devices is None else None
        if spec and "ps" in spec.jobs:
            refuse_job(
                f"MultiWorkerMirroredStrategy: the cluster has {spec.num_tasks('ps')} parameter"
                " server(s), which this strategy does not use: every worker keeps the"
                " variables itself. Start the job without them (`distributary launch` without"
                " --ps), or use ParameterServerStrategy."
            )
        place = connect_workers(self._cluster_resolver, options)
        if devices is None:
            devices = replica_devices(None) if place is None else devices_of_all(place)
        sharded = Sharded.of(experimental_shard_optimizer_state, experimental_shard_parameters)
        replicas = rules.replicas_of(devices, 1 if place is None else place.num_workers)
        super().__init__(extended_of_job(self, place, replicas, options, sharded, rules))
        if place is None:
            return
        if self._extended.options.hierarchical:  # its groups of devices need their own connections
            self.run(_all_reduce_one)
        _log.info("Using %r as %s", self, place.name)

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Cluster resolver of this strategy."""
        return self._cluster_resolver


def _all_reduce_one() -> Any:
    context = get_replica_context()
    assert context is not None
    return context.all_reduce("SUM", 1.0)


# Processes of a job: how a strategy connects them, and what it makes of their devices.


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


def devices_of_all(place: MultiWorker) -> tuple[jax.Device, ...]:
    """Returns the devices of all workers, worker by worker, of the kind this worker would use."""
    local = replica_devices(None)
    platform = local[0].platform
    devices: list[list[jax.Device]] = [[] for _ in range(place.num_workers)]
    for device in jax.devices(platform):
        devices[device.process_index].append(device)
    counts = [len(of_worker) for of_worker in devices]
    if len(set(counts)) > 1:
        seen = ", ".join(
            f"{peer.name} {count}" for peer, count in zip(place.workers, counts, strict=True)
        )
        raise ClusterError(
            f"The workers have different numbers of {platform.upper()} devices: {seen}. Give every"
            " worker the same number, with CUDA_VISIBLE_DEVICES or JAX_NUM_CPU_DEVICES."
        )
    return tuple(itertools.chain.from_iterable(devices))


def extended_of_job(
    strategy: object,
    place: MultiWorker | None,
    devices: Sequence[jax.Device] | Sequence[Sequence[jax.Device]],
    options: CommunicationOptions | None,
    sharded: Sharded = Sharded.NOTHING,
    layout_rules: LayoutRules | None = None,
) -> StrategyExtended:
    """Makes the methods of a strategy that may span processes; all of them call this together.

    Args:
        strategy: The strategy.
        place: The processes; None for this process alone.
        devices: Like `replicas` of `Placement.on_each`, of all processes.
        options: Communication options.
        sharded: Like `sharded` of `StrategyExtended`.
        layout_rules: Like `layout_rules` of `StrategyExtended`.
    """
    extended = StrategyExtended(
        strategy,
        Placement.on_each(devices),
        options=options,
        workers=place,
        sharded=sharded,
        layout_rules=layout_rules,
    )
    # The first collective connects the workers, and gloo waits 30 s for this. Run one now, while
    # all workers are at the same point: before their first step, one may read data for longer than
    # that.
    extended.from_chief([np.zeros(1 << 15, np.int32)], f"the start of {type(strategy).__name__}")
    share_compilation(extended.mesh.devices.flat)
    return extended
