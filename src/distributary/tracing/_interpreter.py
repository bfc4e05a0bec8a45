"""Turns markers into plain data flow.

`interpret` evaluates a traced jaxpr equation by equation inside a second trace. Variables become
values in a `state` dictionary, tapes become `jax.vjp` of the equations they recorded, and
everything else is evaluated as JAX would. So

    { lambda ; a:f32[2]. let
        gradient_tape[event=start tape=1]
        b:f32[2] = variable_read[handle=w]
        c:f32[2] = mul a b
        d:f32[] = reduce_sum c
        gradient_tape[event=stop tape=1]
        e:f32[2] = tape_gradient[handles=(w,) tape=1] d 1.0
        f:f32[2] = variable_read[handle=w]
        g:f32[2] = sub f e
        variable_write[handle=w] g
      in (d,) }

becomes, with the variable as input `w` and its new value as the last output,

    { lambda ; w:f32[2] a:f32[2]. let
        c:f32[2] = mul a w
        d:f32[] = reduce_sum c
        b:f32[2] = broadcast_in_dim 1.0
        e:f32[2] = mul a b
        g:f32[2] = sub w e
      in (d, g) }

The result has the same floating point operations as the step written by hand.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, Literal, Var

from distributary.errors import UnsupportedError
from distributary.jaxprs import (
    CHECKPOINTS,
    CONTROL_FLOW,
    AnyJaxpr,
    Atom,
    Equation,
    aval_of,
    contains,
    evaluate_all,
    evaluate_control_flow,
    evaluate_one,
    leading_to,
    open_jaxpr,
    plain_call_of,
    reversible_while_loop,
    sub_jaxprs,
    value_of,
    variables_made,
    variables_of,
    walk,
)
from distributary.tracing._markers import (
    MARKERS,
    Handle,
    Kind,
    grad_p,
    handles_written,
    read_p,
    sparse_read_p,
    tape_p,
    write_p,
)
from distributary.tracing._scope import Decisions, kind_of


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
    """Returns the kind of every gradient in the equations and the jaxprs nested in them.

    `GradientTape.gradient` returns None for a source the target does not depend on, an
    `IndexedSlices` for a table of which only rows were read, and an array otherwise. User code
    looks at that while it is traced, so the answer must be known before the trace ends. The
    trace starts from a guess. This reads the true answer off the traced jaxpr, and if the guess
    was wrong, the function is traced again. In

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

    the result is `{(1, 0): ("dense", ("sparse", (3,)), None)}`: for call 0 of tape 1 an array
    for `w`, the 3 rows of a read for `table`, and nothing for `bias`, which the target does not
    depend on.
    """
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


State: TypeAlias = dict[Handle, Array]
# The state of some variables, as a nest of arrays for JAX, which cannot sort the keys of a `dict`.
Written: TypeAlias = OrderedDict[Handle, Array]
Env: TypeAlias = dict[Var, Array]
# A variable of the jaxpr or a handle, and the kind of its gradient.
_Source: TypeAlias = tuple[Any, Any]

# Later gradients need these whatever they depend on: rows of tables are counted by reads.
_KEPT = frozenset({write_p, sparse_read_p})


def interpret(
    jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array], state: State
) -> list[Array]:
    """Evaluates `jaxpr`, with variables read from and written to `state`.

    Args:
        jaxpr: Traced jaxpr, with markers.
        consts: Values of its constants.
        args: Values of its inputs.
        state: Value of every variable the jaxpr uses; changed in place.

    Returns:
        The outputs.
    """
    return _Interpreter().jaxpr(jaxpr, consts, args, state)


@final
@dataclass(slots=True)
class _Interpreter:
    # State at the start of every open tape, for its second and later gradients.
    snapshots: dict[int, State] = field(default_factory=dict)
    # Pullbacks of the tapes' first gradients, by tape.
    pullbacks: "dict[int, _Pullback]" = field(default_factory=dict)
    # Array sources computed while a tape records, with the zeros added to them, one per tape.
    cuts: dict[Var, tuple[Array, ...]] = field(default_factory=dict)
    # Tables that are read by rows, with the zeros added to the rows of successive reads and the
    # ids read so far.
    row_cuts: list[tuple[Handle, Iterator[Array], list[Array]]] = field(default_factory=list)
    # Variables that are assigned while a tape records, with the zeros added to what is assigned.
    write_cuts: list[tuple[Handle, Array]] = field(default_factory=list)
    # The innermost tape that records, and whether it is in GradientTape.stop_recording.
    tape: int | None = None
    paused: bool = False

    def jaxpr(
        self, jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array], state: State
    ) -> list[Array]:
        env: Env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        self.equations(jaxpr.eqns, env, state)
        return [value_of(env, atom) for atom in jaxpr.outvars]

    def equations(self, eqns: Sequence[Equation], env: Env, state: State) -> None:
        """Evaluates `eqns` in order; adds all that they make to `env`."""
        index = 0
        while index < len(eqns):
            eqn = eqns[index]
            start, paused = index, self.paused
            if not self._is_special(eqn):
                index += 1
                while index < len(eqns) and not self._is_special(eqns[index]):
                    index += 1
                evaluate_all(eqns[start:index], env)
            elif eqn.primitive is tape_p and eqn.params["event"] == "start":
                index = self._start_tape(eqns, index, env, state)
                for recorded in eqns[start:index]:
                    self._note_pause(recorded)
            else:
                self._special(eqns, index, env, state)
                index += 1
            if paused:
                for var in variables_made(eqns[start:index]):
                    if var not in self.cuts:
                        env[var] = lax.stop_gradient(env[var])

    def _note_pause(self, eqn: Equation) -> None:
        if self.tape is not None:
            self.paused = pauses(eqn, self.tape, self.paused)

    def _is_special(self, eqn: Equation) -> bool:
        return self._has_markers(eqn) or any(var in self.cuts for var in eqn.outvars)

    def _has_markers(self, eqn: Equation) -> bool:
        """Returns whether an equation is or has a marker, or a loop that a tape records."""
        return contains(eqn, MARKERS) or (self.tape is not None and _has_while(eqn))

    def _special(self, eqns: Sequence[Equation], index: int, env: Env, state: State) -> None:
        eqn = eqns[index]
        operands = [value_of(env, atom) for atom in eqn.invars]
        outs: list[Array] = []
        if eqn.primitive is read_p:
            outs = [state[eqn.params["handle"]]]
        elif eqn.primitive is sparse_read_p:
            outs = [self._sparse_read(eqn.params["handle"], operands[0], state)]
        elif eqn.primitive is write_p:
            # As in TensorFlow, no gradient flows through an assignment, and reads after it count.
            value = operands[0] if self.tape is None else lax.stop_gradient(operands[0])
            zeros = [zero for cut, zero in self.write_cuts if cut is eqn.params["handle"]]
            state[eqn.params["handle"]] = sum(zeros, value)
        elif eqn.primitive is tape_p:
            self._note_pause(eqn)
        elif eqn.primitive is grad_p:
            outs = self._gradient(eqns, index, env)
        elif self._has_markers(eqn):
            outs = self._nested(eqn, operands, state)
        else:
            outs = evaluate_one(eqn, operands)
        for var, out in zip(eqn.outvars, outs, strict=True):
            if self.paused:
                out = lax.stop_gradient(out)
            for zero in self.cuts.get(var, ()):
                out = out + zero
            env[var] = out

    def _sparse_read(self, handle: Handle, ids: Array, state: State) -> Array:
        rows = jnp.take(state[handle], ids, axis=0)
        if self.paused:
            return rows
        for cut, zeros, seen in self.row_cuts:
            if cut is handle:
                seen.append(ids.reshape(-1).astype("int32"))
                rows = rows + next(zeros).reshape(rows.shape)
        return rows

    # Nested jaxprs

    def _nested(self, eqn: Equation, operands: list[Array], state: State) -> list[Array]:
        name, params = eqn.primitive.name, eqn.params
        called = plain_call_of(eqn)
        if called is not None:
            return self.jaxpr(*open_jaxpr(called), operands, state)
        if name == "while":
            assigned = handles_written(open_jaxpr(params["cond_jaxpr"])[0].eqns)
            if assigned:
                raise UnsupportedError(
                    f"Variable {assigned[0].name!r} is assigned in the condition"
                    " of jax.lax.while_loop. Assign it in the body."
                )
        written = handles_written([eqn])

        def evaluate(
            jaxprs: Sequence[AnyJaxpr], inputs: Sequence[Sequence[Array]], values: Written
        ) -> tuple[list[list[Array]], Written]:
            after = {**state, **values}
            outs = self.jaxpr(*open_jaxpr(jaxprs[0]), inputs[0], after)
            return [outs], _of(after, written)

        values = _of(state, written)
        if name in CONTROL_FLOW:
            while_loop = lax.while_loop if self.tape is None else reversible_while_loop
            (outs,), values = evaluate_control_flow([eqn], [operands], values, evaluate, while_loop)
        elif name in CHECKPOINTS:
            again = jax.checkpoint(
                lambda inputs, values: evaluate([params["jaxpr"]], inputs, values),
                prevent_cse=params["prevent_cse"],
                policy=params["policy"],
            )
            (outs,), values = again([operands], values)
        else:
            raise UnsupportedError(
                f"A variable or a GradientTape is used inside {name!r} (jax.custom_vjp,"
                " jax.custom_jvp or another transformation that keeps its function). Read variables"
                " outside with v.value(), pass them as arguments, and assign the results"
                " afterwards."
            )
        state.update(values)
        return outs

    # Tapes

    def _start_tape(self, eqns: Sequence[Equation], index: int, env: Env, state: State) -> int:
        """Evaluates the recorded equations, differentiably; returns the index to go on at."""
        tape = eqns[index].params["tape"]
        self.snapshots[tape] = dict(state)
        gradient_index = next(
            (
                later
                for later in range(index + 1, len(eqns))
                if eqns[later].primitive is grad_p and eqns[later].params["tape"] == tape
            ),
            None,
        )
        if gradient_index is None or not any(eqns[gradient_index].params["kinds"]):
            return index + 1
        start, stop = tape_region(eqns, gradient_index)
        region = eqns[start + 1 : stop]
        pullback = self._differentiate(eqns[gradient_index], region, env, state)
        env.update(zip(variables_made(region), pullback.results, strict=True))
        state.update(pullback.changed)
        self.snapshots.update(pullback.snapshots)
        self.pullbacks[tape] = pullback
        return stop

    def _gradient(self, eqns: Sequence[Equation], index: int, env: Env) -> list[Array]:
        eqn = eqns[index]
        if not any(eqn.params["kinds"]):
            return []
        tape = eqn.params["tape"]
        pullback = self.pullbacks.pop(tape, None)
        if pullback is None or pullback.eqn is not eqn:
            # This is not the tape's first gradient, or two tapes overlap. The recorded equations
            # are evaluated once more; XLA merges the two computations.
            start, stop = tape_region(eqns, index)
            region = _recorded_for(eqn, eqns[start:stop])
            pullback = self._differentiate(eqn, region, env, dict(self.snapshots[tape]))
        num_targets = eqn.params["num_targets"]
        seeds = [value_of(env, atom) for atom in eqn.invars[num_targets : 2 * num_targets]]
        return pullback.gradients(seeds)

    def _differentiate(
        self, eqn: Equation, region: Sequence[Equation], env: Env, state: State
    ) -> "_Pullback":
        """Evaluates `region` as a function of the sources of the gradient `eqn`."""
        outvars = variables_made(region)
        inside = set(outvars)
        # Targets computed after the tape are constants, and may have no value yet.
        targets = {
            i: target
            for i, target in enumerate(eqn.invars[: eqn.params["num_targets"]])
            if not isinstance(target, Literal) and (target in env or target in inside)
        }
        sources = _sources_of(eqn)
        of_arrays: OrderedDict[Var, Array] = OrderedDict()
        of_variables: Written = OrderedDict()
        of_rows: OrderedDict[_Source, list[Array]] = OrderedDict()
        of_writes: Written = OrderedDict()
        assigned = handles_written(region)
        for source, kind in dict.fromkeys(sources):
            if kind != "dense":
                of_rows[source, kind] = [
                    jnp.zeros((size, *source.shape[1:]), source.dtype) for size in kind[1]
                ]
            elif not isinstance(source, Handle):
                aval = aval_of(source)
                is_inner = source in inside
                of_arrays[source] = jnp.zeros(aval.shape, aval.dtype) if is_inner else env[source]
            else:
                of_variables[source] = state[source]
                if source in assigned:
                    of_writes[source] = jnp.zeros(source.shape, source.dtype)

        def recorded(
            arrays: OrderedDict[Var, Array],
            variables: Written,
            rows: OrderedDict[_Source, list[Array]],
            writes: Written,
        ) -> tuple[list[Array], Any]:
            inner_env = {**env, **arrays}
            inner_state = {**state, **variables}
            before = dict(inner_state)
            seen: OrderedDict[_Source, list[Array]] = OrderedDict((one, []) for one in rows)
            cuts = dict(self.cuts)
            for var in inside.intersection(arrays):
                cuts[var] = (*cuts.get(var, ()), arrays[var])
            recorder = replace(
                self,
                snapshots=dict(self.snapshots),
                cuts=cuts,
                row_cuts=[*self.row_cuts, *((one[0], iter(rows[one]), seen[one]) for one in rows)],
                write_cuts=[*self.write_cuts, *writes.items()],
                tape=eqn.params["tape"],
                paused=False,
            )
            recorder.equations(region, inner_env, inner_state)
            aux = (
                [inner_env[var] for var in outvars],
                OrderedDict((h, v) for h, v in inner_state.items() if v is not before[h]),
                {
                    tape: OrderedDict(values)
                    for tape, values in recorder.snapshots.items()
                    if tape not in self.snapshots
                },
                OrderedDict(
                    (one, _concatenate(ids) if ids else jnp.zeros(0, jnp.int32))
                    for one, ids in seen.items()
                ),
            )
            return [inner_env[var] for var in targets.values()], aux

        _, pull, aux = jax.vjp(recorded, of_arrays, of_variables, of_rows, of_writes, has_aux=True)
        return _Pullback(eqn, list(targets), pull, *aux)


@final
@dataclass(slots=True)
class _Pullback:
    """The evaluated recording of a tape, with the pullback from its targets to its sources."""

    eqn: Equation
    targets: list[int]  # numbers of the targets that `pull` takes a seed for
    pull: Callable[[list[Array]], Any]
    results: list[Array]  # by the recorded equations
    changed: Written
    snapshots: dict[int, Written]
    ids: Mapping[_Source, Array]

    def gradients(self, seeds: list[Array]) -> list[Array]:
        arrays, variables, rows, writes = self.pull([seeds[i] for i in self.targets])
        for handle, after in writes.items():
            variables[handle] += after
        outs: list[Array] = []
        for source, kind in _sources_of(self.eqn):
            if kind != "dense":
                outs += [_concatenate(rows[source, kind]), self.ids[source, kind]]
            else:
                outs.append((variables if isinstance(source, Handle) else arrays)[source])
        return outs


def _sources_of(eqn: Equation) -> list[_Source]:
    """Returns the sources of a gradient that the targets depend on, in the order of the results."""
    params = eqn.params
    sources = [*eqn.invars[2 * params["num_targets"] :], *params["handles"]]
    pairs = zip(sources, params["kinds"], strict=True)
    return [(source, kind) for source, kind in pairs if kind is not None]


def _has_while(eqn: Equation) -> bool:
    """Returns whether an equation is a `while` loop or has one that it does not keep to itself."""
    if eqn.primitive.name == "while":
        return True
    keeps = eqn.primitive.name not in (*CONTROL_FLOW, *CHECKPOINTS)
    if keeps and plain_call_of(eqn) is None:
        return False
    return any(_has_while(inner) for sub in sub_jaxprs(eqn) for inner in sub.eqns)


def _recorded_for(gradient: Equation, region: Sequence[Equation]) -> list[Equation]:
    """Returns the recorded equations that a later gradient of the tape depends on.

    `region` begins with the tape's start marker.
    """
    is_kept, _ = leading_to(
        region, gradient.invars, lambda e: e.primitive is tape_p or contains(e, _KEPT)
    )
    kept = [eqn for eqn, stays in zip(region, is_kept, strict=True) if stays]
    tape = gradient.params["tape"]
    # The start marker is for gradients that the tape itself recorded.
    recorded = any(e.primitive is grad_p and e.params["tape"] == tape for e in kept)
    return kept if recorded else kept[1:]


def _of(state: State, handles: Iterable[Handle]) -> Written:
    return OrderedDict((handle, state[handle]) for handle in handles)


def _concatenate(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
