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

The stages of `split_over_servers` decide

1. which equations depend on data, and so are the worker's (`is_in_first_stage`): those of a, b, c;
2. which last operations of the worker a server does in its place (`_last_operations`): none here,
   but with `sub w x` in place of `sub w d`, that subtraction;
3. for every other equation, the servers whose variables its result is for (`_tasks_of_equations`):
   server 0 for those of d and e;
4. what every server is given (`_server_part`): `w`, which it has, and `c`, which is pushed;
5. what the worker has to compute (`_worker_part`): the results and everything that is pushed.

Before, `in_parts` divides the variables of a program into parts, each a state of its own. With a
variable of 4 rows in two parts, the update

    { lambda ; a:f32[4,2] b:f32[4,2]. let
        c:f32[4,2] = mul 0.1 b
        d:f32[4,2] = push c
        e:f32[4,2] = sub a d
      in (e,) }

becomes an update of each part

    { lambda ; a:f32[2,2] b:f32[2,2] c:f32[4,2]. let
        e:f32[4,2] = mul 0.1 c
        g:f32[2,2] = slice[start=(0, 0) limit=(2, 2)] e
        h:f32[2,2] = push g
        i:f32[2,2] = sub a h
        j:f32[2,2] = slice[start=(2, 0) limit=(4, 2)] e
        k:f32[2,2] = push j
        l:f32[2,2] = sub b k
      in (i, l) }

so parts of one variable can lie on several parameter servers.

And before that, `per_device` turns a function whose replicas run on several devices into the
program of one device.

Values outside of the replicas are the same on all devices, and each device computes them. So

    { lambda ; w:f32[] x:f32[4]. let
        c:f32[] = mul w 2.0
        d:f32[] = shard_map[in_specs=(P(), P("replica")) out_specs=(P(),)
          jaxpr={ lambda ; e:f32[] f:f32[2]. let
              g:f32[2] = mul f e
              h:f32[] = reduce_sum g
              i:f32[] = psum[replica] h
            in (i,) }
        ] c x
      in (d,) }

becomes one flat program with collectives, of which every device runs a copy:

    { lambda ; w:f32[] x:f32[4]. let
        c:f32[] = mul w 2.0
        d:i32[] = axis_index[replica]
        e:i32[] = mul d 2
        f:f32[2] = dynamic_slice[slice_sizes=(2,)] x e
        g:f32[2] = mul f c
        h:f32[] = reduce_sum g
        i:f32[] = psum[replica] h
      in (i,) }

The other stages then see the equations of the replicas.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias, final

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from distributary.devices import REPLICA_AXIS, shard_dim
from distributary.errors import UnsupportedError
from distributary.jaxprs import (
    AnyJaxpr,
    Array,
    Atom,
    Equation,
    aval_of,
    call_of,
    evaluate_one,
    has_replicas,
    interpret_with,
    jaxpr_of,
    leading_to,
    open_jaxpr,
    opened,
    shape_of,
    variables_of,
)
from distributary.programs import (
    closed_part,
    is_in_first_stage,
    row_operands,
    with_rows,
    without_calls,
)
from distributary.tracing import Handle, is_of_devices, is_sum_of_replicas, start_p

# Stands in for the number of a server, for values that the worker returns or computes with.
_WORKER = -1
_DATA = ("data", "replicas", "argument")

#: The origin of an input of a program: a kind and a number; see `WorkerPlan.inputs`.
Origin: TypeAlias = tuple[str, int]


class Shard(NamedTuple):
    """A variable on a server, or some rows of one.

    Attributes:
        server: Number of the server.
        number: Number of the variable on the server.
        num_rows: Size of dim 0; 1 for a scalar.
    """

    server: int
    number: int
    num_rows: int


@final
@dataclass(frozen=True)
class Step:
    """A program with an input and an output for every shard of a variable.

    Attributes:
        jaxpr: The program, which each device runs, without markers of variables, constants and
            calls of functions.
        constants: Values of its last inputs.
        inputs: Its other inputs: captured arrays, shards of variables, data, arguments.
        shards: The shard that each input of the kind "state" is, by position.
        handles: The variables that these are shards of.
        olds: For every output that is new state, the position of the input that is its old state.
            The results come before these outputs.
        num_devices: Number of devices of a worker; each of them runs the program.
        num_shares: Number of devices over which XLA divides the program.
    """

    jaxpr: Jaxpr
    constants: Mapping[Var, Array]
    inputs: list[Origin]
    shards: dict[int, Shard]
    handles: dict[int, Handle]
    olds: dict[int, int]
    num_devices: int
    num_shares: int

    @property
    def num_results(self) -> int:
        """Number of outputs that are no new state."""
        return len(self.jaxpr.outvars) - len(self.olds)

    @cached_property
    def shard_of(self) -> dict[Var, Shard]:
        """The shard that each input that is state is."""
        return {self.jaxpr.invars[i]: shard for i, shard in self.shards.items()}

    @cached_property
    def goals(self) -> list[int]:
        """For every output, the server that keeps it; `_WORKER` for results."""
        return [_WORKER] * self.num_results + [self.shards[i].server for i in self.olds.values()]


@final
@dataclass(frozen=True, slots=True)
class ServerPart:
    """The work of one server on the values that a worker pushes.

    Attributes:
        update: Closed jaxpr from the state of `states`, then the values at `pushes`, to the new
            state of `outputs`.
        states: Numbers of the variables that it reads.
        pushes: Positions among the pushed values.
        outputs: Numbers of the variables that it changes.
        olds: For every output, the state that it replaces: an input of `update`, if that reads it.
    """

    update: ClosedJaxpr
    states: list[int]
    pushes: list[int]
    outputs: list[int]
    olds: list[Var]


@final
@dataclass(frozen=True, slots=True)
class ServerSplit:
    """A step in parts.

    Attributes:
        worker: Closed jaxpr from the inputs of the step at `inputs` to the outputs of the step that
            are not state, then the pushed values.
        inputs: Positions among the inputs of the step. The worker pulls the state among them.
        servers: The servers that keep state which the step changes, by number.
    """

    worker: ClosedJaxpr
    inputs: list[int]
    servers: dict[int, ServerPart]


def split_over_servers(step: Step) -> ServerSplit:
    """Splits a step over the servers that keep its variables.

    A server computes the values that need its own state or a pushed value, and are of use to it
    alone. The worker computes values that several servers need, such as the norm of all gradients
    or a learning rate that depends on a counter, from the state that it has pulled.

    If a value depends on data and was not pushed, only its last operation is the server's, with
    those operands that are computed from state alone: `v.assign_add(x)` and moving averages. The
    other operands are pushed, unless they are new state of the same server. Without such an
    operation the value is assigned as it is, and the last worker wins. If there are several
    additions to the old state, also by several devices that add to parts of it, the addition to the
    state is made the last one.

    Raises:
        UnsupportedError: if the update of a variable needs the state of several servers at once, or
            workers would overwrite a sum.
    """
    step = replace(step, jaxpr=_with_sums_last(step))
    jaxpr, goals = step.jaxpr, step.goals
    is_data = [*(kind in _DATA for kind, _ in step.inputs), *[False] * len(step.constants)]
    of_worker = is_in_first_stage(jaxpr, is_data, max(2, step.num_devices))
    depends, free = _dependencies(step, is_data)
    at_end = _last_operations(step, of_worker, depends, free)
    at_server, at_worker = _tasks_of_equations(step, of_worker, at_end, depends, free)
    pairs = zip(jaxpr.eqns, of_worker, strict=True)
    updates = {v for eqn, early in pairs if not early for v in eqn.outvars}
    for i, old in step.olds.items():
        output = jaxpr.outvars[i]
        if _hashable(output) not in updates:
            continue
        # Else it would be computed from old state, and overwrite what others have done.
        if not any(output in eqn.outvars for eqn in at_server[goals[i]]):
            raise UnsupportedError(
                f"The update of {step.handles[old].name!r} needs variables on several servers, so"
                " no server can compute it. Start one server, or use an optimizer that updates each"
                " variable by itself; Adafactor, loss scaling and gradient accumulation do not."
            )

    pushes: dict[Var, int] = {}
    servers = {
        server: _server_part(step, server, eqns, pushes) for server, eqns in at_server.items()
    }
    worker, worker_inputs = _worker_part(step, at_worker, pushes)
    return ServerSplit(worker, worker_inputs, servers)


def _with_sums_last(step: Step) -> Jaxpr:
    """Rewrites new state `(v + x) + y` as `v + (x + y)`, also if several devices add to it.

    Devices add to `start_of_sum(v)`, whose sum over them is `v`.
    """
    jaxpr = step.jaxpr
    makers: dict[Var | None, Equation] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    outputs = list(jaxpr.outvars)
    eqns = list(jaxpr.eqns)

    def added_to(
        state: Var, atom: Atom, seen: set[tuple[Atom, bool]], of_devices: bool = False
    ) -> tuple[Atom, Equation] | None:
        """Returns what is added to the state to make an atom, and an equation that adds.

        Args:
            state: The state.
            atom: The atom.
            seen: The atoms that have been looked at.
            of_devices: Whether it is the summand of one of several devices.
        """
        eqn = makers.get(_hashable(atom))
        if eqn is None or (atom, of_devices) in seen:
            return None
        seen.add((atom, of_devices))
        is_sum = is_sum_of_replicas(eqn)
        others: list[Atom] = []
        pair = None
        if is_sum or eqn.primitive.name == "push":
            pair = added_to(state, eqn.invars[0], seen, of_devices or is_sum)
        elif eqn.primitive.name in ("add", "add_any"):
            for first, other in (eqn.invars, eqn.invars[::-1]):
                start = makers.get(_hashable(first)) if of_devices else None
                # Devices start from something else in the place of the state.
                if start is not None and start.primitive is start_p:
                    is_state = start.invars[0] is state
                else:
                    is_state = first is state and not of_devices
                if is_state:
                    return other, eqn
                pair, others = added_to(state, first, seen, of_devices), [other]
                if pair is not None:
                    break
        if pair is None:
            return None
        new = Var(atom.aval)
        eqns.append(eqn.replace(invars=[pair[0], *others], outvars=[new]))
        return new, pair[1]

    for i, old in step.olds.items():
        state = jaxpr.invars[old]
        maker = makers.get(_hashable(outputs[i]))
        if maker is None or state in variables_of(maker.invars):
            continue
        pair = added_to(state, outputs[i], set())
        if pair is not None:
            new = outputs[i] = Var(outputs[i].aval)
            eqns.append(pair[1].replace(invars=[state, pair[0]], outvars=[new]))
    return jaxpr_of(jaxpr.invars, outputs, eqns, jaxpr.constvars)


def _dependencies(step: Step, is_data: Sequence[bool]) -> tuple[dict[Var, set[int]], set[Var]]:
    """Returns what the variables of a step depend on.

    Args:
        step: The step.
        is_data: For every input, whether it is data of the worker.

    Returns:
        For every variable, the servers whose state it depends on; and the variables that depend on
        no data and no pushed value.
    """
    invars = step.jaxpr.invars
    depends: dict[Var, set[int]] = {v: set() for v in invars}
    depends.update((v, {shard.server}) for v, shard in step.shard_of.items())
    free = {v for v, of_data in zip(invars, is_data, strict=True) if not of_data}
    for eqn in step.jaxpr.eqns:
        operands = variables_of(eqn.invars)
        servers = set().union(*(depends[v] for v in operands))
        depends.update((v, servers) for v in eqn.outvars)
        stays = eqn.effects or is_of_devices(eqn)  # `push` counts as such
        if not stays and free.issuperset(operands):
            free.update(eqn.outvars)
    return depends, free


def _last_operations(
    step: Step, of_worker: Sequence[bool], depends: Mapping[Var, set[int]], free: set[Var]
) -> list[set[int]]:
    """Returns for every equation the servers that compute it for new state, like the worker.

    For new state that depends on no data these are all its equations; else only the last operation,
    and those that make its operands that depend on no data.
    """
    eqns = step.jaxpr.eqns
    number_of: dict[Var | None, int] = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    at_end: list[set[int]] = [set() for _ in eqns]
    for output, goal in zip(step.jaxpr.outvars, step.goals, strict=True):
        last = number_of.get(_hashable(output))
        if goal == _WORKER or last is None or not of_worker[last]:
            continue
        eqn = eqns[last]
        known = {v for v in free if depends[v] <= {goal}}
        if _hashable(output) not in known and (
            len(eqn.outvars) > 1
            or eqn.effects
            or is_of_devices(eqn)
            or not any(v in free and depends[v] == {goal} for v in variables_of(eqn.invars))
        ):
            continue
        left = [last]
        while left:
            number = left.pop()
            at_end[number].add(goal)
            operands = variables_of(eqns[number].invars)
            left += [number_of[v] for v in operands if v in known and v in number_of]
    return at_end


def _tasks_of_equations(
    step: Step,
    of_worker: Sequence[bool],
    at_end: Sequence[set[int]],
    depends: Mapping[Var, set[int]],
    free: set[Var],
) -> tuple[dict[int, list[Equation]], list[Equation]]:
    """Returns the equations of every server that keeps changed state, and those of the worker.

    An update is a server's if only that server needs its result, or if it depends on the state of
    that server alone or on nothing. The worker has the other equations, and those of a server whose
    result others need, too. In addition, servers have the equations of `_last_operations`.
    """
    eqns = step.jaxpr.eqns
    # By variable, the servers whose updates need it, and `_WORKER` if that does.
    reaches: dict[Var, set[int]] = {}
    for output, goal in zip(step.jaxpr.outvars, step.goals, strict=True):
        for v in variables_of([output]):
            reaches.setdefault(v, set()).add(goal)
    at_server: dict[int, list[Equation]] = {goal: [] for goal in step.goals if goal != _WORKER}
    at_worker: list[Equation] = []
    for eqn, early, ends in zip(eqns[::-1], of_worker[::-1], at_end[::-1], strict=True):
        to = set().union(*(reaches.get(v, ()) for v in eqn.outvars))
        servers = set(ends)
        if to and not early:
            state = depends[eqn.outvars[0]]
            is_constant = not state and eqn.outvars[0] in free
            servers.update(s for s in to if is_constant or to == {s} or state == {s})
        for server in servers - {_WORKER}:
            at_server[server].append(eqn)
        if early or not to <= servers - {_WORKER}:
            at_worker.append(eqn)
        for v in variables_of(eqn.invars):
            reaches.setdefault(v, set()).update(ends, {_WORKER} if early else to)
    return {server: eqns[::-1] for server, eqns in at_server.items()}, at_worker[::-1]


def _server_part(
    step: Step, server: int, eqns: list[Equation], pushes: dict[Var, int]
) -> ServerPart:
    """Returns the part of one server.

    Args:
        step: The step.
        server: Number of the server.
        eqns: Its equations.
        pushes: Receives the variables that are pushed to the server, with their positions.
    """
    own_outputs = [i for i in step.olds if step.goals[i] == server]
    outvars = [step.jaxpr.outvars[i] for i in own_outputs]
    olds = [step.jaxpr.invars[step.olds[i]] for i in own_outputs]
    results = {v for eqn in eqns for v in eqn.outvars}
    used = [*(atom for eqn in eqns for atom in eqn.invars), *outvars]
    needed = list(dict.fromkeys(variables_of(used)))
    states = [v for v in needed if v in step.shard_of and step.shard_of[v].server == server]
    pushed = [v for v in needed if v not in results.union(states, step.constants)]
    for v in pushed:
        pushes.setdefault(v, len(pushes))
    for i in own_outputs:
        handle = step.handles[step.olds[i]]
        is_overwritten = _hashable(step.jaxpr.outvars[i]) in pushed  # and the last worker wins
        if is_overwritten and handle.cell is not None and getattr(handle.cell(), "is_sum", False):
            raise UnsupportedError(
                f"Variable {handle.name!r} is a sum over all workers, but its new value is not its"
                " old one plus something, so the last worker would overwrite what the others have"
                " added. Use metrics that add to their variables, or compute the value from what"
                " closures return."
            )
    return ServerPart(
        needed_part([*states, *pushed], outvars, eqns, step.constants),
        [step.shard_of[v].number for v in states],
        [pushes[v] for v in pushed],
        [step.shard_of[old].number for old in olds],
        olds,
    )


def _worker_part(
    step: Step, eqns: Sequence[Equation], pushes: Mapping[Var, int]
) -> tuple[ClosedJaxpr, list[int]]:
    """Returns the part of the worker, and the positions of its inputs among those of the step."""
    results = step.jaxpr.outvars[: step.num_results]
    invars = step.jaxpr.invars[: len(step.inputs)]
    worker = needed_part(invars, [*results, *pushes], eqns, step.constants, with_effects=True)
    position = {v: i for i, v in enumerate(invars)}
    return worker, [position[v] for v in worker.jaxpr.invars]


def needed_part(
    invars: Iterable[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[Equation],
    constants: Mapping[Var, Array],
    with_effects: bool = False,
) -> ClosedJaxpr:
    """Returns the part of a program that computes `outvars`.

    Args:
        invars: Inputs of the program. Those that the part needs are its inputs.
        outvars: The outputs of the part.
        eqns: Equations of the program.
        constants: Values of further inputs.
        with_effects: Whether equations with effects stay, even if no output needs them.
    """
    is_needed, _ = leading_to(eqns, outvars, lambda eqn: with_effects and bool(eqn.effects))
    return closed_part(invars, outvars, list(itertools.compress(eqns, is_needed)), constants)


def _hashable(atom: Atom) -> Var | None:
    return None if isinstance(atom, Literal) else atom


def in_parts(
    jaxpr: Jaxpr, inputs: Mapping[int, Sequence[int]], outputs: Mapping[int, Sequence[int]]
) -> tuple[Jaxpr, dict[Var, Array]]:
    """Returns a program with parts in the place of whole variables.

    A value that is computed row by row from parts, or from pushed values, has parts, too: each part
    is computed from the same rows of the operands. So every part has an update of its own, and the
    value pushed for it is a part.

    Args:
        jaxpr: The program.
        inputs: By position of an input, the sizes along dim 0 of the parts that take its place.
        outputs: The same for outputs.

    Returns:
        The program without calls of functions, and the values of constants, which are its last
        inputs.
    """
    jaxpr, constants = without_calls(jaxpr, {})
    invars: list[Var] = []
    joined: list[Equation] = []
    for i, v in enumerate(jaxpr.invars):
        if i not in inputs:
            invars.append(v)
            continue
        parts = [_rows_like(v, num_rows) for num_rows in inputs[i]]
        invars += parts
        joined.append(_equation(lambda *arrays: lax.concatenate(arrays, 0), parts, v))
    parting = _Parting(invars)
    for eqn in (*joined, *jaxpr.eqns):
        parting.add(eqn)
    outvars: list[Atom] = []
    for i, atom in enumerate(jaxpr.outvars):
        whole = parting.renamed(atom)
        if i in outputs and isinstance(whole, Var):
            outvars += [parting.part(whole, *rows) for rows in _ranges(outputs[i])]
        else:
            outvars.append(whole)
    return jaxpr_of(invars, outvars, parting.eqns), constants


@final
class _Parting:
    """A program that is being put together, in which parts are computed from parts.

    Args:
        inputs: Its inputs.

    Attributes:
        eqns: Its equations.
    """

    def __init__(self, inputs: Sequence[Var]) -> None:
        self.eqns: list[Equation] = []
        self._inputs = set(inputs)
        self._makers: dict[Var, Equation] = {}
        self._names: dict[Var, Var] = {}
        self._parts: dict[tuple[Var, int, int], Var] = {}
        # Variables that are computed row by row from pushes or parts.
        self._divisible: set[Var] = set()

    def add(self, eqn: Equation) -> None:
        """Adds the next equation of the program."""
        eqn = eqn.replace(invars=[self.renamed(v) for v in eqn.invars])
        if eqn.primitive.name == "split" and eqn.params["axis"] == 0:  # gradient of a concatenation
            for v, taken in zip(eqn.outvars, _ranges(eqn.params["sizes"]), strict=True):
                self.add(_slice(eqn.invars[0], *taken, v))
            return
        rows = rows_between(eqn)
        if rows is not None and eqn.invars[0] in self._divisible:
            self._names[eqn.outvars[0]] = self.part(eqn.invars[0], *rows)
            return
        operands = row_operands(eqn)
        if (
            (_is_joined(eqn) and all(v in self._inputs or v in self._divisible for v in eqn.invars))
            or (operands is not None and eqn.primitive.name == "push")
            or (operands and not self._divisible.isdisjoint(operands))
        ):
            self._divisible.update(eqn.outvars)
        self._append(eqn)

    def renamed(self, atom: Atom) -> Atom:
        """Returns the variable that has taken the place of one."""
        return atom if isinstance(atom, Literal) else self._names.get(atom, atom)

    def part(self, v: Var, start: int, end: int) -> Var:
        """Returns a variable with the rows of `v` from `start` to `end`."""
        key = v, start, end
        if key not in self._parts:
            self._parts[key] = self._part(v, start, end)
        return self._parts[key]

    def _part(self, v: Var, start: int, end: int) -> Var:
        eqn = self._makers.get(v)
        new = _rows_like(v, end - start)
        operands = None if eqn is None or len(eqn.outvars) > 1 else row_operands(eqn)
        if eqn is not None and _is_joined(eqn):
            ranges = _ranges([aval_of(atom).shape[0] for atom in eqn.invars])
            for atom, rows in zip(eqn.invars, ranges, strict=True):
                if rows == (start, end) and isinstance(atom, Var):
                    return atom
        elif eqn is not None and operands is not None and (not operands or v in self._divisible):
            # These rows can be computed without the others.
            invars = [
                self.part(atom, start, end) if isinstance(atom, Var) and atom in operands else atom
                for atom in eqn.invars
            ]
            params = with_rows(eqn, end - start)
            self._append(eqn.replace(invars=invars, outvars=[new], params=params))
            return new
        self._append(_slice(v, start, end, new))
        return new

    def _append(self, eqn: Equation) -> None:
        self.eqns.append(eqn)
        self._makers.update((v, eqn) for v in eqn.outvars)


def _is_joined(eqn: Equation) -> bool:
    return eqn.primitive.name == "concatenate" and eqn.params["dimension"] == 0


def _ranges(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first row, and the one after the last, of parts of these sizes."""
    return pairwise([0, *np.cumsum(sizes).tolist()])


def _rows_like(v: Var, num_rows: int) -> Var:
    """Returns a new variable like `v`, with another number of rows."""
    aval = aval_of(v)
    return Var(aval.update(shape=(num_rows, *aval.shape[1:])))


def _slice(v: Atom, start: int, end: int, outvar: Var) -> Equation:
    return _equation(lambda whole: lax.slice_in_dim(whole, start, end), [v], outvar)


def _equation(function: Callable[..., Array], invars: Sequence[Atom], outvar: Var) -> Equation:
    """Returns the only equation of a function, with the given variables."""
    avals = map(aval_of, invars)
    closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    (eqn,) = closed.jaxpr.eqns
    return eqn.replace(invars=list(invars), outvars=[outvar])


def rows_between(eqn: Equation) -> tuple[int, int] | None:
    """Returns the start and end of the rows that a slice takes; None for other equations."""
    params = eqn.params
    if (
        eqn.primitive.name != "slice"
        or set(params["strides"] or (1,)) != {1}
        or shape_of(eqn.outvars[0])[1:] != shape_of(eqn.invars[0])[1:]
    ):
        return None
    return params["start_indices"][0], params["limit_indices"][0]


def per_device(
    jaxpr: Jaxpr, is_split: Sequence[bool], num_replicas: int
) -> tuple[Jaxpr, list[Array]]:
    """Returns the program that each of the devices runs, over the axis `"replica"`.

    Args:
        jaxpr: The function, without markers and constants.
        is_split: For every input `[replica, *shape]`, whether a device has only its row of it,
            `[*shape]`.
        num_replicas: Number of devices.

    Returns:
        The program, whose outputs are the same on all devices, and values of its first inputs,
        which come before those of the function.

    Raises:
        UnsupportedError: for replicas inside `jax.lax.scan`, `cond` and `while_loop`.
    """
    avals = [
        jax.ShapeDtypeStruct(shape_of(v)[1:] if split else shape_of(v), aval_of(v).dtype)
        for v, split in zip(jaxpr.invars, is_split, strict=True)
    ]

    def run(*args: Array) -> list[Array]:
        values = [
            _Value(array[None], 0) if split else _Value(array)
            for array, split in zip(args, is_split, strict=True)
        ]
        return _evaluated(jaxpr, values)

    closed = jax.make_jaxpr(run, axis_env=[(REPLICA_AXIS, num_replicas)])(*avals)
    return opened(closed), closed.consts


@final
class _Value:
    """A value on every device.

    Args:
        array: The array that this device has.
        dim: The dim of which this device has a part; None if it has the whole.
    """

    def __init__(self, array: Array, dim: int | None = None) -> None:
        self._array = array
        self._dim = dim
        self._whole = array if dim is None else None

    def whole(self) -> Array:
        """Returns the whole value, gathered if need be."""
        if self._whole is None:
            self._whole = lax.all_gather(self._array, REPLICA_AXIS, axis=self._dim, tiled=True)
        return self._whole

    def part(self, dim: int, num_replicas: int) -> Array:
        """Returns this device's part of the value along a dim."""
        if dim == self._dim:
            return self._array
        size = self.whole().shape[dim] // num_replicas
        start = lax.axis_index(REPLICA_AXIS) * size
        return lax.dynamic_slice_in_dim(self.whole(), start, size, dim)


def _evaluated(jaxpr: AnyJaxpr, args: Sequence[_Value]) -> list[Array]:
    return [value.whole() for value in interpret_with(jaxpr, args, _Value, _results)[0]]


def _results(eqn: Equation, operands: Sequence[_Value]) -> Iterable[_Value]:
    if eqn.primitive.name == "shard_map":
        return _of_replica(eqn, operands)
    if not has_replicas([eqn]):
        return map(_Value, evaluate_one(eqn, [operand.whole() for operand in operands]))
    call = call_of(eqn)
    if call is None:
        raise UnsupportedError(
            f"Strategy.run inside jax.lax.{eqn.primitive.name} in a function that is scheduled on"
            " workers with several devices is not supported. Call it outside of the loop or branch."
        )
    return map(_Value, _evaluated(call, operands))


def _of_replica(eqn: Equation, operands: Sequence[_Value]) -> list[_Value]:
    num_replicas = eqn.params["mesh"].size
    inputs = []
    for operand, spec in zip(operands, eqn.params["in_specs"], strict=True):
        dim = shard_dim(spec)
        inputs.append(operand.whole() if dim is None else operand.part(dim, num_replicas))
    outs = jax.core.eval_jaxpr(*open_jaxpr(eqn.params["jaxpr"]), *inputs)
    return [
        _Value(out, shard_dim(spec))
        for out, spec in zip(outs, eqn.params["out_specs"], strict=True)
    ]
