"""From the function of a closure to programs for workers and servers."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from distributary.coordinator._programs import Program, export_function, export_jaxpr
from distributary.coordinator._rows import PushedRows, RowPlan, TablePart, bucket_of
from distributary.errors import UnsupportedError
from distributary.strategies import split_result
from distributary.tracing import (
    Handle,
    ServerPart,
    SparseUpdate,
    current_scope,
    purify,
    rows_of,
    rows_of_update,
    split_over_servers,
    trace,
)

__all__ = ["ClosureTrace", "Plan", "ServerPlan", "Source", "current_trace", "plan_of"]


@final
@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What a server does with the pushes of a closure.

    Attributes:
        program: From states and pushed values to new states.
        states: Numbers of the variables it starts from.
        pushes: Which of the pushed values it takes.
        outputs: Numbers of the variables it changes.
        rows: What of all this is rows.
    """

    program: Program
    states: list[int]
    pushes: list[int]
    outputs: list[int]
    rows: list[PushedRows]


@final
@dataclass(frozen=True, slots=True)
class Source:
    """Data that a worker brings to a closure of its own.

    Attributes:
        kind: "next" for the next batch of an iterator, "value" for a value.
        number: Of the iterator or value.
        handles: Stand for the leaves of the data in the trace.
    """

    kind: str
    number: int
    handles: list[Handle]


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """A function of closures, for data of given shapes.

    Attributes:
        sources: What a worker brings, in this order.
        program: What it runs.
        inputs: Where each of the program's inputs comes from: `("data", i)` is the i-th leaf of the
            data of all sources, `("argument", i)` of the arguments, `("state", n)` is variable n,
            `("constant", i)` one of `constants`, `("rows", i)` the rows of the i-th buffer of
            `rows`, `("position", i)` where the numbers of its i-th lookup are among them.
        constants: Arrays that the function has captured.
        num_results: The first outputs, that are returned; the others are pushed.
        servers: What each server does with them, by its number.
        server_of: By the number of a variable that of its server.
        rows: What it takes rows of, if it does.
        refusals: By the name of a variable of which rows are looked up, why it travels as a whole.
        rebuild: From the results to what the function returns.
    """

    sources: list[Source]
    program: Program
    inputs: list[tuple[str, int]]
    constants: list[Any]
    num_results: int
    servers: dict[int, ServerPlan]
    server_of: dict[int, int]
    rows: tuple[RowPlan, Program] | None
    refusals: dict[str, str]
    rebuild: Callable[..., Any]


@final
class ClosureTrace:
    """What a closure takes from its worker, while it is traced.

    Args:
        data_avals: Shapes and dtypes of all leaves, if they are not those of the sources.

    Attributes:
        sources: What has been taken.
        position: Number of sources before the present place of the function. Functions are traced
            several times; who does it sets it back.
    """

    def __init__(self, data_avals: Sequence[Any] | None) -> None:
        self.sources: list[Source] = []
        self.position = 0
        self._data_avals = None if data_avals is None else list(data_avals)

    def take(self, kind: str, number: int, specs: Sequence[Any]) -> list[Any]:
        """Data of the worker, as tracers.

        Args:
            kind: Of the `Source`.
            number: Of the `Source`.
            specs: Shapes and dtypes of its leaves.
        """
        if self.position == len(self.sources):
            if self._data_avals is not None:
                specs = [self._data_avals.pop(0) for _ in specs]
            handles = [Handle(None, f"{kind} {number}", s.shape, s.dtype) for s in specs]
            self.sources.append(Source(kind, number, handles))
        source = self.sources[self.position]
        self.position += 1
        scope = current_scope()
        assert scope is not None
        return [scope.read(handle) for handle in source.handles]

    def repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which takes the same data when it is traced again."""
        start = self.position

        def again(*args: Any, **kwargs: Any) -> Any:
            self.position = start
            return function(*args, **kwargs)

        return again


class _ThreadState(threading.local):
    trace: ClosureTrace | None = None


_state = _ThreadState()


def current_trace() -> ClosureTrace | None:
    """The closure that this thread traces."""
    return _state.trace


@contextmanager
def _tracing(closure: ClosureTrace) -> Iterator[None]:
    before, _state.trace = _state.trace, closure
    try:
        yield
    finally:
        _state.trace = before


def plan_of(
    function: Callable[..., Any],
    avals: Sequence[Any],
    data_avals: Sequence[Any] | None,
    place_of: Callable[[Handle], tuple[int, int]],
    sparse_update: SparseUpdate = "exact",
) -> Plan:
    """Traces the function of a closure; to be called in the scope of its strategy.

    Args:
        function: From arrays, the arguments, to what the closure returns.
        avals: Shapes and dtypes of the arguments.
        data_avals: Those of the data that workers bring; None for those of its sources.
        place_of: From the handle of a variable to the numbers of its server and of itself.
        sparse_update: What servers do with rows that are not pushed.

    Raises:
        InvalidTypeError: if it returns something that is no array.
        UnsupportedError: if its updates cannot be split over the servers.
    """
    closure = ClosureTrace(data_avals)
    rebuilds: list[Callable[..., Any]] = []

    def flat(*arrays: Any) -> list[Any]:
        outs, rebuild = split_result(function(*arrays), "ClusterCoordinator.schedule")
        rebuilds[:] = [rebuild]
        return outs

    with _tracing(closure):
        closed, scope = trace(closure.repeatable(flat), avals, "function", [])
    pure = purify(closed, scope, avals, [])
    data = [handle for source in closure.sources for handle in source.handles]
    places = [None if handle in data else place_of(handle) for handle in pure.handles]
    num_captures, num_handles = len(pure.captures), len(pure.handles)

    split = split_over_servers(
        pure.jaxpr,
        [*[None] * num_captures, *[p and p[0] for p in places], *[None] * len(avals)],
        [*[False] * num_captures, *[p is None for p in places], *[True] * len(avals)],
        [
            *[None] * pure.num_outs,
            *[num_captures + pure.handles.index(handle) for handle in pure.written],
        ],
        [
            *[f"capture {i}" for i in range(num_captures)],
            *[handle.name for handle in pure.handles],
            *[f"argument {i}" for i in range(len(avals))],
        ],
    )

    for i in split.overwritten:
        handle = pure.written[i - pure.num_outs]
        cell = handle.cell() if handle.cell is not None else None
        if getattr(cell, "is_sum", False):
            raise UnsupportedError(
                f"The new value of {handle.name!r} is not its old one and what a worker adds: with"
                " several workers it would be that of the last one, and no sum over all. Use"
                " metrics that add to their variables, or compute it from what closures return."
            )

    def number_of(position: int) -> int:
        place = places[position - num_captures]
        assert place is not None
        return int(place[1])

    def table_part(position: int, start: int) -> TablePart:
        place = places[position - num_captures]
        assert place is not None
        return TablePart(*place, start, pure.handles[position - num_captures].shape[0])

    def origin(position: int) -> tuple[str, int]:
        if position < num_captures:
            return "constant", position
        if position >= num_captures + num_handles:
            return "argument", position - num_captures - num_handles
        handle = pure.handles[position - num_captures]
        if handle in data:
            return "data", data.index(handle)
        return "state", number_of(position)

    states = [i for i, place in enumerate(places, num_captures) if place is not None]
    rows, refusals = rows_of(split, states)
    written = [number_of(num_captures + pure.handles.index(handle)) for handle in pure.written]
    servers = {
        server: _server_plan(
            part,
            [number_of(i) for i in part.states],
            [written[i - pure.num_outs] for i in part.outputs],
            rows.pushes if rows else {},
            [space.capacity for space in rows.spaces] if rows else [],
            sparse_update,
        )
        for server, part in split.servers.items()
    }
    inputs = [origin(i) for i in (rows or split).inputs]
    row_plan = None
    if rows is not None:
        inputs += [("rows", i) for i in range(len(rows.buffers))]
        inputs += [("position", i) for i in range(len(rows.ids.jaxpr.outvars))]
        program = export_jaxpr(rows.ids)
        buffers = [
            (buffer.space, [table_part(i, start) for i, start in buffer.parts])
            for buffer in rows.buffers
        ]
        origins = [origin(i) for i in rows.ids_inputs]
        row_plan = RowPlan(program.name, origins, rows.spaces, buffers), program
    return Plan(
        closure.sources,
        export_jaxpr((rows or split).worker),
        inputs,
        [np.asarray(capture) for capture in pure.captures],
        pure.num_outs,
        servers,
        {number: server for server, number in filter(None, places)},
        row_plan,
        {pure.handles[i - num_captures].name: why for i, why in refusals.items()},
        rebuilds[0],
    )


def _server_plan(
    part: ServerPart,
    states: list[int],
    outputs: list[int],
    pushes: Mapping[int, tuple[int, int]],
    capacities: Sequence[int],
    sparse_update: SparseUpdate,
) -> ServerPlan:
    of_output = [states.index(number) if number in states else None for number in outputs]
    update = rows_of_update(part, of_output, pushes, sparse_update)
    rows = [
        PushedRows(
            own.space,
            own.start,
            own.size,
            own.states,
            own.pushes,
            own.outputs,
            own.is_whole,
            bucket_of(min(own.size, capacities[own.space])),
        )
        for own in update.rows
    ]
    avals = part.update.in_avals
    buckets: list[int | None] = [None] * len(avals)
    for own in rows:
        if not own.is_whole:
            for i in (*own.states, *(len(states) + i for i in own.pushes)):
                buckets[i] = own.bucket
    return ServerPlan(
        export_function(update.run, avals, buckets), states, part.pushes, outputs, rows
    )
