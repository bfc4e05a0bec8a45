"""Plans, which turn the function of a closure into programs for workers and servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import jax

from distributary.coordinator._nests import copy_of
from distributary.coordinator._programs import Program, export_function, export_per_device
from distributary.coordinator._rows import PushedRows, RowPlan, TablePart, bucket_of
from distributary.coordinator.passes import (
    ServerPart,
    SparseUpdate,
    in_parts,
    rows_of,
    rows_of_update,
    split_over_servers,
)
from distributary.engine import split_result
from distributary.errors import ContextError, UnsupportedError
from distributary.tracing import (
    Handle,
    current_feeding,
    current_scope,
    fed_by,
    has_replicas,
    per_device,
    purify,
    refused_if_consumed,
    trace,
)
from distributary.values import PerReplica

__all__ = ["ClosureTrace", "Part", "Plan", "ServerPlan", "Source", "current_trace", "plan_of"]


@final
@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The part of a plan that one server runs on the values pushed by a closure.

    Attributes:
        program: Computes new states from states and pushed values.
        states: Numbers of the variables that it reads.
        pushes: Positions of the pushed values that it takes.
        outputs: Numbers of the variables that it changes.
        rows: The states, pushes and outputs that are only rows of tables.
    """

    program: Program
    states: list[int]
    pushes: list[int]
    outputs: list[int]
    rows: list[PushedRows]


@final
@dataclass(frozen=True, slots=True)
class Part:
    """The place of a variable, or of some rows of one.

    Attributes:
        server: Number of the server.
        number: Number of the variable on the server.
        num_rows: Size of dim 0; 0 for a scalar.
    """

    server: int
    number: int
    num_rows: int


@final
@dataclass(frozen=True, slots=True)
class Source:
    """Data that a worker itself supplies to a closure.

    Attributes:
        kind: "next" for the next batch of an iterator, "value" for a value.
        number: Number of the iterator or value.
        columns: The handles that stand in the trace for every array or `PerReplica` of the data:
            one handle each, or one per replica if the replicas' arrays differ in shape.
        tree: The structure of the data around the columns.
    """

    kind: str
    number: int
    columns: list[list[Handle]]
    tree: Any

    @property
    def handles(self) -> list[Handle]:
        """The handles of all columns."""
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
    """The programs that run a scheduled function on data of given shapes.

    Attributes:
        sources: The data that a worker supplies, in this order.
        program: The program that a worker runs.
        inputs: The origin of each input of the program. `("data", i)` is the i-th leaf of the data
            of all sources; `("replicas", i)` is that leaf and the following ones, one per replica;
            `("argument", i)` is a leaf of the arguments; `("state", n)` is variable n;
            `("constant", i)` is one of `constants`; `("rows", i)` holds the rows of the i-th buffer
            of `rows`; `("position", i)` says where the numbers of the i-th lookup are among these
            rows.
        constants: Arrays that the function has captured.
        num_results: Number of outputs that are returned. They come first; the others are pushed.
        servers: The plan of each server, by server number.
        server_of: For each variable number, the number of its server.
        rows: The tables of which a closure takes only rows, and the program that computes the
            numbers of these rows; None if there are none.
        refusals: The reason why a variable is sent as a whole although only rows of it are looked
            up, by name of the variable.
        cells: For every variable, a function that returns it, or None once it was collected.
        rebuild: Converts the results into the return value of the function.
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
    """The trace of a closure, which records the data it takes from its worker.

    Args:
        data_avals: Shapes and dtypes of all leaves; None to use those of the sources.
        source_of: Returns the source that sends the elements of a coordinator's iterator.

    Attributes:
        sources: The data taken so far.
        position: Number of sources before the current point of the function. A function is traced
            several times, and each trace resets this number.
    """

    def __init__(self, data_avals: Sequence[Any] | None, source_of: Callable[[Any], Any]) -> None:
        self._source_of = source_of
        self.sources: list[Source] = []
        self.position = 0
        self._data_avals = None if data_avals is None else list(data_avals)

    def take(self, kind: str, number: int, element: Any) -> Any:
        """Takes data of the worker, with tracers as leaves; in `Strategy.run`, a replica's data.

        Args:
            kind: Kind of the `Source`.
            number: Number of the `Source`.
            element: The structure of the data, with shapes and dtypes as leaves.
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
        """Takes the next element of a coordinator's iterator, which is sent to the workers."""
        source = self._source_of(iterator)
        return self.take("fed", source.number, source.element_spec)

    def begin(self, dataset: Any, is_plain: bool) -> Any:
        """Raises an error: a scheduled function cannot loop over a dataset."""
        raise _loops_over(dataset)

    def leave(self, error: Exception) -> None:
        """Raises `error`, as a closure cannot fall back to running on the host."""
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
    """Returns the trace of the closure that this thread is tracing, or None."""
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
    """Traces the function of a closure and returns its plan; call it in the strategy's scope.

    Args:
        function: Function of the argument arrays, which returns the result of the closure.
        avals: Shapes and dtypes of the arguments.
        data_avals: Shapes and dtypes of the data that workers supply; None to use those of its
            sources.
        parts_of: Returns the places of a handle's variable, in the order of dim 0.
        sparse_update: What servers do with rows that are not pushed.
        num_replicas: Number of devices of a worker.
        source_of: See `ClosureTrace`.

    Raises:
        InvalidTypeError: if the function returns something other than arrays.
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
        # Copies, so that a worker that joins later gets the same values as the others.
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
    """Returns the input that each handle of the sources stands for."""
    inputs: dict[Handle, _Input] = {}
    position = 0
    for handle in [handle for source in sources for handle in source.handles]:
        inputs[handle] = _Input("replicas" if handle.per_replica else "data", position)
        position += handle.num_copies or 1
    return inputs


def _inputs_of(
    handle: Handle, places: Mapping[Handle, Sequence[Part]], data: Mapping[Handle, _Input]
) -> list[_Input]:
    """Returns the inputs of a handle: the parts of its variable, or the data it stands for."""
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
