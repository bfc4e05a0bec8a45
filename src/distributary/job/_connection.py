"""Connects the processes of a job."""

import logging
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax

from distributary.cluster_resolver import MultiWorker
from distributary.devices import backends_started, job_programs, prepare_local_devices
from distributary.errors import BackendStartedError, ClusterError
from distributary.job._channel import called_host
from distributary.job._consensus import consensus, start_consensus
from distributary.job._copies import copies
from distributary.job._liveness import Liveness
from distributary.job._programs import EventSequence
from distributary.job._rendezvous import bind_address, connect_again, connect_workers
from distributary.options import CommunicationOptions

# A relay to JAX's coordination service that keeps connections open when the service dies.

_PROGRAM = Path(__file__).with_name("_relay_process.py")

_processes: list["subprocess.Popen[bytes]"] = []  # each ends when its stdin is closed


def relay_to(address: tuple[str, int]) -> str:
    """Starts a relay that passes connections on to `address`, and returns its loopback address.

    JAX's client ends the process from C++, without a message, as soon as its connection to the
    service breaks. The relay keeps that connection open; `Liveness` tells which worker is lost.

    The relay is a process of its own, which ends with this one. A thread of this process could not
    pass on an answer, because JAX holds Python's lock while it asks the service, for example when a
    preempted job agrees on a step.

    Args:
        address: Host and port of the service.

    Returns:
        `"127.0.0.1:PORT"`.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = address
        arguments = [str(server.fileno()), str(os.getpid()), host, str(port)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(server.fileno(),),
            start_new_session=True,  # spares it signals to all processes of a job
        )
        _processes.append(process)
        return f"127.0.0.1:{server.getsockname()[1]}"


# The connection

_log = logging.getLogger(__name__)

_RENDEZVOUS_SECONDS = 120.0
# Well before JAX would, `Liveness` notices a lost worker and lets all workers end together.
_LATER_THAN_LIVENESS_SECONDS = 60
_SHUTDOWN_SECONDS = 20
_INITIALIZATION_SECONDS = 60


def connect(place: MultiWorker, options: CommunicationOptions) -> None:
    """Connects the processes of a job, once.

    Raises:
        ClusterError: if a worker does not come in time, its port is taken, or the workers do not
            fit together.
        BackendStartedError: if JAX has already computed something.
    """
    if jax.distributed.is_initialized():
        if backends_started() and jax.process_count() != place.num_workers:
            raise ClusterError(
                f"JAX is already connected to {jax.process_count()} processes, but the cluster has"
                f" {place.num_workers} workers. A process can be part of one job only, so start"
                " another program for this cluster."
            )
        if consensus() is None and place.num_workers > 1:  # connected by the script itself
            Liveness(place, connect_again(place, "liveness"), options).start()
            _agree(place)
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
    channels = connect_workers(place, options.timeout_seconds or _RENDEZVOUS_SECONDS)
    Liveness(place, channels, options).start()
    is_first = place.worker_number == 0
    host, port = place.workers[0].host, place.workers[0].port
    # Numeric, as JAX would try all addresses of a name, and another user may listen at one.
    own_address = bind_address(place.workers[0]) if is_first else None
    jax.distributed.initialize(
        own_address or relay_to((called_host(host, port), port)),
        num_processes=place.num_workers,
        process_id=place.worker_number,
        cluster_detection_method="deactivate",
        initialization_timeout=_INITIALIZATION_SECONDS,
        heartbeat_timeout_seconds=math.ceil(options.heartbeat_timeout_seconds)
        + _LATER_THAN_LIVENESS_SECONDS,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        coordinator_bind_address=own_address,
    )
    _agree(place)


def _agree(place: MultiWorker) -> None:
    """Lets the workers agree from now on on the programs that they run."""
    agreement = start_consensus(place)
    sequence = EventSequence(agreement)

    def restart() -> None:
        sequence.forget()
        copies.restart()

    agreement.after_mismatch = restart
    job_programs.enter = sequence.enter
