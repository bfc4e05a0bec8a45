"""Splits the step of a worker into the worker's part and the updates of parameter servers.

A worker reads variables, computes on its batch and pushes gradients. A value that is computed from
a pushed value and the state of variables is an update. It belongs to the server that keeps the
variables, which starts from their latest values, whatever other workers have done since this one
read them. With a variable `w` on server 0 and data `x`, the step

    { lambda ; w:f32[2] x:f32[2]. let
        a:f32[2] = mul x w
        b:f32[] = reduce_sum a
        c:f32[2] = push x
        d:f32[2] = mul 0.1 c
        e:f32[2] = sub w d
      in (b, e) }

splits into a part of the worker, whose last output is the pushed value, and one of the server:

    { lambda ; w:f32[2] x:f32[2]. let       { lambda ; w:f32[2] c:f32[2]. let
        a:f32[2] = mul x w                      d:f32[2] = mul 0.1 c
        b:f32[] = reduce_sum a                  e:f32[2] = sub w d
        c:f32[2] = push x                     in (e,) }
      in (b, c) }
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import jax.extend.core as jex_core

from distributary.errors import UnsupportedError
from distributary.tracing import (
    Equation,
    is_of_devices,
    is_sum_of_replicas,
    jaxpr_of,
    stage_of_equations,
    start_p,
    variables_of,
    without_calls,
)

__all__ = ["ServerPart", "ServerSplit", "split_over_servers"]

# Stands in for the number of a server, for values that the worker returns or computes with.
_WORKER = -1


@final
@dataclass(frozen=True, slots=True)
class ServerPart:
    """The work of one server on the values that a worker pushes.

    Attributes:
        update: Closed jaxpr from the state at `states`, then the values at `pushes`, to the new
            state at `outputs`.
        states: Positions among the inputs of the whole.
        pushes: Positions among the pushed values.
        outputs: Positions among the outputs of the whole.
    """

    update: Any
    states: list[int]
    pushes: list[int]
    outputs: list[int]


@final
@dataclass(frozen=True, slots=True)
class ServerSplit:
    """A step in parts.

    Attributes:
        worker: Closed jaxpr from the inputs of the whole at `inputs` to the outputs of the whole
            that are not state, then the pushed values.
        inputs: Positions among the inputs of the whole. The worker pulls the state among them.
        num_pushes: Number of pushed values.
        servers: The servers that keep state which the step changes, by number.
        overwritten: Positions among the outputs of the whole of new state that no server computes:
            the last worker wins.
    """

    worker: Any
    inputs: list[int]
    num_pushes: int
    servers: dict[int, ServerPart]
    overwritten: list[int]


def split_over_servers(
    jaxpr: Any,
    owners: Sequence[int | None],
    is_data: Sequence[bool],
    state_of_output: Sequence[int | None],
    names: Sequence[str],
    constants: Mapping[Any, Any] = MappingProxyType({}),
    num_devices: int = 1,
) -> ServerSplit:
    """Splits a step over the servers that keep its variables.

    A server computes the values that need its own state or a pushed value, and are of use to it
    alone. The worker computes values that several servers need, such as the norm of all gradients
    or a learning rate that depends on a counter, from the state that it has pulled.

    If a value depends on data and was not pushed, only its last operation is the server's, with
    those operands that are computed from state alone: `v.assign_add(x)` and moving averages. The
    other operands are pushed. Without such an operation the value is assigned as it is, and the
    last worker wins. If there are several additions to the old state, also by several devices that
    add to parts of it, the addition to the state is made the last one.

    Args:
        jaxpr: The step, without markers of variables and without constants.
        owners: For every input that is the state of a variable, the number of its server.
        is_data: For every input, whether it is data of the worker.
        state_of_output: For every output that is the new state of a variable, the position of the
            input that is its old state.
        names: For every input, its name in messages.
        constants: Values of further inputs, which come last.
        num_devices: Number of devices of a worker; each of them runs the step.

    Raises:
        UnsupportedError: if the update of a variable needs the state of several servers at once.
    """
    # Written out, so that an optimizer that is one function can be split over servers.
    jaxpr, constants = without_calls(jaxpr, constants)
    jaxpr = _with_sums_last(jaxpr, state_of_output)
    jaxpr, of_worker = stage_of_equations(
        jaxpr, [*is_data, *[False] * len(constants)], max(2, num_devices)
    )
    state = {v: owner for v, owner in zip(jaxpr.invars, owners, strict=False) if owner is not None}
    goals = [
        _WORKER if position is None else state[jaxpr.invars[position]]
        for position in state_of_output
    ]
    outputs, last = _last_operations(jaxpr, of_worker, is_data, state, goals)
    eqns = [*jaxpr.eqns, *last]
    is_update = [*(not own for own in of_worker), *[True] * len(last)]

    depends = _servers_of_inputs(eqns, state)
    reaches = _servers_of_outputs(eqns, is_update, zip(outputs, goals, strict=True))
    at_server: dict[int, list[Equation]] = {goal: [] for goal in goals if goal != _WORKER}
    at_worker: list[Equation] = []
    for eqn, late in zip(eqns, is_update, strict=True):
        to = set().union(*(reaches.get(v, ()) for v in eqn.outvars))
        own = {s for s in to if late and (to == {s} or depends[eqn.outvars[0]] == {s})} - {_WORKER}
        for server in own:
            at_server[server].append(eqn)
        if not own.issuperset(to) or not late:
            at_worker.append(eqn)
    _check_updates(jaxpr, eqns, is_update, at_server, outputs, state_of_output, owners, names)

    pushes: dict[Any, int] = {}
    servers = {}
    overwritten: list[int] = []
    for server, own_eqns in at_server.items():
        own_outputs = [i for i, goal in enumerate(goals) if goal == server]
        outvars = [outputs[i] for i in own_outputs]
        made = {v for eqn in own_eqns for v in eqn.outvars}
        needed = _in_order([*(eqn.invars for eqn in own_eqns), outvars])
        own_state = [v for v in needed if state.get(v) == server]
        consts = [v for v in needed if v in constants]
        given = [v for v in needed if v not in made.union(own_state, consts)]
        for v in given:
            pushes.setdefault(v, len(pushes))
        overwritten += [i for i in own_outputs if _hashable(outputs[i]) in given]
        servers[server] = ServerPart(
            _closed([*own_state, *given], outvars, own_eqns, consts, constants),
            [jaxpr.invars.index(v) for v in own_state],
            [pushes[v] for v in given],
            own_outputs,
        )

    results = [v for v, goal in zip(outputs, goals, strict=True) if goal == _WORKER]
    wanted = {*variables_of(results), *pushes}
    kept: list[Equation] = []
    for eqn in reversed(at_worker):
        if eqn.effects or not wanted.isdisjoint(eqn.outvars):
            kept.append(eqn)
            wanted.update(variables_of(eqn.invars))
    inputs = [i for i, v in enumerate(jaxpr.invars) if v in wanted and v not in constants]
    worker = _closed(
        [jaxpr.invars[i] for i in inputs],
        [*results, *pushes],
        kept[::-1],
        [v for v in constants if v in wanted],
        constants,
    )
    return ServerSplit(worker, inputs, len(pushes), servers, overwritten)


def _with_sums_last(jaxpr: Any, state_of_output: Sequence[int | None]) -> Any:
    """Rewrites new state `(v + x) + y` as `v + (x + y)`, also if several devices add to it.

    Devices add to `start_of_sum(v)`, whose sum over them is `v`.
    """
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    outputs = list(jaxpr.outvars)
    eqns = list(jaxpr.eqns)
    seen: set[Any] = set()

    def start_of(atom: Any, of_devices: bool) -> Any:
        """Returns the state that an atom is, or that devices start from."""
        eqn = makers.get(_hashable(atom))
        if of_devices:
            return eqn.invars[0] if eqn is not None and eqn.primitive is start_p else None
        return atom

    def added(atom: Any, state: Any, of_devices: bool) -> tuple[Any, Any] | None:
        """Returns what is added to the state to make an atom, and an equation that adds."""
        eqn = makers.get(_hashable(atom))
        if eqn is None or (atom, of_devices) in seen:
            return None
        seen.add((atom, of_devices))
        name, found, others = eqn.primitive.name, None, []
        is_sum = is_sum_of_replicas(eqn)
        if (is_sum or name == "push") and len(eqn.invars) == 1:
            found = added(eqn.invars[0], state, of_devices or is_sum)
        elif name in ("add", "add_any"):
            for first, other in (eqn.invars, eqn.invars[::-1]):
                if start_of(first, of_devices) is state:
                    return other, eqn
                found, others = added(first, state, of_devices), [other]
                if found is not None:
                    break
        if found is None:
            return None
        new = jex_core.Var(atom.aval)
        eqns.append(eqn.replace(invars=[found[0], *others], outvars=[new]))
        return new, found[1]

    for i, position in enumerate(state_of_output):
        output = _hashable(outputs[i])
        state = None if position is None else jaxpr.invars[position]
        if state is None or output not in makers or state in variables_of(makers[output].invars):
            continue
        seen.clear()
        found = added(output, state, False)
        if found is not None:
            outputs[i] = jex_core.Var(output.aval)
            eqns.append(found[1].replace(invars=[state, found[0]], outvars=[outputs[i]]))
    return jaxpr_of(jaxpr.invars, outputs, eqns, jaxpr.constvars)


def _last_operations(
    jaxpr: Any,
    of_worker: Sequence[bool],
    is_data: Sequence[bool],
    state: dict[Any, int],
    goals: Sequence[int],
) -> tuple[list[Any], list[Equation]]:
    """Returns the outputs, and copies of the worker's equations that servers need for new state.

    For new state that depends on no data these are all its equations; else only the last operation,
    with those operands that depend on no data.
    """
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    own = {v for eqn, own in zip(jaxpr.eqns, of_worker, strict=True) if own for v in eqn.outvars}
    free = _servers_without_data(jaxpr, is_data, state)
    outputs = list(jaxpr.outvars)
    eqns: list[Equation] = []
    for i, goal in enumerate(goals):
        output = _hashable(outputs[i])
        eqn = makers.get(output)
        if goal == _WORKER or eqn is None or output not in own:
            continue
        copies: dict[Any, Any] = {}
        known = {v for v, servers in free.items() if servers <= {goal}}
        if output in known:
            eqns += _copied([output], makers, known, copies)
            outputs[i] = copies[output]
        elif (
            len(eqn.outvars) == 1
            and not eqn.effects
            and not is_of_devices(eqn)
            and any(free.get(v) == {goal} for v in variables_of(eqn.invars))
        ):
            eqns += _copied(eqn.invars, makers, known, copies)
            outputs[i] = jex_core.Var(eqn.outvars[0].aval)
            eqns.append(_renamed(eqn, copies, [outputs[i]]))
    return outputs, eqns


def _servers_without_data(
    jaxpr: Any, is_data: Sequence[bool], state: dict[Any, int]
) -> dict[Any, set[int]]:
    """Returns the variables that depend on no data and no pushed value.

    Each comes with the servers whose state it depends on.
    """
    free = {
        v: {state[v]} if v in state else set()
        for i, v in enumerate(jaxpr.invars)
        if i >= len(is_data) or not is_data[i]
    }
    for eqn in jaxpr.eqns:
        operands = variables_of(eqn.invars)
        stays = eqn.effects or is_of_devices(eqn)  # `push` counts as such
        if not stays and all(v in free for v in operands):
            servers = set().union(*(free[v] for v in operands))
            free.update((v, servers) for v in eqn.outvars)
    return free


def _copied(
    atoms: Iterable[Any], makers: dict[Any, Equation], known: set[Any], copies: dict[Any, Any]
) -> list[Equation]:
    """Copies the equations that make atoms from `known` variables, with outputs of their own."""
    eqns: list[Equation] = []
    for v in variables_of(atoms):
        eqn = makers.get(v)
        if eqn is None or v not in known or v in copies:
            continue
        eqns += _copied(eqn.invars, makers, known, copies)
        outvars = [jex_core.Var(out.aval) for out in eqn.outvars]
        eqns.append(_renamed(eqn, copies, outvars))
        copies.update(zip(eqn.outvars, outvars, strict=True))
    return eqns


def _renamed(eqn: Equation, names: dict[Any, Any], outvars: list[Any]) -> Equation:
    return eqn.replace(
        invars=[names.get(_hashable(atom), atom) for atom in eqn.invars], outvars=outvars
    )


def _servers_of_inputs(eqns: Sequence[Equation], state: dict[Any, int]) -> dict[Any, set[int]]:
    """Returns by variable the servers whose state it depends on."""
    depends: dict[Any, set[int]] = {v: {owner} for v, owner in state.items()}
    for eqn in eqns:
        on = set().union(*(depends.get(v, ()) for v in variables_of(eqn.invars)))
        depends.update((v, on) for v in eqn.outvars)
    return depends


def _servers_of_outputs(
    eqns: Sequence[Equation], is_update: Sequence[bool], goals: Iterable[tuple[Any, int]]
) -> dict[Any, set[int]]:
    """Returns by variable the servers whose updates need it, and `_WORKER` if that does."""
    reaches: dict[Any, set[int]] = {}
    for output, goal in goals:
        for v in variables_of([output]):
            reaches.setdefault(v, set()).add(goal)
    for eqn, late in zip(reversed(eqns), reversed(is_update), strict=True):
        to = set().union(*(reaches.get(v, ()) for v in eqn.outvars)) if late else {_WORKER}
        for v in variables_of(eqn.invars):
            reaches.setdefault(v, set()).update(to)
    return reaches


def _check_updates(
    jaxpr: Any,
    eqns: Sequence[Equation],
    is_update: Sequence[bool],
    at_server: dict[int, list[Equation]],
    outputs: Sequence[Any],
    state_of_output: Sequence[int | None],
    owners: Sequence[int | None],
    names: Sequence[str],
) -> None:
    """Refuses an update that would be computed from old state and overwrite that of others."""
    updates = {v for eqn, late in zip(eqns, is_update, strict=True) if late for v in eqn.outvars}
    for output, position in zip(outputs, state_of_output, strict=True):
        if position is None or _hashable(output) not in updates:
            continue
        server = owners[position]
        assert server is not None
        if not any(output in eqn.outvars for eqn in at_server[server]):
            raise UnsupportedError(
                f"The update of variable {names[position]!r} is one operation with those of other"
                " variables, which lie on other servers, so that no server can compute it. Let the"
                " optimizer update every variable by itself: without jax.lax.cond around the whole"
                " update, as loss scaling has it."
            )


def _closed(
    invars: list[Any],
    outvars: list[Any],
    eqns: list[Equation],
    constvars: list[Any],
    constants: dict[Any, Any],
) -> Any:
    opened = jaxpr_of(invars, outvars, eqns, constvars)
    return jex_core.ClosedJaxpr(opened, [constants[v] for v in constvars])


def _in_order(groups: Iterable[Iterable[Any]]) -> list[Any]:
    """Returns the variables in some groups of atoms, each once."""
    return list(dict.fromkeys(v for atoms in groups for v in variables_of(atoms)))


def _hashable(atom: Any) -> Any:
    return None if isinstance(atom, jex_core.Literal) else atom
