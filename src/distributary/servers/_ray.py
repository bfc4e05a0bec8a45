"""Clusters whose workers and servers are Ray actors.

Ray places the actors, restarts them and knows where they are. They talk to each other over their
own connections, as processes do.
"""

import functools
import itertools
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, final

from distributary.cluster_resolver import TOKEN_VARIABLE, Peer
from distributary.errors import ClusterError, MissingPackageError, PSUnavailableError, pip_install
from distributary.servers._certificates import CERTIFICATES_VARIABLE, Credentials
from distributary.servers._cluster import Cluster, check_numbers
from distributary.servers._links import ConnectionLostError, Link
from distributary.servers._messages import JSON
from distributary.servers._processes import CONNECT_VARIABLE, connect_seconds, grpc_task, meet
from distributary.servers._server import TaskServer
from distributary.servers._sessions import Task
from distributary.servers._sources import UnknownMakerError, as_maker
from distributary.servers._statistics import METRICS_VARIABLE
from distributary.servers._token import Token, credentials_of

__all__ = ["RayCluster", "ray_cluster"]

_VARIABLES: Final = (CERTIFICATES_VARIABLE, CONNECT_VARIABLE, METRICS_VARIABLE)
_ASK_SECONDS = 5.0  # after which a task that has not answered is asked again


@final
class RayCluster(Cluster):
    """A cluster of Ray actors, made by `ray_cluster`."""

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        worker_options: Mapping[str, Any],
        ps_options: Mapping[str, Any],
        insecure: bool,
    ) -> None:
        self._ray = ray = _import_ray()
        self._credentials = credentials_of("chief", os.environ)
        has_certificates = isinstance(self._credentials, Credentials)
        if not (self._credentials or insecure):
            self._credentials = Token.new()
        if not ray.is_initialized():
            ray.init()
        is_local = not (insecure or has_certificates)
        environ = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        if isinstance(self._credentials, Token):
            environ[TOKEN_VARIABLE] = self._credentials.secret
        self._job = _Job(
            secrets.token_hex(4),
            num_workers,
            num_servers,
            "127.0.0.1" if is_local else None,
            environ,
            insecure,
        )
        seconds = self._job.seconds
        options = {
            "max_restarts": -1,
            "max_task_retries": -1,  # so that Ray itself waits for a task that it restarts
            "scheduling_strategy": _here(ray) if is_local else "SPREAD",
        }
        self._actors: dict[str, Any] = {}
        servers = self._start("ps", num_servers, {**options, "num_cpus": 0, **ps_options})
        workers = self._start("worker", num_workers, {**options, "num_cpus": 1, **worker_options})
        super().__init__(workers, servers, _Makers(self._job).describe)
        try:
            self.devices_per_worker = meet(self._wait(seconds), self._credentials, seconds)
        except BaseException:
            self.close()
            raise

    def _start(self, task_type: str, number: int, options: Mapping[str, Any]) -> list[Task]:
        tasks = []
        for i in range(number):
            name = f"{task_type} {i}"
            actor = self._ray.remote(DistributaryTask).options(
                **{**options, "name": self._job.name_of_actor(name)}
            )
            self._actors[name] = actor.remote(task_type, i, self._job)
            tasks.append(Task(name, functools.partial(self._connect, name)))
        return tasks

    def close(self) -> None:
        """Ends the coordinators of the cluster, and all tasks."""
        super().close()
        if self._ray.is_initialized():
            for actor in self._actors.values():
                self._ray.kill(actor)

    def _wait(self, seconds: float) -> list[Peer]:
        """Waits until Ray has started all tasks, and returns them."""
        end = time.monotonic() + seconds
        calls = {actor.peer.remote(): name for name, actor in self._actors.items()}
        peers: list[Peer] = []
        while calls:
            left = max(0.0, end - time.monotonic())
            for call in self._ray.wait([*calls], timeout=left)[0]:
                name = calls.pop(call)
                try:
                    peers.append(self._ray.get(call))
                except self._ray.exceptions.RayError as error:
                    raise ClusterError(
                        f"ray_cluster: {name} could not be started: {error}"
                    ) from error
            if calls and time.monotonic() > end:
                raise ClusterError(
                    f"ray_cluster: after {seconds:g} s, Ray has not started"
                    f" {', '.join(calls.values())}. Free are {self._ray.available_resources()};"
                    " worker_options and ps_options say what every task asks for."
                )
        return peers

    def _connect(self, name: str) -> Link:
        """Connects to a task, wherever Ray has last started it."""
        seconds = _ASK_SECONDS if name.startswith("worker") else self._job.seconds
        peer = self._job.ask(name, "peer", seconds=seconds, kind=ConnectionLostError)
        return grpc_task(peer, self._credentials).connect()

    def __repr__(self) -> str:
        return f"ray_cluster(workers={len(self.workers)}, ps={len(self.servers)})"


def ray_cluster(
    workers: int = 2,
    ps: int = 1,
    *,
    worker_options: Mapping[str, Any] | None = None,
    ps_options: Mapping[str, Any] | None = None,
    insecure: bool = False,
) -> RayCluster:
    """Starts workers and parameter servers with Ray, for `ParameterServerStrategy`.

    Every task is an actor, which Ray places, and restarts when it ends. This process is the chief.
    It calls `ray.init()` unless your program has already connected to Ray. You can use the cluster
    in a `with` statement. The tasks end with that block, with `close`, or with this process.

    Without certificates, all tasks run on this machine. They listen at its loopback address, and
    share a secret that this process makes. If `DISTRIBUTARY_CERTS` names a folder made by
    `distributary certs` that every machine has, Ray spreads the tasks over its machines.

    Args:
        workers: Number of workers.
        ps: Number of servers.
        worker_options: Options of Ray's `ActorClass.options` for the workers, such as
            `{"num_cpus": 4}`. By default, `num_cpus` is 1 and `max_restarts` is -1.
        ps_options: The same for the servers, but with a default `num_cpus` of 0.
        insecure: Allows tasks on several machines without certificates. Anyone who reaches an
            address can then read and change all variables.

    Raises:
        InvalidValueError: if a number is not positive.
        ClusterError: if tasks cannot be started, are not there after `DISTRIBUTARY_CONNECT_SECONDS`
            (120), or have other versions of packages; also if Ray has several machines and there
            are no certificates.
        MissingPackageError: if ray is not installed.
    """
    check_numbers("ray_cluster", workers=workers, ps=ps)
    return RayCluster(workers, ps, worker_options or {}, ps_options or {}, insecure)


@final
@dataclass(frozen=True, slots=True)
class _Job:
    """Settings that the tasks of a job share, and their way to each other through Ray.

    Attributes:
        name: Text that is part of the names of the actors.
        num_workers: Number of workers.
        num_servers: Number of servers.
        host: Host to listen at; None for the address of the machine.
        environ: Variables from the chief's environment.
        insecure: Whether to do without certificates.
    """

    name: str
    num_workers: int
    num_servers: int
    host: str | None
    environ: Mapping[str, str]
    insecure: bool

    @property
    def seconds(self) -> float:
        """Number of seconds to wait for a task."""
        return connect_seconds(self.environ)

    def name_of_actor(self, task: str) -> str:
        """Returns the name by which Ray knows a task."""
        return f"distributary {self.name} {task}"

    def ask(
        self,
        task: str,
        method: str,
        *args: Any,
        seconds: float | None = None,
        kind: type[Exception] = PSUnavailableError,
    ) -> Any:
        """Calls a method of a task's actor; raises an error of type `kind` if it is not there."""
        ray = _import_ray()
        try:
            # By name: handles among an actor's arguments could be gone when Ray restarts it.
            actor = ray.get_actor(self.name_of_actor(task))
            call = getattr(actor, method).remote(*args)
            return ray.get(call, timeout=self.seconds if seconds is None else seconds)
        except (ValueError, ray.exceptions.RayError) as error:
            raise kind(f"{task} cannot be reached: {error}") from error


class DistributaryTask:
    """A worker or server in a Ray actor.

    When Ray restarts the actor, the chief tells it again what it has forgotten.

    Args:
        task_type: `"worker"` or `"ps"`.
        task_id: The number of the task.
        job: The job that it belongs to.
    """

    def __init__(self, task_type: str, task_id: int, job: _Job) -> None:
        self._task = task_type, task_id
        self._kept: dict[int, bytes] = {}
        host = job.host or _import_ray().util.get_node_ip_address()
        servers = [f"ps {i}" for i in range(job.num_servers)]
        self._server = TaskServer(
            task_type,
            task_id,
            f"[{host}]:0" if ":" in host else f"{host}:0",
            find_servers=lambda: [job.ask(name, "peer") for name in servers],
            find=_Makers(job).find,
            num_tasks=job.num_workers + job.num_servers,
            environ=job.environ,
            insecure=job.insecure,
        )

    def peer(self) -> Peer:
        """Returns the task and its address."""
        return Peer(*self._task, self._server.address)

    def keep(self, number: int, content: bytes) -> None:
        """Keeps content for other tasks, under a number."""
        self._kept[number] = content

    def kept(self, number: int) -> bytes | None:
        """Returns the content kept under a number, or None if there is none."""
        return self._kept.get(number)

    def __repr__(self) -> str:
        return "{} {}".format(*self._task)


@final
class _Makers:
    """Functions that Ray sends to workers. The first server keeps them as long as variables."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._numbers = itertools.count()

    def describe(self, maker: object) -> JSON:
        """Stores a function, or data, and returns its number.

        Raises:
            UnknownMakerError: if it cannot be serialized.
            PSUnavailableError: if the server is lost.
        """
        try:
            content = _import_ray().cloudpickle.dumps(maker)
        except Exception as error:  # pickling runs code of its parts, which can raise anything
            raise UnknownMakerError(f"Ray cannot send it to them ({error})") from error
        number = next(self._numbers)
        self._job.ask("ps 0", "keep", number, content)
        return number

    def find(self, number: JSON) -> Callable[[], Any]:
        """Returns the function with a number.

        Raises:
            PSUnavailableError: if the server is lost.
            UnknownMakerError: if a module that it needs is missing here.
        """
        content = self._job.ask("ps 0", "kept", number)
        if content is None:
            raise PSUnavailableError("ps 0 was started again, and has lost its variables.")
        try:
            return as_maker(_import_ray().cloudpickle.loads(content))
        except ModuleNotFoundError as error:
            raise UnknownMakerError(f"a worker cannot import what it needs: {error}") from error


def _here(ray: ModuleType) -> Any:
    """Returns the scheduling strategy that places actors on this machine, if it is the only one."""
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    if num_nodes > 1:
        raise ClusterError(
            f"ray_cluster: Ray has {num_nodes} machines, and tasks without certificates listen at"
            " loopback, where those of other machines cannot reach them. `distributary certs` makes"
            " certificates, DISTRIBUTARY_CERTS says where they are on every machine; insecure=True"
            " does without."
        )
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _import_ray() -> ModuleType:
    try:
        import ray
    except ImportError:
        raise MissingPackageError(f"ray_cluster needs Ray: {pip_install('ray')}") from None
    return ray
