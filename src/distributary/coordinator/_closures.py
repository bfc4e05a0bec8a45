"""From the function of a closure to programs for workers and servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import jax

from distributary.coordinator._nests import copy_of
from distributary.coordinator._programs import Program, export_function, export_per_device
from distributary.coordinator._rows import PushedRows, RowPlan, TablePart, bucket_of
from distributary.errors import ContextError, UnsupportedError
from distributary.strategies import split_result
from distributary.tracing import (
    Handle,
    ServerPart,
    SparseUpdate,
    current_feeding,
    current_scope,
    fed_by,
    has_replicas,
    in_parts,
    per_device,
    purify,
    refused_if_consumed,
    rows_of,
    rows_of_update,
    split_over_servers,
    trace,
)
from distributary.values import PerReplica

__all__ = ["ClosureTrace", "Part", "Plan", "ServerPlan", "Source", "current_trace", "plan_of"]


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
class Part:
    """Where a variable is, or some rows of one.

    Attributes:
        server: Number of its server.
        number: Of the variable there.
        num_rows: Size of its dim 0; 0 for a scalar.
    """

    server: int
    number: int
    num_rows: int


@final
@dataclass(frozen=True, slots=True)
class Source:
    """Data that a worker brings to a closure of its own.

    Attributes:
        kind: "next" for the next batch of an iterator, "value" for a value.
        number: Of the iterator or value.
        columns: Of every array or `PerReplica` of the data, what stands for it in the trace: one
            handle, or of replicas whose arrays differ in shape one for each.
        tree: The structure of the data around these.
    """

    kind: str
    number: int
    columns: list[list[Handle]]
    tree: Any

    @property
    def handles(self) -> list[Handle]:
        """Those of all columns."""
        return [handle for column in self.columns for handle in column]

    @property
    def leaves(self) -> list[Any]:
        """Shapes and dtypes of the leaves of the data, in their order."""
        return [
            jax.ShapeDtypeStruct(handle.shape, handle.dtype)
            for handle in self.handles
            for _ in range(handle.num_copies or 1)
        ]


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """A function of closures, for data of given shapes.

    Attributes:
        sources: What a worker brings, in this order.
        program: What it runs.
        inputs: Where each of the program's inputs comes from: `("data", i)` is the i-th leaf of the
            data of all sources, `("replicas", i)` that leaf and those after it, one of each
            replica, `("argument", i)` a leaf of the arguments, `("state", n)` is variable n,
            `("constant", i)` one of `constants`, `("rows", i)` the rows of the i-th buffer of
            `rows`, `("position", i)` where the numbers of its i-th lookup are among them.
        constants: Arrays that the function has captured.
        num_results: The first outputs, that are returned; the others are pushed.
        servers: What each server does with them, by its number.
        server_of: By the number of a variable that of its server.
        rows: What it takes rows of, if it does.
        refusals: By the name of a variable of which rows are looked up, why it travels as a whole.
        cells: For every variable what returns it, or None when it was collected.
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
    cells: list[Callable[[], Any]]
    rebuild: Callable[..., Any]


@final
class ClosureTrace:
    """What a closure takes from its worker, while it is traced.

    Args:
        data_avals: Shapes and dtypes of all leaves, if they are not those of the sources.
        source_of: From an iterator of the coordinator to what the workers are sent of it.

    Attributes:
        sources: What has been taken.
        position: Number of sources before the present place of the function. Functions are traced
            several times; who does it sets it back.
    """

    def __init__(self, data_avals: Sequence[Any] | None, source_of: Callable[[Any], Any]) -> None:
        self._source_of = source_of
        self.sources: list[Source] = []
        self.position = 0
        self._data_avals = None if data_avals is None else list(data_avals)

    def take(self, kind: str, number: int, element: Any) -> Any:
        """Data of the worker, with tracers as leaves; inside `Strategy.run` those of a replica.

        Args:
            kind: Of the `Source`.
            number: Of the `Source`.
            element: The data, with shapes and dtypes as leaves.
        """
        if self.position == len(self.sources):
            if self._data_avals is not None:
                avals = self._data_avals
                element = jax.tree.map(lambda _: avals.pop(0), element)
            columns, tree = jax.tree.flatten(element, is_leaf=_is_per_replica)
            handles = [_handles_of(column, f"{kind} {number}") for column in columns]
            self.sources.append(Source(kind, number, handles, tree))
        source = self.sources[self.position]
        self.position += 1
        return jax.tree.unflatten(source.tree, [_read(column) for column in source.columns])

    def give(self, iterator: Any) -> Any:
        """The next element of an iterator of the coordinator, which it sends to the workers."""
        source = self._source_of(iterator)
        return self.take("fed", source.number, source.element_spec)

    def begin(self, dataset: Any, is_plain: bool) -> Any:
        """Refuses to loop over a dataset."""
        raise _loops_over(dataset)

    def leave(self, error: Exception) -> None:
        """Raises `error`: there is no host to run on."""
        raise error


def _loops_over(dataset: Any) -> ContextError:
    return ContextError(
        f"A scheduled function iterates over {dataset!r} while it is traced, so every closure would"
        " compute with the elements of now. Pass iter(dataset) to schedule and call next(iterator)"
        " in the function, or use create_per_worker_dataset."
    )


def _is_per_replica(value: Any) -> bool:
    return isinstance(value, PerReplica)


def _handles_of(column: Any, name: str) -> list[Handle]:
    if not isinstance(column, PerReplica):
        return [Handle(None, name, column.shape, column.dtype)]
    first, *others = column.values
    if all((one.shape, one.dtype) == (first.shape, first.dtype) for one in others):
        return [Handle(None, name, first.shape, first.dtype, num_copies=len(column.values))]
    return [Handle(None, name, one.shape, one.dtype) for one in column.values]


def _read(column: list[Handle]) -> Any:
    scope = current_scope()
    assert scope is not None
    values = [scope.read(handle) for handle in column]
    if scope.kind == "replica" and len(values) > 1:
        raise UnsupportedError(
            "The next batch of a worker has parts of different sizes for its replicas, and is taken"
            " inside Strategy.run. Take it outside, strategy.run(step, args=(next(iterator),))."
        )
    if len(values) > 1:
        return PerReplica(values)
    num_replicas = column[0].num_copies
    if num_replicas is None or scope.kind == "replica":
        return values[0]
    return PerReplica.from_stacked(values[0], num_replicas)


def current_trace() -> ClosureTrace | None:
    """The closure that this thread traces."""
    feeding = current_feeding()
    return feeding if isinstance(feeding, ClosureTrace) else None


def plan_of(
    function: Callable[..., Any],
    avals: Sequence[Any],
    data_avals: Sequence[Any] | None,
    parts_of: Callable[[Handle], Sequence[Part]],
    sparse_update: SparseUpdate = "exact",
    num_replicas: int = 1,
    *,
    source_of: Callable[[Any], Any],
) -> Plan:
    """Traces the function of a closure; to be called in the scope of its strategy.

    Args:
        function: From arrays, the arguments, to what the closure returns.
        avals: Shapes and dtypes of the arguments.
        data_avals: Those of the data that workers bring; None for those of its sources.
        parts_of: From the handle of a variable to what keeps it, along dim 0.
        sparse_update: What servers do with rows that are not pushed.
        num_replicas: Number of devices of a worker.
        source_of: See `ClosureTrace`.

    Raises:
        InvalidTypeError: if it returns something that is no array.
        UnsupportedError: if its updates cannot be split over the servers.
    """
    closure = ClosureTrace(data_avals, source_of)
    rebuilds: list[Callable[..., Any]] = []

    def flat(*arrays: Any) -> list[Any]:
        outs, rebuild = split_result(function(*arrays), "ClusterCoordinator.schedule")
        rebuilds[:] = [rebuild]
        return outs

    with fed_by(closure), refused_if_consumed(function, (), "ClusterCoordinator.schedule"):
        closed, scope = trace(flat, avals, "function", [], is_for_workers=num_replicas > 1)
    pure = purify(closed, scope, avals, [])
    jaxpr, captures = pure.jaxpr, pure.captures
    num_devices = num_replicas if has_replicas(jaxpr.eqns) else 1
    if num_devices > 1:
        of_inputs = [*[None] * len(captures), *pure.handles, *[None] * len(avals)]
        is_split = [handle is not None and handle.per_replica for handle in of_inputs]
        jaxpr, consts = per_device(jaxpr, is_split, num_devices)
        captures = [*consts, *captures]
    data = _inputs_of_data(closure.sources)
    places = {handle: parts_of(handle) for handle in pure.handles if handle not in data}
    inputs = [
        *(_Input("constant", i) for i in range(len(captures))),
        *(own for handle in pure.handles for own in _inputs_of(handle, places, data)),
        *(_Input("argument", i) for i in range(len(avals))),
    ]
    parts = {h: [part.num_rows for part in own] for h, own in places.items() if len(own) > 1}
    jaxpr, constants = in_parts(
        jaxpr,
        {i: parts[h] for i, h in enumerate(pure.handles, len(captures)) if h in parts},
        {i: parts[h] for i, h in enumerate(pure.written, pure.num_outs) if h in parts},
    )
    written = [part.number for handle in pure.written for part in places[handle]]
    of_number = {own.number: i for i, own in enumerate(inputs) if own.kind == "state"}
    split = split_over_servers(
        jaxpr,
        [own.server for own in inputs],
        [own.kind in ("data", "replicas", "argument") for own in inputs],
        [*[None] * pure.num_outs, *(of_number[number] for number in written)],
        [own.name or f"{own.kind} {own.number}" for own in inputs],
        constants,
        num_devices,
    )

    of_outputs = [handle for handle in pure.written for _ in places[handle]]
    for i in split.overwritten:
        handle = of_outputs[i - pure.num_outs]
        cell = handle.cell() if handle.cell is not None else None
        if getattr(cell, "is_sum", False):
            raise UnsupportedError(
                f"The new value of {handle.name!r} is not its old one and what a worker adds: with"
                " several workers it would be that of the last one, and no sum over all. Use"
                " metrics that add to their variables, or compute it from what closures return."
            )

    def number_of(position: int) -> int:
        return inputs[position].number

    def origin(position: int) -> tuple[str, int]:
        return inputs[position].kind, inputs[position].number

    def export(closed: Any, origins: Sequence[tuple[str, int]], split_outputs: bool) -> Program:
        is_split = [kind in ("replicas", "position") for kind, _ in origins]
        return export_per_device(closed, is_split, num_devices, split_outputs)

    states = {i: own for i, own in enumerate(inputs) if own.server is not None}
    rows, refusals = rows_of(split, states, num_devices)
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
    origins = [origin(i) for i in (rows or split).inputs]
    row_plan = None
    if rows is not None:
        origins += [("rows", i) for i in range(len(rows.buffers))]
        num_lookups = sum(len(space.lookups) for space in rows.spaces)
        origins += [("position", i) for i in range(num_lookups)]
        of_ids = [origin(i) for i in rows.ids_inputs]
        program = export(rows.ids, of_ids, split_outputs=True)
        buffers = [
            (
                buffer.space,
                [
                    TablePart(states[i].server or 0, number_of(i), start, states[i].num_rows)
                    for i, start in buffer.parts
                ],
            )
            for buffer in rows.buffers
        ]
        row_plan = RowPlan(program.name, of_ids, rows.spaces, buffers), program
    return Plan(
        closure.sources,
        export((rows or split).worker, origins, split_outputs=False),
        origins,
        # Copies: a worker that comes later is sent the values of now, as the others were.
        [copy_of(capture) for capture in captures],
        pure.num_outs,
        servers,
        {part.number: part.server for own in places.values() for part in own},
        row_plan,
        {states[i].name: why for i, why in refusals.items()},
        [handle.cell for handle in places if handle.cell is not None],
        rebuilds[0],
    )


@final
@dataclass(frozen=True, slots=True)
class _Input:
    """An input of a function, as in `Plan.inputs`."""

    kind: str
    number: int
    name: str = ""
    server: int | None = None
    num_rows: int = 0


def _inputs_of_data(sources: Sequence[Source]) -> dict[Handle, _Input]:
    """The data that handles stand for."""
    inputs: dict[Handle, _Input] = {}
    position = 0
    for handle in [handle for source in sources for handle in source.handles]:
        inputs[handle] = _Input("replicas" if handle.per_replica else "data", position)
        position += handle.num_copies or 1
    return inputs


def _inputs_of(
    handle: Handle, places: Mapping[Handle, Sequence[Part]], data: Mapping[Handle, _Input]
) -> list[_Input]:
    """What keeps a variable, or the data that a handle stands for."""
    if handle not in places:
        return [data[handle]]
    return [
        _Input("state", part.number, handle.name, part.server, part.num_rows)
        for part in places[handle]
    ]


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
        PushedRows(**asdict(own), bucket=bucket_of(min(own.size, capacities[own.space])))
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
