"""A worker: brings data to the programs of closures, with variables pulled from the servers."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, final

import jax
import numpy as np

from distributary.coordinator._links import error_reply
from distributary.coordinator._messages import JSON, Message
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
    program: str
    states: list[int]
    pushes: list[int]
    outputs: list[int]
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
                                      "closure" that of the closure
        plan     function, shapes, program, inputs, num_results, pulls, servers, rows;
                 arrays: constants; blobs: programs of the worker, of the servers and, if there
                 are rows, of their numbers
        run      function, closures, num_args, finished; arrays: for every closure its
                 arguments and its batches of the kind "fed"
                                      -> num_ended; tally; arrays: results; and if not all
                                      have ended: error, or the shapes that a plan is needed for,
                                      or nothing if there was not the time

    Args:
        number: Of the task.
        links: To the servers, by their number.
        find: Returns the function that a `maker` describes.
    """

    def __init__(
        self, number: int, links: list[ServerLink], find: Callable[[JSON], Callable[[], Any]]
    ) -> None:
        self.number = number
        self._links = links
        self._find = find
        self._programs = ProgramCache()
        self._server_programs: dict[str, bytes] = {}
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
            made = self._find(fields["maker"])()
        except UnknownMakerError as error:
            return Message("unknown maker", {"why": str(error)})
        if fields["kind"] == "next":
            self._iterators[number] = Peekable(iter(made))
        else:
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

    def _plan(self, message: Message) -> Message:
        fields = message.fields
        servers = [
            _Server(number, program, states, pushes, outputs, [PushedRows(*own) for own in rows])
            for number, program, states, pushes, outputs, rows in fields["servers"]
        ]
        content, *of_servers = message.blobs
        self._programs.add(content)
        if fields["rows"] is not None:
            self._programs.add(of_servers.pop())
        for server, content in zip(servers, of_servers, strict=True):
            self._server_programs[server.program] = content
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
        for i, closure in enumerate(closures):
            arrays = message.arrays[i * size : (i + 1) * size]
            args, fed = arrays[:num_args], arrays[num_args:]
            try:
                data = self._waiting.pop(closure, None)
                if data is None:
                    with self._tally.time("data"):
                        data = self._data(fields["function"], closure, fed)
                shapes = _as_shapes(shapes_of([*data, *args]))
                plan = self._plans.get((fields["function"], shapes))
                if plan is None:
                    self._waiting[closure] = data
                    reply["shapes"] = shapes
                    break
                outs = self._step(plan, closure, fields["finished"], data, args)
            except Exception as error:
                reply["error"] = error_reply(error).fields
                break
            results += outs
            num_ended += 1
            num_bytes += sum(out.nbytes for out in outs)
            # Others may be idle, and somebody may wait for a result.
            if time.monotonic() > end or num_bytes > _MAX_RESULT_BYTES:
                break
        reply |= {"num_ended": num_ended, "tally": self.statistics()}
        return Message("ok", reply, results)

    def _data(self, function: int, closure: int, fed: list[np.ndarray]) -> list[np.ndarray]:
        """What one closure gets besides its arguments."""
        leaves: list[np.ndarray] = []
        left = iter(fed)
        for kind, number, num_leaves in self._functions[function]:
            if kind == "index":
                leaves.append(np.asarray(self.number, np.int32))
            elif kind == "closure":
                leaves.append(np.asarray(closure % (1 << 32), np.uint32))
            elif kind == "fed":
                leaves += itertools.islice(left, num_leaves)
            elif kind == "next":
                leaves += leaves_of(self._iterators[number].next())
            else:
                leaves += self._values[number][0]
        return leaves

    def _step(
        self, plan: _Plan, closure: int, finished: int, data: list[Any], args: list[Any]
    ) -> list[Any]:
        """Pulls, computes, pushes; the results."""
        given: dict[str, Any] = {"data": data, "argument": args, "constant": plan.constants}

        def inputs_of(origins: list[tuple[str, int]]) -> list[Any]:
            return [given[kind][number] for kind, number in origins]

        found: list[FoundRows] = []
        if plan.rows is not None:
            with self._tally.time("compute"):
                numbers = self._programs.run(plan.rows.program, inputs_of(plan.rows.inputs))
                found = plan.rows.find(numbers)
            given["position"] = [position for own in found for position in own.positions]
        with self._tally.time("pull"):
            given["state"], given["rows"], versions = self._pull(plan, found)
        with self._tally.time("compute"):
            outs = jax.block_until_ready(self._programs.run(plan.program, inputs_of(plan.inputs)))
        pushed = outs[plan.num_results :]

        def push(server: _Server) -> None:
            # By closure, the server applies it once; by version, it knows how stale it is.
            fields = {"closure": closure, "finished": finished}
            if server.number in versions:
                fields["version"] = versions[server.number]
            self._push(server, fields, pushed, found)

        with self._tally.time("push"):
            list(self._threads.map(push, plan.servers))
        return [np.asarray(out) for out in outs[: plan.num_results]]

    def _pull(
        self, plan: _Plan, found: list[FoundRows]
    ) -> tuple[dict[int, Any], list[np.ndarray], dict[int, int]]:
        """Variables by number, the rows of all buffers, and the versions of the servers."""
        asked = {server: list(ids) for server, ids in plan.pulls.items()}
        numbers: dict[int, list[np.ndarray]] = {}
        places: dict[int, list[tuple[int, slice]]] = {}
        buffers = plan.rows.buffers if plan.rows is not None else []
        for i, (space, parts) in enumerate(buffers):
            for part in parts:
                where, rows = found[space].part(part.start, part.size)
                asked.setdefault(part.server, []).append(part.number)
                numbers.setdefault(part.server, []).append(rows)
                places.setdefault(part.server, []).append((i, where))

        def read(server: int) -> Message:
            message = Message("read", {"ids": asked[server]}, numbers.get(server, []))
            return self._links[server].call(message)

        state: dict[int, Any] = {}
        filled: list[Any] = [None] * len(buffers)
        versions: dict[int, int] = {}
        for server, reply in zip(asked, self._threads.map(read, asked), strict=True):
            versions[server], arrays = reply.fields["version"], reply.arrays
            ids = plan.pulls.get(server, [])
            state.update(zip(ids, arrays, strict=False))
            for (i, where), rows in zip(places.get(server, []), arrays[len(ids) :], strict=True):
                if filled[i] is None:
                    capacity = plan.rows.spaces[buffers[i][0]].capacity  # type: ignore[union-attr]
                    filled[i] = np.zeros((capacity, *rows.shape[1:]), rows.dtype)
                filled[i][where] = rows
        return state, filled, versions

    def _push(
        self,
        server: _Server,
        fields: dict[str, int],
        pushed: list[Any],
        found: list[FoundRows],
    ) -> None:
        link = self._links[server.number]
        arrays = [np.asarray(pushed[i]) for i in server.pushes]
        numbers = []
        for own in server.rows:
            where, rows = found[own.space].part(own.start, own.size)
            numbers.append(rows)
            for i in own.pushes:
                arrays[i] = arrays[i][where]
        message = Message(
            "push",
            {
                **fields,
                "program": server.program,
                "states": server.states,
                "outputs": server.outputs,
                "rows": [astuple(own) for own in server.rows],
                "ids": [],
            },
            [*arrays, *numbers],
        )
        if link.call(message).kind == "unknown program":
            link.call(Message("program", blobs=[self._server_programs[server.program]]))
            link.call(message)

    _methods: ClassVar[dict[str, Callable[["Worker", Message], Message]]] = {
        "function": _function,
        "peek": _peek,
        "plan": _plan,
        "run": _run,
        "source": _source,
    }


def _as_shapes(shapes: Any) -> Shapes:
    return tuple((tuple(shape), dtype) for shape, dtype in shapes)
