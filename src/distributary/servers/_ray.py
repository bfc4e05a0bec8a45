"""Clusters whose workers and servers Ray starts, each as an actor on which a `Server` runs.

They talk to each other over their own connections, as other processes do.
"""

import functools
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final, final

from distributary.cluster_resolver import TOKEN_VARIABLE, ClusterSpec
from distributary.errors import ClusterError, InvalidValueError, WorkerLostError
from distributary.launch import RESTART_VARIABLE, free_addresses
from distributary.options import RecoveryOptions
from distributary.servers._cluster import Cluster, Session, check_positive
from distributary.servers._grpc import CERTIFICATES_VARIABLE, import_extra
from distributary.servers._messages import JSON
from distributary.servers._processes import (
    CONNECT_VARIABLE,
    Server,
    connect,
    connect_seconds,
    tasks_of,
)
from distributary.servers._sources import UnknownMakerError, as_maker
from distributary.servers._statistics import METRICS_VARIABLE

_VARIABLES: Final = (CERTIFICATES_VARIABLE, CONNECT_VARIABLE, METRICS_VARIABLE, TOKEN_VARIABLE)


@final
class RayCluster(Cluster):
    """A cluster of Ray actors, made by `ray_cluster`."""

    def __init__(
        self, numbers: Mapping[str, int], overrides: Mapping[str, Mapping[str, Any]], insecure: bool
    ) -> None:
        self._ray = ray = import_ray()
        environ = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        is_local = not (insecure or CERTIFICATES_VARIABLE in environ)
        if is_local:
            environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(32))
        if not ray.is_initialized():
            ray.init()
        options = {
            "max_restarts": -1,
            "max_task_retries": -1,  # so that Ray calls `run` of an actor that it restarts
            "scheduling_strategy": _here(ray) if is_local else "SPREAD",
        }
        options_of = {
            task_type: {**options, "num_cpus": int(task_type == "worker"), **extra}
            for task_type, extra in overrides.items()
        }
        name = f"distributary {secrets.token_hex(4)}"
        self._makers = ray.remote(RayMakers).options(name=name, num_cpus=0).remote()
        actor = ray.remote(RayTask)
        self._actors = {
            (task_type, i): actor.options(**options_of[task_type]).remote(task_type, i)
            for task_type, number in numbers.items()
            for i in range(number)
        }
        try:
            cluster = self._addresses("127.0.0.1" if is_local else None, connect_seconds(environ))
            for one in self._actors.values():
                one.run.remote(cluster, environ, insecure, name)
            self._wait = functools.partial(connect, tasks_of(ClusterSpec(cluster)), environ)
            super().__init__(*self._wait(), functools.partial(_describe, self._makers))
        except BaseException:
            self._kill()
            raise

    def open(self, options: RecoveryOptions) -> Session:
        """Waits for tasks that Ray starts again, and begins a session; see `Cluster.open`."""
        self._wait()
        return super().open(options)

    def close(self) -> None:
        """Ends the coordinators of the cluster, and all tasks."""
        super().close()
        self._kill()

    def _kill(self) -> None:
        if self._ray.is_initialized():
            for actor in (self._makers, *self._actors.values()):
                self._ray.kill(actor)

    def _addresses(self, host: str | None, seconds: float) -> dict[str, dict[int, str]]:
        """Waits until Ray has started all tasks, and returns an address for each."""
        calls = {task: actor.address.remote(host) for task, actor in self._actors.items()}
        _, late = self._ray.wait([*calls.values()], num_returns=len(calls), timeout=seconds)
        if late:
            names = [f"{task_type} {i}" for (task_type, i), call in calls.items() if call in late]
            raise not_started("ray_cluster", self._ray, seconds, names)
        addresses: dict[str, dict[int, str]] = {"ps": {}, "worker": {}}
        for (task_type, i), call in calls.items():
            try:
                addresses[task_type][i] = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                raise ClusterError(
                    f"ray_cluster: {task_type} {i} could not be started: {error}"
                ) from error
        return addresses

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

    Every task is an actor, which Ray places, and restarts on its machine when it ends. This process
    is the chief. It calls `ray.init()` unless your program has already connected to Ray. You can
    use the cluster in a `with` statement. The tasks end with that block, with `close`, or with this
    process.

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
    check_positive("ray_cluster", workers=workers, ps=ps)
    options = {"ps": ps_options or {}, "worker": worker_options or {}}
    return RayCluster({"ps": ps, "worker": workers}, options, insecure)


def not_started(
    caller: str, library: ModuleType, seconds: float, names: Sequence[str]
) -> ClusterError:
    """Returns the error for actors that Ray has no place for."""
    return ClusterError(
        f"{caller}: after {seconds:g} s, Ray has not started {', '.join(names)}. Free are"
        f" {library.available_resources()}; worker_options and ps_options say what every task asks"
        " for."
    )


class RayTask:
    """A worker or server in a Ray actor."""

    def __init__(self, task_type: str, task_id: int) -> None:
        self._task = task_type, task_id

    def address(self, host: str | None) -> str:
        """Returns a free address of a host; None stands for the machine."""
        (address,) = free_addresses(host or import_ray().util.get_node_ip_address(), 1)
        return address

    def run(
        self,
        cluster: Mapping[str, Mapping[int, str]],
        environ: Mapping[str, str],
        insecure: bool,
        makers: str,
    ) -> None:
        """Serves until the actor ends."""
        os.environ.update(environ)
        server = Server(cluster, *self._task, start=False, insecure=insecure)
        server._find = functools.partial(_find, makers)
        server.start()
        threading.Event().wait()

    def call(self, environ: Mapping[str, str], train: Callable[..., Any], args: Any) -> Any:
        """Calls a function, which finds the other workers in the environment."""
        os.environ.update(environ)
        return train(*args)

    def __repr__(self) -> str:
        return "{} {}".format(*self._task)


class RayMakers:
    """An actor that keeps functions for workers, as Ray serializes them."""

    def __init__(self) -> None:
        self._contents: list[bytes] = []

    def add(self, content: bytes) -> int:
        """Keeps a function, and returns its number."""
        self._contents.append(content)
        return len(self._contents) - 1

    def get(self, number: int) -> bytes:
        """Returns the function with a number."""
        return self._contents[number]


def _describe(makers: Any, maker: object) -> JSON:
    """Sends a function, or data, to the actor `makers`; returns its number.

    Raises:
        UnknownMakerError: if it cannot be serialized.
    """
    ray = import_ray()
    try:
        content = ray.cloudpickle.dumps(maker)
    except Exception as error:  # pickling runs code of its parts, which can raise anything
        raise UnknownMakerError(f"Ray cannot send it to them ({error})") from error
    return ray.get(makers.add.remote(content))


def _find(name: str, number: JSON) -> Callable[[], Any]:
    """Returns the function with a number, from the actor with this name."""
    ray = import_ray()
    content = ray.get(ray.get_actor(name).get.remote(number))
    try:
        return as_maker(ray.cloudpickle.loads(content))
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


def import_ray() -> ModuleType:
    """Imports Ray when it is needed."""
    return import_extra("ray", "A job on Ray needs it", "ray")


# Trainings on Ray: synchronous ones have a worker per actor, others a cluster of actors.

# How long a training waits for all of its workers if it may begin with fewer.
_PATIENCE_SECONDS = 10.0
# Time for the error of a lost worker to arrive, after that of a worker that has missed it.
_LOST_WORKER_SECONDS = 1.0
_GROWS: Final = object()


def ray(
    train: Callable[..., Any],
    *args: Any,
    workers: int | tuple[int, int] = 2,
    ps: int = 0,
    max_restarts: int = 0,
    worker_options: Mapping[str, Any] | None = None,
    ps_options: Mapping[str, Any] | None = None,
    insecure: bool = False,
) -> Any:
    """Runs a training on Ray, and returns what it returns.

    Without parameter servers, every worker is an actor that calls `train(*args)`, where
    `MultiWorkerMirroredStrategy()` finds the others. Workers on the same machine follow each other
    in rank. If one is lost or raises an error, all of them end and start again in new processes,
    and your callbacks or checkpoints restore what they have saved.

    With parameter servers, this process calls `train(cluster, *args)` with a `ray_cluster`, for
    `ParameterServerStrategy(cluster)`, and Ray starts lost tasks again.

    It calls `ray.init()` unless your program has already connected to Ray.

    Args:
        train: The training. Ray sends it to the workers, with the functions and values that it
            uses; they import packages and modules.
        *args: Its arguments.
        workers: Number of workers. A pair is the least and the most: the training starts with as
            many as Ray has places for, goes on without a worker whose machine is lost, and starts
            again with more when there is a place. The global batch stays as it is.
        ps: Number of parameter servers.
        max_restarts: Number of times that all workers start again after a failure.
        worker_options: Options of Ray's `ActorClass.options` for the workers, such as
            `{"num_gpus": 1}`. By default, `num_cpus` is 1.
        ps_options: The same for the servers, but with a default `num_cpus` of 0.
        insecure: Allows parameter servers on several machines without certificates.

    Returns:
        A list of what `train` returns in each worker, in the order of their ranks; with parameter
        servers, what it returns in this process.

    Raises:
        InvalidTypeError: if a number is not an int.
        InvalidValueError: if a number is not positive, or a pair is not in order.
        ClusterError: if workers cannot be started, or are not there after
            `DISTRIBUTARY_CONNECT_SECONDS` (120).
        MissingPackageError: if ray is not installed.
        RayError: if a worker fails and no restart is left; the error is also an instance of what
            `train` has raised.
    """
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    check_positive("ray", workers=least)
    check_positive("ray", workers=most)
    if least > most or (ps and least < most):
        raise InvalidValueError(
            f"ray: workers is {workers!r} and ps is {ps}, expected (least, most) in this order, or,"
            " with servers, a number."
        )
    if ps:
        options = {"worker_options": worker_options, "ps_options": ps_options}
        with ray_cluster(most, ps, **options, insecure=insecure) as cluster:
            return train(cluster, *args)
    library = import_ray()
    if not library.is_initialized():
        library.init()
    maker = library.remote(RayTask).options(
        **{"num_cpus": 1, "scheduling_strategy": "SPREAD", **(worker_options or {})}
    )
    num_starts = num_restarts = 0
    while True:
        actors = [maker.remote("worker", i) for i in range(most)]
        try:
            outcome = _attempt(library, actors, least, num_starts, train, args)
        finally:
            for actor in actors:
                library.kill(actor)
        if isinstance(outcome, list):
            return outcome
        if outcome is not _GROWS:
            if num_restarts == max_restarts:
                raise outcome
            num_restarts += 1
        num_starts += 1


def _attempt(
    library: ModuleType,
    actors: Sequence[Any],
    least: int,
    number: int,
    train: Callable[..., Any],
    args: Sequence[Any],
) -> Any:
    """Runs a training until it ends or must start again.

    Returns:
        What the workers return; the error of one that has failed; `_GROWS` if there is a place for
        one more.
    """
    calls = {actor.address.remote(None): actor for actor in actors}
    seconds = connect_seconds(os.environ)
    patience = seconds if least == len(actors) else min(seconds, _PATIENCE_SECONDS)
    placed, late = library.wait([*calls], num_returns=len(actors), timeout=patience)
    if len(placed) < least:
        placed, late = library.wait([*calls], num_returns=least, timeout=seconds - patience)
    if len(placed) < least:
        names = [f"worker {i}" for i, call in enumerate(calls) if call in late]
        raise not_started("ray", library, seconds, names)
    try:
        # Those of one machine follow each other, as the shards of a host's devices do.
        order = sorted((library.get(call), i) for i, call in enumerate(calls) if call in placed)
    except library.exceptions.RayError as error:
        raise ClusterError(f"ray: a worker could not be started: {error}") from error
    addresses = [address for address, _ in order]
    runs = []
    for rank, (_, i) in enumerate(order):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        environ = {"TF_CONFIG": json.dumps(task), RESTART_VARIABLE: str(number)}
        runs.append(actors[i].call.remote(environ, train, args))
    going_on = list(runs)
    while going_on:
        grows = late if len(going_on) == len(runs) else []  # not at the end
        (first, *_), _ = library.wait([*going_on, *grows], num_returns=1)
        if first in late:
            return _GROWS
        try:
            library.get(first)
        except library.exceptions.RayError as error:
            return _cause(library, error, [run for run in going_on if run != first])
        going_on.remove(first)
    return library.get(runs)


def _cause(library: ModuleType, error: Exception, others: Sequence[Any]) -> Exception:
    """Returns the error of the worker that was lost, if another one has missed it first."""
    if not isinstance(error, WorkerLostError) or not others:
        return error
    ended, _ = library.wait([*others], num_returns=len(others), timeout=_LOST_WORKER_SECONDS)
    for run in ended:
        try:
            library.get(run)
        except library.exceptions.RayError as other:
            if not isinstance(other, WorkerLostError):
                return other
    return error
