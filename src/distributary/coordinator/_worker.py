"""A worker: brings data to the programs of closures, with variables pulled from the servers."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import jax
import numpy as np

from distributary.coordinator._links import error_reply
from distributary.coordinator._messages import JSON, Message, aligned_empty
from distributary.coordinator._nests import leaves_of, nest_of, shapes_of
from distributary.coordinator._per_worker import Peekable
from distributary.coordinator._programs import ProgramCache
from distributary.coordinator._rows import FoundRows, PushedRows, RowPlan
from distributary.coordinator._sessions import ServerLink
from distributary.coordinator._sources import UnknownMakerError
from distributary.coordinator._statistics import Tally
from distributary.errors import InvalidValueError

__all__ = ["Worker"]

# Of one `run`; one closure more than that may be run.
_MAX_SECONDS = 0.1
_MAX_RESULT_BYTES = 1 << 24
# Shape and name of the dtype of every leaf.
Shapes = tuple[tuple[tuple[int, ...], str], ...]


@final
@dataclass(frozen=True, slots=True)
class _Server:
    """What one server does with the pushes of a closure."""

    number: int
    update: int
    pushes: list[int]
    rows: list[PushedRows]


@final
@dataclass(frozen=True, slots=True)
class _Plan:
    """A function of closures for data of given shapes; see `Plan`."""

    program: str
    inputs: list[tuple[str, int]]
    constants: list[jax.Array]
    num_results: int
    pulls: dict[int, list[int]]  # by server
    servers: list[_Server]
    rows: RowPlan | None


@final
@dataclass(frozen=True, slots=True)
class _Runs:
    """By the first of them, leaves that belong to one replica each."""

    leaves: list[np.ndarray]
    length: int

    def __getitem__(self, first: int) -> list[np.ndarray]:
        return self.leaves[first : first + self.length]


@final
@dataclass(slots=True)
class _Read:
    """What a step reads of one server.

    Attributes:
        ids: Numbers of variables.
        num_whole: How many of them it reads as a whole; of the others rows.
        rows: The numbers of these.
        places: The buffers that they belong to, and where in them.
        reply: What the server has replied, once it has.
    """

    ids: list[int]
    num_whole: int
    rows: list[np.ndarray] = field(default_factory=list)
    places: list[tuple[int, slice]] = field(default_factory=list)
    reply: Message | None = None


@final
@dataclass(slots=True)
class _Step:
    """A closure that is run.

    Attributes:
        closure: Its number.
        plan: None if there is none for its shapes.
        shapes: Of its data and arguments.
        given: By kind, what the inputs of programs are taken from.
        taken: Iterators, and what was taken from them.
        found: The rows that it needs.
        reads: By server.
    """

    closure: int
    plan: _Plan | None
    shapes: Shapes
    given: dict[str, Any]
    taken: list[tuple[Peekable, Any]]
    found: list[FoundRows] = field(default_factory=list)
    reads: dict[int, _Read] = field(default_factory=dict)

    def inputs_of(self, origins: list[tuple[str, int]]) -> list[Any]:
        """The inputs of a program."""
        return [self.given[kind][number] for kind, number in origins]

    def put_back(self) -> None:
        """The closure is not run: the next one takes its data."""
        for iterator, element in reversed(self.taken):
            iterator.put_back(element)


@final
class Worker:
    """One task `worker`.

    Messages, with the numbers that the coordinator has given:

        source   kind, number, maker  "next": an iterator over the dataset that the function makes
                                      which `maker` describes; "value": what it returns
                                      -> "unknown maker" with why, if there is none
                 kind "value", number, nest; arrays: the value
        peek     kind, number         -> shapes and nest of what comes next
        function function, sources    what a function takes of this worker's data: kinds, numbers
                                      and numbers of leaves; "index" is the worker's number,
                                      "closure" that of the closure, "bound" what `bound` says
        plan     function, shapes, program, inputs, num_results, pulls, servers, rows;
                 arrays: constants; blobs: its program and, if there are rows, that of their
                 numbers
        forget   keys                 functions and sources that are not used any more
        run      function, closures, num_args, bound, finished; arrays: for every closure its
                 arguments and its batches of the kind "fed"; bound: kinds and numbers of the
                 sources among the arguments
                                      -> num_ended; tally; arrays: results; and if not all
                                      have ended: error, or the shapes that a plan is needed for,
                                      or nothing if there was not the time

    Args:
        number: Of the task.
        links: To the servers, by their number.
        find: Returns the function that a `maker` describes.
        devices: On which programs run, each with a replica.
    """

    def __init__(
        self,
        number: int,
        links: list[ServerLink],
        find: Callable[[JSON], Callable[[], Any]],
        devices: Sequence[jax.Device],
    ) -> None:
        self.number = number
        self._links = links
        self._find = find
        self._num_devices = len(devices)
        self._programs = ProgramCache(devices)
        self._functions: dict[int, list[tuple[str, int, int]]] = {}
        self._plans: dict[tuple[int, Shapes], _Plan] = {}
        self._iterators: dict[int, Peekable] = {}
        # Leaves and structure.
        self._values: dict[int, tuple[list[np.ndarray], JSON]] = {}
        # Data of closures that wait for a plan.
        self._waiting: dict[int, list[np.ndarray]] = {}
        self._tally = Tally()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max(1, len(links)), "distributary-worker")

    def close(self) -> None:
        """Ends its threads, and what they do."""
        for link in self._links:
            link.close()
        self._threads.shutdown(wait=False)

    def statistics(self) -> dict[str, float]:
        """What it has spent; see `Tally`."""
        return {
            **self._tally.sums,
            "received_bytes": sum(link.received_bytes for link in self._links),
            "sent_bytes": sum(link.sent_bytes for link in self._links),
        }

    def handle(self, message: Message, peer: Any) -> Message:
        """The reply to a message.

        Raises:
            InvalidValueError: for messages that make no sense here.
        """
        method = self._methods.get(message.kind)
        if method is None:
            raise InvalidValueError(f"worker {self.number} got the message {message.kind!r}.")
        with self._lock:
            return method(self, message)

    def _source(self, message: Message) -> Message:
        fields = message.fields
        number = fields["number"]
        if "maker" not in fields:
            self._values[number] = message.arrays, fields["nest"]
            return Message("ok")
        try:
            make = self._find(fields["maker"])
        except UnknownMakerError as error:
            return Message("unknown maker", {"why": str(error)})
        if fields["kind"] == "next":
            self._iterators[number] = Peekable(make)
        else:
            made = make()
            self._values[number] = leaves_of(made), nest_of(made)
        return Message("ok")

    def _peek(self, message: Message) -> Message:
        number = message.fields["number"]
        if message.fields["kind"] == "value":
            leaves, nest = self._values[number]
        else:
            element = self._iterators[number].peek()
            leaves, nest = leaves_of(element), nest_of(element)
        return Message("ok", {"shapes": shapes_of(leaves), "nest": nest})

    def _function(self, message: Message) -> Message:
        fields = message.fields
        self._functions[fields["function"]] = [(k, i, n) for k, i, n in fields["sources"]]
        return Message("ok")

    def _forget(self, message: Message) -> Message:
        gone = {kind: set[int]() for kind in ("function", "source")}
        for kind, number in message.fields["keys"]:
            gone[kind].add(number)
        for number in gone["function"]:
            self._functions.pop(number, None)
        self._plans = {k: plan for k, plan in self._plans.items() if k[0] not in gone["function"]}
        for number in gone["source"]:
            self._iterators.pop(number, None)
            self._values.pop(number, None)
        return Message("ok")

    def _plan(self, message: Message) -> Message:
        fields = message.fields
        servers = [
            _Server(number, update, pushes, [PushedRows(*own) for own in rows])
            for number, update, pushes, rows in fields["servers"]
        ]
        for content in message.blobs:
            self._programs.add(content)
        key = fields["function"], _as_shapes(fields["shapes"])
        self._plans[key] = _Plan(
            fields["program"],
            [(kind, number) for kind, number in fields["inputs"]],
            [jax.numpy.asarray(array) for array in message.arrays],
            fields["num_results"],
            dict(map(tuple, fields["pulls"])),
            servers,
            fields["rows"] and RowPlan.from_json(fields["rows"]),
        )
        return Message("ok")

    def _run(self, message: Message) -> Message:
        fields = message.fields
        closures, num_args = fields["closures"], fields["num_args"]
        size = len(message.arrays) // len(closures)
        for closure in [number for number in self._waiting if number < fields["finished"]]:
            del self._waiting[closure]
        results: list[Any] = []
        num_ended = num_bytes = 0
        end = time.monotonic() + _MAX_SECONDS
        reply: dict[str, Any] = {}
        ahead: _Step | Exception | None = None
        left = list(enumerate(closures))

        def prepare() -> "_Step | Exception":
            """What the next closure needs, or why it fails."""
            i, closure = left.pop(0)
            arrays = message.arrays[i * size : (i + 1) * size]
            try:
                return self._prepare(
                    fields["function"],
                    closure,
                    arrays[:num_args],
                    arrays[num_args:],
                    fields["bound"][i],
                )
            except Exception as error:
                return error

        while ahead or left:
            step, ahead = ahead or prepare(), None
            try:
                if isinstance(step, Exception):
                    raise step
                if step.plan is None:
                    self._waiting[step.closure] = step.given["data"]
                    reply["shapes"] = step.shapes
                    break
                with self._tally.time("pull"):
                    self._pull(step)
                outs = self._programs.run(step.plan.program, step.inputs_of(step.plan.inputs))
                num_bytes += sum(out.nbytes for out in outs[: step.plan.num_results])
                # Others may be idle, and somebody may wait for a result. What is prepared is run.
                if left and time.monotonic() < end and num_bytes < _MAX_RESULT_BYTES:
                    ahead = prepare()
                with self._tally.time("compute"):
                    jax.block_until_ready(outs)
                with self._tally.time("push"):
                    self._push(step, outs[step.plan.num_results :], ahead)
            except Exception as error:
                reply["error"] = error_reply(error).fields
                break
            results += [np.asarray(out) for out in outs[: step.plan.num_results]]
            num_ended += 1
            if ahead is None:
                break
        if isinstance(ahead, _Step):
            ahead.put_back()
        reply |= {"num_ended": num_ended, "tally": self.statistics()}
        return Message("ok", reply, results)

    def _prepare(
        self,
        function: int,
        closure: int,
        args: list[np.ndarray],
        fed: list[np.ndarray],
        bound: Sequence[tuple[str, int]],
    ) -> "_Step":
        """Gets the data of a closure, and finds out what it pulls."""
        data = self._waiting.pop(closure, None)
        taken: list[tuple[Peekable, Any]] = []
        if data is None:
            with self._tally.time("data"):
                data, taken = self._data(function, closure, fed, bound)
        shapes = _as_shapes(shapes_of([*data, *args]))
        plan = self._plans.get((function, shapes))
        step = _Step(closure, plan, shapes, {"data": data, "argument": args}, taken)
        if plan is None:
            return step
        step.given["constant"] = plan.constants
        step.given["replicas"] = _Runs(data, self._num_devices)
        for server, ids in plan.pulls.items():
            step.reads[server] = _Read(list(ids), len(ids))
        if plan.rows is not None:
            with self._tally.time("compute"):
                numbers = self._programs.run(plan.rows.program, step.inputs_of(plan.rows.inputs))
                step.found = plan.rows.find(numbers)
            step.given["position"] = [at for own in step.found for at in own.positions]
            for buffer, (space, parts) in enumerate(plan.rows.buffers):
                for part in parts:
                    where, rows = step.found[space].part(part.start, part.size)
                    read = step.reads.setdefault(part.server, _Read([], 0))
                    read.ids.append(part.number)
                    read.rows.append(rows)
                    read.places.append((buffer, where))
        return step

    def _data(
        self,
        function: int,
        closure: int,
        fed: list[np.ndarray],
        bound: Sequence[tuple[str, int]],
    ) -> tuple[list[np.ndarray], list[tuple[Peekable, Any]]]:
        """What one closure gets besides its arguments, and what was taken from iterators for it."""
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
            elif kind == "next":
                iterator = self._iterators[number]
                taken.append((iterator, iterator.next()))
                leaves += leaves_of(taken[-1][1])
            else:
                leaves += self._values[number][0]
        return leaves, taken

    def _pull(self, step: "_Step") -> None:
        """Gives a step the variables and rows that have not come with the reply to a push."""

        def read(server: int) -> None:
            own = step.reads[server]
            own.reply = self._links[server].call(Message("read", {"ids": own.ids}, own.rows))

        list(self._threads.map(read, [i for i, own in step.reads.items() if own.reply is None]))
        state: dict[int, Any] = {}
        rows = step.plan.rows if step.plan else None
        filled: list[Any] = [None] * (len(rows.buffers) if rows else 0)
        for own in step.reads.values():
            assert own.reply is not None
            arrays: list[Any] = own.reply.arrays
            if self._num_devices > 1:  # those of servers in this process lie on one device
                arrays = [*map(np.asarray, arrays)]
            state.update(zip(own.ids[: own.num_whole], arrays, strict=False))
            for (i, where), found in zip(own.places, arrays[own.num_whole :], strict=True):
                if filled[i] is None:
                    assert rows is not None
                    capacity = rows.spaces[rows.buffers[i][0]].capacity
                    filled[i] = aligned_empty((capacity, *found.shape[1:]), found.dtype)
                    filled[i][len(step.found[rows.buffers[i][0]].rows) :] = 0
                filled[i][where] = found
        step.given["state"], step.given["rows"] = state, filled

    def _push(self, step: "_Step", pushed: list[Any], ahead: "_Step | Exception | None") -> None:
        """Sends the servers what is theirs; they reply with what the next step pulls."""
        assert step.plan is not None
        reads = ahead.reads if isinstance(ahead, _Step) else {}

        def push(server: _Server) -> None:
            arrays = [np.asarray(pushed[i]) for i in server.pushes]
            for own in server.rows:
                where, rows = step.found[own.space].part(own.start, own.size)
                arrays.append(rows)
                for i in own.pushes:
                    arrays[i] = arrays[i][where]
            read = reads.get(server.number, _Read([], 0))
            fields = {
                # By closure, the server applies it once; by version, it knows how stale it is.
                "closure": step.closure,
                "update": server.update,
                "ids": read.ids,
                "num_row_reads": len(read.rows),
            }
            own_read = step.reads.get(server.number)
            if own_read is not None and own_read.reply is not None:
                fields["version"] = own_read.reply.fields["version"]
            message = Message("push", fields, [*arrays, *read.rows])
            read.reply = self._links[server.number].call(message)

        list(self._threads.map(push, step.plan.servers))

    _methods: ClassVar[dict[str, Callable[["Worker", Message], Message]]] = {
        "forget": _forget,
        "function": _function,
        "peek": _peek,
        "plan": _plan,
        "run": _run,
        "source": _source,
    }


def _as_shapes(shapes: Any) -> Shapes:
    return tuple((tuple(shape), dtype) for shape, dtype in shapes)
