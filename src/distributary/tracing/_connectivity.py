"""The kind of every gradient that a tape returns: an array, rows of a table, or None.

`GradientTape.gradient` returns None for a source the target does not depend on, an `IndexedSlices`
for a table of which only rows were read, and an array otherwise. User code looks at that while it
is traced, so the answer must be known before the trace ends. The trace starts from a guess. This
module reads the true answer off the traced jaxpr, and if the guess was wrong, the function is
traced again. In

    { lambda ; x:f32[2] ids:i32[3]. let
        gradient_tape[event=start tape=1]
        b:f32[2] = variable_read[handle=w]
        c:f32[3,2] = variable_sparse_read[handle=table] ids
        d:f32[2] = mul x b
        e:f32[] = reduce_sum d
        f:f32[] = reduce_sum c
        g:f32[] = add e f
        gradient_tape[event=stop tape=1]
        h:f32[2] i:f32[3,2] j:i32[3] = tape_gradient[handles=(w, table, bias) tape=1] g 1.0
      in (h, i) }

`gradient_kinds` gives `{(1, 0): ("dense", ("sparse", (3,)), None)}`: for call 0 of tape 1 an array
for `w`, the 3 rows of a read for `table`, and nothing for `bias`, which the target does not depend
on.
"""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, Var

from distributary.errors import UnsupportedError
from distributary.jaxprs import (
    Atom,
    Equation,
    aval_of,
    open_jaxpr,
    plain_call_of,
    sub_jaxprs,
    variables_of,
    walk,
)
from distributary.tracing._markers import Handle, grad_p, read_p, sparse_read_p, tape_p
from distributary.tracing._scope import Decisions, Kind, kind_of


def reads_of_tapes(eqns: Sequence[Equation]) -> dict[int, list[Handle]]:
    """Returns the variables read while each tape records, by tape, nested jits included."""
    reads: dict[int, list[Handle]] = {}
    for index, eqn in enumerate(eqns):
        if eqn.primitive is tape_p and eqn.params["event"] == "start":
            ends = (i for i in range(index, len(eqns)) if _stops(eqns[i], eqn.params["tape"]))
            recorded = eqns[index : next(ends, len(eqns))]
            reads[eqn.params["tape"]] = [
                inner.params["handle"]
                for inner in walk(recorded)
                if inner.primitive in (read_p, sparse_read_p)
                and inner.params["handle"].cell is not None
            ]
        for sub in sub_jaxprs(eqn):
            reads.update(reads_of_tapes(sub.eqns))
    return reads


def _stops(eqn: Equation, tape: int) -> bool:
    return eqn.primitive is tape_p and eqn.params == {"tape": tape, "event": "stop"}


def tape_region(eqns: Sequence[Equation], gradient_index: int) -> tuple[int, int]:
    """Returns where the recording of a tape starts and ends, for its gradient at `gradient_index`.

    Returns:
        Index of the start marker, and of the equation the recording ends before.

    Raises:
        UnsupportedError: if the tape was opened outside of the `lax` control flow the gradient
            was taken in.
    """
    tape = eqns[gradient_index].params["tape"]
    marks = {
        eqn.params["event"]: index
        for index, eqn in enumerate(eqns[:gradient_index])
        if eqn.primitive is tape_p and eqn.params["tape"] == tape
    }
    if "start" not in marks:
        raise UnsupportedError(
            "GradientTape.gradient was called inside a jax.lax control flow body, jax.checkpoint or"
            " jax.jit, but the tape was opened outside of it, or while a tape records that was"
            " opened later. Open the tape and take the gradient in the same body, or take the"
            " gradient after the control flow and after the other tape."
        )
    return marks["start"], marks.get("stop", gradient_index)


def gradient_kinds(eqns: Sequence[Equation]) -> Decisions:
    """Returns the kind of every gradient in the equations and the jaxprs nested in them."""
    decisions: Decisions = {}
    for index, eqn in enumerate(eqns):
        if eqn.primitive is grad_p:
            key = (eqn.params["tape"], eqn.params["call"])
            decisions[key] = _kinds(eqns, index)
        for sub in sub_jaxprs(eqn):
            decisions.update(gradient_kinds(sub.eqns))
    return decisions


def _kinds(eqns: Sequence[Equation], gradient_index: int) -> tuple[Kind, ...]:
    start, stop = tape_region(eqns, gradient_index)
    region = eqns[start + 1 : stop]
    eqn = eqns[gradient_index]
    handles: tuple[Handle, ...] = eqn.params["handles"]
    num_targets = eqn.params["num_targets"]
    targets = eqn.invars[:num_targets]
    arrays = eqn.invars[2 * num_targets :]

    # Sources are bits of a mask: the arrays, then the handles.
    bits: dict[Var, int] = {}
    for i, array in enumerate(arrays):
        for var in variables_of([array]):
            bits[var] = bits.get(var, 0) | 1 << i
    state = {handle: 1 << i for i, handle in enumerate(handles, start=len(arrays))}
    env = dict(bits)
    flow = _Flow(bits, eqn.params["tape"])
    flow.run(region, env, state)
    reached = _union(env, targets)

    sources: list[ShapedArray | Handle] = [*map(aval_of, arrays), *handles]
    kinds: list[Kind] = []
    for i, source in enumerate(sources):
        is_connected = reached >> i & 1 and jnp.issubdtype(source.dtype, jnp.inexact)
        reads: Sequence[int | None] = (None,)
        if isinstance(source, Handle):
            reads = flow.reads.get(source, ())
        kinds.append(kind_of(reads) if is_connected else None)
    return tuple(kinds)


def reached_inputs(jaxpr: Jaxpr) -> list[bool]:
    """Returns for every input whether an output has a gradient with respect to it."""
    bits = {var: 1 << i for i, var in enumerate(jaxpr.invars) if _is_differentiable(var)}
    env = dict(bits)
    _Flow(bits, tape=0).run(jaxpr.eqns, env, {})
    reached = _union(env, jaxpr.outvars)
    return [bool(reached >> i & 1) for i in range(len(jaxpr.invars))]


def pauses(eqn: Equation, tape: int, paused: bool) -> bool:
    """Returns whether `tape` is in `stop_recording` after `eqn`; before it was `paused`."""
    if eqn.primitive is tape_p and eqn.params["tape"] == tape:
        return bool(eqn.params["event"] == "pause")
    return paused


class _Flow:
    """Forward reachability: the sources, as bits of a mask, that each value depends on.

    Attributes:
        reads: Of every variable, the reads that the tape records, in program order: the number of
            rows, or None for the whole variable. Inside control flow, all are reads of the whole.
    """

    def __init__(self, bits: dict[Var, int], tape: int) -> None:
        self.reads: dict[Handle, list[int | None]] = {}
        self._bits = bits
        self._tape = tape
        self._paused = False

    def run(self, eqns: Sequence[Equation], env: dict[Var, int], state: dict[Handle, int]) -> None:
        for eqn in eqns:
            self._paused = pauses(eqn, self._tape, self._paused)
            masks = self._masks(eqn, env, state)
            for var, mask in zip(eqn.outvars, masks, strict=True):
                differentiable = _is_differentiable(var) and not self._paused
                env[var] = (mask if differentiable else 0) | self._bits.get(var, 0)

    def _masks(self, eqn: Equation, env: dict[Var, int], state: dict[Handle, int]) -> Sequence[int]:
        if eqn.primitive in (read_p, sparse_read_p):
            is_whole = eqn.primitive is read_p
            self._note_read(eqn.params["handle"], None if is_whole else aval_of(*eqn.invars).size)
            return [state.get(eqn.params["handle"], 0)]
        if eqn.primitive.name == "stop_gradient":
            return [0]
        called = plain_call_of(eqn)
        if called is not None:
            jaxpr, _ = open_jaxpr(called)
            inner = {
                var: _union(env, [atom]) for var, atom in zip(jaxpr.invars, eqn.invars, strict=True)
            }
            self.run(jaxpr.eqns, inner, state)
            return [_union(inner, [atom]) for atom in jaxpr.outvars]
        mask = _union(env, eqn.invars) | self._nested_reads(eqn, state)
        return [mask] * len(eqn.outvars)

    def _nested_reads(self, eqn: Equation, state: dict[Handle, int]) -> int:
        mask = 0
        if eqn.primitive is grad_p:
            for handle in eqn.params["handles"]:
                mask |= state.get(handle, 0)
            return mask
        for read in walk([eqn]):
            if read.primitive in (read_p, sparse_read_p):
                self._note_read(read.params["handle"], None)
                mask |= state.get(read.params["handle"], 0)
        return mask

    def _note_read(self, handle: Handle, num_rows: int | None) -> None:
        if not self._paused:
            self.reads.setdefault(handle, []).append(num_rows)


def _union(masks: dict[Var, int], atoms: Iterable[Atom]) -> int:
    """Returns the sources of any of some atoms."""
    mask = 0
    for var in variables_of(atoms):
        mask |= masks.get(var, 0)
    return mask


def _is_differentiable(var: Var) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
