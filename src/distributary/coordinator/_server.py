"""A process that is a worker or a parameter server."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import jax

from distributary.cluster_resolver import ClusterResolver, ClusterSpec, multi_worker
from distributary.coordinator._certificates import Credentials
from distributary.coordinator._grpc import GrpcLink, GrpcServer
from distributary.coordinator._links import Peer, Service
from distributary.coordinator._messages import Message
from distributary.coordinator._metrics import MetricsServer, lines_of
from distributary.coordinator._processes import IDENTIFY, connect_seconds, tasks_of, versions
from distributary.coordinator._sessions import (
    ServerLink,
    SessionId,
    SessionLink,
    SessionService,
    Tenant,
)
from distributary.coordinator._sources import find, is_reimporting
from distributary.coordinator._store import ParameterServer
from distributary.coordinator._worker import Worker
from distributary.errors import ClusterError, ContextError, InvalidTypeError, InvalidValueError
from distributary.topology import backends_started

__all__ = ["RoleCheck", "Server", "ServerDef"]

_log = logging.getLogger(__name__)

_LINKS_PER_TASK = 8
_MIN_LINKS = 256
_POLL_SECONDS = 0.5
_CLOSE_SECONDS = 2.0  # for what is being done when the process ends; datasets may wait for ever


@final
@dataclass(frozen=True)
class ServerDef:
    """What a `Server` is.

    Args:
        cluster: All tasks.
        job_name: `"worker"` or `"ps"`.
        task_index: Its number.
        protocol: `"grpc"`.

    Source: `tf.train.ServerDef`.
    """

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str = "grpc"


@final
class Server:
    """Lets the chief of a job use this process as a worker or a parameter server.

    It listens at its address in the cluster and nowhere else. If `DISTRIBUTARY_CERTS` names a
    folder of `distributary certs`, connections are encrypted and only tasks of the job are heard;
    without, the address must be of loopback.

    Args:
        server_or_cluster_def: The cluster: a `ClusterSpec`, a dict as for it, a cluster resolver,
            which also knows the arguments that are left out, or a `ServerDef`.
        job_name: `"worker"` or `"ps"`. None if the cluster has only tasks of one type.
        task_index: Its number. None if there is only one of the type.
        protocol: Only `"grpc"`, which None means too.
        config: Has no meaning here; accepted for compatibility.
        start: Whether to listen at once, and not before `start` or `join`.
        insecure: Allows other addresses than loopback without certificates: whoever reaches the
            address can read and change all variables.

    Raises:
        InvalidTypeError: if the cluster is none.
        InvalidValueError: if it has no such task, no workers or no servers, the task is the chief,
            or the protocol is another one.
        ClusterError: if it cannot listen at its address, or must not do so without certificates;
            if its host has no address yet, after `DISTRIBUTARY_CONNECT_SECONDS` (120).
        MissingPackageError: without grpcio.

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
        config: Any = None,
        start: bool = True,
        *,
        insecure: bool = False,
    ) -> None:
        del config
        self._server_def = _server_def(server_or_cluster_def, job_name, task_index, protocol)
        self._insecure = insecure
        self._server: GrpcServer | None = None
        self._service: SessionService | None = None
        self._metrics: MetricsServer | None = None
        if start:
            self.start()

    @property
    def server_def(self) -> ServerDef:
        """Which task of which cluster it is."""
        return self._server_def

    @property
    def target(self) -> str:
        """Its address, `"grpc://host:port"`."""
        return f"grpc://{self._address}"

    def start(self) -> None:
        """Listens from now on, if it does not yet."""
        # A worker's second run of its script finds definitions; the first one has the server.
        if self._server is not None or is_reimporting():
            return
        this = self._server_def
        peers = tasks_of(this.cluster)
        credentials = Credentials.from_environ(this.job_name, os.environ)
        name = f"{this.job_name} {this.task_index}"
        _keep_off_accelerators()
        if this.job_name == "ps":

            def make(session: SessionId) -> Tenant:
                return ParameterServer(this.task_index)

        else:
            servers = [peer for peer in peers if peer.task_type == "ps"]

            def make(session: SessionId) -> Tenant:
                links = [
                    ServerLink(
                        SessionLink(GrpcLink(peer.address, "ps", credentials), str(peer), session)
                    )
                    for peer in servers
                ]
                return Worker(this.task_index, links, find)

        self._service = service = SessionService(name, make)
        for_workers = ParameterServer.for_workers if this.job_name == "ps" else frozenset()
        try:
            self._metrics = MetricsServer.from_environ(
                os.environ, lambda: lines_of(this.job_name, service.statistics())
            )
            self._server = self._listen(
                RoleCheck(name, service, for_workers),
                credentials,
                max(_MIN_LINKS, _LINKS_PER_TASK * len(peers)),
            )
        except BaseException:
            self._close()
            raise

    def join(self) -> None:
        """Works for the chief until SIGTERM or SIGINT comes, then ends the process with code 0.

        Returns at once only in a worker that runs its script a second time, to find a function
        defined below.

        Raises:
            ContextError: if it is not called in the main thread, which receives signals.
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

    def _listen(
        self, service: Service, credentials: Credentials | None, max_links: int
    ) -> GrpcServer:
        end = time.monotonic() + connect_seconds(os.environ)
        while True:
            try:
                return GrpcServer(
                    service,
                    self._address,
                    credentials,
                    max_links=max_links,
                    insecure=self._insecure,
                )
            except ClusterError as error:
                # The name of a Kubernetes pod is published some time after the pod has started.
                is_early = isinstance(error.__cause__, socket.gaierror)
                if not is_early or time.monotonic() >= end:
                    raise
                _log.info("%s", error)
            time.sleep(_POLL_SECONDS)

    @property
    def _address(self) -> str:
        this = self._server_def
        return this.cluster.task_address(this.job_name, this.task_index)

    def _close(self) -> None:
        if self._service is not None:  # first: what waits for a server's reply ends
            self._service.close()
        if self._server is not None:
            self._server.close(_CLOSE_SECONDS)
        if self._metrics is not None:
            self._metrics.close()


@final
class RoleCheck:
    """Lets a service see only messages that the role of the sender allows, and says who it is.

    The chief may send everything, a worker some kinds of messages. A sender without
    a certificate, which came to an address of loopback, may send everything.

    Args:
        name: The task, `"ps 0"`.
        service: The service.
        for_workers: The kinds that a worker may send.
    """

    def __init__(
        self, name: str, service: Service, for_workers: frozenset[str] = frozenset()
    ) -> None:
        self._name = name
        self._service = service
        self._for_workers = for_workers

    def handle(self, message: Message, peer: Peer) -> Message:
        """The reply to a message.

        Raises:
            PermissionError: if the role of the sender does not allow it.
            Exception: what the service raises.
        """
        if message.kind == IDENTIFY:
            return Message("ok", {"task": self._name, "versions": versions()})
        may = peer.role in ("chief", "local") or (
            peer.role == "worker" and message.kind in self._for_workers
        )
        if not may:
            raise PermissionError(
                f"{self._name} got {message.kind!r} from {peer.identity}, which only the chief may"
                " send."
            )
        return self._service.handle(message, peer)


def _server_def(
    cluster: Any, job_name: str | None, task_index: int | None, protocol: str | None
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


def _keep_off_accelerators() -> None:
    # Programs run on CPUs, and JAX would take the memory of GPUs.
    if not backends_started():
        jax.config.update("jax_platforms", "cpu")


def _end(number: int, frame: Any) -> NoReturn:
    for other in (signal.SIGTERM, signal.SIGINT):  # the next one ends the process at once
        signal.signal(other, signal.SIG_DFL)
    raise SystemExit(0)
