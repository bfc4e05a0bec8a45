"""Takes sums over the rows of a batch per device, and adds up all that are ready together.

A step of the whole batch, divided over the devices of a mesh, leaves it to XLA to divide the
program. On CPUs XLA adds up every sum over rows by itself, for which gloo pays each time, and it
cannot divide the forms of `_rules`, which are fast on one device. So the gradients of a layer,

    { lambda ; x:f32[8,3] g:f32[8,5]. let
        a:f32[3,5] = dot_general[dimension_numbers=(([0], [0]), ([], []))] x g
        b:f32[5] = reduce_sum[axes=(0,)] g
        c:f32[5] = mul b 0.5
        d:f32[3,5] = exp a
      in (d, c) }

become

    { lambda ; x:f32[8,3] g:f32[8,5]. let
        a:f32[3,5] c:f32[5] = shard_map[
          in_specs=(P("replica"), P("replica")) out_specs=(P(), P())
          jaxpr={ lambda ; x:f32[4,3] g:f32[4,5]. let
              e:f32[3,5] = dot_general[dimension_numbers=(([0], [0]), ([], []))] x g
              f:f32[5] = reduce_sum[axes=(0,)] g
              h:f32[5] = mul f 0.5
              a:f32[3,5] c:f32[5] = psum[axes=("replica",)] e h
            in (a, c) }
        ] x g
        d:f32[3,5] = exp a
      in (d, c) }

The program is evaluated once more. `_batch_dims` tells where the rows are, and which equations sum
over them or are linear. Their results stay parts of a sum, and are not computed yet, until nothing
else is left that can be computed. Then the parts that are needed are added up in one `shard_map`,
as one vector between processes. A loop may carry parts: its sums are added up after it.

Results are those of one device but for the order of additions.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import Mesh, PartitionSpec as P

from distributary._types import Nest
from distributary.collectives import all_reduce_of_vectors
from distributary.topology import REPLICA_AXIS
from distributary.tracing import (
    CONTROL_FLOW,
    AnyJaxpr,
    Atom,
    Equation,
    aval_of,
    evaluate_control_flow,
    evaluate_one,
    jaxpr_of,
    open_jaxpr,
    parts_of_scan,
    parts_of_while,
    shape_of,
    variables_of,
    with_pass,
    without_calls,
)
from distributary.xla_cpu._batch_dims import (
    Dim,
    Share,
    State,
    dims_of,
    is_part,
    is_wide,
    may_be_linear,
    shares_of,
)
from distributary.xla_cpu._exchanged_sums import with_exchanged_sums
from distributary.xla_cpu._rewrites import rewritten_for_cpus, with_cpu_rewrites


def with_partial_sums(
    step: Callable[..., Nest], dims: Sequence[Dim], mesh: Mesh
) -> Callable[..., Nest]:
    """Returns `step` with sums over the batch taken per device and added up together.

    The parts that each device computes by itself have the forms of `with_cpu_rewrites`, which must
    not see the rest.

    Args:
        step: From arrays to a nest of arrays; called inside `jax.jit`.
        dims: For every input the dim of the rows, which are divided over the devices; None for
            inputs that are the same on all devices.
        mesh: CPU devices of one or several processes, along the axis `"replica"`.
    """

    def run(closed: ClosedJaxpr, args: Sequence[Array]) -> list[Array]:
        evaluation = _Evaluation(mesh)
        body = evaluation.body(closed)
        return evaluation.outputs(body, args, dims, [None] * len(body.jaxpr.outvars))

    return with_pass(step, run)


@final
@dataclass(frozen=True, eq=False, slots=True)
class _Body:
    """A jaxpr without calls.

    Attributes:
        jaxpr: The jaxpr; its last inputs are constants.
        constants: Their values.
    """

    jaxpr: Jaxpr
    constants: list[Array]


@final
@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """An array of which every device has, or can compute, a part; the array is their sum.

    Attributes:
        operands: Arrays, other parts and literals.
        shares: How a device gets each; see `_batch_dims`.
        shape: The shape of the array.
        number: Larger than those of the parts among the operands.
        eqn: The equation that makes the part; None if the only operand is a stack of the parts:
            those of the devices one after the other, along the dim in `shares`.
    """

    operands: "Sequence[Array | _Part]"
    shares: Sequence[Share]
    shape: tuple[int, ...]
    number: int
    eqn: Equation | None = None


@final
@dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """What goes into and out of the bodies of a loop or branch.

    Attributes:
        operands: The states of the operands.
        results: Those of the results.
        bodies: For the identity of each jaxpr, itself, the states of its inputs and its outputs.
    """

    operands: Sequence[State]
    results: Sequence[State]
    bodies: dict[int, tuple[AnyJaxpr, Sequence[State], Sequence[State]]]


_Value: TypeAlias = Array | _Part


@final
class _Evaluation:
    """The evaluation of one program; see `with_partial_sums` for the arguments."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._numbers = itertools.count()
        # By identities, of objects that are kept so that they stay unique.
        self._bodies: dict[int, tuple[AnyJaxpr, _Body]] = {}
        self._plans: dict[tuple[int, tuple[State, ...]], tuple[Equation, _Plan]] = {}

    def body(self, jaxpr: AnyJaxpr) -> _Body:
        """Returns a jaxpr without calls."""
        if id(jaxpr) not in self._bodies:
            inner, consts = open_jaxpr(jaxpr)
            last = jaxpr_of([*inner.invars, *inner.constvars], inner.outvars, inner.eqns)
            known = dict(zip(inner.constvars, consts, strict=True))
            flat, known = without_calls(last, known, with_barriers=True)
            num_inputs = len(inner.invars)
            made = _Body(flat, [known[v] for v in flat.invars[num_inputs:]])
            self._bodies[id(jaxpr)] = jaxpr, made
        return self._bodies[id(jaxpr)][1]

    def outputs(
        self,
        body: _Body,
        inputs: Sequence[Array],
        states: Sequence[State],
        results: Sequence[State],
    ) -> list[Array]:
        """Returns the outputs of a body.

        Args:
            body: The body.
            inputs: Its inputs but for the constants; stacks of parts for those that are parts.
            states: The state of each.
            results: The state of each output: those that are parts become stacks of them.
        """
        jaxpr = body.jaxpr
        env: dict[Var, _Value] = {}
        dims: dict[Var, Dim] = {}
        all_states = [*states, *([None] * len(body.constants))]
        for v, value, state in zip(
            jaxpr.invars, [*inputs, *body.constants], all_states, strict=True
        ):
            env[v] = self._part(value, v) if is_part(state) else value
            dims[v] = None if is_part(state) else state
        stacked = [v for v, state in zip(jaxpr.outvars, results, strict=True) if is_part(state)]
        whole = [v for v, state in zip(jaxpr.outvars, results, strict=True) if not is_part(state)]
        todo: Sequence[Equation] = jaxpr.eqns
        stacks: dict[Atom, Array] = {}
        while True:
            later: list[Equation] = []
            for eqn in todo:
                # Effects happen in order.
                waits = bool(eqn.effects) and any(other.effects for other in later)
                if waits or not self._evaluated(eqn, env, dims):
                    later.append(eqn)
            wanted = [v for eqn in later for v in _wanted(eqn, env)]
            # What is computed from the same parts later must not compute them again.
            used = [v for eqn in later for v in eqn.invars if _is_pending(v, env)]
            stacks = self._add_up([*wanted, *whole], used if later else stacked, env)
            if not later:
                break
            todo = later
        values = []
        for v, state in zip(jaxpr.outvars, results, strict=True):
            if is_part(state):
                values.append(stacks[v] if v in stacks else self._stack(_value(v, env)))
            else:
                values.append(_value(v, env))
        return values

    def _evaluated(self, eqn: Equation, env: dict[Var, _Value], dims: dict[Var, Dim]) -> bool:
        """Adds the results of an equation to `env` and `dims` if it can be evaluated."""
        if any(v not in env for v in variables_of(eqn.invars)):
            return False
        operands = [_value(atom, env) for atom in eqn.invars]
        states: list[State] = [
            "partial" if isinstance(value, _Part) else _state(atom, dims)
            for atom, value in zip(eqn.invars, operands, strict=True)
        ]
        shares = shares_of(eqn, states)
        if shares is not None:
            (result,) = eqn.outvars
            env[result] = _Part(operands, shares, shape_of(result), next(self._numbers), eqn)
            return True
        if eqn.primitive.name in CONTROL_FLOW:
            plan = self._plan(eqn, states)
            made = zip(states, plan.operands, strict=True)
            if any(is_part(before) and not is_part(state) for before, state in made):
                return False
            values = self._controlled(eqn, operands, plan, env)
            results = list(plan.results)
        elif any(map(is_part, states)):
            return False
        else:
            found: list[Any] = states
            results = list(dims_of(eqn, found))
            values = self._local(eqn, operands, found, results) or evaluate_one(eqn, operands)
        for v, value, state in zip(eqn.outvars, values, results, strict=True):
            env[v] = value
            dims[v] = None if is_part(state) else state
        return True

    # Sums

    def _add_up(
        self, whole: Iterable[Atom], kept: Iterable[Atom], env: dict[Var, _Value]
    ) -> dict[Atom, Array]:
        """Adds up parts; computes others, which become stacks that are returned, too."""
        sums = list(dict.fromkeys(v for v in variables_of(whole) if isinstance(env.get(v), _Part)))
        rest = [v for v in variables_of(kept) if isinstance(env.get(v), _Part) and v not in sums]
        stacks = list(dict.fromkeys(rest))
        if not sums and not stacks:
            return {}
        parts = _needed([env[v] for v in (*sums, *stacks)])
        leaves: dict[tuple[int, Share], tuple[Array, Share]] = {}
        for part in parts:
            for operand, share in zip(part.operands, part.shares, strict=True):
                if not isinstance(operand, _Part) and not isinstance(operand, np.generic):
                    leaves[id(operand), share] = operand, share
        keys = list(leaves)

        def local(*arrays: Array) -> tuple[list[Array], list[Array]]:
            given = dict(zip(keys, arrays, strict=True))
            made: dict[int, Array] = {}
            for part in parts:
                operands = [
                    made[id(operand)]
                    if isinstance(operand, _Part)
                    else given.get((id(operand), share), operand)
                    for operand, share in zip(part.operands, part.shares, strict=True)
                ]
                made[id(part)] = _part_of(part, operands)
            totals = [made[id(env[v])] for v in sums]
            if totals:
                together = all_reduce_of_vectors if self._mesh.is_multi_process else _all_reduced
                totals = together(totals)
            totals = [x.astype(aval_of(v).dtype) for x, v in zip(totals, sums, strict=True)]
            return totals, [_in_stack(made[id(env[v])]) for v in stacks]

        exchanged = with_exchanged_sums(local, self._mesh)
        totals, stacked = self._on_devices(
            exchanged, list(leaves.values()), ([P()] * len(sums), [P(REPLICA_AXIS)] * len(stacks))
        )
        for v, total in zip(sums, totals, strict=True):
            env[v] = total
        for v, stack in zip(stacks, stacked, strict=True):
            env[v] = self._part(stack, v)
        return dict(zip(stacks, stacked, strict=True))

    def _part(self, stack: Array, v: Var, axis: int = 0) -> _Part:
        return _Part([stack], [axis], shape_of(v), next(self._numbers))

    def _stack(self, value: Array) -> Array:
        """Returns parts of a value: the first device has all of it."""
        return self._on_devices(_in_stack, [(_wide(value), "first")], P(REPLICA_AXIS))

    def _local(
        self,
        eqn: Equation,
        operands: Sequence[Array],
        dims: Sequence[Dim],
        results: Sequence[Dim],
    ) -> list[Array] | None:
        """Returns the results of an equation that is rewritten, for the rows of each device."""
        dim, params = results[0], eqn.params
        match eqn.primitive:
            case lax.conv_general_dilated_p if (
                dim is not None and dims[0] == params["dimension_numbers"].lhs_spec[0]
            ):
                dims = [dims[0], None]
            case lax.select_and_scatter_add_p if dim is not None and _is_alone(params, dim):
                dims = [dim, dim]
            case _:
                return None
        shapes = [
            jax.ShapeDtypeStruct(
                [-(-n // self._mesh.size) if i == of_rows else n for i, n in enumerate(x.shape)],
                x.dtype,
            )
            for x, of_rows in zip(map(aval_of, eqn.invars), dims, strict=True)
        ]
        function = functools.partial(_bound, eqn)
        closed = jax.make_jaxpr(function)(*shapes)
        if rewritten_for_cpus(closed) is closed:
            return None
        spec = P(*[None] * dim, REPLICA_AXIS)
        made = self._on_devices(function, list(zip(operands, dims, strict=True)), spec)
        return [lax.slice_in_dim(made, 0, shape_of(eqn.outvars[0])[dim], axis=dim)]

    def _on_devices(
        self,
        function: Callable[..., Any],
        operands: Sequence[tuple[Array, Share]],
        out_specs: Any,
    ) -> Any:
        """Returns the results of a function of what each device has of the operands."""

        def local(*arrays: Array) -> Any:
            is_first = lax.axis_index(REPLICA_AXIS) == 0
            shared = [
                jnp.where(is_first, x, jnp.zeros_like(x)) if share == "first" else x
                for x, (_, share) in zip(arrays, operands, strict=True)
            ]
            return function(*shared)

        specs, padded = [], []
        for x, share in operands:
            specs.append(P(*[None] * share, REPLICA_AXIS) if isinstance(share, int) else P())
            if isinstance(share, int) and x.shape[share] % self._mesh.size:
                missing = -x.shape[share] % self._mesh.size
                config = [(0, missing if i == share else 0, 0) for i in range(x.ndim)]
                x = lax.pad(x, np.zeros((), x.dtype), config)
            padded.append(x)
        mapped = jax.shard_map(
            with_cpu_rewrites(local, self._mesh),
            mesh=self._mesh,
            in_specs=tuple(specs),
            out_specs=out_specs,
            check_vma=False,
        )
        return mapped(*padded)

    # Loops and branches

    def _states(self, body: _Body, states: Sequence[State]) -> tuple[list[State], list[State]]:
        """Returns the states of the inputs and outputs of a body, without those that it adds up."""
        jaxpr = body.jaxpr
        all_states = [*states, *([None] * len(body.constants))]
        env: dict[Atom, State] = dict(zip(jaxpr.invars, all_states, strict=True))
        added = set()
        for eqn in jaxpr.eqns:
            found = [_state(atom, env) for atom in eqn.invars]
            if shares_of(eqn, found) is not None:
                # A constant that goes through linear operations alone is no sum.
                is_sum = not any(map(is_part, found)) or "partial" in found
                env[eqn.outvars[0]] = "partial" if is_sum else "assumed"
                continue
            if eqn.primitive.name in CONTROL_FLOW:
                plan = self._plan(eqn, found)
                made, needed = plan.results, plan.operands
            else:
                dims = [_dim(state) for state in found]
                made, needed = dims_of(eqn, dims), dims
            for atom, state, need in zip(eqn.invars, found, needed, strict=True):
                if is_part(state) and not is_part(need):
                    added.add(atom)
            env.update(zip(eqn.outvars, made, strict=True))
        return tuple(
            [None if atom in added else _state(atom, env) for atom in atoms]
            for atoms in (jaxpr.invars[: len(states)], jaxpr.outvars)
        )

    def _plan(self, eqn: Equation, states: Sequence[State]) -> _Plan:
        key = id(eqn), tuple(states)
        if key not in self._plans:
            rules = {"scan": self._plan_of_scan, "while": self._plan_of_while}
            rule = rules.get(eqn.primitive.name, self._plan_of_cond)
            self._plans[key] = eqn, rule(eqn, list(states))
        return self._plans[key][1]

    def _plan_of_scan(self, eqn: Equation, states: list[State]) -> _Plan:
        consts, carry, xs = parts_of_scan(eqn, states)
        consts, xs = list(map(_dim, consts)), list(map(_dim, xs))
        inner = [None if dim in (None, 0) else dim - 1 for dim in xs]
        jaxpr = eqn.params["jaxpr"]
        carry, inputs, outputs = self._carried(
            self.body(jaxpr), carry, lambda carry: [*consts, *carry, *inner], len(consts)
        )
        ys = [state + 1 if isinstance(state, int) else state for state in outputs[len(carry) :]]
        outputs = [*carry, *outputs[len(carry) :]]
        bodies = {id(jaxpr): (jaxpr, inputs, outputs)}
        return _Plan([*consts, *carry, *xs], [*carry, *ys], bodies)

    def _plan_of_while(self, eqn: Equation, states: list[State]) -> _Plan:
        of_condition, of_body, carry = parts_of_while(eqn, states)
        of_condition, of_body = list(map(_dim, of_condition)), list(map(_dim, of_body))
        condition, jaxpr = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        decides = self.body(condition).jaxpr
        used = {v for one in decides.eqns for v in variables_of(one.invars)}
        used.update(variables_of(decides.outvars))
        deciding = [v in used for v in decides.invars[len(of_condition) :][: len(carry)]]
        carry, inputs, _ = self._carried(
            self.body(jaxpr), carry, lambda carry: [*of_body, *carry], len(of_body), deciding
        )
        bodies = {
            id(condition): (condition, [*of_condition, *carry], [None]),
            id(jaxpr): (jaxpr, inputs, carry),
        }
        return _Plan([*of_condition, *of_body, *carry], carry, bodies)

    def _plan_of_cond(self, eqn: Equation, states: list[State]) -> _Plan:
        operands = list(map(_dim, states))
        branches = eqn.params["branches"]
        made = [self._states(self.body(jaxpr), operands[1:])[1] for jaxpr in branches]
        results = [
            next((state for state in of_branches if isinstance(state, int)), None)
            for of_branches in zip(*made, strict=True)
        ]
        bodies = {id(jaxpr): (jaxpr, operands[1:], results) for jaxpr in branches}
        return _Plan(operands, results, bodies)

    def _carried(
        self,
        body: _Body,
        carry: Sequence[State],
        inputs_of: Callable[[Sequence[State]], list[State]],
        start: int,
        deciding: Sequence[bool] | None = None,
    ) -> tuple[list[State], list[State], list[State]]:
        """Finds the states of what a loop carries that a turn of it does not change.

        Args:
            body: The body.
            carry: The states before the loop.
            inputs_of: Returns all inputs of the body.
            start: Where what it carries begins among these.
            deciding: For each whether the condition of the loop needs it.

        Returns:
            The states of what it carries, of all inputs and of all outputs.
        """
        needed = deciding or [False] * len(carry)
        # First, all that can are parts. Those stay that sums are added to and nothing else reads.
        new: list[State] = [
            _dim(state) if decides else "assumed" if state is None else state
            for state, decides in zip(carry, needed, strict=True)
        ]
        states: list[State] | None = None
        while new != states:
            states = new
            before, after = self._states(body, inputs_of(states))
            new = []
            for i, state in enumerate(states):
                stays = is_part(before[start + i]) and after[i] == "partial"
                if is_part(state) and not stays:
                    new.append(_dim(after[i]))
                else:
                    new.append(_dim(after[i]) if state is None else state)
        states, after = [
            ["partial" if is_part(state) else state for state in found] for found in (states, after)
        ]
        return states, inputs_of(states), after

    def _controlled(
        self, eqn: Equation, operands: Sequence[_Value], plan: _Plan, env: dict[Var, _Value]
    ) -> list[_Value]:
        """Returns the results of a loop or branch."""
        parts = [
            atom
            for atom, value in zip(eqn.invars, operands, strict=True)
            if isinstance(value, _Part)
        ]
        stacks = self._add_up([], parts, env)
        arrays: list[Any] = []
        for atom, value, state in zip(eqn.invars, operands, plan.operands, strict=True):
            if is_part(state):
                value = stacks[atom] if isinstance(value, _Part) else self._stack(value)
            arrays.append(value)

        def evaluate(jaxprs: Sequence[AnyJaxpr], inputs: Any, further: None) -> Any:
            _, states, results = plan.bodies[id(jaxprs[0])]
            return [self.outputs(self.body(jaxprs[0]), inputs[0], states, results)], further

        (made,), _ = evaluate_control_flow([eqn], [arrays], None, evaluate)
        is_scan = eqn.primitive.name == "scan"
        num_carried = len(parts_of_scan(eqn, arrays)[1]) if is_scan else len(made)
        return [
            self._part(x, v, int(i >= num_carried)) if is_part(state) else x
            for i, (x, v, state) in enumerate(zip(made, eqn.outvars, plan.results, strict=True))
        ]


def _dim(state: State) -> Dim:
    return state if isinstance(state, int) else None


def _state(atom: Atom, env: Mapping[Var, State]) -> State:
    return None if isinstance(atom, Literal) else env.get(atom)


def _value(atom: Atom, env: Mapping[Var, _Value]) -> Any:
    if isinstance(atom, Literal):
        return np.asarray(atom.val, aval_of(atom).dtype)[()]
    return env[atom]


def _wanted(eqn: Equation, env: Mapping[Var, _Value]) -> list[Var]:
    """Returns the parts among the operands of an equation that cannot be evaluated with them."""
    operands = variables_of(eqn.invars)
    if may_be_linear(eqn) and any(v not in env for v in operands):
        return []
    return [v for v in operands if isinstance(env.get(v), _Part)]


def _is_pending(atom: Atom, env: Mapping[Var, _Value]) -> bool:
    """Returns whether an array is a part that is not computed yet."""
    value = None if isinstance(atom, Literal) else env.get(atom)
    return isinstance(value, _Part) and value.eqn is not None


def _needed(parts: Iterable[Any]) -> list[_Part]:
    """Returns parts and all that they are computed from, in order."""
    found: dict[int, _Part] = {}
    left = list(parts)
    while left:
        part = left.pop()
        if part.number not in found:
            found[part.number] = part
            left.extend([operand for operand in part.operands if isinstance(operand, _Part)])
    return [found[number] for number in sorted(found)]


def _part_of(part: _Part, operands: Sequence[Array]) -> Array:
    """Computes a part from what the device has of the operands."""
    if part.eqn is None:
        return operands[0].reshape(part.shape)
    params: dict[str, Any] = {}
    if not is_wide(aval_of(part.eqn.outvars[0]).dtype):
        # The sum is rounded once.
        if "preferred_element_type" in part.eqn.params:
            params["preferred_element_type"] = np.dtype(np.float32)
        else:
            operands = list(map(_wide, operands))
    return _bound(part.eqn, *operands, **params)


def _in_stack(x: Array) -> Array:
    return x if x.ndim else x[None]


def _wide(x: Array) -> Array:
    return x if is_wide(x.dtype) else x.astype(np.float32)


def _is_alone(params: Mapping[str, Any], dim: int) -> bool:
    """Returns whether windows have one element of a dim, in order."""
    names = ("window_dimensions", "window_strides", "padding")
    return [params[name][dim] for name in names] == [1, 1, (0, 0)]


def _bound(eqn: Equation, *operands: Array, **changed: Any) -> Array:
    """Returns the result of an equation, with some parameters changed, on one device."""
    params = {name: None if "sharding" in name else x for name, x in eqn.params.items()}
    made: Array = eqn.primitive.bind(*operands, **{**params, **changed})
    return made


def _all_reduced(arrays: list[Array]) -> list[Array]:
    return list(lax.psum(arrays, REPLICA_AXIS))
