"""Connects the processes of a job."""

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from distributary.cluster_resolver import MultiWorker
from distributary.errors import BackendStartedError, ClusterError
from distributary.options import CommunicationOptions
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


def connect(place: MultiWorker, options: CommunicationOptions) -> None:
    """Connects the processes of a job, once.

    Raises:
        ClusterError: if a worker does not come in time, its port is taken, or the workers do not
            fit together.
        BackendStartedError: if JAX has computed something already.
    """
    if jax.distributed.is_initialized():
        if backends_started() and jax.process_count() != place.num_workers:
            raise ClusterError(
                f"JAX is connected to {jax.process_count()} processes already, and the cluster has"
                f" {place.num_workers} workers. A process belongs to one job."
            )
        return
    if backends_started():
        if place.num_workers == 1:
            return
        raise BackendStartedError(
            f"{place.name} cannot be connected to the other workers any more: JAX has started."
            " Create the strategy, or call experimental_connect_to_cluster, at the beginning of the"
            " program, before any array or device of JAX is used."
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


def devices_of_all(place: MultiWorker) -> tuple[jax.Device, ...]:
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


def extended_of_job(
    strategy: Any,
    place: MultiWorker,
    devices: Sequence[jax.Device] | Sequence[Sequence[jax.Device]],
    options: CommunicationOptions | None,
    shard_optimizer_state: bool = False,
) -> StrategyExtended:
    """The methods of a strategy of connected processes, which all call this together.

    Args:
        strategy: The strategy.
        place: The processes.
        devices: As in `StrategyExtended`.
        options: Communication options.
        shard_optimizer_state: As in `StrategyExtended`.
    """
    extended = StrategyExtended(
        strategy,
        devices,
        options=options,
        workers=place,
        shard_optimizer_state=shard_optimizer_state,
    )
    # The first collective connects the workers, for which gloo waits 30 s. They are together now;
    # by their first step one may have read data for longer than that.
    extended.from_chief([np.zeros(1, np.int32)])
    return extended
