"""Workers and servers that are separate processes: how one runs, and how a chief connects them."""

import concurrent.futures
import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, NoReturn, final

import jax

from distributary._threads import call_after
from distributary.cluster_resolver import ClusterResolver, ClusterSpec, Peer, multi_worker
from distributary.devices import backends_started, prepare_local_devices
from distributary.errors import ClusterError, ContextError, InvalidTypeError, InvalidValueError
from distributary.job import package_versions
from distributary.servers._cluster import Cluster
from distributary.servers._grpc import (
    Credentials,
    GrpcLink,
    GrpcServer,
    credentials_of,
    credentials_of_this_process,
)
from distributary.servers._links import (
    IDENTIFY,
    ConnectionLostError,
    Link,
    Task,
    UnauthenticatedError,
)
from distributary.servers._messages import JSON, Message
from distributary.servers._sources import ScriptEndError, describe, find, is_reimporting
from distributary.servers._statistics import lines_of, serve_metrics
from distributary.servers._worker import new_service

_log = logging.getLogger(__name__)

CONNECT_VARIABLE: Final = "DISTRIBUTARY_CONNECT_SECONDS"
_CONNECT_SECONDS = 120.0
_PATIENCE_SECONDS = 10.0  # before the chief says whom it waits for


def cluster_of(cluster_resolver: object) -> Cluster:
    """Returns the cluster for a strategy: a given cluster, or the processes a resolver names.

    Waits until all of these processes are there, for at most `DISTRIBUTARY_CONNECT_SECONDS` (120).

    Raises:
        InvalidTypeError: if it is neither a cluster nor a cluster resolver.
        InvalidValueError: if the cluster has no workers or no servers, or this process is not its
            chief.
        ClusterError: if tasks do not connect in time, do not know the same secret or have other
            versions of packages, or if the workers differ in their number of devices.
    """
    if isinstance(cluster_resolver, Cluster):
        return cluster_resolver
    if not isinstance(cluster_resolver, ClusterResolver):
        raise InvalidTypeError(
            f"ParameterServerStrategy: cluster_resolver is {cluster_resolver!r}, expected a"
            " ClusterResolver such as TFConfigClusterResolver(), or local_cluster(workers=2, ps=2)"
            " for workers and servers in this process."
        )
    if is_reimporting():
        raise ScriptEndError("only the chief creates the strategy")
    peers = tasks_of(cluster_resolver.cluster_spec())
    task_type = cluster_resolver.task_type
    if task_type not in (None, "chief"):
        raise InvalidValueError(
            f"ParameterServerStrategy: this process is {task_type} {cluster_resolver.task_id} of"
            " the cluster, and only the chief creates the strategy. Workers and servers call"
            " Server(cluster_resolver).join() instead."
        )
    return Cluster(*connect(peers, os.environ), describe)


def tasks_of(cluster_spec: ClusterSpec) -> list[Peer]:
    """Returns the workers and servers of a cluster.

    Raises:
        InvalidValueError: if there are no workers or no servers, if there are unknown types of
            tasks or several chiefs, or if the numbers of the servers have gaps.
    """
    for task_type in ("worker", "ps"):
        if task_type not in cluster_spec.jobs:
            raise InvalidValueError(
                f'The cluster has no "{task_type}": {cluster_spec.as_dict()}. Expected at least one'
                ' address each of "worker" and "ps". local_cluster(workers=2, ps=2) does without'
                " other processes."
            )
    if None in cluster_spec.job_tasks("ps"):
        raise InvalidValueError(
            f'The cluster has gaps between its "ps": {cluster_spec.as_dict()["ps"]}. Number the'
            " servers from 0."
        )
    first = cluster_spec.task_indices("worker")[0]
    peers = multi_worker(cluster_spec, "worker", first).peers
    return [peer for peer in peers if peer.task_type in ("worker", "ps")]


def connect_seconds(environ: Mapping[str, str]) -> float:
    """Returns how many seconds to wait for other tasks, from `DISTRIBUTARY_CONNECT_SECONDS`.

    Raises:
        InvalidValueError: if it is not a number that threads can wait for.
    """
    text = environ.get(CONNECT_VARIABLE, str(_CONNECT_SECONDS))
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) <= threading.TIMEOUT_MAX:
            return seconds
    raise InvalidValueError(
        f"{CONNECT_VARIABLE} is {text!r}, expected a number of seconds, such as {_CONNECT_SECONDS}."
    )


def connect(
    peers: list[Peer], environ: Mapping[str, str]
) -> tuple[Sequence[Task], Sequence[Task], int]:
    """Waits for all tasks as their chief; checks names, package versions and numbers of devices.

    Args:
        peers: The workers and servers.
        environ: The environment.

    Returns:
        The workers, the servers, and the number of devices of every worker.

    Raises:
        ClusterError: see `cluster_of`.
    """
    credentials = credentials_of("chief", environ) or credentials_of_this_process("chief")
    tasks = {peer: grpc_task(peer, credentials) for peer in peers}
    replies: dict[Peer, dict[str, Any]] = {}

    def warn() -> None:
        missing = [str(peer) for peer in peers if peer not in replies]
        _log.warning("The chief waits for %s.", ", ".join(missing))

    _log.info("Waiting for %s", ", ".join(map(str, peers)))
    links = {peer: task.connect() for peer, task in tasks.items()}
    try:
        with call_after(_PATIENCE_SECONDS, warn):
            _identify(links, replies, connect_seconds(environ))
    finally:
        for link in links.values():
            link.close()
    workers, servers = (
        [task for peer, task in tasks.items() if peer.task_type == task_type]
        for task_type in ("worker", "ps")
    )
    return workers, servers, _num_devices(peers, replies)


def grpc_task(peer: Peer, credentials: Credentials | None) -> Task:
    """Returns a worker or server in another process, which a task with `credentials` can call."""
    return Task(str(peer), functools.partial(GrpcLink, peer.address, peer.name, credentials))


def _num_devices(peers: Sequence[Peer], replies: Mapping[Peer, dict[str, Any]]) -> int:
    counts = {p: replies[p].get("devices", 1) for p in peers if p.task_type == "worker"}
    (first, expected), *others = counts.items()
    for peer, count in others:
        if count != expected:
            raise ClusterError(
                f"{peer} has {count} devices, and {first} has {expected}: a step is one program for"
                " all workers. Start every worker with the same JAX_NUM_CPU_DEVICES, which"
                " `distributary launch --devices-per-worker` sets."
            )
    return int(expected)


def _identify(links: dict[Peer, Link], replies: dict[Peer, dict[str, Any]], seconds: float) -> None:
    """Asks every task who it is; repeats this until it is there, for at most so many seconds."""
    end = time.monotonic() + seconds
    reasons: dict[Peer, Exception] = {}
    calls = {link.start(Message(IDENTIFY)): peer for peer, link in links.items()}
    while calls:
        done, _ = concurrent.futures.wait(
            calls, max(0.0, end - time.monotonic()), concurrent.futures.FIRST_COMPLETED
        )
        if not done:
            listing = "".join(
                f"\n  {peer}: {reasons.get(peer, 'no answer')}"
                for peer in sorted(calls.values(), key=str)
            )
            raise ClusterError(
                f"ParameterServerStrategy: after {seconds:g} s, there is no connection to"
                f"{listing}\nStart a process with Server(cluster_resolver).join() at each address,"
                f" and let the chief connect to it; {CONNECT_VARIABLE} sets how many seconds the"
                " chief waits for them."
            )
        for call in done:
            peer = calls.pop(call)
            try:
                replies[peer] = call.result().fields
                _check(peer, replies[peer])
            except UnauthenticatedError as error:
                raise ClusterError(str(error)) from None
            except ConnectionLostError as error:
                reasons[peer] = error
                calls[links[peer].start(Message(IDENTIFY))] = peer


def _check(peer: Peer, fields: dict[str, Any]) -> None:
    if fields.get("task") != peer.name:
        raise ClusterError(
            f"{peer.address} should be {peer.name}, and is {fields.get('task')}. Give all"
            " tasks the same cluster, and each its own task."
        )
    versions, others = package_versions(), fields["versions"]
    different = [
        f"{package} {others[package]} and the chief {version}"
        for package, version in versions.items()
        if others.get(package, version) != version
    ]
    if different:
        raise ClusterError(
            f"{peer} has {', '.join(different)}. Install the same versions for all tasks."
        )


# A worker or server in its own process.

_LINKS_PER_TASK = 8
_MIN_LINKS = 256
_POLL_SECONDS = 0.5
_CLOSE_SECONDS = 2.0  # for requests under way at the end; a dataset may block forever


@final
@dataclass(frozen=True)
class ServerDef:
    """The task that a `Server` runs, and its cluster.

    Args:
        cluster: All tasks of the job.
        job_name: `"worker"` or `"ps"`.
        task_index: The number of the task.
        protocol: `"grpc"`.

    Source: `tf.train.ServerDef`.
    """

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str = "grpc"


@final
class Server:
    """A worker or parameter server in this process, which works for the chief of a job.

    It listens only at its address in the cluster. There are two ways to keep others out:

    - If `DISTRIBUTARY_CERTS` names a folder made by `distributary certs`, connections are
      encrypted, and only tasks of the job can connect.
    - Without certificates, the address must be a loopback address, and only tasks with the same
      secret in `DISTRIBUTARY_TOKEN` can connect. `distributary launch` makes the secret. Without
      one and without `TF_CONFIG`, only a chief in the same process can connect.

    Args:
        server_or_cluster_def: The cluster: a `ClusterSpec`, a dict as for `ClusterSpec`, a cluster
            resolver or a `ServerDef`. The last two also supply the arguments that you leave out.
        job_name: `"worker"` or `"ps"`. Can be None if all tasks of the cluster have one type.
        task_index: The number of the task. Can be None if there is only one task of the type.
        protocol: `"grpc"`, or None, which means the same.
        config: Ignored; accepted for compatibility.
        start: True to listen at once, False to listen only after `start` or `join`.
        insecure: Allows any address without certificates and without a secret. Anyone who reaches
            the address can then read and change all variables.

    Raises:
        InvalidTypeError: if the first argument is not a cluster.
        InvalidValueError: if the cluster has no such task, no workers or no servers, if the task
            is the chief, or if the protocol is another one.
        ClusterError: if it cannot listen at its address, or must not do so without certificates or
            a secret, or if its host name still has no address after
            `DISTRIBUTARY_CONNECT_SECONDS` (120).
        MissingPackageError: if grpcio is not installed.

    Source: `tf.distribute.Server`.
    """

    def __init__(
        self,
        server_or_cluster_def: (
            ClusterSpec
            | ServerDef
            | ClusterResolver
            | Mapping[str, Sequence[str] | Mapping[int, str]]
        ),
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: object = None,
        start: bool = True,
        *,
        insecure: bool = False,
    ) -> None:
        del config
        self._server_def = _server_def(server_or_cluster_def, job_name, task_index, protocol)
        self._insecure = insecure
        self._find: Callable[[JSON], Callable[[], Any]] = find
        self._server: GrpcServer | None = None
        self._end_metrics: Callable[[], object] = lambda: None
        if start:
            self.start()

    @property
    def server_def(self) -> ServerDef:
        """The task, and the cluster that it is part of."""
        return self._server_def

    @property
    def target(self) -> str:
        """Address of the server, `"grpc://host:port"`."""
        return f"grpc://{self._address}"

    def start(self) -> None:
        """Starts to listen, unless the server already does.

        Raises:
            ClusterError, MissingPackageError: see `Server`.
        """
        # A worker runs its script again to find definitions; only the first run has the server.
        if self._server is not None or is_reimporting():
            return
        this, environ = self._server_def, os.environ
        credentials = credentials_of(this.job_name, environ)
        if credentials is None and not self._insecure and "TF_CONFIG" not in environ:
            # Without TF_CONFIG, the chief may be in this process. Another one is refused.
            credentials = credentials_of_this_process(this.job_name, make=True)
        if not backends_started():
            # Programs run on CPUs; if JAX saw the GPUs, it would take their memory.
            jax.config.update("jax_platforms", "cpu")
        prepare_local_devices()
        peers = tasks_of(this.cluster)
        servers = [peer for peer in peers if peer.task_type == "ps"]
        self._service = service = new_service(
            this.job_name,
            this.task_index,
            servers=lambda: [grpc_task(server, credentials) for server in servers],
            find=self._find,
            devices=lambda: jax.local_devices(backend="cpu"),
        )
        self._end_metrics = serve_metrics(
            environ, lambda: lines_of(this.job_name, service.statistics())
        )
        try:
            end = time.monotonic() + connect_seconds(environ)
            while self._server is None:
                try:
                    self._server = GrpcServer(
                        service,
                        self._address,
                        credentials,
                        max_links=max(_MIN_LINKS, _LINKS_PER_TASK * len(peers)),
                        insecure=self._insecure,
                    )
                except ClusterError as error:
                    # Kubernetes publishes the name of a pod some time after the pod has started.
                    is_early = isinstance(error.__cause__, socket.gaierror)
                    if not is_early or time.monotonic() >= end:
                        raise
                    _log.info("%s", error)
                    time.sleep(_POLL_SECONDS)
        except BaseException:
            self._end_metrics()
            raise

    def join(self) -> None:
        """Works for the chief until SIGTERM or SIGINT, then ends the process with code 0.

        There is one case in which it returns at once: when a worker runs its script a second time
        to find a function that is defined below this call.

        Raises:
            ContextError: if it is not called in the main thread, which receives the signals.
            SystemExit: at the end.
        """
        if is_reimporting():
            return
        if threading.current_thread() is not threading.main_thread():
            raise ContextError("Server.join must be called in the main thread.")
        self.start()
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, _end)
            threading.Event().wait()
        finally:
            self._close()

    def _close(self) -> None:
        """Ends the work of the task, and all connections."""
        if self._server is not None:
            self._service.close()  # first, as it ends requests that wait for a server's reply
            self._server.close(_CLOSE_SECONDS)
        self._end_metrics()

    @property
    def _address(self) -> str:
        this = self._server_def
        return this.cluster.task_address(this.job_name, this.task_index)


def _server_def(
    cluster: object, job_name: str | None, task_index: int | None, protocol: str | None
) -> ServerDef:
    defaults: tuple[Any, Any, Any] = None, None, None
    if isinstance(cluster, ServerDef):
        defaults = cluster.job_name, cluster.task_index, cluster.protocol
        cluster = cluster.cluster
    elif isinstance(cluster, ClusterResolver):
        defaults = cluster.task_type, cluster.task_id, cluster.rpc_layer
        cluster = cluster.cluster_spec()
    elif not isinstance(cluster, (ClusterSpec, Mapping)):
        raise InvalidTypeError(
            f"Server: the cluster is {cluster!r}, expected a ClusterSpec, a dict such as"
            ' {"worker": ["10.0.0.1:2222"], "ps": ["10.0.0.2:2222"]} or a cluster resolver.'
        )
    job_name = defaults[0] if job_name is None else job_name
    task_index = defaults[1] if task_index is None else task_index
    protocol = defaults[2] if protocol is None else protocol
    if protocol not in (None, "", "grpc"):
        raise InvalidValueError(f'Server: protocol is {protocol!r}, expected "grpc" or None.')
    spec = ClusterSpec(cluster)
    if job_name is None and len(spec.jobs) == 1:
        job_name = spec.jobs[0]
    if task_index is None and job_name in spec.jobs and spec.num_tasks(job_name) == 1:
        (task_index,) = spec.task_indices(job_name)
    place = multi_worker(spec, job_name, task_index)
    if place.task_type not in ("worker", "ps"):
        raise InvalidValueError(
            f'Server: this process is "{place.task_type}", and only "worker" and "ps" serve. The'
            " chief creates a ParameterServerStrategy."
        )
    tasks_of(spec)
    return ServerDef(spec, place.task_type, place.task_id)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    for other in (signal.SIGTERM, signal.SIGINT):  # so that a second signal ends it at once
        signal.signal(other, signal.SIG_DFL)
    raise SystemExit(0)
