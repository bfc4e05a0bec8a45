"""Programs that tasks send to each other, and plans: what to do with them for every closure."""

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, final

import jax.export
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.typing import ArrayLike

from distributary.devices import REPLICA_AXIS, dispatcher_for, make_abstract_mesh, make_mesh
from distributary.errors import InvalidValueError, UnsupportedError
from distributary.servers._messages import aligned_empty
from distributary.servers._rows import RowSpace, TablePart, UpdatedRows
from distributary.servers._split import Origin
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
    closed: ClosedJaxpr, is_split: Sequence[bool], num_devices: int, split_outputs: bool = False
) -> Program:
    """Exports a jaxpr as a program in which each device runs it, along the axis `"replica"`.

    Args:
        closed: The closed jaxpr that each device runs.
        is_split: For every input, whether each device has its own, a row of `[device, *shape]`.
        num_devices: Number of devices. With one, `is_split` is ignored.
        split_outputs: Whether each device has its own outputs, which become such rows.
    """
    of_one: Callable[..., list[Any]] = jaxpr_as_fun(rewritten_for_cpus(closed))
    if num_devices == 1:
        return export_function(of_one, closed.in_avals, [None] * len(closed.in_avals))
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


def take_rows(array: ArrayLike, numbers: np.ndarray) -> np.ndarray:
    """Returns rows of an array.

    Raises:
        InvalidValueError: if the array does not have these rows.
    """
    source = np.asarray(array)
    check_rows(numbers, source.shape)
    return source.take(numbers, axis=0, mode="clip")  # checked above; "raise" is slower


def check_rows(numbers: np.ndarray, shape: Sequence[int]) -> None:
    """Checks that numbers are those of rows of an array, each once and in order.

    Raises:
        InvalidValueError: if they are not.
    """
    if numbers.ndim != 1 or numbers.dtype != np.int64 or not shape:
        raise InvalidValueError(
            f"Rows of a variable of shape {tuple(shape)} are asked for by an array {numbers.dtype}"
            f"{list(numbers.shape)}, expected int64[number of rows]."
        )
    if len(numbers) and not (
        numbers[0] >= 0 and numbers[-1] < shape[0] and (np.diff(numbers) > 0).all()
    ):
        raise InvalidValueError(
            f"Rows {numbers.min()} to {numbers.max()} of a variable of shape {tuple(shape)} are"
            f" asked for, expected numbers from 0 to {shape[0] - 1}, each once and in order."
        )


def padded(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns rows, padded with zeros to a number of rows."""
    out = aligned_empty((num_rows, *rows.shape[1:]), rows.dtype)
    out[: len(rows)], out[len(rows) :] = rows, 0
    return out


def rows_in_zeros(rows: np.ndarray, numbers: np.ndarray, size: int) -> np.ndarray:
    """Returns an array of `size` rows, with `rows` at `numbers` and zeros elsewhere."""
    check_rows(numbers, (size,))
    out = np.zeros((size, *rows.shape[1:]), rows.dtype)
    out[numbers] = rows
    return out


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
