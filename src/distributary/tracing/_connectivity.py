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

`gradient_kinds` gives `{(1, 0): ("dense", ("sparse", 3), None)}`: for call 0 of tape 1 an array for
`w`, 3 rows for `table`, and nothing for `bias`, which the target does not depend on.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp

from distributary.errors import UnsupportedError
from distributary.tracing._markers import (
    Equation,
    Handle,
    contains,
    grad_p,
    handles_read,
    handles_written,
    open_jaxpr,
    read_p,
    sparse_read_p,
    sub_jaxprs,
    tape_p,
    walk,
    write_p,
)
from distributary.tracing._scope import Decisions, Kind

_JIT = frozenset({"jit", "pjit"})
_CALLS = frozenset({"closed_call", "core_call", "checkpoint", "remat", "remat2"})


def is_jit(eqn: Equation) -> bool:
    """Returns whether `eqn` is a nested `jax.jit`, which the passes look through."""
    return eqn.primitive.name in _JIT


def call_of(eqn: Equation) -> Any | None:
    """Returns the jaxpr of an equation that only calls it, else None."""
    if is_jit(eqn) or eqn.primitive.name in _CALLS:
        return eqn.params["jaxpr"]
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return eqn.params["call_jaxpr"]
    return None


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
    start = stop = None
    for index in range(gradient_index):
        eqn = eqns[index]
        if eqn.primitive is tape_p and eqn.params["tape"] == tape:
            if eqn.params["event"] == "start":
                start = index
            elif eqn.params["event"] == "stop":
                stop = index
    if start is None:
        raise UnsupportedError(
            "GradientTape.gradient was called inside a jax.lax control flow body, jax.checkpoint or"
            " jax.jit, but the tape was opened outside of it, or while a tape records that was"
            " opened later. Open the tape and take the gradient in the same body, or take the"
            " gradient after the control flow and after the other tape."
        )
    return start, gradient_index if stop is None else stop


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

    bits: dict[Any, int] = {}
    for i, var in enumerate(arrays):
        if not _is_literal(var):
            bits[var] = bits.get(var, 0) | 1 << i
    state = {handle: 1 << (len(arrays) + i) for i, handle in enumerate(handles)}
    env = dict(bits)
    tape = eqn.params["tape"]
    _Flow(bits, set(handles), tape).run(region, env, state)
    reached = 0
    for target in targets:
        reached |= 0 if _is_literal(target) else env.get(target, 0)

    kinds: list[Kind] = []
    for i, var in enumerate(arrays):
        connected = reached >> i & 1 and jnp.issubdtype(var.aval.dtype, jnp.inexact)
        kinds.append("dense" if connected else None)
    for i, handle in enumerate(handles, start=len(arrays)):
        connected = reached >> i & 1 and jnp.issubdtype(handle.dtype, jnp.inexact)
        kinds.append(_handle_kind(region, handle, tape) if connected else None)
    return tuple(kinds)


def _handle_kind(region: Sequence[Equation], handle: Handle, tape: int) -> Kind:
    sizes = sparse_read_sizes(region, handle, tape)
    return "dense" if sizes is None else ("sparse", sum(sizes))


def pauses(eqn: Equation, tape: int, paused: bool) -> bool:
    """Returns whether `tape` is in `stop_recording` after `eqn`; before it was `paused`."""
    if eqn.primitive is tape_p and eqn.params["tape"] == tape:
        return bool(eqn.params["event"] == "pause")
    return paused


def sparse_read_sizes(eqns: Sequence[Equation], handle: Handle, tape: int) -> list[int] | None:
    """Returns the number of rows of every read of a table that is only read by rows.

    Reads inside control flow count as reads of the whole table.

    Returns:
        The number of rows of each read that `tape` records, in program order, or None if the table
        is also read in another way.
    """
    sizes: list[int] = []
    paused = False
    for eqn in eqns:
        paused = pauses(eqn, tape, paused)
        if paused:
            continue
        if eqn.primitive is read_p and eqn.params["handle"] is handle:
            return None
        if eqn.primitive is sparse_read_p and eqn.params["handle"] is handle:
            sizes.append(eqn.invars[0].aval.size)
        elif is_jit(eqn):
            inner = sparse_read_sizes(next(sub_jaxprs(eqn)).eqns, handle, tape)
            if inner is None:
                return None
            sizes += inner
        elif any(
            inner.params.get("handle") is handle
            for sub in sub_jaxprs(eqn)
            for inner in walk(sub.eqns)
            if inner.primitive in (read_p, sparse_read_p)
        ):
            return None
    return sizes


class _Flow:
    """Forward reachability: the sources, as bits of a mask, that each value depends on."""

    def __init__(self, bits: dict[Any, int], sources: set[Handle], tape: int) -> None:
        self._bits = bits
        self._sources = sources
        self._tape = tape
        self._paused = False
        self._written: set[Handle] = set()

    def run(self, eqns: Sequence[Equation], env: dict[Any, int], state: dict[Handle, int]) -> None:
        for eqn in eqns:
            self._paused = pauses(eqn, self._tape, self._paused)
            operands = 0
            for atom in eqn.invars:
                operands |= 0 if _is_literal(atom) else env.get(atom, 0)
            if eqn.primitive in (read_p, sparse_read_p):
                masks = [self._read(eqn.params["handle"], state)]
            elif eqn.primitive is write_p:
                self._written.add(eqn.params["handle"])
                state[eqn.params["handle"]] = 0
                continue
            elif eqn.primitive.name == "stop_gradient":
                masks = [0]
            elif is_jit(eqn):
                masks = self._run_jit(eqn, env, state)
            else:
                masks = [operands | self._nested_reads(eqn, state)] * len(eqn.outvars)
            for var, mask in zip(eqn.outvars, masks, strict=True):
                differentiable = _is_differentiable(var.aval) and not self._paused
                env[var] = (mask if differentiable else 0) | self._bits.get(var, 0)

    def _run_jit(self, eqn: Equation, env: dict[Any, int], state: dict[Handle, int]) -> list[int]:
        jaxpr, _ = open_jaxpr(eqn.params["jaxpr"])
        inner = {
            var: 0 if _is_literal(atom) else env.get(atom, 0)
            for var, atom in zip(jaxpr.invars, eqn.invars, strict=True)
        }
        self.run(jaxpr.eqns, inner, state)
        return [0 if _is_literal(atom) else inner.get(atom, 0) for atom in jaxpr.outvars]

    def _nested_reads(self, eqn: Equation, state: dict[Handle, int]) -> int:
        inner = [e for sub in sub_jaxprs(eqn) for e in sub.eqns]
        if eqn.primitive is grad_p:
            mask = 0
            for handle in eqn.params["handles"]:
                mask |= state.get(handle, 0)
            return mask
        if not any(contains(e, frozenset({read_p, sparse_read_p, write_p})) for e in inner):
            return 0
        mask = 0
        for handle in handles_read(inner):
            mask |= self._read(handle, state)
        for handle in handles_written(inner):
            self._written.add(handle)
            state[handle] = 0
        return mask

    def _read(self, handle: Handle, state: dict[Handle, int]) -> int:
        if handle in self._written and handle in self._sources and not self._paused:
            raise UnsupportedError(
                f"GradientTape: variable {handle.name!r} is assigned and then read again while the"
                " tape records, and the gradient with respect to it is asked for. Assign it after"
                " the tape, or differentiate with respect to a value you watch with tape.watch."
            )
        return state.get(handle, 0)


def _is_differentiable(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, jex_core.Literal)
