"""A worker, which runs the programs of closures on its data and on variables from the servers."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, final

import jax
import numpy as np

from distributary.servers._links import (
    SessionId,
    SessionLink,
    SessionService,
    Task,
    Tenant,
    error_reply,
)
from distributary.servers._messages import (
    JSON,
    Message,
    aligned_empty,
    from_json,
    leaves_of,
    nest_of,
    shapes_of,
)
from distributary.servers._plans import FoundRows, ProgramCache, Push, WorkerPlan
from distributary.servers._sources import Peekable, UnknownMakerError
from distributary.servers._split import Origin
from distributary.servers._statistics import new_tally, timed
from distributary.servers._store import ParameterServer

# Limits of one `run`, which can exceed them by one closure.
_MAX_SECONDS = 0.1
_MAX_RESULT_BYTES = 1 << 24
# The shape and the name of the dtype of every leaf.
Shapes = tuple[tuple[tuple[int, ...], str], ...]


@final
@dataclass(slots=True)
class _Read:
    """The variables and rows that a step reads from one server.

    Attributes:
        ids: Numbers of the variables.
        rows: Numbers of the rows to read of the last variables; the others are read as a whole.
        slices: Buffer of these rows, the rows of its space, and the slice of those that are read,
            for each of the last variables.
        reply: Reply of the server, or None before it has come.
    """

    ids: list[int]
    rows: list[np.ndarray] = field(default_factory=list)
    slices: list[tuple[int, FoundRows, slice]] = field(default_factory=list)
    reply: Message | None = None


@final
@dataclass(slots=True)
class _Step:
    """One run of a closure.

    Attributes:
        closure: Number of the closure.
        plan: The plan for its shapes, or None if there is none.
        number: The number of this plan.
        shapes: Shapes of its data and arguments.
        values: The values from which the inputs of programs are taken, by kind.
        taken: Iterators, and the elements taken from them.
        rows: The rows that it needs.
        reads: The reads from each server, by server number.
    """

    closure: int
    plan: WorkerPlan | None
    number: int
    shapes: Shapes
    values: dict[str, Any]
    taken: list[tuple[Peekable, Any]]
    rows: list[FoundRows] = field(default_factory=list)
    reads: dict[int, _Read] = field(default_factory=dict)

    def inputs_of(self, origins: list[Origin]) -> list[Any]:
        """Returns the inputs of a program."""
        return [self.values[kind][number] for kind, number in origins]

    def put_back(self) -> None:
        """Puts the data back for the next closure, as this one is not run."""
        for iterator, element in reversed(self.taken):
            iterator.put_back(element)


def new_service(
    task_type: str,
    number: int,
    *,
    servers: Callable[[], Sequence[Task]],
    find: Callable[[JSON], Callable[[], Any]],
    devices: Callable[[], Sequence[jax.Device]],
) -> SessionService:
    """Returns the service of a task, a worker or parameter server.

    Args:
        task_type: `"worker"` or `"ps"`.
        number: Number of the task.
        servers: Returns the servers, by number. A worker calls it for every session.
        find: Returns the function that a `maker` describes.
        devices: Returns the devices that run a worker's programs, each with a replica.
    """

    def make(session: SessionId) -> Tenant:
        if task_type == "ps":
            return ParameterServer(session, number)
        links = [SessionLink(server, session, is_server=True) for server in servers()]
        return Worker(session, number, links, find, devices())

    return SessionService(f"{task_type} {number}", make)


@final
class Worker(Tenant):
    """The service of one task `worker`.

    It handles these messages, with numbers that the coordinator has assigned:

        source   kind, number, maker  defines a source by the function that `maker` describes;
                                      "next": an iterator over the dataset that it returns;
                                      "value": the value that it returns
                                      -> "unknown maker" with why, if there is no such function
                 number, nest; arrays: the value
        peek     number               -> shapes and nest of the next data
        plan     function, sources, shapes, number, plan: a `WorkerPlan`; arrays: constants; blobs:
                 its programs; sources: the data of this worker that the function takes, as kinds,
                 numbers and numbers of leaves; "index" is the number of the worker, "closure" that
                 of the closure, "bound" refers to `bound`
        forget   keys                 functions and sources that are no longer used
        run      function, closures, num_args, bound, finished; arrays: the arguments and the
                 batches of the kind "fed" of every closure; bound: kinds and numbers of the
                 sources among the arguments
                                      -> plans: the number of the plan of each closure that has
                                      ended; tally; arrays: results; if some have not ended, also
                                      error, or the shapes that need a plan, or
                                      neither if there was no time

    Args:
        session: The session.
        number: Number of the task.
        links: The links to the servers, by server number.
        find: Returns the function that a `maker` describes.
        devices: The devices that run programs, each with a replica.
    """

    def __init__(
        self,
        session: SessionId,
        number: int,
        links: list[SessionLink],
        find: Callable[[JSON], Callable[[], Any]],
        devices: Sequence[jax.Device],
    ) -> None:
        super().__init__(session, f"worker {number}")
        self.number = number
        self._links = links
        self._find = find
        self._num_devices = len(devices)
        self._programs = ProgramCache(devices)
        self._functions: dict[int, list[tuple[str, int, int]]] = {}
        # Each with the arrays that its function has captured, and its number.
        self._plans: dict[tuple[int, Shapes], tuple[WorkerPlan, list[jax.Array], int]] = {}
        # Iterators, and the leaves and the structure of values.
        self._sources: dict[int, Peekable | tuple[list[np.ndarray], JSON]] = {}
        # The data of closures that wait for a plan.
        self._waiting: dict[int, list[np.ndarray]] = {}
        self._tally = new_tally()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max(1, len(links)), "distributary-worker")

    def close(self) -> None:
        """Ends the threads of the worker, and the calls they are making."""
        for link in self._links:
            link.close()
        self._threads.shutdown(wait=False)

    def statistics(self) -> dict[str, float]:
        """Returns the totals of time and bytes; see `new_tally`."""
        return {
            **self._tally,
            "received_bytes": sum(link.received_bytes for link in self._links),
            "sent_bytes": sum(link.sent_bytes for link in self._links),
        }

    def handle(self, message: Message) -> Message:
        """Handles a message, one at a time; see `Tenant`."""
        with self._lock:
            return super().handle(message)

    def _on_source(self, message: Message) -> Message | None:
        fields = message.fields
        number = fields["number"]
        if "maker" not in fields:
            self._sources[number] = message.arrays, fields["nest"]
            return None
        try:
            make = self._find(fields["maker"])
        except UnknownMakerError as error:
            return Message("unknown maker", {"why": str(error)})
        if fields["kind"] == "next":
            self._sources[number] = Peekable(make)
        else:
            self._sources[number] = _described(make())
        return None

    def _on_peek(self, message: Message) -> Message:
        source = self._sources[message.fields["number"]]
        leaves, nest = _described(source.peek()) if isinstance(source, Peekable) else source
        return Message("ok", {"shapes": shapes_of(leaves), "nest": nest})

    def _on_forget(self, message: Message) -> None:
        gone = {(kind, number) for kind, number in message.fields["keys"]}
        is_used = lambda kind, number: (kind, number) not in gone
        self._functions = {n: f for n, f in self._functions.items() if is_used("function", n)}
        self._plans = {k: plan for k, plan in self._plans.items() if is_used("function", k[0])}
        self._sources = {n: data for n, data in self._sources.items() if is_used("source", n)}

    def _on_plan(self, message: Message) -> None:
        fields = message.fields
        for content in message.blobs:
            self._programs.add(content)
        constants = [jax.numpy.asarray(array) for array in message.arrays]
        self._functions[fields["function"]] = [(k, i, n) for k, i, n in fields["sources"]]
        key = fields["function"], _as_shapes(fields["shapes"])
        self._plans[key] = from_json(WorkerPlan, fields["plan"]), constants, fields["number"]

    def _on_run(self, message: Message) -> Message:
        fields = message.fields
        for closure in [number for number in self._waiting if number < fields["finished"]]:
            del self._waiting[closure]
        results: list[Any] = []
        plans: list[int] = []
        num_bytes = 0
        end = time.monotonic() + _MAX_SECONDS
        reply: dict[str, Any] = {}
        ahead: _Step | Exception | None = None
        left = list(range(len(fields["closures"])))

        def prepare() -> _Step | Exception:
            """Returns the step of the next closure, or the error if it fails."""
            try:
                return self._prepare(message, left.pop(0))
            except Exception as error:
                return error

        while ahead or left:
            step, ahead = ahead or prepare(), None
            try:
                if isinstance(step, Exception):
                    raise step
                if step.plan is None:
                    self._waiting[step.closure] = step.values["data"]
                    reply["shapes"] = step.shapes
                    break
                with timed(self._tally, "pull"):
                    self._pull(step)
                outs = self._programs.run(step.plan.program, step.inputs_of(step.plan.inputs))
                num_bytes += sum(out.nbytes for out in outs[: step.plan.num_results])
                # Stops after a while, as other workers may be idle and a caller may wait for a
                # result. A closure that has been prepared is also run.
                if left and time.monotonic() < end and num_bytes < _MAX_RESULT_BYTES:
                    ahead = prepare()
                with timed(self._tally, "compute"):
                    jax.block_until_ready(outs)
                with timed(self._tally, "push"):
                    self._push(step, outs[step.plan.num_results :], ahead)
            except Exception as error:
                reply["error"] = error_reply(error).fields
                break
            results += [np.asarray(out) for out in outs[: step.plan.num_results]]
            plans.append(step.number)
            if ahead is None:
                break
        if isinstance(ahead, _Step):
            ahead.put_back()
        reply |= {"plans": plans, "tally": self.statistics()}
        return Message("ok", reply, results)

    def _prepare(self, message: Message, i: int) -> _Step:
        """Gets the data of the i-th closure of a `run`, and finds out what it reads."""
        fields, function = message.fields, message.fields["function"]
        closure, num_args = fields["closures"][i], fields["num_args"]
        size = len(message.arrays) // len(fields["closures"])
        arrays = message.arrays[i * size : (i + 1) * size]
        args, fed = arrays[:num_args], arrays[num_args:]
        data = self._waiting.pop(closure, None)
        taken: list[tuple[Peekable, Any]] = []
        if data is None:
            with timed(self._tally, "data"):
                data, taken = self._data(function, closure, fed, fields["bound"][i])
        shapes = _as_shapes(shapes_of([*data, *args]))
        plan, constants, number = self._plans.get((function, shapes), (None, [], 0))
        step = _Step(closure, plan, number, shapes, {"data": data, "argument": args}, taken)
        if plan is None:
            return step
        step.values["constant"] = constants
        step.values["replicas"] = [data[i : i + self._num_devices] for i in range(len(data))]
        for server, ids in plan.pulls:
            step.reads[server] = _Read(list(ids))
        if plan.rows is not None:
            with timed(self._tally, "compute"):
                numbers = self._programs.run(plan.rows.program, step.inputs_of(plan.rows.inputs))
                step.rows = plan.rows.find(numbers)
            step.values["position"] = [at for entry in step.rows for at in entry.positions]
            for buffer, (space, parts) in enumerate(plan.rows.buffers):
                found = step.rows[space]
                for part in parts:
                    where, rows = found.part(part.start, part.size)
                    read = step.reads.setdefault(part.server, _Read([]))
                    read.ids.append(part.number)
                    read.rows.append(rows)
                    read.slices.append((buffer, found, where))
        return step

    def _data(
        self, function: int, closure: int, fed: list[np.ndarray], bound: list[tuple[str, int]]
    ) -> tuple[list[np.ndarray], list[tuple[Peekable, Any]]]:
        """Returns the data of a closure, and the elements taken from iterators for it."""
        leaves: list[np.ndarray] = []
        taken: list[tuple[Peekable, Any]] = []
        left = iter(fed)
        for kind, number, num_leaves in self._functions[function]:
            if kind == "bound":
                kind, number = bound[number]
            if kind == "index":
                leaves.append(np.asarray(self.number, np.int32))
            elif kind == "closure":
                leaves.append(np.asarray(closure % (1 << 32), np.uint32))
            elif kind == "fed":
                leaves += itertools.islice(left, num_leaves)
            elif isinstance(source := self._sources[number], Peekable):
                taken.append((source, source.next()))
                leaves += leaves_of(taken[-1][1])
            else:
                leaves += source[0]
        return leaves, taken

    def _pull(self, step: _Step) -> None:
        """Reads the variables and rows of a step, unless they came with the reply to a push."""

        def read(server: int) -> None:
            load = step.reads[server]
            load.reply = self._links[server].call(Message("read", {"ids": load.ids}, load.rows))

        list(self._threads.map(read, [i for i, load in step.reads.items() if load.reply is None]))
        state: dict[int, Any] = {}
        filled: dict[int, np.ndarray] = {}
        for load in step.reads.values():
            assert load.reply is not None
            arrays: list[Any] = load.reply.arrays
            if self._num_devices > 1:  # arrays from servers in this process are on one device
                arrays = [*map(np.asarray, arrays)]
            num_whole = len(load.ids) - len(load.rows)
            state.update(zip(load.ids[:num_whole], arrays, strict=False))
            for (i, found, where), part in zip(load.slices, arrays[num_whole:], strict=True):
                if i not in filled:
                    filled[i] = aligned_empty((found.capacity, *part.shape[1:]), part.dtype)
                    filled[i][len(found.rows) :] = 0
                filled[i][where] = part
        step.values["state"], step.values["rows"] = state, filled

    def _push(self, step: _Step, pushed: list[Any], ahead: _Step | Exception | None) -> None:
        """Pushes values to the servers, which reply with the variables of the next step."""
        assert step.plan is not None
        reads = ahead.reads if isinstance(ahead, _Step) else {}

        def push(to: Push) -> None:
            arrays = [np.asarray(pushed[i]) for i in to.values]
            for entry in to.rows:
                where, rows = step.rows[entry.space].part(entry.start, entry.size)
                arrays.append(rows)
                for i in entry.pushes:
                    arrays[i] = arrays[i][where]
            read = reads.get(to.server, _Read([]))
            fields = {
                # The closure lets the server apply it once; the version shows how stale it is.
                "closure": step.closure,
                "update": to.update,
                "ids": read.ids,
                "num_row_reads": len(read.rows),
            }
            own_read = step.reads.get(to.server)
            if own_read is not None and own_read.reply is not None:
                fields["version"] = own_read.reply.fields["version"]
            message = Message("push", fields, [*arrays, *read.rows])
            read.reply = self._links[to.server].call(message)

        list(self._threads.map(push, step.plan.pushes))


def _described(value: Any) -> tuple[list[np.ndarray], JSON]:
    return leaves_of(value), nest_of(value)


def _as_shapes(shapes: JSON) -> Shapes:
    return tuple((tuple(shape), dtype) for shape, dtype in shapes)
