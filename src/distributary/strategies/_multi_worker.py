"""Synchronous training on the devices of several machines."""

import itertools
import logging
import math
from typing import Any, final

import jax
import numpy as np

from distributary.cluster_resolver import (
    ClusterResolver,
    MultiWorker,
    TFConfigClusterResolver,
    multi_worker,
)
from distributary.context import get_replica_context
from distributary.errors import BackendStartedError, ClusterError, InvalidTypeError
from distributary.options import CommunicationOptions
from distributary.strategies._base import Strategy
from distributary.strategies._extended import StrategyExtended
from distributary.strategies._liveness import Liveness
from distributary.strategies._relay import relay_to
from distributary.strategies._rendezvous import bind_address, meet
from distributary.topology import backends_started, prepare_local_devices, replica_devices

_log = logging.getLogger(__name__)

_MEET_SECONDS = 120.0
# `Liveness` notices a lost worker and lets all workers end together, well before JAX would.
_LATER_THAN_LIVENESS_SECONDS = 60
_SHUTDOWN_SECONDS = 20
_INITIALIZATION_SECONDS = 60


@final
class MultiWorkerMirroredStrategy(Strategy):
    """One replica per device of every worker of a cluster, with variables mirrored on all of them.

    The same program runs on every worker. Create the strategy before anything is computed with
    JAX: it waits until all workers are there and connects them.

    Every worker has to do the same things with the strategy in the same order; what only one of
    them does (printing, saving what it has read) must not involve `run`, `reduce` or `gather`.

    When a worker is lost, the others end within two seconds, with a line on stderr that names it
    and the exit code `WorkerLostError.exit_code`: their next step raises `WorkerLostError`, and a
    process that does something else, or waits in a collective, is ended. The workers leave the
    program together: one that has finished waits for the others.

    Args:
        cluster_resolver: Says where the workers are and which one this is; None reads `TF_CONFIG`.
            Without a cluster this is a `MirroredStrategy` of this machine.
        communication_options: How gradients are combined; its `timeout_seconds` is also how long
            the start waits for the other workers, two minutes if it is None, and its
            `heartbeat_timeout_seconds` when a silent worker counts as lost.

    Raises:
        ClusterError: if a worker does not come in time, its port is taken, or the workers do not
            fit together.
        BackendStartedError: if JAX has computed something already.
        InvalidTypeError: for arguments of another type.
        InvalidValueError: if the cluster or the task is wrong.

    Source: `tf.distribute.MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        options = communication_options
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise InvalidTypeError(
                f"MultiWorkerMirroredStrategy: cluster_resolver is {cluster_resolver!r}, expected a"
                " ClusterResolver such as distributary.cluster_resolver.TFConfigClusterResolver()."
            )
        if options is not None and not isinstance(options, CommunicationOptions):
            raise InvalidTypeError(
                f"MultiWorkerMirroredStrategy: communication_options is {options!r}, expected"
                " distributary.experimental.CommunicationOptions."
            )
        self._cluster_resolver = cluster_resolver or TFConfigClusterResolver()
        spec = self._cluster_resolver.cluster_spec()
        if not spec:
            super().__init__(StrategyExtended(self, replica_devices(None), options=options))
            return
        resolver = self._cluster_resolver
        place = multi_worker(spec, resolver.task_type, resolver.task_id)
        if not place.in_collective_group:
            raise ClusterError(
                f"MultiWorkerMirroredStrategy: this process is {place.name}, which does not train"
                f" with the workers. Use MirroredStrategy or OneDeviceStrategy in the {place.name}."
            )
        _connect(place, options or CommunicationOptions())
        devices = _devices_of_all(place)
        super().__init__(StrategyExtended(self, devices, options=options, workers=place))
        # The first collective connects the workers, for which gloo waits 30 s. They are together
        # now; by their first step one may have read data for longer than that.
        self._extended.from_chief([np.zeros(1, np.int32)])
        if self._extended.options.hierarchical:  # between other groups of devices
            self.run(_all_reduce_one)
        _log.info("Using %r as %s", self, place.name)

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The cluster resolver."""
        return self._cluster_resolver


def _all_reduce_one() -> Any:
    context = get_replica_context()
    assert context is not None
    return context.all_reduce("SUM", 1.0)


def _connect(place: MultiWorker, options: CommunicationOptions) -> None:
    """Connects the processes of a job, once."""
    if jax.distributed.is_initialized():
        if backends_started() and jax.process_count() != place.num_workers:
            raise ClusterError(
                f"JAX is connected to {jax.process_count()} processes already, and the cluster has"
                f" {place.num_workers} workers. A process belongs to one job."
            )
        return
    if backends_started():
        raise BackendStartedError(
            "MultiWorkerMirroredStrategy was created after JAX had started. Create it at the"
            " beginning of the program, before any array or device of JAX is used, so that JAX can"
            " connect the workers."
        )
    prepare_local_devices()
    if place.num_workers == 1:
        return
    _log.info("%s: waiting for %s", place.name, ", ".join(map(str, place.other_workers)))
    connections = meet(place, options.timeout_seconds or _MEET_SECONDS)
    Liveness(place, connections, options.heartbeat_timeout_seconds).start()
    is_first = place.worker_number == 0
    coordinator = place.workers[0]
    jax.distributed.initialize(
        coordinator.address if is_first else relay_to((coordinator.host, coordinator.port)),
        num_processes=place.num_workers,
        process_id=place.worker_number,
        cluster_detection_method="deactivate",
        initialization_timeout=_INITIALIZATION_SECONDS,
        heartbeat_timeout_seconds=math.ceil(options.heartbeat_timeout_seconds)
        + _LATER_THAN_LIVENESS_SECONDS,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        coordinator_bind_address=bind_address(coordinator) if is_first else None,
    )


def _devices_of_all(place: MultiWorker) -> tuple[jax.Device, ...]:
    """The devices of all workers, worker by worker, of the kind this worker would use."""
    own = replica_devices(None)
    platform = own[0].platform
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
