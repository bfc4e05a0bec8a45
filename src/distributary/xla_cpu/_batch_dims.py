"""Rules for where the rows of a batch are in the results of an equation, and what sums over them.

With 8 rows of a batch in dim 0 of `a`, and 2 replicas:

    b:f32[5] = reduce_max[axes=(1,)] a     rows in dim 0
    c:f32[3,5] = reduce_sum[axes=(0,)] a   a sum over rows: each replica has a part of it
    d:f32[5,3] = transpose c               linear: each replica has a part of it
    e:f32[5,3] = exp d                     not linear: needs the sum of the parts

A dim that is not known, or is wrong, costs time: XLA moves the rows. It never changes a number.

A loop that goes through the layers of a model, or through time, adds the gradients of a kernel to
zeros in every turn. With 8 rows in dim 1 of `x` and `g`,

    a:f32[3,5] = broadcast_in_dim 0.0
    b:f32[3,5] = scan[
      jaxpr={ lambda ; c:f32[3,5] d:f32[8,3] e:f32[8,5]. let
          f:f32[3,5] = dot_general[dimension_numbers=(([0], [0]), ([], []))] d e
          g:f32[3,5] = add c f
        in (g,) }
    ] a x g

nothing in the body but the addition reads `c`. So the loop may carry the parts of the sum that the
replicas have, of which there is one all-reduce after the loop. That holds if it also holds for the
output of the body, so it is assumed for everything that is carried, and taken back where it fails.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal as OneOf, TypeAlias, final

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from distributary.devices import REPLICA_AXIS
from distributary.jaxprs import (
    CONTROL_FLOW,
    AnyJaxpr,
    Atom,
    Equation,
    aval_of,
    parts_of_scan,
    parts_of_while,
    shape_of,
    variables_of,
)
from distributary.programs import flattened, number_of
from distributary.xla_cpu._rewrites import is_explicit

Dim: TypeAlias = int | None
# "partial": the sum of what the replicas have. "assumed": the same, of what a loop starts from; the
# sum is then what the first replica has.
State: TypeAlias = Dim | OneOf["partial", "assumed"]
# How a replica gets an operand: its rows of a dim, its part of a sum ("partial"), the whole (None),
# or the whole if it is the first replica and else zeros ("first").
Share: TypeAlias = Dim | OneOf["partial", "first"]

_LINEAR = frozenset(
    """
    broadcast_in_dim copy neg reduce_sum reshape rev slice squeeze transpose
    """.split()  # noqa: SIM905
)
_ADDITIONS = frozenset({"add", "add_any", "concatenate", "sub"})


def is_part(state: State) -> bool:
    """Returns whether replicas have parts of a sum."""
    return isinstance(state, str)


def may_be_linear(eqn: Equation) -> bool:
    """Returns whether the result can be computed from parts, depending on the operands."""
    return eqn.primitive.name in _LINEAR | _ADDITIONS | {"mul", "div", "convert_element_type"}


def shares_of(eqn: Equation, states: Sequence[State]) -> list[Share] | None:
    """Returns how replicas get the operands of an equation, each to compute its part of a sum.

    Returns:
        None if the result is not the sum of such parts.
    """
    if len(eqn.outvars) != 1 or eqn.effects or is_explicit(eqn.params.get("out_sharding")):
        return None
    parts = list(map(is_part, states))
    if any(parts):
        linear = _is_linear(eqn, parts)
        return ["partial" if part else None for part in parts] if linear else None
    dtype = aval_of(eqn.outvars[0]).dtype
    rule = _SUMS.get(eqn.primitive.name)
    if rule is None or not any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer)):
        return None
    return rule(eqn, states)


def dims_of(eqn: Equation, dims: Sequence[Dim]) -> list[Dim]:
    """Returns the dims of the rows in the results, given those in the operands."""
    name = eqn.primitive.name
    if name == "sharding_constraint":
        return [_constrained(eqn, dims[0])]
    if all(dim is None for dim in dims):
        return [None] * len(eqn.outvars)
    result_dims = _DIMS.get(name, _alike)(eqn, dims)
    return result_dims if isinstance(result_dims, list) else [result_dims] * len(eqn.outvars)


def dims_of_windows(eqn: Equation, dims: Sequence[Dim]) -> list[Dim]:
    """Returns how to divide the operands of an operation with windows that are in one row each.

    Returns:
        The dims; [] if this is no such operation.
    """
    params = eqn.params
    match eqn.primitive.name:
        case "conv_general_dilated" if dims[0] == params["dimension_numbers"].lhs_spec[0]:
            return [dims[0], None]
        case "select_and_scatter_add":
            _, dim = _first(dims) if any(d is not None for d in dims) else (0, None)
            names = ("window_dimensions", "window_strides", "padding")
            if dim is not None and [params[name][dim] for name in names] == [1, 1, (0, 0)]:
                return [dim, dim]
    return []


def _is_linear(eqn: Equation, parts: Sequence[bool]) -> bool:
    operands, result = list(map(aval_of, eqn.invars)), aval_of(eqn.outvars[0])
    match eqn.primitive.name:
        case name if name in _LINEAR:
            return len(operands) == 1 and result.size <= operands[0].size
        case name if name in _ADDITIONS:
            return all(parts)
        case "convert_element_type":
            before, after = operands[0].dtype, result.dtype
            are_floating = all(jnp.issubdtype(x, np.floating) for x in (before, after))
            is_exact = are_floating and is_wide(before) and before.itemsize <= after.itemsize
            return before == after or is_exact
        case "mul":
            return sum(parts) == 1 and math.isfinite(number_of(eqn.invars[parts.index(False)]))
        case "div":
            is_exact = jnp.issubdtype(result.dtype, np.integer)
            factor = number_of(eqn.invars[1])
            return parts == [True, False] and not is_exact and math.isfinite(factor) and factor != 0
    return False


def is_wide(dtype: Any) -> bool:
    """Returns whether a sum can be rounded once for each part: not to 16 bits."""
    return not jnp.issubdtype(dtype, np.floating) or jnp.finfo(dtype).bits >= 32


# Sums over rows


def _products(eqn: Equation, states: Sequence[Any]) -> list[Share] | None:
    contracted, _ = eqn.params["dimension_numbers"]
    return _contracted(states, list(zip(*contracted, strict=True)))


def _images(eqn: Equation, states: Sequence[Any]) -> list[Share] | None:
    numbers = eqn.params["dimension_numbers"]
    if eqn.params["feature_group_count"] != 1:
        return None
    return _contracted(states, [(numbers.lhs_spec[1], numbers.rhs_spec[1])])


def _contracted(states: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> list[Share] | None:
    """Returns the two dims with rows if they are contracted with each other."""
    matching: list[list[Share]] = [
        [*pair]
        for pair in pairs
        if all(state in (dim, None) for state, dim in zip(states, pair, strict=True))
    ]
    return matching[0] if matching and list(states) != [None, None] else None


def _reduced(eqn: Equation, states: Sequence[Any]) -> list[Share] | None:
    return list(states) if states[0] in eqn.params["axes"] else None


def _scattered(eqn: Equation, states: Sequence[Any]) -> list[Share] | None:
    of_rows = _scatter_dims(eqn)
    batching = eqn.params["dimension_numbers"].scatter_indices_batching_dims
    for of_indices, of_updates in enumerate(of_rows):
        matches = states[1] in (of_indices, None) and states[2] in (of_updates, None)
        if states[0] is None and matches and states[1:] != [None, None]:
            return None if of_indices in batching else ["first", of_indices, of_updates]
    return None


def _dims_but(atom: Atom, *others: int) -> list[int]:
    return [d for d in range(len(shape_of(atom))) if d not in others]


def _scatter_dims(eqn: Equation) -> list[int]:
    """Returns the dim of the updates for each dim of the indices but the last."""
    return _dims_but(eqn.invars[2], *eqn.params["dimension_numbers"].update_window_dims)


_SUMS: dict[str, Callable[[Equation, Sequence[Any]], list[Share] | None]] = {
    "dot_general": _products,
    "conv_general_dilated": _images,
    "reduce_sum": _reduced,
    "scatter-add": _scattered,
}


# Dims of results


def _first(dims: Sequence[Dim]) -> tuple[int, int]:
    """Returns the first operand that has rows, and their dim in it."""
    return next((i, dim) for i, dim in enumerate(dims) if dim is not None)


def _alike(eqn: Equation, dims: Sequence[Dim]) -> list[Dim]:
    """Returns the same dim for every result that has it."""
    result_dims: list[Dim] = []
    for v in eqn.outvars:
        fitting = [
            dim
            for dim, atom in zip(dims, eqn.invars, strict=True)
            if dim is not None
            and len(shape_of(v)) == len(shape_of(atom))
            and (shape_of(v)[dim] > 1 or shape_of(atom)[dim] == 1)
        ]
        result_dims.append(fitting[0] if fitting else None)
    return result_dims


def _each(eqn: Equation, dims: Sequence[Dim]) -> list[Dim]:
    return list(dims)


def _constrained(eqn: Equation, dim: Dim) -> Dim:
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None or len(eqn.params.get("unconstrained_dims", ())) > 0:
        return dim
    of_axis = [i for i, axes in enumerate(spec) if axes in (REPLICA_AXIS, (REPLICA_AXIS,))]
    return of_axis[0] if of_axis else None


def _without(eqn: Equation, dims: Sequence[Dim]) -> Dim:
    _, dim = _first(dims)
    params = eqn.params
    removed = params["axes"] if "axes" in params else params["dimensions"]
    return None if dim in removed else dim - sum(axis < dim for axis in removed)


def _transposed(eqn: Equation, dims: Sequence[Dim]) -> Dim:
    return list(eqn.params["permutation"]).index(dims[0])


def _broadcast(eqn: Equation, dims: Sequence[Dim]) -> Dim:
    return None if dims[0] is None else int(eqn.params["broadcast_dimensions"][dims[0]])


def _reshaped(eqn: Equation, dims: Sequence[Dim]) -> Dim:
    """Returns the dim that begins where the rows did: they are its major part, or it is theirs."""
    before, (_, dim) = shape_of(eqn.invars[0]), _first(dims)
    after = shape_of(eqn.outvars[0])
    num_outer = math.prod(before[:dim])
    for i, size in enumerate(after):
        if size > 1 and math.prod(after[:i]) == num_outer:
            is_whole = size % before[dim] == 0 or before[dim] % size == 0
            return i if is_whole else None
    return None


def _product(eqn: Equation, dims: Sequence[Dim]) -> Dim:
    contracted, batch = eqn.params["dimension_numbers"]
    free = [_dims_but(v, *c, *b) for v, c, b in zip(eqn.invars, contracted, batch, strict=True)]
    for i, dim in enumerate(dims):
        if dim in batch[i]:
            return list(batch[i]).index(dim)
        if dim in free[i]:
            return len(batch[0]) + i * len(free[0]) + free[i].index(dim)
    return None


def _convolved(eqn: Equation, dims: Sequence[Dim]) -> Dim:
    numbers = eqn.params["dimension_numbers"]
    if dims[0] == numbers.lhs_spec[0] and eqn.params["batch_group_count"] == 1:
        return int(numbers.out_spec[0])
    if dims[1] == numbers.rhs_spec[0] and eqn.params["feature_group_count"] == 1:
        return int(numbers.out_spec[1])
    return None


def _gathered(eqn: Equation, dims: Sequence[Dim]) -> Dim:
    numbers = eqn.params["dimension_numbers"]
    free = _dims_but(eqn.outvars[0], *numbers.offset_dims)
    of_operand, of_indices = dims
    if of_operand in numbers.operand_batching_dims:
        position = numbers.operand_batching_dims.index(of_operand)
        return free[numbers.start_indices_batching_dims[position]]
    if of_indices is not None:
        return free[of_indices] if of_indices < len(free) else None
    removed = *numbers.collapsed_slice_dims, *numbers.operand_batching_dims
    kept = _dims_but(eqn.invars[0], *removed)
    return numbers.offset_dims[kept.index(of_operand)] if of_operand in kept else None


def _updated(eqn: Equation, dims: Sequence[Dim]) -> Dim:
    """Returns the dim of the rows in the operand, or of those that the updates bring there."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = dims
    if operand is not None:
        return operand
    free = _scatter_dims(eqn)
    if updates in free:
        indices = free.index(updates)
    if indices is not None:
        batching = list(numbers.scatter_indices_batching_dims)
        if indices not in batching:
            return None
        return int(numbers.operand_batching_dims[batching.index(indices)])
    inserted = *numbers.inserted_window_dims, *numbers.operand_batching_dims
    kept = _dims_but(eqn.invars[0], *inserted)
    return kept[list(numbers.update_window_dims).index(updates)]


def _stacked(eqn: Equation, dims: Sequence[Dim]) -> Dim:
    _, dim = _first(dims)
    return dim + (eqn.params["axis"] <= dim)


def _unstacked(eqn: Equation, dims: Sequence[Dim]) -> Dim:
    _, dim = _first(dims)
    return None if dim == eqn.params["axis"] else dim - (eqn.params["axis"] < dim)


_REDUCTIONS = """
    argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
    reduce_xor squeeze
""".split()  # noqa: SIM905
_DIMS: dict[str, Callable[[Equation, Sequence[Dim]], Dim | list[Dim]]] = {
    **dict.fromkeys(_REDUCTIONS, _without),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        _updated,
    ),
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolved,
    "dot_general": _product,
    "gather": _gathered,
    "optimization_barrier": _each,
    "reshape": _reshaped,
    "stack": _stacked,
    "transpose": _transposed,
    "unstack": _unstacked,
}


@final
@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What goes into and out of a loop or branch.

    Attributes:
        operands: The states of the operands.
        results: Those of the results.
        bodies: For the identity of each jaxpr the states of its inputs and outputs.
    """

    operands: Sequence[State]
    results: Sequence[State]
    bodies: Mapping[int, tuple[Sequence[State], Sequence[State]]]


@final
class Plans:
    """The plans for one program, whose equations it keeps."""

    def __init__(self) -> None:
        # By identities, of objects that are kept so that they stay unique.
        self._bodies: dict[int, tuple[AnyJaxpr, ClosedJaxpr]] = {}
        self._plans: dict[tuple[int, tuple[State, ...]], tuple[Equation, Plan]] = {}

    def body(self, jaxpr: AnyJaxpr) -> ClosedJaxpr:
        """Returns a jaxpr without calls."""
        if id(jaxpr) not in self._bodies:
            self._bodies[id(jaxpr)] = jaxpr, flattened(jaxpr)
        return self._bodies[id(jaxpr)][1]

    def plan(self, eqn: Equation, states: Sequence[State]) -> Plan:
        """Returns the plan for an equation of `CONTROL_FLOW`, given the states of its operands."""
        key = id(eqn), tuple(states)
        if key not in self._plans:
            rules = {"scan": self._of_scan, "while": self._of_while, "cond": self._of_cond}
            self._plans[key] = eqn, rules[eqn.primitive.name](eqn, list(states))
        return self._plans[key][1]

    def _of_scan(self, eqn: Equation, states: list[State]) -> Plan:
        of_consts, carry, of_xs = parts_of_scan(eqn, states)
        consts, xs = dims_in(of_consts), dims_in(of_xs)
        inner = [dim - 1 if isinstance(dim, int) and dim > 0 else None for dim in xs]
        jaxpr = eqn.params["jaxpr"]
        body = self.body(jaxpr)
        carry = self._carried(body, [*consts], carry, [*inner])
        inputs = [*consts, *carry, *inner]
        ys = _of_loop(self._states(body, inputs)[1][len(carry) :])
        results = [*carry, *[y + 1 if isinstance(y, int) else y for y in ys]]
        return Plan([*consts, *carry, *xs], results, {id(jaxpr): (inputs, [*carry, *ys])})

    def _of_while(self, eqn: Equation, states: list[State]) -> Plan:
        parts = parts_of_while(eqn, states)
        of_condition, of_body, carry = dims_in(parts[0]), dims_in(parts[1]), parts[2]
        condition, jaxpr = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        test = self.body(condition).jaxpr
        read = {v for one in test.eqns for v in variables_of(one.invars)} | {*test.outvars}
        start = len(of_condition)
        is_read = [v in read for v in test.invars[start : start + len(carry)]]
        carry = self._carried(self.body(jaxpr), [*of_body], carry, [], is_read)
        bodies: dict[int, tuple[Sequence[State], Sequence[State]]] = {
            id(condition): ([*of_condition, *carry], [None]),
            id(jaxpr): ([*of_body, *carry], carry),
        }
        return Plan([*of_condition, *of_body, *carry], carry, bodies)

    def _of_cond(self, eqn: Equation, states: list[State]) -> Plan:
        operands, branches = dims_in(states), eqn.params["branches"]
        outputs = [self._states(self.body(jaxpr), operands[1:])[1] for jaxpr in branches]
        results = [
            next((state for state in column if isinstance(state, int)), None)
            for column in zip(*outputs, strict=True)
        ]
        bodies = {id(jaxpr): (operands[1:], results) for jaxpr in branches}
        return Plan(operands, results, bodies)

    def _carried(
        self,
        body: ClosedJaxpr,
        before: list[State],
        carry: list[State],
        after: list[State],
        is_read: Sequence[bool] = (),
    ) -> list[State]:
        """Returns the states of what a loop carries, which a turn of it does not change.

        Args:
            body: The body.
            before: The states of the inputs before what it carries.
            carry: The states before the loop.
            after: The states of the inputs after what it carries.
            is_read: Whether the condition of the loop reads each; () if there is none.
        """
        reads = is_read or [False] * len(carry)
        new: list[State] = [
            _dim(state) if read else "assumed" if state is None else state
            for state, read in zip(carry, reads, strict=True)
        ]
        states: list[State] = []
        while new != states:
            states = new
            inputs, outputs = self._states(body, [*before, *states, *after])
            new = [
                state
                if isinstance(state, int) or (is_part(used) and output == "partial")
                else _dim(output)
                for state, used, output in zip(
                    states,
                    inputs[len(before) :][: len(states)],
                    outputs[: len(states)],
                    strict=True,
                )
            ]
        return _of_loop(states)

    def _states(
        self, body: ClosedJaxpr, states: Sequence[State]
    ) -> tuple[list[State], list[State]]:
        """Returns the states of the inputs and outputs; None for parts that the body adds up."""
        jaxpr = body.jaxpr
        env: dict[Atom, State] = dict(zip(jaxpr.invars, states, strict=True))
        sources: dict[Atom, list[Atom]] = {}
        for eqn in jaxpr.eqns:
            operands = [state_of(atom, env) for atom in eqn.invars]
            if shares_of(eqn, operands) is not None:
                # What a loop starts from is no sum until one is added to it.
                is_sum = "partial" in operands or "assumed" not in operands
                env[eqn.outvars[0]] = "partial" if is_sum else "assumed"
                sources[eqn.outvars[0]] = [*variables_of(eqn.invars)]
                continue
            needed: Sequence[State] = dims_in(operands)
            results: Sequence[State] = []
            if eqn.primitive.name in CONTROL_FLOW:
                plan = self.plan(eqn, operands)
                needed, results = plan.operands, plan.results
            else:
                results = dims_of(eqn, dims_in(operands))
            read = [v for v, need in zip(eqn.invars, needed, strict=True) if not is_part(need)]
            while read:
                atom = read.pop()
                if is_part(state_of(atom, env)):
                    env[atom] = None
                    read.extend(sources.get(atom, ()))
            env.update(zip(eqn.outvars, results, strict=True))
        outputs = [state_of(atom, env) for atom in jaxpr.outvars]
        return [env[v] for v in jaxpr.invars], outputs


def state_of(atom: Atom, env: Mapping[Atom, State]) -> State:
    """Returns the state of a variable in `env`, or of a literal."""
    return None if isinstance(atom, Literal) else env.get(atom)


def dims_in(states: Sequence[State]) -> list[Dim]:
    """Returns the states without those of parts."""
    return list(map(_dim, states))


def _dim(state: State) -> Dim:
    return state if isinstance(state, int) else None


def _of_loop(states: Sequence[State]) -> list[State]:
    """Returns the states in a loop in which assumptions hold."""
    return ["partial" if is_part(state) else state for state in states]
