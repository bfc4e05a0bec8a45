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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import lax

from distributary.errors import UnsupportedError
from distributary.topology import scan_counts
from distributary.tracing._connectivity import (
    is_jit,
    pauses,
    sparse_read_sizes,
    tape_region,
)
from distributary.tracing._markers import (
    MARKERS,
    Array,
    Equation,
    Handle,
    contains,
    grad_p,
    handles_written,
    jaxpr_of,
    open_jaxpr,
    read_p,
    sparse_read_p,
    tape_p,
    write_p,
)

State: TypeAlias = dict[Handle, Array]
Env: TypeAlias = dict[Any, Array]

_WRITE = frozenset({write_p})


def interpret(
    jaxpr: Any, consts: Sequence[Array], args: Sequence[Array], state: State
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
        self._cuts: dict[Any, tuple[Array, ...]] = {}
        # Tables that are read by rows, with the zeros added to the rows of successive reads and the
        # ids read so far.
        self._row_cuts: list[tuple[Handle, Iterator[Array], list[Array]]] = []
        # Number of tapes that record, and the innermost of them.
        self._depth = 0
        self._tape: int | None = None
        # Whether the innermost tape is in GradientTape.stop_recording.
        self._paused = False

    def jaxpr(
        self, jaxpr: Any, consts: Sequence[Array], args: Sequence[Array], state: State
    ) -> list[Array]:
        env: Env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        self.equations(jaxpr.eqns, env, state, set(_variables(jaxpr.outvars)))
        return [value_of(env, atom) for atom in jaxpr.outvars]

    def equations(self, eqns: Sequence[Equation], env: Env, state: State, needed: set[Any]) -> None:
        """Evaluates `eqns` in order; afterwards `env` holds at least the `needed` variables."""
        last_use = _last_uses(eqns, needed)
        index = 0
        while index < len(eqns):
            eqn = eqns[index]
            start, paused = index, self._paused
            if not self._is_special(eqn):
                index += 1
                while index < len(eqns) and not self._is_special(eqns[index]):
                    index += 1
                _evaluate_chunk(eqns[start:index], env, last_use, index)
            elif eqn.primitive is tape_p and eqn.params["event"] == "start":
                index = self._start_tape(eqns, index, env, state, last_use)
                for recorded in eqns[start:index]:
                    self._note_pause(recorded)
            else:
                self._special(eqns, index, env, state)
                index += 1
            if paused:
                for var in _outputs(eqns[start:index]):
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
            jaxpr, consts = open_jaxpr(eqn.params["jaxpr"])
            return self.jaxpr(jaxpr, consts, operands, state)
        if name == "scan":
            return self._scan(eqn, operands, state)
        if name == "while":
            return self._while(eqn, operands, state)
        if name == "cond":
            return self._cond(eqn, operands, state)
        if name in ("checkpoint", "remat", "remat2"):
            return self._checkpoint(eqn, operands, state)
        raise UnsupportedError(
            f"A variable or a GradientTape is used inside {name!r} (jax.custom_vjp, jax.custom_jvp"
            " or another transformation that keeps its function). Read variables outside with"
            " v.value(), pass them as arguments, and assign the results afterwards."
        )

    def _scan(self, eqn: Equation, operands: list[Array], state: State) -> list[Array]:
        params = eqn.params
        jaxpr, jaxpr_consts = open_jaxpr(params["jaxpr"])
        num_consts, num_carry = scan_counts(params)
        consts = operands[:num_consts]
        carry = operands[num_consts : num_consts + num_carry]
        written = handles_written(jaxpr.eqns)

        def body(carried: Any, xs: Any) -> Any:
            carry, values = carried
            inner = {**state, **dict(zip(written, values, strict=True))}
            outs = self.jaxpr(jaxpr, jaxpr_consts, [*consts, *carry, *xs], inner)
            return (outs[:num_carry], [inner[handle] for handle in written]), outs[num_carry:]

        (carry, values), ys = lax.scan(
            body,
            (carry, [state[handle] for handle in written]),
            operands[num_consts + num_carry :],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        state.update(zip(written, values, strict=True))
        return [*carry, *ys]

    def _while(self, eqn: Equation, operands: list[Array], state: State) -> list[Array]:
        params = eqn.params
        condition, condition_closed = open_jaxpr(params["cond_jaxpr"])
        body, body_closed = open_jaxpr(params["body_jaxpr"])
        num_condition, num_body = params["cond_nconsts"], params["body_nconsts"]
        condition_consts = operands[:num_condition]
        body_consts = operands[num_condition : num_condition + num_body]
        written = handles_written([*condition.eqns, *body.eqns])
        if handles_written(condition.eqns):
            raise UnsupportedError(
                f"Variable {handles_written(condition.eqns)[0].name!r} is assigned in the condition"
                " of jax.lax.while_loop. Assign it in the body."
            )

        def condition_fn(carried: Any) -> Any:
            carry, values = carried
            inner = {**state, **dict(zip(written, values, strict=True))}
            return self.jaxpr(condition, condition_closed, [*condition_consts, *carry], inner)[0]

        def body_fn(carried: Any) -> Any:
            carry, values = carried
            inner = {**state, **dict(zip(written, values, strict=True))}
            outs = self.jaxpr(body, body_closed, [*body_consts, *carry], inner)
            return outs, [inner[handle] for handle in written]

        carry, values = lax.while_loop(
            condition_fn,
            body_fn,
            (operands[num_condition + num_body :], [state[handle] for handle in written]),
        )
        state.update(zip(written, values, strict=True))
        return list(carry)

    def _cond(self, eqn: Equation, operands: list[Array], state: State) -> list[Array]:
        branches = [open_jaxpr(branch) for branch in eqn.params["branches"]]
        written = handles_written([e for jaxpr, _ in branches for e in jaxpr.eqns])

        def branch_fn(jaxpr: Any, consts: Sequence[Array]) -> Any:
            def run(*args: Array) -> Any:
                inner = dict(state)
                outs = self.jaxpr(jaxpr, consts, args, inner)
                return outs, [inner[handle] for handle in written]

            return run

        outs, values = lax.switch(
            operands[0], [branch_fn(*branch) for branch in branches], *operands[1:]
        )
        state.update(zip(written, values, strict=True))
        return list(outs)

    def _checkpoint(self, eqn: Equation, operands: list[Array], state: State) -> list[Array]:
        jaxpr, consts = open_jaxpr(eqn.params["jaxpr"])
        written = handles_written(jaxpr.eqns)

        def run(args: list[Array]) -> Any:
            inner = dict(state)
            outs = self.jaxpr(jaxpr, consts, args, inner)
            return outs, [inner[handle] for handle in written]

        outs, values = jax.checkpoint(
            run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]
        )(operands)
        state.update(zip(written, values, strict=True))
        return list(outs)

    # Tapes

    def _start_tape(
        self,
        eqns: Sequence[Equation],
        index: int,
        env: Env,
        state: State,
        last_use: dict[Any, int],
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
        live = [var for var in _outputs(region) if last_use.get(var, -1) >= stop]
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
            region = _leading_to(eqn, eqns[start:stop])
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
        live: list[Any],
    ) -> "_Pullback":
        """Evaluates `region` as a function of the sources of the gradient `eqn`."""
        known = {*env, *_outputs(region)}
        # Targets computed after the tape are constants, and may have no value yet.
        targets = {
            i: target
            for i, target in enumerate(eqn.invars[: eqn.params["num_targets"]])
            if not isinstance(target, jex_core.Literal) and target in known
        }
        sources = _Sources.of(eqn, region, env, state)
        keys: dict[str, Any] = {}

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
            changed = {h: v for h, v in inner_state.items() if v is not before[h]}
            keys["changed"] = list(changed)
            keys["snapshots"] = {tape: list(values) for tape, values in snapshots.items()}
            aux = (
                [inner_env[var] for var in live],
                list(changed.values()),
                [list(values.values()) for values in snapshots.values()],
                [_concatenate(ids) for ids in seen],
            )
            return [inner_env[var] for var in targets.values()], aux

        _, pull, (live_values, changed, snapshots, ids) = jax.vjp(
            recorded,
            [env[var] for var in sources.outer],
            [jnp.zeros(var.aval.shape, var.aval.dtype) for var in sources.inner],
            [state[handle] for handle in sources.dense],
            [
                [jnp.zeros((size, *handle.shape[1:]), handle.dtype) for size in sizes]
                for handle, sizes in sources.sparse.items()
            ],
            has_aux=True,
        )
        return _Pullback(
            eqn,
            list(targets),
            sources,
            pull,
            live_values,
            dict(zip(keys["changed"], changed, strict=True)),
            {
                tape: dict(zip(handles, values, strict=True))
                for (tape, handles), values in zip(
                    keys["snapshots"].items(), snapshots, strict=True
                )
            },
            ids,
        )


@final
@dataclass(slots=True)
class _Sources:
    """The sources of one gradient, grouped by the way they are differentiated."""

    order: list[tuple[str, int]]  # (list below, index in it), in the order of the results
    outer: list[Any]  # arrays that exist before the tape starts
    inner: list[Any]  # arrays computed while the tape records
    dense: list[Handle]
    sparse: dict[Handle, list[int]]  # with the rows of each read

    @classmethod
    def of(cls, eqn: Equation, region: Sequence[Equation], env: Env, state: State) -> "_Sources":
        sources = cls([], [], [], [], {})
        kinds, tape = eqn.params["kinds"], eqn.params["tape"]
        handles: tuple[Handle, ...] = eqn.params["handles"]
        arrays = eqn.invars[2 * eqn.params["num_targets"] :]
        inside = {var for inner in region for var in inner.outvars}
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
    pull: Any
    live: list[Array]
    changed: State
    snapshots: dict[int, State]
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


def _leading_to(gradient: Equation, region: Sequence[Equation]) -> list[Equation]:
    """Returns the recorded equations that a later gradient of the tape depends on.

    `region` begins with the tape's start marker.
    """
    needed = set(_variables(gradient.invars))
    kept: list[Equation] = []
    for eqn in reversed(region):
        stays = eqn.primitive is tape_p or contains(eqn, _WRITE)
        if stays or not needed.isdisjoint(eqn.outvars):
            needed.update(_variables(eqn.invars))
            kept.append(eqn)
    kept.reverse()
    tape = gradient.params["tape"]
    # The start marker is for gradients that the tape itself recorded.
    recorded = any(e.primitive is grad_p and e.params["tape"] == tape for e in kept)
    return kept if recorded else kept[1:]


def _last_uses(eqns: Sequence[Equation], needed: set[Any]) -> dict[Any, int]:
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
            for var in _variables(inner.invars):
                last[var] = max(last.get(var, -1), index)
    return last


def _evaluate_chunk(eqns: Sequence[Equation], env: Env, last_use: dict[Any, int], end: int) -> None:
    """Evaluates equations without markers; `end` is the index after the last of them."""
    outs = [var for var in _outputs(eqns) if last_use.get(var, -1) >= end]
    env.update(zip(outs, evaluate(eqns, outs, env), strict=True))


def evaluate(eqns: Sequence[Equation], outs: Sequence[Any], env: Env) -> list[Array]:
    """Returns the values of `outs`, which `eqns` compute from inputs in `env`."""
    defined = {var for eqn in eqns for var in eqn.outvars}
    free = dict.fromkeys(
        var for eqn in eqns for var in _variables(eqn.invars) if var not in defined
    )
    jaxpr = jaxpr_of(list(free), outs, eqns)
    return jax.core.eval_jaxpr(jaxpr, (), *(env[var] for var in free))


def evaluate_all(eqns: Sequence[Equation], env: Env) -> None:
    """Adds every result of `eqns` to `env`, which has the values of their inputs."""
    outs = list(_outputs(eqns))
    env.update(zip(outs, evaluate(eqns, outs, env), strict=True))


def _outputs(eqns: Sequence[Equation]) -> Iterator[Any]:
    return (var for eqn in eqns for var in eqn.outvars)


def _concatenate(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def value_of(env: Env, atom: Any) -> Array:
    """Returns the value of a literal, or of a variable in `env`."""
    return atom.val if isinstance(atom, jex_core.Literal) else env[atom]


def _variables(atoms: Sequence[Any]) -> Iterator[Any]:
    return (atom for atom in atoms if not isinstance(atom, jex_core.Literal))
