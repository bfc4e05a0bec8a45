"""Traces the function of a closure, and makes programs for workers and servers of it.

`plan_of` goes through five stages. With a variable `w` in two shards of one row, on servers 0 and
1, and the function

    def step(iterator):
        x = next(iterator)
        w.assign_sub(push(x))
        return x.sum()

the stages make

1. `trace`: a pure program of what the function reads, from w:f32[2,3] and x:f32[2,3]
   to the sum and the new w.
2. `in_parts`: a program of what servers keep, from w0:f32[1,3], w1:f32[1,3] and x:f32[2,3] to the
   sum, the new w0 and the new w1.
3. `split_over_servers`: a program of the worker, from x to the sum and the pushed values x[0:1] and
   x[1:2], and an update of each server, from its shard and a pushed value to its new shard.
4. `rows_of`: programs that take and push only rows of tables. There are none here: without lookups,
   nothing shows which rows of a variable a step needs.
5. `_update_of` and `_worker_plan`: exported programs, and what the tasks are told about them. The
   worker reads no variable; it pushes value 0 to server 0, and value 1 to server 1.

Stages 2 to 4 count inputs and outputs by their positions in the program of stage 2, and pushed
values by their positions in the order in which the worker computes them. `Step.shards` has the
numbers by which servers know variables.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from distributary.data import DatasetIterator
from distributary.devices import Nest
from distributary.engine import split_result
from distributary.errors import ContextError, UnsupportedError, shown
from distributary.jaxprs import Array, has_replicas
from distributary.servers._messages import copy_of
from distributary.servers._partitioners import Shard
from distributary.servers._parts import in_parts
from distributary.servers._per_device import per_device
from distributary.servers._plans import (
    Program,
    Push,
    RowPlan,
    Update,
    WorkerPlan,
    export_divided,
    export_function,
    export_per_device,
)
from distributary.servers._rows import RowSplit, SparseUpdate, rows_of, rows_of_update
from distributary.servers._split import Origin, ServerPart, ServerSplit, Step, split_over_servers
from distributary.tracing import Handle, Subject, current_feeding, current_scope, fed_by, trace
from distributary.variables import PerReplica

if TYPE_CHECKING:
    from distributary.servers._per_worker import Feed, RemoteSource


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
        feed: The feed that makes the data, if the coordinator sends it.
    """

    kind: str
    number: int
    columns: list[list[Handle]]
    tree: jax.tree_util.PyTreeDef
    feed: "Feed | None"

    @property
    def handles(self) -> list[Handle]:
        """The handles of all columns."""
        return [handle for column in self.columns for handle in column]

    @property
    def leaves(self) -> list[jax.ShapeDtypeStruct]:
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
        worker: What a worker does.
        programs: The programs that a worker needs for it.
        constants: Arrays that the function has captured.
        updates: What each server does with what is pushed, and the program for it, by server
            number.
        refusals: The reason why a variable is sent as a whole although only rows of it are looked
            up, by name of the variable.
        cells: For every variable, a function that returns it, or None once it was collected.
        rebuild: Converts the results into the return value of the function.
    """

    sources: list[Source]
    worker: WorkerPlan
    programs: list[Program]
    constants: list[np.ndarray]
    updates: dict[int, tuple[Update, Program]]
    refusals: dict[str, str]
    cells: list[Callable[[], Any]]
    rebuild: Callable[..., Nest]


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
        divides_rows: Whether the devices of the worker share the rows of its arguments and data.
    """

    def __init__(
        self,
        data_avals: Sequence[jax.ShapeDtypeStruct] | None,
        source_of: Callable[[DatasetIterator], "RemoteSource"],
    ) -> None:
        self._source_of = source_of
        self.sources: list[Source] = []
        self.position = 0
        self.divides_rows = False
        self._data_avals = None if data_avals is None else list(data_avals)

    def take(self, kind: str, number: int, element: Nest, feed: "Feed | None" = None) -> Nest:
        """Takes data of the worker, with tracers as leaves; in `Strategy.run`, a replica's data.

        Args:
            kind: Kind of the `Source`.
            number: Number of the `Source`.
            element: The structure of the data, with shapes and dtypes as leaves.
            feed: The feed of the `Source`.
        """
        if self.position == len(self.sources):
            if self._data_avals is not None:
                avals = self._data_avals
                element = jax.tree.map(lambda _: avals.pop(0), element)
            is_column = lambda node: isinstance(node, PerReplica)
            columns, tree = jax.tree.flatten(element, is_leaf=is_column)
            handles = [_handles_of(column, f"{kind} {number}") for column in columns]
            self.sources.append(Source(kind, number, handles, tree, feed))
        source = self.sources[self.position]
        self.position += 1
        return jax.tree.unflatten(source.tree, [_read(column) for column in source.columns])

    def give(self, iterator: Any) -> Nest:
        """Takes the next element of a coordinator's iterator, which is sent to the workers."""
        source = self._source_of(iterator)
        return self.take("fed", source.number, source.element_spec, source.feed)

    def begin(self, dataset: object, is_plain: bool) -> Any:
        """Raises an error: a scheduled function cannot loop over a dataset."""
        raise ContextError(
            f"A scheduled function iterates over {shown(dataset)} while it is traced, so every"
            " closure would compute with the same elements. Pass iter(dataset) to schedule and call"
            " next(iterator) in the function, or use create_per_worker_dataset."
        )

    def leave(self, error: Exception) -> None:
        """Raises `error`, as a closure cannot fall back to running on the host."""
        raise error


def _handles_of(column: jax.ShapeDtypeStruct | PerReplica, name: str) -> list[Handle]:
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
            "The next batch of a worker has parts of different sizes for its replicas, so"
            " next(iterator) cannot be called inside Strategy.run. Call it outside:"
            " strategy.run(step, args=(next(iterator),))."
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


def share_rows() -> None:
    """Lets the devices of a worker share the rows of what the traced closure is given.

    The closure sees whole arrays, as on one device, and XLA divides its program.
    """
    closure = current_trace()
    assert closure is not None
    closure.divides_rows = True


def plan_of(
    function: Callable[..., Nest],
    avals: Sequence[jax.ShapeDtypeStruct],
    data_avals: Sequence[jax.ShapeDtypeStruct] | None,
    shards_of: Callable[[Handle], Sequence[Shard]],
    sparse_update: SparseUpdate,
    num_replicas: int,
    source_of: Callable[[DatasetIterator], "RemoteSource"],
) -> Plan:
    """Traces the function of a closure and returns its plan; call it in the strategy's scope.

    Args:
        function: Function of the argument arrays, which returns the result of the closure.
        avals: Shapes and dtypes of the arguments.
        data_avals: Shapes and dtypes of the data that workers supply; None to use those of its
            sources.
        shards_of: Returns the shards of a handle's variable, in the order of dim 0.
        sparse_update: What servers do with rows that are not pushed.
        num_replicas: Number of devices of a worker.
        source_of: See `ClosureTrace`.

    Raises:
        InvalidTypeError: if the function returns something other than arrays.
        UnsupportedError: if its updates cannot be split over the servers.
    """
    closure = ClosureTrace(data_avals, source_of)
    step, captures, rebuild = _traced(function, avals, closure, num_replicas, shards_of)
    split = split_over_servers(step)
    rows = rows_of(step, split)
    updates = {
        server: _update_of(part, rows, sparse_update) for server, part in split.servers.items()
    }
    worker, programs = _worker_plan(step, split, rows, updates)
    variables = dict.fromkeys(step.handles.values())
    return Plan(
        closure.sources,
        worker,
        programs,
        # Copies, so that a worker that joins later gets the same values as the others.
        [copy_of(capture) for capture in captures],
        updates,
        rows.refusals,
        [handle.cell for handle in variables if handle.cell is not None],
        rebuild,
    )


def _traced(
    function: Callable[..., Nest],
    avals: Sequence[jax.ShapeDtypeStruct],
    closure: ClosureTrace,
    num_replicas: int,
    shards_of: Callable[[Handle], Sequence[Shard]],
) -> tuple[Step, list[Array], Callable[..., Nest]]:
    """Returns the step of a function, the arrays it has captured, and what makes its result."""
    rebuilds: list[Callable[..., Nest]] = []

    def flat(*arrays: Array) -> list[Array]:
        outs, rebuild = split_result(function(*arrays), "ClusterCoordinator.schedule")
        rebuilds[:] = [rebuild]
        return outs

    with fed_by(closure):
        pure, _ = trace(flat, avals, "function", Subject(function), is_for_workers=num_replicas > 1)
    jaxpr, captures = pure.jaxpr, pure.captures
    num_devices = num_replicas if has_replicas(jaxpr.eqns) else 1
    if num_devices > 1:
        of_inputs = [*[None] * len(captures), *pure.handles, *[None] * len(avals)]
        is_split = [handle is not None and handle.per_replica for handle in of_inputs]
        jaxpr, consts = per_device(jaxpr, is_split, num_devices)
        captures = [*consts, *captures]
    data = _inputs_of_data(closure.sources)
    inputs: list[Origin] = [("constant", i) for i in range(len(captures))]
    shards: dict[int, Shard] = {}
    handles: dict[int, Handle] = {}
    positions: dict[Handle, range] = {}
    for handle in pure.handles:
        start = len(inputs)
        if handle in data:
            inputs.append(data[handle])
            continue
        for shard in shards_of(handle):
            shards[len(inputs)], handles[len(inputs)] = shard, handle
            inputs.append(("state", shard.number))
        positions[handle] = range(start, len(inputs))
    inputs += [("argument", i) for i in range(len(avals))]
    sizes = {h: [shards[i].num_rows for i in at] for h, at in positions.items() if len(at) > 1}
    jaxpr, constants = in_parts(
        jaxpr,
        {i: sizes[h] for i, h in enumerate(pure.handles, len(captures)) if h in sizes},
        {i: sizes[h] for i, h in enumerate(pure.written, pure.num_outs) if h in sizes},
    )
    olds = [i for handle in pure.written for i in positions[handle]]
    step = Step(
        jaxpr,
        constants,
        inputs,
        shards,
        handles,
        dict(enumerate(olds, pure.num_outs)),
        num_devices,
        num_replicas if closure.divides_rows else 1,
    )
    return step, captures, rebuilds[0]


def _inputs_of_data(sources: Sequence[Source]) -> dict[Handle, Origin]:
    """Returns the input that each handle of the sources stands for."""
    inputs: dict[Handle, Origin] = {}
    leaf = 0
    for handle in [handle for source in sources for handle in source.handles]:
        inputs[handle] = "replicas" if handle.per_replica else "data", leaf
        leaf += handle.num_copies or 1
    return inputs


def _update_of(
    part: ServerPart, rows: RowSplit, sparse_update: SparseUpdate
) -> tuple[Update, Program]:
    """Returns the update of a server, and its program."""
    updated, run = rows_of_update(part, rows, sparse_update)
    avals = part.update.in_avals
    buckets: list[int | None] = [None] * len(avals)
    for entry in updated:
        if not entry.is_whole:
            for i in (*entry.states, *(len(part.states) + i for i in entry.pushes)):
                buckets[i] = entry.bucket
    program = export_function(run, avals, buckets)
    return Update(program.name, part.states, part.outputs, updated), program


def _worker_plan(
    step: Step, split: ServerSplit, rows: RowSplit, updates: Mapping[int, tuple[Update, Program]]
) -> tuple[WorkerPlan, list[Program]]:
    """Returns what a worker does, and the programs that it needs for it."""
    origins = [step.inputs[i] for i in rows.inputs]
    programs: list[Program] = []
    row_plan = None
    if rows.spaces:
        num_lookups = sum(len(space.lookups) for space in rows.spaces)
        origins += [("rows", i) for i in range(len(rows.buffers))]
        origins += [("position", i) for i in range(num_lookups)]
        of_ids = [step.inputs[i] for i in rows.ids_inputs]
        programs.append(_exported(rows.ids, of_ids, step, split_outputs=True))
        row_plan = RowPlan(programs[0].name, of_ids, rows.spaces, rows.buffers)
    if step.num_shares > 1:
        has_rows = [
            kind in ("argument", "data", "replicas") and len(aval.shape) > 0
            for (kind, _), aval in zip(origins, rows.worker.in_avals, strict=True)
        ]
        program = export_divided(rows.worker, has_rows, step.num_shares)
    else:
        program = _exported(rows.worker, origins, step, split_outputs=False)
    pulls: dict[int, list[int]] = {}
    for shard in [step.shards[i] for i in rows.inputs if i in step.shards]:
        pulls.setdefault(shard.server, []).append(shard.number)
    pushes = [
        Push(server, update.name, split.servers[server].pushes, update.rows)
        for server, (update, _) in updates.items()
    ]
    of_servers = list(pulls.items()), pushes
    plan = WorkerPlan(program.name, origins, step.num_results, *of_servers, row_plan)
    return plan, [program, *programs]


def _exported(
    closed: ClosedJaxpr, origins: Sequence[Origin], step: Step, split_outputs: bool
) -> Program:
    is_split = [kind in ("replicas", "position") for kind, _ in origins]
    return export_per_device(closed, is_split, step.num_devices, split_outputs)
