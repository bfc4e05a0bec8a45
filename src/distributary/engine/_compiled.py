"""A compiled program together with the variables it reads and writes."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary.datasets import DatasetIterator
from distributary.dispatch import Dispatcher, JobEvent, interrupts, job_programs, latest_program
from distributary.engine._cache import WeakIdentity
from distributary.errors import ContextError, InvalidTypeError
from distributary.inputs import StepCounts
from distributary.job import copies
from distributary.topology import (
    REPLICA_AXIS,
    ProgramKind,
    for_target,
    inside_jax_trace,
    is_left_over,
    mesh_of_values,
    own_copies,
    put_replicated,
    shard_dim,
    stored_shards,
    whole_shards,
)
from distributary.tracing import FunctionProgram, Handle, ReplicaProgram, describe_value
from distributary.values import DistributedValues, IndexedSlices, same_structure
from distributary.variables import StateList, Variable, joined
from distributary.xla_cpu import with_cpu_rewrites


class VariableGoneError(Exception):
    """Raised if a variable of a cached program was collected; the caller traces again."""


# An output of at most this size may be kept until the program that made it has finished.
_MAX_TOKEN_BYTES = 1 << 16


@final
class Compiled:
    """A program on devices: collects its variables, dispatches it and stores what it wrote.

    Args:
        program: The traced program.
        replicated: Sharding of values that all replicas share; None for JAX's default device.
        stacked: Sharding of `[replica, *shape]`; None on one device.
        mesh: Devices on which the program runs; None for JAX's default device.
        dispatcher: Limits the number of programs in flight.
        rebuild: Function from the outputs of the program to the result of the function.
        name: Name of the program, for people.
        counts: Object that counts its runs.
        home: Sharding of the device of the variables; None if they lie where the replicas compute.
        storage: Sharding of the variables there.
    """

    __slots__ = (
        "__weakref__",
        "_avals",
        "_call",
        "_captures",
        "_dispatcher",
        "_event",
        "_has_collectives",
        "_is_of_job",
        "_is_staged",
        "_name",
        "_num_single_runs",
        "_numbers",
        "_read_only",
        "_rebuild",
        "_replicated",
        "_shardings",
        "_states",
        "_token_of",
        "_written",
        "program",
        "runs",
    )

    def __init__(
        self,
        program: ReplicaProgram | FunctionProgram,
        replicated: Any,
        stacked: Any,
        mesh: Any,
        dispatcher: Dispatcher,
        rebuild: Callable[[Sequence[Any]], Any],
        name: str,
        counts: StepCounts,
        home: Any = None,
        storage: Any = None,
    ) -> None:
        self.program = program
        self.runs = counts.runs_of(self)
        self._avals: Any = None  # of the arguments of the first call
        self._name = name
        self._rebuild = rebuild
        self._replicated = replicated
        # None is the sharding of arguments that have none; they can go anywhere.
        self._shardings = None if replicated is None else (stacked, replicated, None)
        self._has_collectives = replicated is not None and home is None
        self._is_of_job = replicated is not None and not replicated.is_fully_addressable
        # The event that the other workers have to begin, too, and the arguments that are numbers.
        self._event: JobEvent | None = None
        self._numbers: list[int] = []
        self._is_staged = home is not None
        self._dispatcher = dispatcher
        self._written = [handle.cell for handle in program.written]
        self._read_only = [handle.cell for handle in program.read_only]
        # The list in which the written variables keep their arrays together, if they do.
        self._states: Callable[[], StateList | None] = _no_states
        self._num_single_runs = 0
        self._call: Any
        self._captures: Sequence[Sequence[Any]]
        if home is not None:
            from distributary.engine._staged import StagedProgram

            self._captures = program.captures
            self._token_of = _last_output
            self._call = StagedProgram(program, stacked, replicated.mesh, home, storage)
            return
        self._captures = [
            [self._place(capture) for capture in captures] for captures in program.captures
        ]
        written_shardings = [_sharding_of(handle) for handle in program.written]
        read_shardings = [_sharding_of(handle) for handle in program.read_only]
        # The bounded dispatcher needs an output on every device to see when the program has
        # finished: the first result if it is small, else one that is made for this.
        has_token = dispatcher.bounded and not _has_small_first_output(program)
        token_sharding = stacked if has_token else None
        read = set(program.handles)
        trains = any(h in read and h.cell().trainable for h in program.written)
        self._token_of = _last_output if has_token else _first_output

        def run(captures: Any, written: Any, read_only: Any, args: Any) -> Any:
            written = map(_whole, written, program.written, written_shardings)
            read_only = map(_whole, read_only, program.read_only, read_shardings)
            new, outs = program(captures, list(written), list(read_only), args)
            new = [
                value if sharding is None else stored_shards(value, sharding)
                for value, sharding in zip(new, written_shardings, strict=True)
            ]
            token = None
            if token_sharding is not None:
                zeros = jnp.zeros(len(token_sharding.device_set), jnp.int8)
                token = jax.lax.with_sharding_constraint(zeros, token_sharding)
            return new, outs, token

        jitted = jax.jit(with_cpu_rewrites(run, mesh), donate_argnums=1)
        self._call = for_target(jitted, mesh, ProgramKind(name, trains))

    def _place(self, value: Any) -> Any:
        """Puts a value where the program can take it."""
        if isinstance(value, jax.core.Tracer):
            raise _traced(value, "Strategy.run or a distributary.function")
        if self._replicated is None or not isinstance(value, jax.Array):
            return value
        if value.sharding.device_set == self._replicated.device_set:
            return value
        return put_replicated(value, self._replicated)

    def lowered(self, args: Sequence[Any]) -> Any:
        """Returns the program lowered for `args`, to inspect what XLA compiles."""
        written = [cell()._value for cell in self._written]
        read_only = [cell()._value for cell in self._read_only]
        return self._call.lower(self._captures, written, read_only, args)

    def collective_bytes(self) -> int:
        """Returns the size of the arrays that one run sends through collectives."""
        if not self._has_collectives:
            return 0
        from distributary.compilation import collective_bytes

        return collective_bytes(self.lowered(self._avals).compile().as_text())

    def __call__(self, args: Sequence[Any]) -> Any:
        """Runs the program once and returns the result of the function.

        Raises:
            VariableGoneError: if one of its variables does not exist any more.
            ContextError: inside `jax.jit`.
        """
        if inside_jax_trace():
            raise _inside_jax("Strategy.run or a distributary.function")
        shardings = self._shardings
        if shardings is not None:
            for arg in args:
                if getattr(arg, "sharding", None) not in shardings:
                    args = [self._place(arg) for arg in args]
                    break
        # For other threads, reading, donating and replacing the state has to be one step.
        with latest_program.lock:
            states = self._states()
            if states is not None and states.withheld:
                states = None
            variables: list[Any] = []
            shared: list[Any] = []
            try:
                cells = self._read_only
                read_only = [cell()._value for cell in cells] if cells else []
                if states is not None:
                    written = states.arrays
                else:
                    variables = [cell() for cell in self._written]
                    written = [v._value for v in variables if not v._shared]
            except AttributeError:
                raise VariableGoneError from None
            if len(written) < len(variables):
                shared = [v for v in variables if v._shared]
                fresh = iter(own_copies([v._value for v in shared]))
                written = [next(fresh) if v._shared else v._value for v in variables]
            if self._is_of_job:
                self._begin(args)
            if latest_program.timer is not None:
                latest_program.begin()
            made: list[Any] = []
            given = self._captures, written, read_only, args
            try:
                if self._is_staged:
                    with interrupts.watched(), interrupts:
                        self._dispatcher.run_into(made, self._call, self._token_of, given)
                else:
                    self._dispatcher.run_into(made, self._call, self._token_of, given)
            finally:
                # The program has consumed the old values, so the new ones must be stored. Ctrl-C
                # may have come already, or may come here: Python raises it at calls and at the end
                # of each round of a loop.
                if made:
                    new, outs, _ = made[0]
                    if states is not None:
                        states.arrays = new
                    else:
                        try:
                            for variable, value in zip(variables, new, strict=True):
                                variable._value = value
                        except BaseException:
                            for variable, value in zip(variables, new, strict=True):
                                variable._value = value
                            raise
            if states is None:
                for variable in shared:
                    variable._shared = False
                self._join(variables)
            if not self.runs.num_runs:
                self._avals = jax.tree.map(placed_struct_of, list(args))
            self.runs.num_runs += 1
            result = outs[0] if outs else None
            latest_program.end(new[0] if new else result, result)
            if self._is_of_job:
                copies.num_left -= 1
                if copies.num_left <= 0:
                    self._compare_copies(new)
        return self._rebuild(outs)

    def _begin(self, args: Sequence[Any]) -> None:
        """Checks that all workers run this program now, with the same numbers."""
        event = self._event
        if event is None:
            arrays = [
                (f"argument {i} = {describe_value(arg)}", "")
                for i, arg in enumerate(args)
                if isinstance(arg, jax.Array)
                and arg.ndim == 0
                and jnp.isdtype(arg.dtype, "numeric")
            ]
            name = f"the program of {self._name}"
            event = self._event = JobEvent(name, lambda: arrays + self._describe())
            self._numbers = [i for i, arg in enumerate(args) if _is_number(arg)]
        job_programs.begin(event, tuple([args[i] for i in self._numbers]))

    def _compare_copies(self, new: Sequence[Any]) -> None:
        """Compares the values that the workers have written to mirrored variables."""
        mirrored = [
            (handle.name, value)
            for handle, value in zip(self.program.written, new, strict=True)
            if not handle.per_replica and shard_dim(handle.parts) is None
        ]
        names, values = zip(*mirrored, strict=True) if mirrored else ((), ())
        copies.compare(f"after the program of {self._name}", names, values)

    def _describe(self) -> list[tuple[str, str]]:
        lines = [
            (f"{'assigned' if handle in self.program.written else 'read'} variable {place}", "")
            for handle in (*self.program.written, *self.program.read_only)
            for place in [f"{handle.name} {handle.dtype}{list(handle.shape)}"]
        ]
        return lines + self.program.describe()

    def _join(self, variables: Sequence[Any]) -> None:
        """Makes the variables store their arrays together, after 2, 4, 8, ... separate runs.

        If several programs write a variable, its arrays can be stored together for only one of them
        at a time. The wait doubles each time, so that programs that take turns do not spend their
        time on it.
        """
        self._num_single_runs = number = self._num_single_runs + 1
        if number > 1 and not number & (number - 1):
            states = joined(variables)
            if states is not None:
                self._states = weakref.ref(states)


def _is_number(arg: Any) -> bool:
    """Returns whether an argument is a number from the script, which all workers must agree on."""
    if isinstance(arg, (np.ndarray, np.generic)):
        return arg.ndim == 0
    return isinstance(arg, (int, float, complex))


def _no_states() -> None:
    return None


def _traced(value: Any, what: str) -> ContextError:
    """Returns the error for a traced value that is passed to a program."""
    if not is_left_over(value):
        return _inside_jax(what)
    return ContextError(
        f"{what} was given {value!r}, which an earlier step has left in a list, an attribute or a"
        " global variable. Values of a step exist only while it is traced. Return what you need"
        " later, or assign it to a distributary.Variable."
    )


def _inside_jax(what: str) -> ContextError:
    return ContextError(
        f"{what} was called inside jax.jit, jax.grad or another JAX transformation. Compile the"
        " outer function with distributary.function instead, and differentiate inside the step."
    )


def _has_small_first_output(program: ReplicaProgram | FunctionProgram) -> bool:
    """Returns whether the first output is small, on all devices, and made by the program itself."""
    if not isinstance(program, ReplicaProgram) or program.uneven or not program.num_outs:
        return False
    aval = program.pures[0].jaxpr.outvars[0].aval
    return program.split_outs[0] and aval.size * aval.dtype.itemsize <= _MAX_TOKEN_BYTES


def _first_output(result: Any) -> Any:
    return result[1][0]


def _last_output(result: Any) -> Any:
    return result[2]


def _sharding_of(handle: Handle) -> Any:
    layout = handle.cell()._layout
    mesh = layout.strategy.extended.mesh
    if mesh is None or mesh.size == 1:
        return None
    if shard_dim(handle.parts) is not None:
        return NamedSharding(mesh, handle.parts)
    return NamedSharding(mesh, P(REPLICA_AXIS) if handle.per_replica else P())


def _whole(value: Any, handle: Handle, sharding: Any) -> Any:
    """Returns the whole value of a variable that is stored as `value`; call in a program."""
    if shard_dim(handle.parts) is None:
        return value
    return whole_shards(value, handle.shape, sharding)


# The key of one argument in the cache: cheap to make and to compare.

# Types of arrays that are not tracers. JAX checks in Python whether an object is an array.
_array_types: set[type] = set()


def signature_of(leaf: Any, what: str) -> Any:
    """Returns the key of an argument; if keys are equal, the same program can be used.

    The key of an array is its shape and dtype, that of a Python number its type. Everything else is
    static: hashable objects are compared by value, others by identity. The key does not keep an
    object alive if it can be referenced weakly.
    """
    kind = type(leaf)
    if kind in _array_types or isinstance(leaf, jax.Array):
        if kind not in _array_types:
            if isinstance(leaf, jax.core.Tracer):
                raise _traced(leaf, what)
            _array_types.add(kind)
        aval = leaf.aval
        # Arrays of random keys have no weak types.
        return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
    if isinstance(leaf, (np.ndarray, np.generic)):
        if leaf.dtype.kind in "OUSV" and not _is_extension(leaf.dtype):
            raise InvalidTypeError(
                f"{what}: an argument is a NumPy array of dtype {leaf.dtype}; arrays of strings or"
                " objects cannot go to a device. Map them to numbers first."
            )
        return leaf.shape, leaf.dtype
    if kind in (int, float, complex):
        return kind
    if isinstance(leaf, Variable):
        return leaf._handle
    if kind in (bool, str, bytes) or leaf is None:
        return kind, leaf
    if kind is DatasetIterator:  # every call looks at the elements that it gives
        return kind
    try:
        hash(leaf)
    except TypeError:
        hashable = False
    else:
        hashable = True
    try:
        return weakref.ref(leaf) if hashable else WeakIdentity(leaf)
    except TypeError:
        pass
    if not hashable:
        raise InvalidTypeError(
            f"{what}: an argument is {leaf!r}, a {kind.__name__}, which is neither an array nor"
            " hashable. Pass arrays, numbers, nests of them, or objects to which a compiled step"
            " can be keyed."
        )
    return kind, leaf


def _is_extension(dtype: Any) -> bool:
    """Returns whether a dtype that NumPy shows as void is one of JAX's, such as bfloat16."""
    return dtype.kind == "V" and dtype.names is None and jnp.issubdtype(dtype, jnp.number)


def is_dynamic(leaf: Any) -> bool:
    """Returns whether an argument is data, rather than part of the program."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)) and (
        not isinstance(leaf, bool)
    )


def split_result(result: Any, what: str) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the arrays of a function's result, and a function that rebuilds it from their values.

    Python numbers, strings and variables are part of the program and are returned unchanged.

    Raises:
        InvalidTypeError: for anything else that is not an array.
    """
    leaves, tree = jax.tree.flatten(
        result, is_leaf=lambda x: isinstance(x, (DistributedValues, IndexedSlices))
    )
    arrays: list[Any] = []
    slots: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, (Variable, bool, int, float, complex, str, bytes)):
            slots.append(("static", leaf))
        elif isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            slots.append(("array", None))
            arrays.append(leaf)
        elif isinstance(leaf, (DistributedValues, IndexedSlices)):
            inner, inner_tree = jax.tree.flatten(leaf)
            slots.append(("tree", inner_tree))
            arrays += inner
        else:
            raise InvalidTypeError(
                f"{what}: the function returned {leaf!r}, a {type(leaf).__name__}. It is compiled,"
                " so it can return arrays, numbers, strings, None, variables and nests of them."
            )

    if all(kind == "array" for kind, _ in slots):
        is_array = same_structure(tree, jax.tree.structure(0))

        def rebuild_arrays(values: Sequence[Any], wrap: Callable[[Any], Any] | None = None) -> Any:
            if is_array:
                return values[0] if wrap is None else wrap(values[0])
            return jax.tree.unflatten(tree, values if wrap is None else map(wrap, values))

        return arrays, rebuild_arrays

    def rebuild(values: Sequence[Any], wrap: Callable[[Any], Any] = lambda value: value) -> Any:
        remaining = iter(values)
        parts = []
        for kind, content in slots:
            if kind == "static":
                parts.append(content)
            elif kind == "array":
                parts.append(wrap(next(remaining)))
            else:
                own = [next(remaining) for _ in range(content.num_leaves)]
                parts.append(wrap(jax.tree.unflatten(content, own)))
        return jax.tree.unflatten(tree, parts)

    return arrays, rebuild


def replica_shardings(mesh: Any) -> tuple[Any, Any]:
    """Returns the shardings of values that all replicas share, and of `[replica, *shape]`."""
    mesh = mesh_of_values(mesh)
    return NamedSharding(mesh, P()), NamedSharding(mesh, P(REPLICA_AXIS))


def placed_struct_of(leaf: Any) -> Any:
    """Returns shape, dtype and place of an array; a Python number is returned unchanged."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.aval.weak_type
        )
    return struct_of(leaf) if hasattr(leaf, "dtype") else leaf


def struct_of(leaf: Any) -> Any:
    """Returns shape and dtype of an array or number, without its place."""
    if hasattr(leaf, "dtype") and not isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
