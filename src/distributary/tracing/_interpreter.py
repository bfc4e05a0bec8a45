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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, Literal, Var

from distributary.errors import UnsupportedError
from distributary.tracing._connectivity import pauses, sparse_read_sizes, tape_region
from distributary.tracing._jaxprs import (
    CHECKPOINTS,
    AnyJaxpr,
    Equation,
    aval_of,
    contains,
    is_jit,
    jaxpr_of,
    leading_to,
    open_jaxpr,
    parts_of_scan,
    parts_of_while,
    value_of,
    variables_made,
    variables_of,
)
from distributary.tracing._markers import (
    MARKERS,
    Handle,
    grad_p,
    handles_written,
    read_p,
    sparse_read_p,
    tape_p,
    write_p,
)

State: TypeAlias = dict[Handle, Array]
# The state of some variables, as a nest of arrays for JAX, which cannot sort the keys of a `dict`.
Written: TypeAlias = OrderedDict[Handle, Array]
_Outs: TypeAlias = tuple[list[Array], Written]
Env: TypeAlias = dict[Var, Array]

_WRITE = frozenset({write_p})


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
class _Interpreter:
    def __init__(self) -> None:
        # State at the start of every open tape, for its second and later gradients.
        self._snapshots: dict[int, State] = {}
        # Pullbacks of the tapes' first gradients, by tape.
        self._pullbacks: dict[int, _Pullback] = {}
        # Array sources computed while a tape records, with the zeros added to them, one per tape.
        self._cuts: dict[Var, tuple[Array, ...]] = {}
        # Tables that are read by rows, with the zeros added to the rows of successive reads and the
        # ids read so far.
        self._row_cuts: list[tuple[Handle, Iterator[Array], list[Array]]] = []
        # Number of tapes that record, and the innermost of them.
        self._depth = 0
        self._tape: int | None = None
        # Whether the innermost tape is in GradientTape.stop_recording.
        self._paused = False

    def jaxpr(
        self, jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array], state: State
    ) -> list[Array]:
        env: Env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        self.equations(jaxpr.eqns, env, state, set(variables_of(jaxpr.outvars)))
        return [value_of(env, atom) for atom in jaxpr.outvars]

    def equations(self, eqns: Sequence[Equation], env: Env, state: State, needed: set[Var]) -> None:
        """Evaluates `eqns` in order; afterwards `env` holds at least the `needed` variables."""
        last_use = last_uses(eqns, needed)
        index = 0
        while index < len(eqns):
            eqn = eqns[index]
            start, paused = index, self._paused
            if not self._is_special(eqn):
                index += 1
                while index < len(eqns) and not self._is_special(eqns[index]):
                    index += 1
                evaluate_chunk(eqns[start:index], env, last_use, index)
            elif eqn.primitive is tape_p and eqn.params["event"] == "start":
                index = self._start_tape(eqns, index, env, state, last_use)
                for recorded in eqns[start:index]:
                    self._note_pause(recorded)
            else:
                self._special(eqns, index, env, state)
                index += 1
            if paused:
                for var in variables_made(eqns[start:index]):
                    if var in env and var not in self._cuts:
                        env[var] = lax.stop_gradient(env[var])

    def _note_pause(self, eqn: Equation) -> None:
        if self._tape is not None:
            self._paused = pauses(eqn, self._tape, self._paused)

    def _is_special(self, eqn: Equation) -> bool:
        return contains(eqn, MARKERS) or any(var in self._cuts for var in eqn.outvars)

    def _special(self, eqns: Sequence[Equation], index: int, env: Env, state: State) -> None:
        eqn = eqns[index]
        operands = [value_of(env, atom) for atom in eqn.invars]
        if eqn.primitive is read_p:
            outs = [state[eqn.params["handle"]]]
        elif eqn.primitive is sparse_read_p:
            outs = [self._sparse_read(eqn.params["handle"], operands[0], state)]
        elif eqn.primitive is write_p:
            # As in TensorFlow, no gradient flows through an assignment.
            value = lax.stop_gradient(operands[0]) if self._depth else operands[0]
            state[eqn.params["handle"]] = value
            outs = []
        elif eqn.primitive is tape_p:
            self._note_pause(eqn)
            outs = []
        elif eqn.primitive is grad_p:
            outs = self._gradient(eqns, index, env)
        elif not contains(eqn, MARKERS):
            outs = evaluate([eqn], eqn.outvars, env)
        else:
            outs = self._nested(eqn, operands, state)
        for var, out in zip(eqn.outvars, outs, strict=True):
            if self._paused:
                out = lax.stop_gradient(out)
            for zero in self._cuts.get(var, ()):
                out = out + zero
            env[var] = out

    def _sparse_read(self, handle: Handle, ids: Array, state: State) -> Array:
        rows = jnp.take(state[handle], ids, axis=0)
        if self._paused:
            return rows
        for cut, zeros, seen in self._row_cuts:
            if cut is handle:
                seen.append(ids.reshape(-1).astype("int32"))
                rows = rows + next(zeros).reshape(rows.shape)
        return rows

    # Nested jaxprs

    def _nested(self, eqn: Equation, operands: list[Array], state: State) -> list[Array]:
        name = eqn.primitive.name
        if is_jit(eqn):
            return self.jaxpr(*open_jaxpr(eqn.params["jaxpr"]), operands, state)
        rules = {"scan": self._scan, "while": self._while, "cond": self._cond}
        rule = self._checkpoint if name in CHECKPOINTS else rules.get(name)
        if rule is not None:
            outs, values = rule(eqn, operands, state)
            state.update(values)
            return outs
        raise UnsupportedError(
            f"A variable or a GradientTape is used inside {name!r} (jax.custom_vjp, jax.custom_jvp"
            " or another transformation that keeps its function). Read variables outside with"
            " v.value(), pass them as arguments, and assign the results afterwards."
        )

    def _body(
        self, jaxpr: AnyJaxpr, state: State, written: Sequence[Handle]
    ) -> Callable[..., _Outs]:
        """Returns a function of the inputs of a jaxpr, and of variables that have changed.

        It returns the outputs, and the state of the variables that are `written`.
        """
        inner, consts = open_jaxpr(jaxpr)

        def run(args: Sequence[Array], values: State) -> _Outs:
            after = {**state, **values}
            outs = self.jaxpr(inner, consts, args, after)
            return outs, _of(after, written)

        return run

    def _scan(self, eqn: Equation, operands: list[Array], state: State) -> _Outs:
        params = eqn.params
        consts, carry, xs = parts_of_scan(eqn, operands)
        written = handles_written(open_jaxpr(params["jaxpr"])[0].eqns)
        run = self._body(params["jaxpr"], state, written)
        num_carry = len(carry)

        def body(carried: _Outs, xs: list[Array]) -> Any:
            carry, values = carried
            outs, values = run([*consts, *carry, *xs], values)
            return (outs[:num_carry], values), outs[num_carry:]

        (carry, values), ys = lax.scan(
            body,
            (carry, _of(state, written)),
            xs,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys], values

    def _while(self, eqn: Equation, operands: list[Array], state: State) -> _Outs:
        params = eqn.params
        condition_consts, body_consts, carry = parts_of_while(eqn, operands)
        assigned = handles_written(open_jaxpr(params["cond_jaxpr"])[0].eqns)
        if assigned:
            raise UnsupportedError(
                f"Variable {assigned[0].name!r} is assigned in the condition"
                " of jax.lax.while_loop. Assign it in the body."
            )
        written = handles_written(open_jaxpr(params["body_jaxpr"])[0].eqns)
        condition = self._body(params["cond_jaxpr"], state, [])
        body = self._body(params["body_jaxpr"], state, written)

        def is_going_on(carried: _Outs) -> Array:
            carry, values = carried
            return condition([*condition_consts, *carry], values)[0][0]

        def step(carried: _Outs) -> _Outs:
            carry, values = carried
            return body([*body_consts, *carry], values)

        return lax.while_loop(is_going_on, step, (carry, _of(state, written)))

    def _cond(self, eqn: Equation, operands: list[Array], state: State) -> _Outs:
        branches = eqn.params["branches"]
        eqns = [e for branch in branches for e in open_jaxpr(branch)[0].eqns]
        runs = [self._body(branch, state, handles_written(eqns)) for branch in branches]
        return lax.switch(operands[0], runs, operands[1:], OrderedDict())

    def _checkpoint(self, eqn: Equation, operands: list[Array], state: State) -> _Outs:
        params = eqn.params
        written = handles_written(open_jaxpr(params["jaxpr"])[0].eqns)
        run = self._body(params["jaxpr"], state, written)
        return jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])(
            operands, OrderedDict()
        )

    # Tapes

    def _start_tape(
        self,
        eqns: Sequence[Equation],
        index: int,
        env: Env,
        state: State,
        last_use: dict[Var, int],
    ) -> int:
        """Evaluates the recorded equations, differentiably; returns the index to go on at."""
        tape = eqns[index].params["tape"]
        self._snapshots[tape] = dict(state)
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
        live = [var for var in variables_made(region) if last_use.get(var, -1) >= stop]
        pullback = self._differentiate(eqns[gradient_index], region, env, state, live)
        env.update(zip(live, pullback.live, strict=True))
        state.update(pullback.changed)
        self._snapshots.update(pullback.snapshots)
        self._pullbacks[tape] = pullback
        return stop

    def _gradient(self, eqns: Sequence[Equation], index: int, env: Env) -> list[Array]:
        eqn = eqns[index]
        if not any(eqn.params["kinds"]):
            return []
        tape = eqn.params["tape"]
        pullback = self._pullbacks.pop(tape, None)
        if pullback is None or pullback.eqn is not eqn:
            # This is not the tape's first gradient, or two tapes overlap. The recorded equations
            # are evaluated once more; XLA merges the two computations.
            start, stop = tape_region(eqns, index)
            region = _recorded_for(eqn, eqns[start:stop])
            pullback = self._differentiate(eqn, region, env, dict(self._snapshots[tape]), [])
        num_targets = eqn.params["num_targets"]
        seeds = [value_of(env, atom) for atom in eqn.invars[num_targets : 2 * num_targets]]
        return pullback.gradients(seeds)

    def _differentiate(
        self,
        eqn: Equation,
        region: Sequence[Equation],
        env: Env,
        state: State,
        live: list[Var],
    ) -> "_Pullback":
        """Evaluates `region` as a function of the sources of the gradient `eqn`."""
        known = {*env, *variables_made(region)}
        # Targets computed after the tape are constants, and may have no value yet.
        targets = {
            i: target
            for i, target in enumerate(eqn.invars[: eqn.params["num_targets"]])
            if not isinstance(target, Literal) and target in known
        }
        sources = _Sources.of(eqn, region, env, state)

        def recorded(
            outer: list[Array], zeros: list[Array], dense: list[Array], rows: list[list[Array]]
        ) -> tuple[list[Array], Any]:
            inner_env = {**env, **dict(zip(sources.outer, outer, strict=True))}
            inner_state = {**state, **dict(zip(sources.dense, dense, strict=True))}
            before = dict(inner_state)
            seen: list[list[Array]] = [[] for _ in rows]
            saved = self._cuts, self._row_cuts, dict(self._snapshots)
            saved_tape = self._tape, self._paused
            self._cuts = dict(self._cuts)
            for var, zero in zip(sources.inner, zeros, strict=True):
                self._cuts[var] = (*self._cuts.get(var, ()), zero)
            self._row_cuts = self._row_cuts + [
                (handle, iter(values), ids)
                for handle, values, ids in zip(sources.sparse, rows, seen, strict=True)
            ]
            self._depth += 1
            self._tape, self._paused = eqn.params["tape"], False
            try:
                self.equations(region, inner_env, inner_state, {*live, *targets.values()})
            finally:
                self._depth -= 1
                self._tape, self._paused = saved_tape
                snapshots = {t: s for t, s in self._snapshots.items() if t not in saved[2]}
                self._cuts, self._row_cuts, self._snapshots = saved
            aux = (
                [inner_env[var] for var in live],
                OrderedDict((h, v) for h, v in inner_state.items() if v is not before[h]),
                {tape: OrderedDict(values) for tape, values in snapshots.items()},
                [_concatenate(ids) for ids in seen],
            )
            return [inner_env[var] for var in targets.values()], aux

        _, pull, aux = jax.vjp(
            recorded,
            [env[var] for var in sources.outer],
            [jnp.zeros(aval.shape, aval.dtype) for aval in map(aval_of, sources.inner)],
            [state[handle] for handle in sources.dense],
            [
                [jnp.zeros((size, *handle.shape[1:]), handle.dtype) for size in sizes]
                for handle, sizes in sources.sparse.items()
            ],
            has_aux=True,
        )
        return _Pullback(eqn, list(targets), sources, pull, *aux)


@final
@dataclass(slots=True)
class _Sources:
    """The sources of one gradient, grouped by the way they are differentiated."""

    # The list below and the index in it, in the order of the results.
    order: list[tuple[str, int]] = field(default_factory=list)
    # Arrays that exist before the tape starts, and arrays computed while it records.
    outer: list[Var] = field(default_factory=list)
    inner: list[Var] = field(default_factory=list)
    dense: list[Handle] = field(default_factory=list)
    # Tables, with the rows of each read.
    sparse: dict[Handle, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, eqn: Equation, region: Sequence[Equation], env: Env, state: State) -> "_Sources":
        sources = cls()
        kinds, tape = eqn.params["kinds"], eqn.params["tape"]
        handles: tuple[Handle, ...] = eqn.params["handles"]
        arrays = eqn.invars[2 * eqn.params["num_targets"] :]
        inside = set(variables_made(region))
        for var, kind in zip(arrays, kinds[: len(arrays)], strict=True):
            if kind is not None:
                name = "inner" if var in inside else "outer"
                group = getattr(sources, name)
                if var not in group:
                    group.append(var)
                sources.order.append((name, group.index(var)))
        for handle, kind in zip(handles, kinds[len(arrays) :], strict=True):
            if kind == "dense":
                sources.order.append(("dense", len(sources.dense)))
                sources.dense.append(handle)
            elif kind is not None:
                sources.order.append(("sparse", len(sources.sparse)))
                sources.sparse[handle] = sparse_read_sizes(region, handle, tape) or []
        return sources


@final
@dataclass(slots=True)
class _Pullback:
    """The evaluated recording of a tape, with the pullback from its targets to its sources."""

    eqn: Equation
    targets: list[int]  # numbers of the targets that `pull` takes a seed for
    sources: _Sources
    pull: Callable[[list[Array]], Any]
    live: list[Array]
    changed: Written
    snapshots: dict[int, Written]
    ids: list[Array]

    def gradients(self, seeds: list[Array]) -> list[Array]:
        outer, inner, dense, sparse = self.pull([seeds[i] for i in self.targets])
        groups = {"outer": outer, "inner": inner, "dense": dense}
        outs: list[Array] = []
        for name, index in self.sources.order:
            if name == "sparse":
                outs += [_concatenate(sparse[index]), self.ids[index]]
            else:
                outs.append(groups[name][index])
        return outs


def _recorded_for(gradient: Equation, region: Sequence[Equation]) -> list[Equation]:
    """Returns the recorded equations that a later gradient of the tape depends on.

    `region` begins with the tape's start marker.
    """
    is_kept, _ = leading_to(
        region, gradient.invars, lambda e: e.primitive is tape_p or contains(e, _WRITE)
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


# Equations without markers


def last_uses(eqns: Sequence[Equation], needed: Iterable[Var]) -> dict[Var, int]:
    """Returns the index of each variable's last use; `len(eqns)` for the needed ones.

    A gradient uses everything its tape recorded, because that may have to be evaluated again.
    """
    last = dict.fromkeys(needed, len(eqns))
    for index, eqn in enumerate(eqns):
        used = [eqn]
        if eqn.primitive is grad_p:
            start, stop = tape_region(eqns, index)
            used += eqns[start + 1 : stop]
        for inner in used:
            for var in variables_of(inner.invars):
                last[var] = max(last.get(var, -1), index)
    return last


def evaluate_chunk(eqns: Sequence[Equation], env: Env, last_use: dict[Var, int], end: int) -> None:
    """Adds to `env` the results of equations that others use; `end` is the index after them."""
    outs = [var for var in variables_made(eqns) if last_use.get(var, -1) >= end]
    env.update(zip(outs, evaluate(eqns, outs, env), strict=True))


def evaluate(eqns: Sequence[Equation], outs: Sequence[Var], env: Env) -> list[Array]:
    """Returns the values of `outs`, which `eqns` compute from inputs in `env`."""
    defined = set(variables_made(eqns))
    free = dict.fromkeys(
        var for eqn in eqns for var in variables_of(eqn.invars) if var not in defined
    )
    jaxpr = jaxpr_of(list(free), outs, eqns)
    return jax.core.eval_jaxpr(jaxpr, (), *(env[var] for var in free))


def evaluate_all(eqns: Sequence[Equation], env: Env) -> None:
    """Adds every result of `eqns` to `env`, which has the values of their inputs."""
    outs = variables_made(eqns)
    env.update(zip(outs, evaluate(eqns, outs, env), strict=True))


def evaluate_one(eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    """Returns the results of one equation."""
    env = {
        atom: value
        for atom, value in zip(eqn.invars, operands, strict=True)
        if not isinstance(atom, Literal)
    }
    return evaluate([eqn], eqn.outvars, env)
