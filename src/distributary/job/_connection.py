"""Connects the processes of a job: they find each other, before JAX starts, and then JAX connects.

JAX's own startup ends the process without a message when a worker is missing, a port is taken or
the workers do not fit together. Here they meet first, each over one connection to the first worker,
at the address that JAX's coordination service uses afterward. `Liveness` keeps the connections.
"""

import contextlib
import errno
import json
import logging
import math
import os
import platform
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

import jax

from distributary._threads import call_after
from distributary.cluster_resolver import MultiWorker, Peer, join_address
from distributary.devices import (
    backends_started,
    coordination_client,
    job_programs,
    prepare_local_devices,
)
from distributary.errors import BackendStartedError, ClusterError
from distributary.job import package_versions
from distributary.job._channel import (
    Channel,
    ChannelClosedError,
    ConnectionAcceptor,
    Message,
    bound_address,
    called_host,
    connected,
    is_proof,
    proof,
)
from distributary.job._consensus import consensus, copies, start_consensus
from distributary.job._liveness import Liveness
from distributary.job._programs import EventSequence
from distributary.options import CommunicationOptions

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
    first = place.workers[0]
    # Numeric, as JAX would try all addresses of a name, and another user may listen at one.
    own_address = join_address(*resolved(first)[1][:2]) if place.worker_number == 0 else None
    jax.distributed.initialize(
        own_address or relay_to((called_host(first.host, first.port), first.port)),
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
    agreement = start_consensus(place, connect_again(place, "consensus"))
    sequence = EventSequence(agreement)

    def restart() -> None:
        sequence.forget()
        copies.restart()

    agreement.after_mismatch = restart
    job_programs.enter = sequence.enter


# The rendezvous

# Time for an answer, after the first worker has heard from everybody or given up.
_ANSWER_SECONDS = 10.0
_PATIENCE_SECONDS = 10.0  # before it says whom it waits for
_AGAIN_SECONDS = 60.0  # for connections of workers that have started

_Facts: TypeAlias = dict[str, Any]  # about one worker, as JSON


def resolved(peer: Peer) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Returns the address of a worker on its own machine, and its family.

    Raises:
        ClusterError: if its host is unknown.
    """
    try:
        return bound_address(peer.host, peer.port)
    except OSError as error:
        raise ClusterError(
            f"{peer}: the host is unknown: {error.strerror or error}. Give {peer.name} an address"
            " that all workers can resolve."
        ) from error


def connect_workers(place: MultiWorker, deadline_seconds: float) -> dict[int, Channel]:
    """Waits until all workers of a cluster have called it and fit together.

    Args:
        place: The cluster, and which of its workers this process is.
        deadline_seconds: Time to wait for the others.

    Returns:
        Channels by the number of the worker at the other end: from the first worker to each other
        one, from the others to the first.

    Raises:
        ClusterError: on every worker that is there, if one is missing, its port is taken, two are
            the same worker, or their clusters or package versions differ; the message says which.
    """
    assert place.worker_number is not None
    is_first = place.worker_number == 0
    # Only the first worker is connected to, but all hold their ports while they meet: a second
    # process with the same task fails here.
    with _held_port(place.workers[place.worker_number], must_be_own=is_first) as server:
        if is_first:
            return _accept_all(server, place, deadline_seconds)
        return {0: _register(place.workers[0].port, place, deadline_seconds)}


def connect_again(place: MultiWorker, purpose: str) -> dict[int, Channel]:
    """Returns more channels between the same workers as `connect_workers`.

    All workers call it once for each purpose, after JAX has connected them: worker 0 listens at a
    free port, and tells the others its number and a secret through JAX's service.

    Raises:
        ClusterError: if the workers cannot reach each other.
    """
    first, client = place.workers[0], coordination_client()
    key = f"distributary/channels/{purpose}"
    if place.worker_number != 0:
        milliseconds = int(_AGAIN_SECONDS * 1000)
        port, secret = json.loads(client.blocking_key_value_get(key, milliseconds))
        if not port:
            raise _cannot_listen(first, reason=secret)
        return {0: _register(port, place, _AGAIN_SECONDS, secret)}
    family, (host, *_) = resolved(first)
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError as error:
        reason = _reason_of(error)
        client.key_value_set(key, json.dumps([0, reason]))
        raise _cannot_listen(first, reason) from error
    with server:
        secret = secrets.token_hex(16)
        client.key_value_set(key, json.dumps([server.getsockname()[1], secret]))
        return _accept_all(server, place, _AGAIN_SECONDS, secret)


def _facts(place: MultiWorker) -> _Facts:
    minor_version = ".".join(platform.python_version_tuple()[:2])
    versions = {"python": minor_version, **package_versions()}
    workers = [str(peer) for peer in place.workers]
    return {"worker": place.worker_number, "workers": workers, "versions": versions}


def _held_port(peer: Peer, *, must_be_own: bool) -> socket.socket:
    """Returns a socket that listens at the address of a worker, so that nobody else can."""
    family, address = resolved(peer)
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(
                f"{peer}: the port is in use, perhaps by another process that is also {peer.name},"
                " or by a job that has not ended. End that process, or choose another port for"
                f" {peer.name} on all workers."
            ) from error
        if must_be_own:
            raise _cannot_listen(peer, _reason_of(error)) from error
    # The cluster may know this machine by another address; only the first worker must have its own.
    return socket.socket(family)


def _reason_of(error: OSError) -> str:
    return os.strerror(error.errno or 0)  # `strerror` of `create_server` is longer


def _cannot_listen(peer: Peer, reason: str) -> ClusterError:
    return ClusterError(
        f"{peer} cannot listen at its address: {reason}. The address of a worker must be one of its"
        " own machine, with a port that it may use."
    )


def _port_of(first: Peer, port: int) -> str:
    if port == first.port:
        return str(first)
    return f"{first}, port {port} (workers must reach every port of the first one)"


# On the first worker


def _accept_all(
    server: socket.socket, place: MultiWorker, deadline_seconds: float, secret: str = ""
) -> dict[int, Channel]:
    """Waits for the other workers, tells each the result, and returns the channels to them."""
    arrived: dict[int, tuple[Channel, _Facts]] = {}
    problem: str | None = "it was interrupted"
    try:
        problem = _problem_of(server, place, deadline_seconds, secret, arrived)
        for channel, _ in arrived.values():
            with contextlib.suppress(ChannelClosedError):
                channel.send("verdict", problem)
    finally:
        if problem is not None:
            for channel, _ in arrived.values():
                channel.close()
    if problem is not None:
        raise ClusterError(problem)
    return {number: channel for number, (channel, _) in arrived.items()}


def _warn(place: MultiWorker, missing: str, deadline_seconds: float) -> None:
    _log.warning(
        "%s waits for %s, %g s at most. Start it with the same program and cluster.",
        place.name,
        missing,
        deadline_seconds,
    )


def _problem_of(
    server: socket.socket,
    place: MultiWorker,
    deadline_seconds: float,
    secret: str,
    arrived: dict[int, tuple[Channel, _Facts]],
) -> str | None:
    """Adds the other workers to `arrived`; returns why the job cannot go on, or None."""
    report = _facts(place)
    deadline = time.monotonic() + deadline_seconds

    def missing() -> str:
        return ", ".join(
            str(peer) for n, peer in enumerate(place.workers) if n and n not in arrived
        )

    with (
        call_after(_PATIENCE_SECONDS, lambda: _warn(place, missing(), deadline_seconds)),
        ConnectionAcceptor(server, place.num_workers) as acceptor,
    ):
        for channel, message in acceptor.first_messages(deadline):
            facts = _checked(message, secret)
            if facts is None:  # from a program outside of the job
                channel.close()
                continue
            number = facts["worker"]
            if number in arrived or not 0 < number < place.num_workers:
                channel.close()
                return (
                    f"Two processes are worker number {number} of the cluster {report['workers']}."
                    " Give every process a task of its own, in TF_CONFIG:"
                    ' {"task": {"type": "worker", "index": ...}}.'
                )
            channel.peer = str(place.workers[number])
            arrived[number] = channel, facts
            if len(arrived) == place.num_workers - 1:
                # With a secret, JAX has connected them: they have been compared, or the script has
                # decided that they fit together.
                return None if secret else _difference(place, report, arrived)
    return (
        f"{missing()} did not connect to"
        f" {_port_of(place.workers[0], server.getsockname()[1])} within {deadline_seconds:g} s."
        " Start the same program on every worker, with the same cluster in TF_CONFIG, and check"
        " that every worker can reach that address."
    )


def _difference(
    place: MultiWorker, report: _Facts, arrived: dict[int, tuple[Channel, _Facts]]
) -> str | None:
    """Returns how the workers differ, or None."""
    for number, (_, facts) in sorted(arrived.items()):
        name = place.workers[number].name
        if facts["workers"] != report["workers"]:
            return (
                f"{name} has another cluster than {place.name}: {facts['workers']} and"
                f" {report['workers']}. Give all workers the same cluster."
            )
        theirs, ours = facts["versions"], report["versions"]
        for package in sorted({*theirs, *ours}):
            if theirs.get(package) != ours.get(package):
                return (
                    f"{name} has {package} {theirs.get(package, 'not installed')}, {place.name} has"
                    f" {ours.get(package, 'not installed')}: they would compile different programs."
                    " Install the same versions on all workers."
                )
    return None


def _checked(message: Message, secret: str) -> _Facts | None:
    """Returns the facts of a worker; None for anything else, which anybody can send."""
    try:
        facts, shown = message.content
        is_one = message.kind == "here" and is_proof(shown, secret, "worker", facts)
    except (ValueError, TypeError, RecursionError):
        return None
    return facts if is_one else None


# On the others


def _register(port: int, place: MultiWorker, deadline_seconds: float, secret: str = "") -> Channel:
    """Tells the first worker that this one is there; returns the channel to it."""
    first = place.workers[0]
    deadline = time.monotonic() + deadline_seconds
    try:
        with call_after(_PATIENCE_SECONDS, lambda: _warn(place, str(first), deadline_seconds)):
            channel = connected(first.host, port, str(first), deadline_seconds)
    except OSError as error:
        raise ClusterError(
            f"{place.name} could not reach {_port_of(first, port)} within {deadline_seconds:g} s:"
            f" {error.strerror or error}. Check that it is running, and that it has the same"
            " address in its own TF_CONFIG."
        ) from error
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(channel.close)
        try:
            facts = _facts(place)
            # Without a secret, the proof shows that the facts come from a worker, undamaged.
            channel.send("here", [facts, proof(secret, "worker", facts)])
            answer = channel.receive(max(0.0, deadline - time.monotonic()) + _ANSWER_SECONDS)
            if answer.kind != "verdict" or not isinstance(answer.content, (str, type(None))):
                raise ChannelClosedError(f"it sent an unexpected message, {answer.kind!r:.100}")
        except OSError as problem:
            raise ClusterError(
                f"{first} did not say whether the workers of the cluster are complete: {problem}."
                " Look at its output."
            ) from problem
        if answer.content is not None:
            raise ClusterError(answer.content)
        on_failure.pop_all()
        return channel


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
