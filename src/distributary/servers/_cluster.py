"""The tasks of a job with parameter servers, and the places of its variables."""

import contextlib
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self, final

import jax
import numpy as np
from numpy.typing import DTypeLike

from distributary._threads import call_when_collected
from distributary.checkpoint import SavedPart, SavedVariable
from distributary.devices import (
    backends_started,
    local_devices_of,
    prepare_cpu_threads,
    requested_cpu_devices,
    set_logical_cpu_devices,
)
from distributary.errors import (
    CancelledError,
    DeviceError,
    InvalidTypeError,
    InvalidValueError,
    UnavailableError,
)
from distributary.options import RecoveryOptions
from distributary.servers._links import (
    Heartbeat,
    InProcessLink,
    Link,
    SessionId,
    SessionLink,
    SessionService,
    Task,
    call_all,
    new_session,
)
from distributary.servers._messages import JSON, Message
from distributary.servers._plans import Program, Update
from distributary.servers._sources import as_maker
from distributary.servers._split import Shard
from distributary.servers._statistics import ServerStatistics
from distributary.servers._store import CopyOnServers
from distributary.servers._worker import new_service
from distributary.tracing import Handle

_PIECE_BYTES = 1 << 26
_NUM_REMEMBERED = 4096


@final
class Session:
    """The workers and servers of one coordinator, with its variables on the servers.

    Args:
        cluster: The tasks.
        options: When to give up tasks.
        session: The id by which the tasks know the session.

    Attributes:
        cluster: The tasks.
        at_rest: Returns a context in which no closure runs; it raises the error of an earlier
            closure.
        server_links: The links to the servers, by server number.
    """

    def __init__(self, cluster: "Cluster", options: RecoveryOptions, session: SessionId) -> None:
        self.cluster = cluster
        self.options = options
        self.id = session
        self.server_links = [
            SessionLink(server, session, is_server=True) for server in cluster.servers
        ]
        self._heartbeats: list[Heartbeat] = []
        self._on_end: Callable[[Exception], None] = lambda error: None
        self.at_rest: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._numbers = itertools.count()
        self._copy_numbers = itertools.count()
        self._known_updates: set[tuple[int, str]] = set()  # servers and the updates that they know
        self._finished = 0  # the last number that the servers have been told
        self._next_server = itertools.cycle(range(len(cluster.servers)))
        self._lock = threading.Lock()

    def watch(
        self,
        on_end: Callable[[Exception], None],
        at_rest: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Prepares the session to run closures, and watches the servers from now on.

        Args:
            on_end: Called with the error when a server is lost or the session is closed.
            at_rest: Value of the attribute `at_rest`.
        """
        seconds = self.options.heartbeat_seconds
        self._on_end = on_end
        self.at_rest = at_rest
        self._heartbeats = [
            Heartbeat(SessionLink(server, self.id, is_server=True), seconds, on_end)
            for server in self.cluster.servers
        ]

    def add_updates(self, updates: Mapping[int, tuple[Update, Program]]) -> None:
        """Tells the servers how to apply the pushes of a function.

        Args:
            updates: The update of each server and its program, by server number.

        Raises:
            PSUnavailableError: if a server is lost.
        """
        new = {
            server: Message("update", {"update": astuple(update)}, blobs=[program.content])
            for server, (update, program) in updates.items()
            if (server, update.name) not in self._known_updates
        }
        call_all(self.server_links, new)  # at the same time, as each server compiles its program
        # Only now, as other threads rely on it.
        self._known_updates.update((server, updates[server][0].name) for server in new)

    def finish_many(self, finished: int) -> None:
        """Calls `finish` once enough closures have ended; servers remember them until then."""
        if finished - self._finished >= _NUM_REMEMBERED:
            self.finish(finished)

    def finish(self, finished: int) -> None:
        """Tells the servers to refuse pushes of closures with smaller numbers."""
        self._finished = finished
        for link in self.server_links:
            with contextlib.suppress(UnavailableError):  # its heartbeat will report the loss
                link.call(Message("finish", {"finished": finished}))

    def create(self, value: np.ndarray, beside: Shard | None = None) -> Shard:
        """Creates a variable; returns its place.

        Args:
            value: Initial value.
            beside: Place of a variable on whose server to create it; None for the next server.
        """
        with self._lock:
            number = next(self._numbers)
            server = next(self._next_server) if beside is None else beside.server
        place = Shard(server, number, value.shape[0] if value.shape else 1)
        link = self.server_links[server]
        if len(_pieces(value.shape, value.dtype)) == 1:
            link.call_once(Message("create", {"id": number}, [value]))
        else:
            fields = {"id": number, "zeros": value.shape}
            link.call_once(Message("create", fields, [np.empty(0, value.dtype)]))
            self.assign(place, "assign", value)
        return place

    def read(self, place: Shard, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Returns the value of a variable with this shape and dtype."""
        pieces = _pieces(shape, dtype)
        rows = [[np.arange(*piece)] for piece in pieces] if len(pieces) > 1 else [[]]
        values: list[np.ndarray] = []
        for numbers in rows:
            message = Message("read", {"ids": [place.number]}, numbers)
            values += self.server_links[place.server].call(message).arrays
        return np.concatenate(values) if len(values) > 1 else np.asarray(values[0])

    def assign(self, place: Shard, operation: str, value: np.ndarray) -> None:
        """Changes a variable by assign, assign_add or assign_sub; sends large values in pieces."""
        pieces = _pieces(value.shape, value.dtype)
        for start, end in pieces:
            fields: dict[str, JSON] = {"id": place.number, "operation": operation}
            piece = value
            if len(pieces) > 1:
                fields["start"], piece = start, value[start:end]
            self.server_links[place.server].call_once(Message("assign", fields, [piece]))

    def copy(self, variables: Mapping[str, SavedVariable]) -> CopyOnServers:
        """Copies variables on their servers; see `RemoteStore`."""
        return self._new_copy(variables).make()

    def load(
        self,
        path: Path,
        variables: Mapping[str, SavedVariable],
        parts: Mapping[str, Sequence[SavedPart]],
    ) -> CopyOnServers:
        """Loads values from a checkpoint on the servers; see `RemoteStore`."""
        return self._new_copy(variables).load(path, parts)

    def _new_copy(self, variables: Mapping[str, SavedVariable]) -> CopyOnServers:
        shards = {name: _shards_of(variable) for name, variable in variables.items()}
        connect = lambda server: SessionLink(self.cluster.servers[server], self.id, is_server=True)
        shapes = {name: variable.shape for name, variable in variables.items()}
        return CopyOnServers(next(self._copy_numbers), shards, shapes, connect)

    def shards_of(self, handle: Handle) -> list[Shard]:
        """Returns the shards of a handle's variable, one or several."""
        shards = [] if handle.cell is None else _shards_of(handle.cell())
        if not shards:
            raise InvalidValueError(
                f"Variable {handle.name!r} was not created in the scope of the strategy, so no"
                " server has it. Create it inside `with strategy.scope():`."
            )
        return shards

    def statistics(self) -> tuple[ServerStatistics, ...]:
        """Returns the statistics of each server.

        Raises:
            PSUnavailableError: if a server is lost.
        """
        return tuple(
            ServerStatistics(task.name, **link.call(Message("statistics")).fields)
            for task, link in zip(self.cluster.servers, self.server_links, strict=True)
        )

    def close(self) -> None:
        """Ends the threads of the session and its coordinator, which then runs no more closures."""
        self._on_end(CancelledError("The coordinator was closed."))
        for heartbeat in self._heartbeats:
            heartbeat.stop()
        for link in self.server_links:
            link.close()


@dataclass(eq=False, repr=False)
class Cluster:
    """The tasks of a job that a coordinator can use.

    Args:
        workers: The workers, by number.
        servers: The servers, by number.
        devices_per_worker: Number of devices of each worker.
        describe: Describes a function that makes data, so that workers can find it.
    """

    workers: Sequence[Task]
    servers: Sequence[Task]
    devices_per_worker: int
    describe: Callable[[Any], JSON]

    def __post_init__(self) -> None:
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    def open(self, options: RecoveryOptions) -> Session:
        """Begins a session on all servers, which ends older ones.

        The thread of each worker begins the session there.

        Args:
            options: When the coordinator of the session gives up tasks.

        Raises:
            ConnectionLostError: if a server cannot be reached.
        """
        session: SessionId | None = None
        while True:
            session = new_session(session)
            newer = [other for server in self.servers if (other := _begin_session(server, session))]
            if not newer:
                break
            # Another machine's clock is ahead, or two coordinators start at the same time.
            session = max(newer)
        opened = Session(self, options, session)
        self._sessions.add(opened)
        return opened

    def close(self) -> None:
        """Ends the coordinators of the cluster, and the tasks that were started with it."""
        for session in list(self._sessions):
            session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _shards_of(variable: object) -> list[Shard]:
    return [shard._place for shard in getattr(variable, "_shards", [])]


def _pieces(shape: tuple[int, ...], dtype: DTypeLike) -> list[tuple[int, int]]:
    """Returns the ranges of rows in which a value of this shape is sent; a small one has one."""
    if not shape or not shape[0]:
        return [(0, 0)]
    row_bytes = max(1, math.prod(shape[1:]) * np.dtype(dtype).itemsize)
    num_rows = max(1, _PIECE_BYTES // row_bytes)
    return [(start, min(start + num_rows, shape[0])) for start in range(0, shape[0], num_rows)]


def _begin_session(task: Task, session: SessionId) -> SessionId | None:
    """Begins a session on a task; returns the newer session that the task has, if there is one."""
    with contextlib.closing(task.connect()) as link:
        newer: SessionId | None = link.call(Message("hello", {"session": session})).fields.get(
            "session"
        )
    return newer


@final
class LocalCluster(Cluster):
    """A cluster of tasks in this process, made by `local_cluster`.

    Attributes:
        fault: Function called for every message, with the names of its sender and its receiver,
            followed by the arguments of `fault` of an `InProcessLink`.
    """

    fault: Callable[[str, str, Message, Callable[[Message], Message]], Message] | None = None

    def __init__(
        self, devices_of_workers: Sequence[Sequence[jax.Device]], num_servers: int
    ) -> None:
        self._links: weakref.WeakKeyDictionary[InProcessLink, tuple[str, str]] = (
            weakref.WeakKeyDictionary()
        )
        call_when_collected(self, functools.partial(_close_all, self._links))
        self._link_lock = threading.Lock()
        servers = [f"ps {number}" for number in range(num_servers)]
        workers = [f"worker {number}" for number in range(len(devices_of_workers))]
        makers: dict[int, Any] = {}

        this = weakref.ref(self)  # services, and so the threads of links, must not keep it alive

        def tasks(source: str, names: list[str]) -> list[Task]:
            cluster = this()
            assert cluster is not None
            return [Task(name, functools.partial(cluster._connect, source, name)) for name in names]

        def describe(maker: object) -> int:
            makers[id(maker)] = maker
            return id(maker)

        def start(name: str) -> SessionService:
            task_type, number = name.split()
            return new_service(
                task_type,
                int(number),
                servers=lambda: tasks(name, servers),
                find=lambda number: as_maker(makers[number]),
                devices=lambda: devices_of_workers[int(number)],
            )

        self._start = start
        self._services: dict[str, SessionService | None] = {n: start(n) for n in servers + workers}
        num_devices = len(devices_of_workers[0])
        super().__init__(tasks("chief", workers), tasks("chief", servers), num_devices, describe)

    def kill(self, name: str) -> None:
        """Breaks all connections to and from a task, as if its process had been killed.

        Args:
            name: `"worker 0"` or `"ps 0"`.
        """
        with self._link_lock:
            service, self._services[name] = self._services[name], None
            links = [link for link, ends in self._links.items() if name in ends]
        for link in links:
            link.kill()
        if service is not None:
            service.close()

    def restart(self, name: str) -> None:
        """Starts a task again, with nothing remembered from before."""
        with self._link_lock:
            self._services[name] = self._start(name)

    def cut(self, source: str, target: str) -> None:
        """Breaks the connections from one task to another; the tasks can connect again.

        Args:
            source: `"chief"`, or the name of a worker.
            target: The name of a worker or server.
        """
        with self._link_lock:
            links = [link for link, ends in self._links.items() if ends == (source, target)]
        for link in links:
            link.cut()

    def close(self) -> None:
        """Ends the coordinators of the cluster, and all tasks."""
        super().close()
        for name in self._services:
            self.kill(name)

    def _connect(self, source: str, target: str) -> Link:
        cluster = weakref.ref(self)  # the thread of a link must not keep the cluster alive

        def fault(message: Message, deliver: Callable[[Message], Message]) -> Message:
            function = getattr(cluster(), "fault", None)
            if function is None:
                return deliver(message)
            reply: Message = function(source, target, message, deliver)
            return reply

        with self._link_lock:
            service = self._services[target]
            link = InProcessLink(service, target, fault)
            self._links[link] = source, target
        return link

    def __repr__(self) -> str:
        text = f"local_cluster(workers={len(self.workers)}, ps={len(self.servers)}"
        count = self.devices_per_worker
        return f"{text})" if count == 1 else f"{text}, devices_per_worker={count})"


def _close_all(links: Iterable[Link]) -> None:
    for link in list(links):
        link.close()


def local_cluster(workers: int = 2, ps: int = 1, devices_per_worker: int = 1) -> LocalCluster:
    """Starts workers and parameter servers in this process, for `ParameterServerStrategy`.

    Args:
        workers: Number of workers, each a thread.
        ps: Number of servers.
        devices_per_worker: Number of CPU devices of each worker, each with a replica. With 1, all
            workers share the first CPU device. With more, each worker gets devices of its own if
            there are enough, in the order of the workers; otherwise all workers share the first
            ones. If JAX has not started yet, this call makes sure that there are enough.

    Raises:
        InvalidValueError: if a number is not positive.
        DeviceError: if JAX has already started with fewer CPU devices than one worker needs.
    """
    check_positive("local_cluster", workers=workers, ps=ps, devices_per_worker=devices_per_worker)
    return LocalCluster(_devices_of_workers(workers, devices_per_worker), ps)


def _devices_of_workers(num_workers: int, num_devices: int) -> list[Sequence[jax.Device]]:
    if num_devices == 1:
        return [jax.local_devices(backend="cpu")[:1]] * num_workers
    wanted = num_workers * num_devices
    if not backends_started() and requested_cpu_devices() < wanted:
        set_logical_cpu_devices(wanted)
    devices = local_devices_of("CPU")
    if len(devices) < num_devices:
        raise DeviceError(
            f"local_cluster: devices_per_worker is {num_devices}, but this process has"
            f" {len(devices)} CPU devices. At the top of the program, before anything uses JAX,"
            f" call distributary.config.set_logical_cpu_devices({wanted})."
        )
    prepare_cpu_threads(min(wanted, len(devices)))
    if len(devices) < wanted:
        return [devices[:num_devices]] * num_workers
    return [devices[i : i + num_devices] for i in range(0, wanted, num_devices)]


def check_positive(caller: str, **numbers: int) -> None:
    """Checks numbers that are arguments.

    Raises:
        InvalidTypeError: if a number is not an int.
        InvalidValueError: if a number is not positive.
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidTypeError(
                f"{caller}: {name} is {number!r} ({type(number).__name__}), expected an int."
            )
        if number < 1:
            raise InvalidValueError(f"{caller}: {name} is {number}, expected 1 or more.")
