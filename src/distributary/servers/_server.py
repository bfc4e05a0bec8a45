"""A process that is a worker or a parameter server."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, final

import jax

from distributary.cluster_resolver import ClusterResolver, ClusterSpec, multi_worker
from distributary.devices import backends_started, prepare_local_devices
from distributary.errors import ClusterError, ContextError, InvalidTypeError, InvalidValueError
from distributary.servers._certificates import credentials_of, credentials_of_this_process
from distributary.servers._grpc import GrpcServer
from distributary.servers._messages import JSON
from distributary.servers._processes import connect_seconds, grpc_task, tasks_of
from distributary.servers._sources import find, is_reimporting
from distributary.servers._statistics import lines_of, serve_metrics
from distributary.servers._worker import new_service

_log = logging.getLogger(__name__)

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
