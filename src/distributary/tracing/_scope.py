"""The functions that this thread traces at the moment, and the records their traces leave.

A `TraceScope` is active while a function runs on tracers. Variables and tapes ask for it, and it
binds the markers of `_markers`. After `w.assign_add(x)` at line 7 of a script the jaxpr has a read,
an addition and a write, and the record knows where the write came from:

    scope.writes == {1: (w, (("script.py", 7), ...))}
"""

import itertools
import os
import threading
import traceback
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, final

import jax
import jax.extend
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from distributary._late import libraries
from distributary.devices import inside_jax_trace
from distributary.errors import ContextError, ReplicaMismatchError
from distributary.jaxprs import Array
from distributary.tracing._markers import (
    REPLICA_ID,
    Handle,
    Kind,
    grad_p,
    read_p,
    sparse_read_p,
    tape_p,
    write_p,
)

# Keys: the tape (its number among all tapes, or among those of one trace) and the number of the
# call of its `gradient`.
Decisions = dict[tuple[int, int], tuple[Kind, ...]]
Call = tuple[str, int]  # file and line of a caller
ScopeKind = Literal["replica", "function"]

# Numbers are unique among all traces, because JAX caches the jaxprs of nested jits, markers
# included, and puts them into other traces.
_tape_numbers = itertools.count(1)
_write_serials = itertools.count(1)


@final
@dataclass(frozen=True, slots=True)
class Known:
    """Facts about a function from an earlier trace.

    Attributes:
        gradients: The kinds of gradients its tapes return. Tapes are counted from 0.
        reads: The variables read while each tape records. Tapes are counted from 0.
        may_create: Whether it may create variables.
    """

    gradients: Decisions = field(default_factory=dict)
    reads: dict[int, list[Handle]] = field(default_factory=dict)
    may_create: bool = True


@final
@dataclass(eq=False)
class TraceScope:
    """One trace of one function.

    Args:
        kind: "replica" for the program of one replica, "function" for the body of
            `distributary.function`.
        known: Facts from an earlier trace of the same function.
        uneven: Sizes that the replicas of an uneven batch agreed on, else None.
        is_for_workers: Whether the program runs on devices of other processes.
        num_replicas: Number of replicas whose program is traced.
        replica: Number of the only replica that is traced, if its Python code may look at that.
        converts: Whether Python control flow is converted.
    """

    kind: ScopeKind
    known: Known
    uneven: "UnevenSizes | None"
    is_for_workers: bool
    num_replicas: int
    replica: int | None
    converts: bool

    def __post_init__(self) -> None:
        self._replica_ids: list[Array] = []
        self._jax_trace: Any = None
        self.created: list[str] = []
        self.num_created = 0  # without the variables of Keras, which get their values later
        self.writes: dict[int, tuple[Handle, tuple[Call, ...]]] = {}
        self.recording: list[TapeRecord] = []
        self.strategies: list[Any] = []  # their replicas run inside the function
        # Keys: a tape's number among all tapes; values: its number in this trace, from 0.
        self.tapes: dict[int, int] = {}
        # The numbers of the tapes that were asked for the variables they watch, and these.
        self.asked: list[tuple[int, Container[Handle]]] = []
        # Of every check that ends the step when it runs, the errors with which it has done so.
        self.checks: list[list[Exception]] = []
        # The functions whose control flow cannot be converted, and why.
        self.unconverted: dict[str, str] = {}
        self.merge_calls = 0
        self.reduced_by: list[str] = []  # the operation of each all_reduce
        # Whether the function has asked for the number of replicas, such as to divide by it.
        self.asked_for_replicas = False
        # The results of `int(value)` and `float(value)` of converted code.
        self.numbers: list[Array] = []

    @property
    def may_create(self) -> bool:
        """True if variables may be created in this trace."""
        return self.known.may_create

    def begin(self) -> None:
        """Marks the beginning of the function; call it in the code that JAX traces."""
        self._jax_trace = jax.extend.core.get_opaque_trace_state(convention="flax")

    def is_outermost(self) -> bool:
        """Returns whether the caller is in the function itself, not in a nested JAX trace."""
        state = jax.extend.core.get_opaque_trace_state(convention="flax")
        return bool(state == self._jax_trace)

    def read(self, handle: Handle) -> Array:
        """Returns a tracer for a variable's current value, or for data given to the program."""
        if handle.cell is not None:
            for tape in self.recording:
                tape.note_read(handle, None)
        return read_p.bind(handle=handle, aval=handle.aval(self.kind == "replica"))

    def replica_id(self) -> Array | np.generic:
        """Returns the replica's number, int32 `[]`."""
        if self.replica is not None:
            return np.int32(self.replica)
        self._replica_ids.append(read_p.bind(handle=REPLICA_ID, aval=REPLICA_ID.aval(True)))
        return self._replica_ids[-1]

    @property
    def reads_replica_id(self) -> bool:
        """True if the code has asked for the replica's number, and got a traced one."""
        return bool(self._replica_ids)

    def is_replica_id(self, value: object) -> bool:
        """Returns whether a value is what `replica_id` has returned, and is traced."""
        return any(value is number for number in self._replica_ids)

    def sparse_read(self, handle: Handle, ids: Array) -> Array:
        """Returns the rows `ids` of a variable, `[*ids.shape, *row]`."""
        for tape in self.recording:
            tape.note_read(handle, ids.size)
        return sparse_read_p.bind(ids, handle=handle)

    def write(self, handle: Handle, value: Array) -> None:
        """Records the new value of a variable."""
        serial = next(_write_serials)
        calls = tuple(_user_calls())
        self.writes[serial] = (handle, calls)
        write_p.bind(value, handle=handle, serial=serial, where=location_of(calls))

    def new_tape(self) -> "TapeRecord":
        """Returns the record of a new tape."""
        number = next(_tape_numbers)
        order = self.tapes[number] = len(self.tapes)
        return TapeRecord(self, number, self.known.reads.get(order, ()))


@final
class TapeRecord:
    """The record of one `GradientTape` while a function is traced."""

    def __init__(self, scope: TraceScope, number: int, watched: Iterable[Handle]) -> None:
        self._scope = scope
        self._number = number
        self._num_calls = 0
        self._reads: dict[Handle, list[int | None]] = {}
        # Includes reads in nested jits whose jaxpr JAX had cached, once a trace has shown them.
        self._watched: dict[Handle, None] = dict.fromkeys(watched)

    def mark(self, event: str) -> None:
        """Marks where the tape starts, stops, pauses or resumes recording."""
        tape_p.bind(tape=self._number, event=event)
        if event in ("start", "resume"):
            self._scope.recording.append(self)
        else:
            self._scope.recording.remove(self)

    def note_read(self, handle: Handle, num_rows: int | None) -> None:
        self._reads.setdefault(handle, []).append(num_rows)
        self._watched.setdefault(handle)

    def variables(self) -> list[Any]:
        """Returns the variables that were read; None for those that exist no more."""
        self._scope.asked.append((self._number, self._watched))
        return [handle.cell() for handle in self._watched]

    def gradient(
        self,
        targets: list[Array],
        seeds: list[Array],
        arrays: list[Array],
        handles: list[Handle],
    ) -> list[Any]:
        """Returns the gradients of the sum of `targets * seeds`, of `arrays` and then of `handles`.

        An entry is an array, a pair `(rows, ids)` or None.
        """
        call = self._num_calls
        self._num_calls += 1
        of_arrays: list[Kind] = ["dense"] * len(arrays)
        kinds = (*of_arrays, *map(self._guess, handles))
        known = self._scope.known.gradients.get((self._scope.tapes[self._number], call), ())
        if len(known) == len(kinds):
            kinds = known
        outs = iter(
            grad_p.bind(
                *targets,
                *seeds,
                *arrays,
                tape=self._number,
                call=call,
                num_targets=len(targets),
                handles=tuple(handles),
                kinds=kinds,
            )
        )
        return [
            None if kind is None else next(outs) if kind == "dense" else (next(outs), next(outs))
            for kind in kinds
        ]

    def _guess(self, handle: Handle) -> Kind:
        """Guesses the kind of a gradient; if the guess is wrong, the function is traced again."""
        reads = self._reads.get(handle)
        return None if reads is None else kind_of(reads)


def kind_of(reads: Sequence[int | None]) -> Kind:
    """Returns the kind of the gradient of a variable.

    Args:
        reads: The number of rows in each of its reads; None for the whole variable.
    """
    rows = tuple([num_rows for num_rows in reads if num_rows is not None])
    return ("sparse", rows) if len(rows) == len(reads) else "dense"


def _or_zeros(kind: Kind, first: Kind) -> Kind:
    if kind is not None or first is None:
        return kind
    return "dense" if first == "dense" else ("sparse", (0,))


@final
class UnevenSizes:
    """Sizes along the gathered dim of every `all_gather` of an uneven step, per replica.

    The replicas of an uneven batch are traced one after the other, so the first cannot know how
    much the others will contribute. It stops its trace with `SizesMissing`. Once every replica has
    stopped at the same call, the sizes for that call are known, and the traces start again.

    A replica without rows can lack a gradient that the others have, and combine: JAX does not read
    a table to look up no rows. `with_gradients` gives it zeros.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.known: list[tuple[int, ...]] = []
        self._calls = 0
        self.replica = 0
        self._axis = 0
        self._pending: dict[int, tuple[int, ...]] = {}  # shapes
        self._first: Decisions = {}  # of replica 0; its tapes are counted from 0

    def start(self, replica: int) -> None:
        self.replica = replica
        self._calls = 0

    def sizes(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """Returns every replica's size along `axis` for the next gather; this one brings `shape`.

        Raises:
            ReplicaMismatchError: if they do not fit together.
        """
        size = shape[axis]
        if self._calls < len(self.known):
            sizes = self.known[self._calls]
            self._calls += 1
            if sizes[self.replica] != size:
                raise ReplicaMismatchError(
                    f"all_gather: replica {self.replica} of an uneven batch brings {size} rows,"
                    f" but {sizes[self.replica]} when it was traced before. Do not call one"
                    " jax.jit function with all_gather in it on several arrays."
                )
            return sizes
        others = {(*one[:axis], *one[axis + 1 :]) for one in (*self._pending.values(), shape)}
        if len(others) > 1:
            other, known = next(iter(self._pending.items()))
            raise ReplicaMismatchError(
                f"all_gather: replica {self.replica} has shape {shape}, but replica {other}"
                f" {known}; they may differ in dim {axis} only."
            )
        self._pending[self.replica] = shape
        self._axis = axis
        raise SizesMissing

    def with_gradients(self, decisions: Decisions, tapes: Mapping[int, int]) -> Decisions:
        """Returns the kinds of a replica's gradients; none is absent that replica 0 has.

        Args:
            decisions: The kinds that its trace shows.
            tapes: The number in this trace of each tape.
        """
        keys = {key: (tapes.get(key[0], -1), key[1]) for key in decisions}
        if self.replica == 0:
            self._first = {keys[key]: kinds for key, kinds in decisions.items()}
        result = {}
        for key, kinds in decisions.items():
            first = self._first.get(keys[key], kinds)
            # A replica may ask for the gradients of other variables.
            is_alike = len(first) == len(kinds)
            result[key] = tuple(map(_or_zeros, kinds, first)) if is_alike else kinds
        return result

    def settle(self) -> bool:
        """Stores the sizes of a call that all replicas stopped at; False if some did not."""
        complete = len(self._pending) == self.num_replicas
        if complete:
            shapes = [self._pending[i] for i in range(self.num_replicas)]
            self.known.append(tuple([shape[self._axis] for shape in shapes]))
        self._pending = {}
        return complete


class SizesMissing(BaseException):
    """A stop of the trace of one replica of an uneven batch; it never reaches the user."""


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.scopes: list[TraceScope | None] = []


_state = _ThreadState()


def current_scope() -> TraceScope | None:
    """Returns this thread's innermost trace."""
    scopes = _state.scopes
    return scopes[-1] if scopes else None


@contextmanager
def activate(scope: TraceScope | None) -> Iterator[None]:
    """Runs the block with `scope` as the current trace; None if nothing counts as traced."""
    _state.scopes.append(scope)
    try:
        yield
    finally:
        _state.scopes.pop()


@contextmanager
def outside_of_trace() -> Iterator[None]:
    """Runs the block as if nothing were traced: JAX computes, and there is no scope."""
    with activate(None), jax.ensure_compile_time_eval():
        yield


def is_outside_of_trace() -> bool:
    """Returns whether the caller is inside an `outside_of_trace` block."""
    scopes = _state.scopes
    return bool(scopes) and scopes[-1] is None


def in_role(role: str) -> AbstractContextManager[Any]:
    """Keeps apart the jaxprs that JAX caches inside one trace, by the role the code runs in.

    A nested jit that reads or assigns variables means something else in a merge call than in the
    step around it. This metadata is the one public setting that is part of JAX's key and changes no
    number.
    """
    return set_xla_metadata(distributary_role=role)


def infers_shapes() -> bool:
    """Returns whether a library runs the caller for the shapes of its results, as Keras does."""
    return inside_jax_trace() and any(library.infers_shapes() for library in libraries())


def drops_assignments() -> bool:
    """Returns whether a library runs the caller, outside of traces, so that no state changes."""
    return any(library.drops_assignments() for library in libraries())


def check_not_frozen(name: str, what: str) -> None:
    """Raises if a variable is used inside a raw `jax.jit`, which would freeze its value."""
    if inside_jax_trace() and not infers_shapes():
        raise ContextError(
            f"Variable {name!r} is {what} inside a function compiled by jax.jit (or traced by"
            " jax.make_jaxpr or jax.lax control flow) outside of Strategy.run: JAX would keep the"
            " value of the first call forever. Compile the function with distributary.function, or"
            " pass v.value() as an argument."
        )


def _user_calls() -> Iterator[Call]:
    """Yields the callers outside of distributary and JAX, innermost first."""
    for frame, line in traceback.walk_stack(None):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("distributary.", "jax.", "jax_", "keras.src.")):
            yield frame.f_code.co_filename, line


def location_of(calls: tuple[Call, ...]) -> str:
    """Returns `file:line` of the innermost of `calls`."""
    return "{}:{}".format(*calls[0]) if calls else "unknown location"


def script_line() -> str:
    """Returns `file:line` of the code that called distributary or Keras."""
    file, line = next(_user_calls(), ("an unknown line", 0))
    return f"{os.path.basename(file)}:{line}"
