"""A compiled program together with the variables it reads and writes."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary.devices import (
    REPLICA_AXIS,
    JobEvent,
    ProgramKind,
    StepCounts,
    for_target,
    inside_jax_trace,
    interrupts,
    is_divided,
    job_programs,
    latest_program,
    own_copies,
    progress,
    put_replicated,
    shard_dim,
    sharding_on,
    stored_shards,
    whole_shards,
)
from distributary.engine._cache import inside_jax, placed_struct_of, traced
from distributary.engine._collectives import Program, total_bytes
from distributary.engine._placement import Placement
from distributary.engine._staged import StagedProgram
from distributary.errors import ContextError
from distributary.jaxprs import aval_of
from distributary.job import compiled_once, copies
from distributary.programs import TracedProgram
from distributary.tracing import Handle, describe_value
from distributary.variables import ForeignVariable, StateList, Variable, joined
from distributary.xla_cpu import with_cpu_rewrites


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Keeps Python from looking for garbage in the block.

    A trace makes many objects, nearly all of which it keeps. Python then looks through all objects
    of the process, which takes a quarter of the time that a step is traced.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:  # otherwise the user, or another thread in such a block, has disabled it
            gc.enable()


class VariableGoneError(ContextError):
    """Raised if a variable of a program was collected; of a cached one, the caller traces again."""

    def __init__(self, what: str = "variables that are") -> None:
        super().__init__(
            f"A step makes {what} gone when the step ends. Make models, metrics and variables"
            " before, in strategy.scope(), and use them in the step."
        )


# An output of at most this size may be kept until the program that made it has finished, and
# variables up to this size are copied together.
_MAX_SMALL_BYTES = 1 << 16


@final
class Executable:
    """A program on devices: collects its variables, dispatches it and stores what it wrote.

    Args:
        program: The traced program.
        placement: The devices, and where values lie on them.
        rebuild: Function from the outputs of the program to the result of the function.
        name: Name of the program, in profiles and reports.
        title: The program in messages, such as "a step of net.fit".
        counts: Object that counts its runs.
        shardings: For every argument, its sharding if it comes as a NumPy array; the program then
            moves it to the devices, for a third of the cost of `device_put`. None for other
            arguments, and in place of the list if there are only others.
    """

    def __init__(
        self,
        program: TracedProgram,
        placement: Placement,
        rebuild: Callable[[Sequence[Any]], Any],
        name: str,
        title: str,
        counts: StepCounts,
        shardings: Sequence[NamedSharding | None] | None = None,
    ) -> None:
        self.program = program
        #: Positions of its arguments among the flattened arguments of a call, see `picked`.
        self.picks: Any = None
        self.runs = counts.runs_of(self)
        self._avals: Any = None  # of the arguments of the first call
        self._title = title
        self._rebuild = rebuild
        self._replicated = placement.replicated
        self._shardings = (
            None if self._replicated is None else (placement.stacked, self._replicated)
        )
        is_staged = placement.home is not None
        # Python code dispatches these, and Ctrl-C may come in the midst of it.
        self._is_python = is_staged or program.has_effects
        self._checks = program.checks
        self._has_collectives = self._replicated is not None and not is_staged
        self._is_of_job = placement.is_of_job
        # The event that the other workers have to begin, too, and the arguments that are numbers.
        self._event: JobEvent | None = None
        self._numbers: list[int] = []
        self._dispatcher = placement.dispatcher
        self._written = list(map(_holder_of, program.written))
        self._read_only = list(map(_holder_of, program.read_only))
        # In a job, the variables made outside of the scope, of which each worker has its own: 0 if
        # they are written, else 1, and their position among these.
        self._outside: list[tuple[int, int, Handle]] = []
        self._has_own_variables = any(isinstance(h.cell(), Variable) for h in program.written)
        # The list in which the written variables keep their arrays together, if they do.
        self._states: Callable[[], StateList | None] = lambda: None
        self._num_single_runs = 0
        # Held while the program is compiled, before its first run; None from then on.
        self._compiling: threading.Lock | None = None
        self._call: Any
        self._captures: Sequence[Sequence[Any]]
        if is_staged:
            self._captures = program.captures
            self._token_of = _last_output
            self._call = StagedProgram(program, placement, shardings)
            return
        self._captures = [
            [self._place_constant(capture) for capture in captures] for captures in program.captures
        ]
        # The bounded dispatcher needs an output on every device to see when the program has
        # finished: the first result if it is small, else one that is made for this.
        has_token = self._dispatcher.bounded and not _has_small_first_output(program)
        self._token_of = _last_output if has_token else _first_output
        run = _of_stored(program, placement.stacked if has_token else None)
        run.__name__ = run.__qualname__ = name  # in profiles
        if not program.is_rewritten:
            run = with_cpu_rewrites(run, placement.mesh)
        options: Any = {} if shardings is None else {"in_shardings": (None, None, None, shardings)}
        # If a check fails, the variables keep their values.
        donated = () if self._keeps_state() else (1,)
        jitted = jax.jit(run, donate_argnums=donated, **options)
        read = set(program.handles)
        trains = any(h in read and h.cell().trainable for h in program.written)
        self._call = for_target(jitted, placement.mesh, ProgramKind(name, trains))
        if self._is_of_job:
            self._outside = [
                (k, i, handle)
                for k, handles in enumerate((program.written, program.read_only))
                for i, handle in enumerate(handles)
                if handle.cell()._layout.strategy.extended.is_default
            ]
        # The processes of a job compile together on some platforms, so they do it in the order of
        # their programs, too. A target's programs are not compiled here.
        if self._call is jitted and not self._is_of_job:
            self._compiling = threading.Lock()

    def _place(self, value: object) -> Any:
        """Puts a value where the program can take it."""
        if isinstance(value, jax.core.Tracer):
            raise traced(value, "Strategy.run or a distributary.function")
        if self._replicated is None or not isinstance(value, jax.Array):
            return value
        if value.sharding.device_set == self._replicated.device_set:
            return value
        return put_replicated(value, self._replicated)

    def _place_constant(self, value: object) -> Any:
        """Puts a value where it stays for all runs; a NumPy array would be moved in each."""
        if self._replicated is None or isinstance(value, jax.Array):
            return self._place(value)
        return put_replicated(np.asarray(value), self._replicated)

    def lowered(self, args: Sequence[Any]) -> Any:
        """Returns the program lowered for `args`, to inspect what XLA compiles."""
        try:
            written = [cell()._value for cell in self._written]
            read_only = [cell()._value for cell in self._read_only]
        except AttributeError:
            raise VariableGoneError from None
        for k, i, _ in self._outside:  # what was assigned since the last run is of this worker
            state = (written, read_only)[k]
            if state[i].is_fully_addressable:
                state[i] = self._place_constant(np.array(state[i]))
        with garbage_kept():
            return self._call.lower(self._captures, written, read_only, args)

    def _compile(self, lock: threading.Lock, args: Sequence[Any]) -> None:
        """Compiles the program without the locks of a dispatch, so that other threads go on."""
        with progress.doing("compilation"), lock:
            if self._compiling is not None:
                # JAX keeps the result and takes it when the program runs.
                self.lowered(args).compile()
                self._compiling = None

    def collective_bytes(self) -> int:
        """Returns the size of the arrays that one run sends; 0 if its variables are gone."""
        if not self._has_collectives:
            return 0
        try:
            hlo = self.lowered(self._avals).compile().as_text()
        except VariableGoneError:
            return 0
        return total_bytes(Program(hlo).collectives.values())

    def __call__(self, args: Sequence[Any]) -> Any:
        """Runs the program once and returns the result of the function.

        Raises:
            VariableGoneError: if one of its variables does not exist any more.
            ContextError: inside `jax.jit`.
        """
        if inside_jax_trace():
            raise inside_jax("Strategy.run or a distributary.function")
        if self._shardings is not None:
            args = self._placed(args, self._shardings)
        if self._compiling is not None:
            self._compile(self._compiling, args)
        # For other threads, reading, donating and replacing the state has to be one step.
        with latest_program.lock:
            states = self._states()
            if states is not None and states.withheld:
                states = None
            try:
                read_only = [cell()._value for cell in self._read_only]
                variables = [] if states is not None else [cell() for cell in self._written]
                written = [v._value for v in variables] if states is None else states.arrays
            except AttributeError:
                raise VariableGoneError from None
            if variables:
                written = self._own_arrays(variables, written)
            has_met = self._is_of_job and self._begin(args, written, read_only)
            if latest_program.timer is not None:
                latest_program.begin()
            results: list[Any] = []
            try:
                run = self._dispatch_checked if self._checks else self._dispatch
                operands = (self._captures, written, read_only, args)
                if has_met:
                    with compiled_once(self._title, not self.runs.num_runs), garbage_kept():
                        run(results, operands)
                else:
                    run(results, operands)
            finally:
                # The program has consumed the old values, so the new ones must be stored. Ctrl-C
                # may have come already, or may come here: Python raises it at calls and at the end
                # of each round of a loop.
                if results:
                    new, outs, _ = results[0]
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
            if variables and self._has_own_variables:
                self._join(variables)
            self._note_run(args, new, outs)
        return self._rebuild(outs)

    def _own_arrays(self, variables: Sequence[Any], arrays: list[Any]) -> list[Any]:
        """Returns the arrays of variables; copies of those that somebody else may hold."""
        shared = [i for i, v in enumerate(variables) if getattr(v, "_shared", False)]
        if not shared:
            return arrays
        # Large ones one by one, so that memory holds one copy more and not all.
        small = [i for i in shared if arrays[i].nbytes <= _MAX_SMALL_BYTES]
        large = [i for i in shared if arrays[i].nbytes > _MAX_SMALL_BYTES]
        for group in filter(None, (small, *([i] for i in large))):
            for i, copy in zip(group, own_copies([arrays[i] for i in group]), strict=True):
                variables[i]._value = arrays[i] = copy
                variables[i]._shared = False
        return arrays

    def _placed(self, args: Sequence[Any], shardings: tuple[Any, ...]) -> Sequence[Any]:
        """Returns the arguments where the program can take them."""
        for arg in args:
            sharding = getattr(arg, "sharding", None)
            # Arguments without a sharding can go anywhere. To compare None with one takes 1 us.
            if sharding is not None and sharding not in shardings:
                return [self._place(arg) for arg in args]
        return args

    def _dispatch(self, results: list[Any], operands: tuple[Any, ...]) -> None:
        """Dispatches the program; `results` gets what it returns, even if Ctrl-C comes."""
        if not self._is_python:
            self._dispatcher.run_into(results, self._call, self._token_of, operands)
            return
        with interrupts.watched(), interrupts:
            self._dispatcher.run_into(results, self._call, self._token_of, operands)

    def _keeps_state(self) -> bool:
        """Returns whether a run whose checks fail leaves the variables as they were.

        In a job, the other workers have new values, so this one must not go on with old ones.
        """
        return bool(self._checks) and not self._is_of_job

    def _dispatch_checked(self, results: list[Any], operands: tuple[Any, ...]) -> None:
        """Runs the program to its end, and raises the error of a check that has failed in it."""
        try:
            self._dispatch(results, operands)
            jax.block_until_ready(results)
        except jax.errors.JaxRuntimeError:
            failed = [error for errors in self._checks for error in errors]
            for errors in self._checks:
                errors.clear()
            if not failed:
                raise
            if self._keeps_state():
                results.clear()
            raise failed[0] from None

    def _note_run(self, args: Sequence[Any], new: Sequence[Any], outs: Sequence[Any]) -> None:
        if not self.runs.num_runs:
            self._avals = jax.tree.map(placed_struct_of, list(args))
        self.runs.num_runs += 1
        result = outs[0] if outs else None
        latest_program.end(new[0] if new else result, result)
        if self._is_of_job:
            copies.num_left -= 1
            if copies.num_left <= 0:
                self._compare_copies(new)

    def _begin(self, args: Sequence[Any], *states: list[Any]) -> bool:
        """Checks that all workers run this program now, with the same numbers.

        Args:
            args: The arguments.
            *states: The values of the variables that it writes, and of those that it only reads.

        Returns:
            Whether they have met for it.
        """
        event = self._event
        if event is None:
            arrays = [
                (f"argument {i} = {describe_value(arg)}", "")
                for i, arg in enumerate(args)
                if isinstance(arg, jax.Array)
                and arg.ndim == 0
                and jnp.isdtype(arg.dtype, "numeric")
            ]
            event = self._event = JobEvent(self._title, lambda: arrays + self._describe())
            self._numbers = [i for i, arg in enumerate(args) if _is_number(arg)]
        values: list[Any] = [args[i] for i in self._numbers]
        own = [(states[k], i, handle) for k, i, handle in self._outside]
        for state, i, handle in own:
            # What a step has written is the same on all workers.
            is_local = state[i].is_fully_addressable
            value = describe_value(state[i]) if is_local else "as a step has left it"
            values.append(f"variable {handle.name!r}, made outside of the scope, {value}")
        has_met = job_programs.begin(event, tuple(values))
        for state, i, handle in own:
            if state[i].is_fully_addressable:
                state[i] = handle.cell()._value = self._place_constant(np.array(state[i]))
        return has_met

    def _compare_copies(self, new: Sequence[Any]) -> None:
        """Compares the values that the workers have written to mirrored variables."""
        mirrored = [
            (handle.name, value)
            for handle, value in zip(self.program.written, new, strict=True)
            if not handle.per_replica and not is_divided(handle.parts)
        ]
        names, values = zip(*mirrored, strict=True) if mirrored else ((), ())
        copies.compare(f"after {self._title}", names, values)

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


def _is_number(arg: object) -> bool:
    """Returns whether an argument is a number from the script, which all workers must agree on."""
    if isinstance(arg, (np.ndarray, np.generic)):
        return arg.ndim == 0
    return isinstance(arg, (int, float, complex))


def _holder_of(handle: Handle) -> Callable[[], Any]:
    """Returns a weak reference to the object that has the stored array as its `_value`."""
    # Arrays of other libraries' variables are read and written without their stand-ins, because
    # this happens for every variable in every run.
    variable = handle.cell()
    return variable.holder if isinstance(variable, ForeignVariable) else handle.cell


def _has_small_first_output(program: TracedProgram) -> bool:
    """Returns whether the first output is small, on all devices, and made by the program itself."""
    if not program.num_outs or not program.has_first_output_everywhere:
        return False
    aval = aval_of(program.jaxpr.outvars[0])
    return aval.size * aval.dtype.itemsize <= _MAX_SMALL_BYTES


def _first_output(result: Any) -> Any:
    return result[1][0]


def _last_output(result: Any) -> Any:
    return result[2]


def _of_stored(
    program: TracedProgram, token_sharding: NamedSharding | None
) -> Callable[..., tuple[Any, ...]]:
    """Returns a program as a function of its state as that is stored, which also gives a token.

    Args:
        program: The program.
        token_sharding: Where the token lies; None for none.
    """
    written_shardings = list(map(_sharding_of, program.written))
    read_shardings = list(map(_sharding_of, program.read_only))

    def run(captures: Any, written: Any, read_only: Any, args: Any) -> tuple[Any, ...]:
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

    return run


def _sharding_of(handle: Handle) -> Any:
    variable = handle.cell()
    if variable is None:
        raise VariableGoneError(f"the variable {handle.name!r}, which is")
    layout = variable._layout
    mesh = layout.strategy.extended.mesh
    if mesh is None or mesh.size == 1:
        return None
    if is_divided(handle.parts):
        return sharding_on(mesh, handle.parts)
    return NamedSharding(mesh, P(REPLICA_AXIS) if handle.per_replica else P())


def _whole(value: Any, handle: Handle, sharding: Any) -> Any:
    """Returns the whole value of a variable that is stored as `value`; call in a program."""
    if shard_dim(handle.parts) is None:
        return value
    return whole_shards(value, handle.shape, sharding)
