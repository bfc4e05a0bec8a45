"""Programs that tasks send to each other, and plans: what to do with them for every closure.

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

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, final

import jax
import jax.export
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary.data import DatasetIterator
from distributary.devices import REPLICA_AXIS, Nest, dispatcher_for, make_abstract_mesh, make_mesh
from distributary.engine import split_result
from distributary.errors import ContextError, InvalidValueError, UnsupportedError, shown
from distributary.jaxprs import Array, has_replicas
from distributary.servers._messages import copy_of
from distributary.servers._rows import (
    RowSpace,
    RowSplit,
    SparseUpdate,
    TablePart,
    UpdatedRows,
    rows_of,
    rows_of_update,
)
from distributary.servers._split import (
    Origin,
    ServerPart,
    ServerSplit,
    Shard,
    Step,
    in_parts,
    per_device,
    split_over_servers,
)
from distributary.tracing import Handle, Subject, current_feeding, current_scope, fed_by, trace
from distributary.variables import PerReplica
from distributary.xla_cpu import rewritten_for_cpus, with_partial_sums

_DIGEST_BYTES = hashlib.sha256().digest_size


@final
@dataclass(frozen=True, slots=True)
class Program:
    """A serialized program.

    Attributes:
        name: Hash of the serialized `jax.export.Exported`, in hex.
        content: The hash, followed by the serialized bytes.
    """

    name: str
    content: bytes


def export_per_device(
    closed: ClosedJaxpr, origins: Sequence[Origin], num_devices: int, split_outputs: bool = False
) -> Program:
    """Exports a jaxpr as a program in which each device runs it, along the axis `"replica"`.

    Args:
        closed: The closed jaxpr that each device runs.
        origins: The origins of its inputs, as in `WorkerPlan`. Each device has its own "replicas"
            and "position", a row of `[device, *shape]`.
        num_devices: Number of devices. With one, `origins` are ignored.
        split_outputs: Whether each device has its own outputs, which become such rows.
    """
    of_one: Callable[..., list[Any]] = jaxpr_as_fun(rewritten_for_cpus(closed))
    if num_devices == 1:
        return export_function(of_one, closed.in_avals, [None] * len(closed.in_avals))
    is_split = [kind in ("replicas", "position") for kind, _ in origins]
    mesh = make_abstract_mesh(num_devices)
    specs = tuple([P(REPLICA_AXIS) if split else P() for split in is_split])

    def run(*inputs: Any) -> list[Any]:
        values = [x[0] if split else x for x, split in zip(inputs, is_split, strict=True)]
        outs = of_one(*values)
        return [out[None] for out in outs] if split_outputs else outs

    on_all = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=specs,
        out_specs=P(REPLICA_AXIS) if split_outputs else P(),
        check_vma=False,
    )
    structs = [
        jax.ShapeDtypeStruct((num_devices, *aval.shape) if split else aval.shape, aval.dtype)
        for aval, split in zip(closed.in_avals, is_split, strict=True)
    ]
    shardings = tuple([NamedSharding(mesh, spec) for spec in specs])
    return _exported(jax.jit(on_all, in_shardings=shardings), structs)


def export_divided(closed: ClosedJaxpr, has_rows: Sequence[bool], num_devices: int) -> Program:
    """Exports a jaxpr as a program that XLA divides over devices, by the rows of a batch.

    Args:
        closed: The closed jaxpr, of whole arrays.
        has_rows: For every input, whether its dim 0 counts rows of the batch, or devices.
        num_devices: Number of devices.
    """
    mesh = make_abstract_mesh(num_devices)
    whole, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P(REPLICA_AXIS))
    dims = [0 if rows else None for rows in has_rows]
    step = with_partial_sums(jaxpr_as_fun(closed), dims, mesh)

    def run(*inputs: Any) -> list[Any]:
        rows = [
            jax.lax.with_sharding_constraint(x, divided) if rows else x
            for x, rows in zip(inputs, has_rows, strict=True)
        ]
        return list(step(*rows))

    # JAX takes no uneven rows from outside of a program.
    shardings = [
        divided if rows and aval.shape[0] % num_devices == 0 else whole
        for aval, rows in zip(closed.in_avals, has_rows, strict=True)
    ]
    jitted = jax.jit(run, in_shardings=tuple(shardings), out_shardings=whole)
    return _exported(jitted, closed.in_avals)


def export_function(
    run: Callable[..., list[Any]], avals: Sequence[Any], buckets: Sequence[int | None]
) -> Program:
    """Exports a function as a program from a flat list of arrays to another.

    Args:
        run: The function.
        avals: Shapes and dtypes of its arguments.
        buckets: For every argument, None or a number. Arguments with a number can have any number
            of rows instead of the one in their shape, but all with the same number have equally
            many.

    Raises:
        UnsupportedError: if the function calls back into Python.
    """
    names = sorted({bucket for bucket in buckets if bucket is not None})
    sizes: dict[int | None, Any] = {}
    if names:
        symbols = jax.export.symbolic_shape(",".join(f"rows_{name}" for name in names))
        sizes.update(zip(names, symbols, strict=True))
    structs = [
        jax.ShapeDtypeStruct(
            aval.shape if bucket is None else (sizes[bucket], *aval.shape[1:]), aval.dtype
        )
        for aval, bucket in zip(avals, buckets, strict=True)
    ]
    return _exported(jax.jit(run), structs)


def _exported(jitted: jax.stages.Wrapped, structs: Sequence[jax.ShapeDtypeStruct]) -> Program:
    try:
        serialized = bytes(jax.export.export(jitted, platforms=["cpu"])(*structs).serialize())
    except NotImplementedError as error:
        if "callback" not in str(error):
            raise
        raise UnsupportedError(
            "A step calls back into Python, as jax.debug.print and jax.pure_callback do, but"
            f" workers get programs and no Python code ({error}). Return the values that you want"
            " to print, and fetch them."
        ) from error
    digest = hashlib.sha256(serialized).digest()
    return Program(digest.hex(), digest + serialized)


@final
class ProgramCache:
    """The programs that a task knows, by name.

    Tasks in one process that have the same devices compile each program only once.

    Args:
        devices: Devices that run the programs; None for the first CPU device.
    """

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        self._devices = None if devices is None else tuple(devices)
        self._calls: dict[str, Callable[..., Sequence[Any]]] = {}

    def add(self, content: bytes) -> str:
        """Adds the content of a program, and returns its name.

        Raises:
            InvalidValueError: if the program is damaged, calls custom code that is not known to be
                harmless, or is for another number of devices.
        """
        digest, serialized = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        # Checked here, because XLA's parser crashes on damaged programs.
        if hashlib.sha256(serialized).digest() != digest:
            raise InvalidValueError(f"A program of {len(content)} bytes has been damaged.")
        name = digest.hex()
        if name not in self._calls:
            with _loading:
                devices = self._devices or (jax.local_devices(backend="cpu")[0],)
                self._calls[name] = _loaded(serialized, devices)
        return name

    def run(self, name: str, inputs: Sequence[Any]) -> list[jax.Array]:
        """Runs a program.

        Args:
            name: Name of the program.
            inputs: Arrays. An array `[device, *shape]` can also be a list of arrays `[*shape]`.
        """
        return list(self._calls[name](*inputs))


_loading = threading.Lock()


@functools.lru_cache(maxsize=256)
def _loaded(serialized: bytes, devices: tuple[jax.Device, ...]) -> Callable[..., Sequence[Any]]:
    exported = jax.export.deserialize(bytearray(serialized))
    _check_custom_calls(exported)
    if exported.nr_devices > 1:
        return _on_devices(exported, devices)
    # Programs are exported for CPUs, and JAX's default device may be another one.
    call = jax.jit(exported.call, in_shardings=jax.sharding.SingleDeviceSharding(devices[0]))
    if not any(jax.export.is_symbolic_dim(dim) for aval in exported.in_avals for dim in aval.shape):
        call.lower(*exported.in_avals).compile()  # not while others wait for the first result

    def run(*inputs: Any) -> Any:
        return call(*[np.stack(x) if isinstance(x, list) else x for x in inputs])

    return run


def _on_devices(
    exported: jax.export.Exported, devices: tuple[jax.Device, ...]
) -> Callable[..., Sequence[Any]]:
    if exported.nr_devices != len(devices):
        raise InvalidValueError(
            f"A program is for {exported.nr_devices} devices, and there are {len(devices)}. All"
            " workers must have the same number of devices, as long as the chief runs."
        )
    mesh = make_mesh(devices)
    stacked = NamedSharding(mesh, P(REPLICA_AXIS))
    call = jax.jit(exported.call, in_shardings=exported.in_shardings_jax(mesh))
    call.lower(*exported.in_avals).compile()
    dispatcher = dispatcher_for(devices)

    def placed(value: object) -> Any:
        if not isinstance(value, list):
            return value
        rows = jax.device_put([row[None] for row in value], list(devices))
        shape = (len(value), *value[0].shape)
        return jax.make_array_from_single_device_arrays(shape, stacked, rows)

    def run(*inputs: Any) -> Any:
        arrays = map(placed, inputs)
        return dispatcher.run(call, lambda outs: outs[0] if outs else None, *arrays)

    return run


# The custom calls to which JAX lowers numeric functions on CPUs. They touch only their operands.
_HARMLESS = re.compile(
    r"Sharding|SPMDFullToShardShape|SPMDShardToFullShape|ducc_fft|(lapack_\w+_ffi)|mhlo\.\w+|TopK"
    r"|ApproxTopK|cpu_threefry2x32|shape_assertion"
)
_CUSTOM_CALL = re.compile(r'custom_call @"?([^"\s(]+)|call_target_name = "([^"]*)"')


def _check_custom_calls(exported: jax.export.Exported) -> None:
    for names in _CUSTOM_CALL.findall(exported.mlir_module()):
        name = next(filter(None, names), "")
        if _HARMLESS.fullmatch(name) is None:
            raise InvalidValueError(
                f"A program calls {name!r}, which is not among the functions that a program from"
                " another process may call. Steps are made of JAX operations, without host"
                " callbacks and custom kernels."
            )


# Plans: what workers and servers do for every closure of a function, and for rows of tables.
#
# The coordinator makes them once for a function and shapes of data, and sends them as JSON. A
# closure is then no more than its number, its arguments and the number of the function.


@final
@dataclass(frozen=True)
class Update:
    """The work of a server on values that a worker pushes.

    The coordinator defines it; workers only refer to it, by its name.

    Attributes:
        program: Name of the program that computes new states from states and pushed values.
        states: Numbers of the variables that it reads.
        outputs: Numbers of the variables that it changes.
        rows: The states, pushed values and outputs that are only rows of tables.
    """

    program: str
    states: list[int]
    outputs: list[int]
    rows: list[UpdatedRows]

    @functools.cached_property
    def name(self) -> str:
        """A hash of the update, so that two functions with the same update share it."""
        return hashlib.sha256(json.dumps(astuple(self)).encode()).hexdigest()


@final
@dataclass(frozen=True, slots=True)
class Push:
    """The values that a worker pushes to one server at the end of a closure.

    Attributes:
        server: Number of the server.
        update: Name of the update that they are for.
        values: Their positions among the pushed values.
        rows: Those that are only rows of tables.
    """

    server: int
    update: str
    values: list[int]
    rows: list[UpdatedRows]


@final
@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows that a closure needs, and where to find them.

    Attributes:
        program: Name of the program that computes the numbers of the rows.
        inputs: The origins of its inputs, as in `WorkerPlan`.
        spaces: Groups of tables that are looked up by the same numbers.
        buffers: For every table of which the worker takes rows, its space and the variables that
            hold its rows.
    """

    program: str
    inputs: list[Origin]
    spaces: list[RowSpace]
    buffers: list[tuple[int, list[TablePart]]]

    def find(self, numbers: Sequence[Any]) -> "list[FoundRows]":
        """Returns the rows to take of every space.

        Args:
            numbers: The results of `program`.
        """
        left = iter(numbers)
        return [
            _find(space, [np.asarray(next(left)) for _ in space.lookups]) for space in self.spaces
        ]


@final
@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The work of a worker for a closure.

    Attributes:
        program: Name of the program that it runs.
        inputs: The origin of each input of the program. `("data", i)` is the i-th leaf of the data
            of all sources; `("replicas", i)` is that leaf and the following ones, one per replica;
            `("argument", i)` is a leaf of the arguments; `("state", n)` is variable n;
            `("constant", i)` is one of the arrays that the function has captured; `("rows", i)`
            holds the rows of the i-th buffer of `rows`; `("position", i)` says where the numbers of
            the i-th lookup are among these rows.
        num_results: Number of outputs that are returned. They come first; the others are pushed.
        pulls: The numbers of the variables that it reads as a whole, for each server.
        pushes: The values that it pushes, for each server.
        rows: The tables of which it takes only rows; None if there are none.
    """

    program: str
    inputs: list[Origin]
    num_results: int
    pulls: list[tuple[int, list[int]]]
    pushes: list[Push]
    rows: RowPlan | None


@final
@dataclass(frozen=True, slots=True)
class FoundRows:
    """The rows that a closure takes of a space.

    Attributes:
        rows: The int64 numbers of the rows, each once and in order.
        positions: For every lookup, the int32 positions of its numbers in `rows`, in the shape of
            the numbers. Those of numbers that are no rows mean nothing; steps do not use them.
        capacity: Number of rows in the buffers of the space; those after `rows` are zero.
    """

    rows: np.ndarray
    positions: list[np.ndarray]
    capacity: int

    def part(self, start: int, size: int) -> tuple[slice, np.ndarray]:
        """Returns the slice of `rows` that a variable holds, and their numbers in the variable."""
        low, high = np.searchsorted(self.rows, (start, start + size))
        return slice(low, high), self.rows[low:high] - start


def _find(space: RowSpace, numbers: Sequence[np.ndarray]) -> FoundRows:
    end = max(at.start + at.size for at in space.lookups)  # the number of no row
    flat = [array.reshape(-1).astype(np.int64) for array in numbers]
    wanted = [
        array.clip(0, at.size - 1) + at.start
        if at.is_clipped
        else np.where((array >= 0) & (array < at.size), array + at.start, end)
        for at, array in zip(space.lookups, flat, strict=True)
    ]
    rows, inverse = np.unique(np.concatenate(wanted), return_inverse=True)
    inverse = inverse.reshape(-1).astype(np.int32)
    parts = np.split(inverse, np.cumsum([len(array) for array in flat])[:-1])
    positions = [part.reshape(a.shape) for part, a in zip(parts, numbers, strict=True)]
    return FoundRows(rows[rows < end], positions, space.capacity)


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
    feed: Any

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
        source_of: Callable[[DatasetIterator], Any],
    ) -> None:
        self._source_of = source_of
        self.sources: list[Source] = []
        self.position = 0
        self.divides_rows = False
        self._data_avals = data_avals

    def take(self, kind: str, number: int, element: Nest, feed: Any = None) -> Nest:
        """Takes data of the worker, with tracers as leaves; in `Strategy.run`, a replica's data.

        Args:
            kind: Kind of the `Source`.
            number: Number of the `Source`.
            element: The structure of the data, with shapes and dtypes as leaves.
            feed: The feed of the `Source`.
        """
        taken = [(source.kind, source.number) for source in self.sources[self.position :][:1]]
        if taken != [(kind, number)]:
            del self.sources[self.position :]  # an earlier trace has taken others from here on
            if self._data_avals is not None:
                num_taken = sum(len(source.leaves) for source in self.sources)
                avals = iter(self._data_avals[num_taken:])
                element = jax.tree.map(lambda _: next(avals), element)
            is_column = lambda node: isinstance(node, PerReplica)
            columns, tree = jax.tree.flatten(element, is_leaf=is_column)
            handles = [_handles_of(column, f"{kind} {number}") for column in columns]
            self.sources.append(Source(kind, number, handles, tree, feed))
        source = self.sources[self.position]
        self.position += 1
        return jax.tree.unflatten(source.tree, [_read(column) for column in source.columns])

    def give(self, iterator: Any) -> Nest:
        """Takes the next element of a coordinator's iterator, which is sent to the workers."""
        return self._source_of(iterator).take()

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
    source_of: Callable[[DatasetIterator], Any],
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
    del closure.sources[closure.position :]  # an earlier trace has taken more
    jaxpr, captures = pure.jaxpr, pure.captures
    num_devices = num_replicas if has_replicas(jaxpr.eqns) else 1
    if num_devices > 1:
        of_inputs = [*[None] * len(captures), *pure.handles, *[None] * len(avals)]
        is_split = [handle is not None and handle.per_replica for handle in of_inputs]
        jaxpr, consts = per_device(jaxpr, is_split, num_devices)
        captures = [*consts, *captures]
    data: dict[Handle, Origin] = {}
    leaf = 0
    for handle in [handle for source in closure.sources for handle in source.handles]:
        data[handle] = "replicas" if handle.per_replica else "data", leaf
        leaf += handle.num_copies or 1
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
        programs.append(export_per_device(rows.ids, of_ids, step.num_devices, split_outputs=True))
        row_plan = RowPlan(programs[0].name, of_ids, rows.spaces, rows.buffers)
    if step.num_shares > 1:
        has_rows = [
            kind in ("argument", "data", "replicas") and len(aval.shape) > 0
            for (kind, _), aval in zip(origins, rows.worker.in_avals, strict=True)
        ]
        program = export_divided(rows.worker, has_rows, step.num_shares)
    else:
        program = export_per_device(rows.worker, origins, step.num_devices)
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
