"""The server that makes a worker or parameter server available to other processes."""

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax

from distributary.cluster_resolver import Peer as Task
from distributary.coordinator._certificates import Credentials
from distributary.coordinator._grpc import GrpcLink, GrpcServer
from distributary.coordinator._links import Service
from distributary.coordinator._messages import JSON
from distributary.coordinator._permissions import RoleCheck
from distributary.coordinator._processes import connect_seconds
from distributary.coordinator._sessions import (
    ServerLink,
    SessionId,
    SessionLink,
    SessionService,
    Tenant,
)
from distributary.coordinator._statistics import MetricsServer, lines_of
from distributary.coordinator._store import ParameterServer
from distributary.coordinator._token import Token, credentials_of
from distributary.coordinator._worker import Worker
from distributary.errors import ClusterError
from distributary.topology import (
    backends_started,
    prepare_local_devices,
)

__all__ = ["TaskServer"]

_log = logging.getLogger(__name__)

_LINKS_PER_TASK = 8
_MIN_LINKS = 256
_POLL_SECONDS = 0.5
_CLOSE_SECONDS = 2.0  # for requests under way at the end; a dataset may block forever


@final
class TaskServer:
    """A worker or parameter server that listens at an address from now on.

    Args:
        task_type: `"worker"` or `"ps"`.
        task_id: Number of the task.
        address: Address to listen at. Port 0 takes a free port.
        find_servers: Returns the servers of the job, by number. A worker calls it for every
            coordinator.
        find: Returns the function that a coordinator has described.
        num_tasks: Number of workers and servers of the job.
        environ: The environment, for certificates, the token, metrics and times.
        insecure: Allows any address without certificates and without a token.

    Raises:
        ClusterError: if it cannot listen at its address, or must not do so without certificates or
            a token, or if its host name still has no address after `DISTRIBUTARY_CONNECT_SECONDS`
            (120).
        MissingPackageError: if grpcio is not installed.

    Attributes:
        address: The address, with the port that was taken.
    """

    def __init__(
        self,
        task_type: str,
        task_id: int,
        address: str,
        *,
        find_servers: Callable[[], Sequence[Task]],
        find: Callable[[JSON], Callable[[], Any]],
        num_tasks: int,
        environ: Mapping[str, str],
        insecure: bool,
    ) -> None:
        credentials = credentials_of(task_type, environ)
        name = f"{task_type} {task_id}"
        _keep_off_accelerators()
        prepare_local_devices()

        def make_server(session: SessionId) -> Tenant:
            return ParameterServer(task_id)

        def make_worker(session: SessionId) -> Tenant:
            links = [
                ServerLink(
                    SessionLink(GrpcLink(one.address, one.name, credentials), str(one), session)
                )
                for one in find_servers()
            ]
            return Worker(task_id, links, find, jax.local_devices(backend="cpu"))

        make = make_server if task_type == "ps" else make_worker
        self._service = SessionService(name, make)
        self._metrics = MetricsServer.from_environ(
            environ, lambda: lines_of(task_type, self._service.statistics())
        )
        try:
            self._server = _listen(
                RoleCheck(task_type, task_id, self._service),
                address,
                credentials,
                task=name,
                max_links=max(_MIN_LINKS, _LINKS_PER_TASK * num_tasks),
                insecure=insecure,
                end=time.monotonic() + connect_seconds(environ),
            )
        except BaseException:
            if self._metrics is not None:
                self._metrics.close()
            raise
        self.address = self._server.address

    def close(self) -> None:
        """Ends the work of the task, and all connections."""
        self._service.close()  # first, as it ends requests that wait for a server's reply
        self._server.close(_CLOSE_SECONDS)
        if self._metrics is not None:
            self._metrics.close()


def _listen(
    service: Service,
    address: str,
    credentials: Credentials | Token | None,
    *,
    task: str,
    max_links: int,
    insecure: bool,
    end: float,
) -> GrpcServer:
    while True:
        try:
            return GrpcServer(
                service, address, credentials, task=task, max_links=max_links, insecure=insecure
            )
        except ClusterError as error:
            # Kubernetes publishes the name of a pod some time after the pod has started.
            is_early = isinstance(error.__cause__, socket.gaierror)
            if not is_early or time.monotonic() >= end:
                raise
            _log.info("%s", error)
        time.sleep(_POLL_SECONDS)


def _keep_off_accelerators() -> None:
    # Programs run on CPUs; if JAX saw the GPUs, it would take their memory.
    if not backends_started():
        jax.config.update("jax_platforms", "cpu")
