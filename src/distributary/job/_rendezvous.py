"""The rendezvous: the workers of a job find each other before JAX starts.

JAX's own startup ends the process without a message when a worker is missing, a port is taken or
the workers do not fit together. Here they meet first, each over one connection to the first worker,
at the address that JAX's coordination service uses afterward. `Liveness` keeps the connections.
"""

import contextlib
import errno
import json
import logging
import os
import platform
import secrets
import socket
import time
from typing import Any, TypeAlias

from distributary._threads import call_after
from distributary.cluster_resolver import MultiWorker, Peer, join_address
from distributary.devices import coordination_client
from distributary.errors import ClusterError
from distributary.job._channel import (
    Channel,
    ChannelClosedError,
    ConnectionAcceptor,
    Message,
    bound_address,
    connected,
    is_proof,
    proof,
)
from distributary.job._versions import package_versions

_log = logging.getLogger(__name__)

# Time for an answer, after the first worker has heard from everybody or given up.
_ANSWER_SECONDS = 10.0
_PATIENCE_SECONDS = 10.0  # before it says whom it waits for
_AGAIN_SECONDS = 60.0  # for connections of workers that have started

_Facts: TypeAlias = dict[str, Any]  # about one worker, as JSON
_Address: TypeAlias = tuple[Any, ...]  # as sockets expect it


def bind_address(peer: Peer) -> str:
    """Returns the numeric address of a worker on its own machine, `"127.0.0.1:2222"`.

    Raises:
        ClusterError: if its host is unknown.
    """
    _, (host, port, *_) = resolved(peer)
    return join_address(host, port)


def resolved(peer: Peer) -> tuple[socket.AddressFamily, _Address]:
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
