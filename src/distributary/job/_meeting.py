"""The meeting: the workers of a job find each other before JAX starts.

JAX's own startup ends the process without a message when a worker is missing, a port is taken or
the workers do not fit together. Here they meet first, each over one connection to the first worker,
at the address that JAX's coordination service uses afterward. `Liveness` keeps the connections.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import platform
import socket
import time
from collections.abc import Iterator
from typing import Any, final

from distributary.cluster_resolver import MultiWorker, Peer
from distributary.errors import ClusterError
from distributary.job._channel import Channel, ChannelClosedError, Message
from distributary.job._reception import Reception

_PACKAGES = ("distributary", "jax", "jaxlib", "keras")
_RETRY_SECONDS = 0.1
# Time for an answer, after the first worker has heard from everybody or given up.
_ANSWER_SECONDS = 10.0


def bind_address(peer: Peer) -> str:
    """Returns the numeric address of a worker on its own machine, `"127.0.0.1:2222"`.

    Raises:
        ClusterError: if its host is unknown.
    """
    family, address = _resolved(peer)
    host = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
    return f"{host}:{address[1]}"


def meet(place: MultiWorker, deadline_seconds: float) -> dict[int, Channel]:
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
    facts = _facts(place)
    deadline = time.monotonic() + deadline_seconds
    if place.worker_number == 0:
        with (
            _listening(place.workers[0]) as server,
            Reception(server, place.num_workers) as reception,
        ):
            return _Host(reception, place, facts, deadline, deadline_seconds).run()
    # Held while the workers meet: a second process with the same task fails here.
    with _own_port(place.workers[place.worker_number]):
        return {0: _asked(place, facts, deadline, deadline_seconds)}


def package_versions() -> dict[str, str]:
    """Returns the versions of packages that all tasks of a job must have in common."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _facts(place: MultiWorker) -> dict[str, Any]:
    versions = {"python": platform.python_version(), **package_versions()}
    workers = [str(peer) for peer in place.workers]
    facts = {"worker": place.worker_number, "workers": workers, "versions": versions}
    return {**facts, "check": _check(facts)}


def _check(facts: dict[str, Any]) -> str:
    """Returns a digest that shows that the other facts come from a worker, undamaged."""
    parts = json.dumps([facts[name] for name in ("worker", "workers", "versions")], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()


@final
class _Host:
    """The first worker, which hears from all others and tells each the result."""

    def __init__(
        self,
        reception: Reception,
        place: MultiWorker,
        facts: dict[str, Any],
        deadline: float,
        deadline_seconds: float,
    ) -> None:
        self._reception = reception
        self._place = place
        self._facts = facts
        self._deadline = deadline
        self._deadline_seconds = deadline_seconds
        self._arrived: dict[int, tuple[Channel, dict[str, Any]]] = {}

    def run(self) -> dict[int, Channel]:
        """Returns the channels to all others."""
        problem: str | None = "it was interrupted"
        try:
            problem = self._wait() or self._difference()
            self._answer(problem)
        finally:
            if problem is not None:
                for channel, _ in self._arrived.values():
                    channel.close()
        if problem is not None:
            raise ClusterError(problem)
        return {number: channel for number, (channel, _) in self._arrived.items()}

    def _wait(self) -> str | None:
        """Waits for the others; returns the problem, if there is one."""
        for channel, message in self._reception.arrivals(self._deadline):
            facts = _checked(message)
            if facts is None:  # from a program outside of the job
                channel.close()
                continue
            number = facts["worker"]
            if number in self._arrived or not 0 < number < self._place.num_workers:
                channel.close()
                return (
                    f"Two processes are worker number {number} of the cluster"
                    f" {self._facts['workers']}. Give every process a task of its own, in"
                    ' TF_CONFIG: {"task": {"type": "worker", "index": ...}}.'
                )
            channel.peer = str(self._place.workers[number])
            self._arrived[number] = channel, facts
            if len(self._arrived) == self._place.num_workers - 1:
                return None
        return self._missing()

    def _missing(self) -> str:
        missing = [
            str(peer)
            for number, peer in enumerate(self._place.workers)
            if number and number not in self._arrived
        ]
        return (
            f"After {self._deadline_seconds:g} s {', '.join(missing)} did not come to"
            f" {self._place.workers[0]}. Start the same program on every worker; is it running,"
            " with the same cluster in its TF_CONFIG, and can it reach that address?"
        )

    def _difference(self) -> str | None:
        """Returns how the workers differ, or None."""
        for number, (_, facts) in sorted(self._arrived.items()):
            name = self._place.workers[number].name
            if facts["workers"] != self._facts["workers"]:
                return (
                    f"{name} has another cluster than {self._place.name}: {facts['workers']} and"
                    f" {self._facts['workers']}. Give all workers the same cluster."
                )
            theirs, ours = facts["versions"], self._facts["versions"]
            for package in sorted({*theirs, *ours}):
                if package == "python":
                    same = _minor(theirs.get(package)) == _minor(ours.get(package))
                else:
                    same = theirs.get(package) == ours.get(package)
                if not same:
                    return (
                        f"{name} has {package} {theirs.get(package, 'not installed')},"
                        f" {self._place.name} has {ours.get(package, 'not installed')}: they would"
                        " compile different programs. Install the same versions on all workers."
                    )
        return None

    def _answer(self, problem: str | None) -> None:
        for channel, _ in self._arrived.values():
            with contextlib.suppress(ChannelClosedError):
                channel.send("verdict", problem)


def _checked(message: Message) -> dict[str, Any] | None:
    """Returns the facts of a worker; None for anything else, which anybody can send."""
    facts = message.content
    try:
        worker, workers, versions = (facts[name] for name in ("worker", "workers", "versions"))
        is_one = (
            message.kind == "here"
            and type(worker) is int
            and isinstance(workers, list)
            and isinstance(versions, dict)
            and 0 <= worker < len(workers)
            and all(isinstance(text, str) for text in (*workers, *versions.values()))
            and facts["check"] == _check(facts)
        )
        return facts if is_one else None
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None


def _minor(version: str | None) -> list[str]:
    return (version or "").split(".")[:2]


def _asked(
    place: MultiWorker, facts: dict[str, Any], deadline: float, deadline_seconds: float
) -> Channel:
    """Tells the first worker that this one is there; returns the channel to it."""
    first = place.workers[0]
    connection, reason = None, "no answer"
    while connection is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ClusterError(
                f"{place.name} could not reach {first} within {deadline_seconds:g} s: {reason}."
                " Is it running, and is the address the one it has in its own TF_CONFIG?"
            )
        try:
            connection = socket.create_connection((first.host, first.port), timeout=left)
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(min(_RETRY_SECONDS, max(0.0, left)))
    channel = Channel(connection, str(first))
    with contextlib.ExitStack() as stack:
        stack.callback(channel.close)
        try:
            channel.send("here", facts)
            answer = channel.receive(max(0.0, deadline - time.monotonic()) + _ANSWER_SECONDS)
            if answer.kind != "verdict" or not isinstance(answer.content, (str, type(None))):
                raise ChannelClosedError("it says something else")
        except OSError as problem:
            raise ClusterError(
                f"{first} did not say whether the workers of the cluster are complete: {problem}."
                " Look at its output."
            ) from problem
        if answer.content is not None:
            raise ClusterError(answer.content)
        stack.pop_all()
        return channel


@contextlib.contextmanager
def _listening(peer: Peer) -> Iterator[socket.socket]:
    family, address = _resolved(peer)
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(address)
        except OSError as error:
            raise ClusterError(_cannot_bind(peer, error)) from error
        server.listen()
        yield server


@contextlib.contextmanager
def _own_port(peer: Peer) -> Iterator[None]:
    family, address = _resolved(peer)
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(address)
            held.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ClusterError(_cannot_bind(peer, error)) from error
            # The cluster may know this machine by another address; only the first worker must have
            # its own.
        yield


def _cannot_bind(peer: Peer, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{peer}: the port is in use. Another process listens there, perhaps one that is"
            f" {peer.name} too, or a job that has not ended. End it, or choose another port for all"
            " workers."
        )
    return (
        f"{peer}: this process cannot listen there: {error.strerror}. The address of a worker must"
        " be one of its own machine."
    )


def _resolved(peer: Peer) -> tuple[Any, Any]:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            peer.host, peer.port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        raise ClusterError(f"{peer}: the host is unknown: {error.strerror or error}.") from error
    return family, address
