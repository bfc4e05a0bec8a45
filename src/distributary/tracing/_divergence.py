"""Finds the values of a replica program that can differ between replicas.

A value varies if it depends on per-replica input, on the replica id or on something outside of the
program, and does not pass through a collective that gives every replica the same result. On two
replicas that each have their own `a`:

    { lambda ; a:f32[2] b:f32[2]. let     a varies, b agrees
        c:f32[2] = mul a b                varies
        d:f32[2] = psum[replica] c        agrees
        e:f32[2] = sub b d                agrees
      in (c, e) }                         varying_outputs: [True, False]

Where this forward analysis cannot know, it says that a value varies. It refuses collectives that it
does not know.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from distributary.devices import REPLICA_AXIS
from distributary.errors import ContextError, UnsupportedError
from distributary.jaxprs import (
    AnyJaxpr,
    Equation,
    call_of,
    interpret_with,
    known_through,
    open_jaxpr,
    parts_of_scan,
    parts_of_while,
    place_of,
    sub_jaxprs,
    walk,
)

# Collectives whose result is the same on every replica, and those whose result is not.
_UNIFYING = frozenset({"psum", "pmax", "pmin", "all_gather", "pbroadcast", "push"})
_SCATTERING = frozenset({"reduce_scatter", "all_to_all", "ppermute", "ragged_all_to_all"})
_OF_DEVICES = frozenset({"axis_index", "start_of_sum"})
# Results that come from outside of the program can differ from device to device: from functions of
# the host, a device's memory and random numbers, kernels of others. References are here because a
# value goes through one without an equation between the two; copies between devices go through
# those of a kernel.
OUTSIDE = frozenset(
    {
        *("io_callback", "pure_callback", "buffer_callback", "ffi_call", "infeed", "rng_uniform"),
        *("empty", "empty_ref", "new_ref", "dma_start"),
    }
)
# Effects that do not tell where the result of an equation comes from.
_KNOWN_EFFECTS = frozenset(
    {
        *("NamedAxisEffect", "ReadEffect", "WriteEffect", "AccumEffect"),
        *("DebugEffect", "OrderedDebugEffect", "NoDCEEffect", "InternalMutableArrayEffect"),
        # Inside of kernels.
        *("MemoryEffect", "_WGMMAPipelineEffect", "BarrierEffect", "SemaphoreEffect"),
        *("DelayEffect", "TraceEffect", "MXUEffect"),
    }
)

# One number per replica, equal for replicas that hold the same value: (0, 0, 1) if only the third
# has another.
Agreement: TypeAlias = tuple[int, ...]


def is_collective(eqn: Equation) -> bool:
    """Returns whether the replicas exchange values in an equation, not counting those it carries.

    A reduction over an axis of `jax.vmap`, or over no axis at all, is no collective.
    """
    name = eqn.primitive.name
    return name == "push" or (
        (name in _UNIFYING or name in _SCATTERING) and _names_replicas(eqn.params)
    )


def has_collective(eqn: Equation) -> bool:
    """Returns whether the replicas exchange values in an equation or in those it carries."""
    return any(is_collective(inner) for inner in walk([eqn]))


def is_of_devices(eqn: Equation) -> bool:
    """Returns whether replicas meet in an equation, or are told apart by it."""
    return any(is_collective(inner) or inner.primitive.name in _OF_DEVICES for inner in walk([eqn]))


def check_collectives(jaxpr: Jaxpr) -> None:
    """Refuses collectives whose results this module does not know.

    Raises:
        UnsupportedError: for an equation over the replica axis that is not a known collective.
    """
    for eqn in walk(jaxpr.eqns):
        _refuse_unknown(eqn)


def _refuse_unknown(eqn: Equation) -> None:
    name = eqn.primitive.name
    if is_collective(eqn) or name in _OF_DEVICES:
        return
    if _names_replicas(eqn.params) or _has_effect_on_replicas(eqn):
        where = place_of(eqn) or "unknown location"
        raise UnsupportedError(
            f"The collective {name!r} at {where} is none of those whose result"
            " distributary can tell to be the same on every replica or not, so the copies of a"
            " mirrored variable could drift apart. Use get_replica_context().all_reduce or"
            " all_gather, or jax.lax.psum, pmax, pmin, all_gather, psum_scatter, all_to_all,"
            " ppermute or pbroadcast."
        )


def _names_replicas(params: Mapping[str, Any]) -> bool:
    return any(
        key.startswith(("axes", "axis")) and REPLICA_AXIS in _as_tuple(value)
        for key, value in params.items()
    )


def _has_effect_on_replicas(eqn: Equation) -> bool:
    """Returns whether an equation by itself has the replica axis among its effects."""
    named = any(getattr(effect, "name", None) == REPLICA_AXIS for effect in eqn.effects)
    return named and not sub_jaxprs(eqn)


def _as_tuple(value: object) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else (value,)


def is_sum_of_replicas(eqn: Equation) -> bool:
    """Returns whether an equation sums over all replicas."""
    return (
        eqn.primitive.name == "psum"
        and eqn.params["axes"] == (REPLICA_AXIS,)
        and eqn.params["axis_index_groups"] is None
    )


def varying_outputs(jaxpr: Jaxpr, varying_inputs: Sequence[bool], num_replicas: int) -> list[bool]:
    """Returns for every output of `jaxpr` whether it can differ between replicas.

    Args:
        jaxpr: Program of one replica, without markers.
        varying_inputs: For every constant and then every input of the jaxpr, whether it can differ
            between replicas.
        num_replicas: Number of replicas.

    Raises:
        ContextError: if a collective runs in a branch or loop that some replicas may take and
            others not; such a program would wait forever.
        UnsupportedError: for collectives whose results are not known to agree or to differ.
    """
    varying = varying_variables(jaxpr, varying_inputs, num_replicas)
    return [not isinstance(v, Literal) and v in varying for v in jaxpr.outvars]


def varying_variables(
    jaxpr: Jaxpr, varying_inputs: Sequence[bool], num_replicas: int
) -> frozenset[Var]:
    """Returns the varying variables of `jaxpr`, not of nested ones; see `varying_outputs`."""
    analysis = _Analysis(num_replicas)
    inputs = [analysis.distinct if varying else analysis.same for varying in varying_inputs]
    _, env = analysis.jaxpr(jaxpr, inputs)
    return frozenset(v for v, agreement in env.items() if agreement != analysis.same)


@final
class _Analysis:
    def __init__(self, num_replicas: int) -> None:
        self.same: Agreement = (0,) * num_replicas
        self.distinct: Agreement = tuple(range(num_replicas))

    def jaxpr(
        self, jaxpr: AnyJaxpr, inputs: Sequence[Agreement]
    ) -> tuple[list[Agreement], dict[Var, Agreement]]:
        """Returns the agreement on the outputs, and on all variables."""
        return interpret_with(jaxpr, inputs, lambda constant: self.same, self._equation)

    def _equation(self, eqn: Equation, operands: list[Agreement]) -> list[Agreement]:
        name = eqn.primitive.name
        num_outs = len(eqn.outvars)
        if name in _UNIFYING and is_collective(eqn):
            groups = eqn.params.get("axis_index_groups")
            return [self._over_groups(self._all(operands), groups)] * num_outs
        through = known_through(
            eqn, operands, lambda jaxpr, args: self.jaxpr(jaxpr, args)[0], self._all, self._decides
        )
        if through is not None:
            return through
        differs = False
        for inner in walk([eqn]):
            _refuse_unknown(inner)
            differs = differs or _is_source(inner)
        return [self.distinct if differs else self._all(operands)] * num_outs

    def _all(self, values: Sequence[Agreement]) -> Agreement:
        """Returns the agreement on a result: replicas agree if they agree on every operand."""
        different = {value for value in values if value != self.same}
        if len(different) <= 1:
            return next(iter(different), self.same)
        return _numbered(zip(*different, strict=True))

    def _over_groups(self, value: Agreement, groups: Sequence[Sequence[int]] | None) -> Agreement:
        """Returns the agreement on a reduction or gather in each group of replicas."""
        if groups is None:
            return self.same
        combined = {i: tuple(value[j] for j in group) for group in groups for i in group}
        return _numbered(combined[i] for i in range(len(value)))

    def _decides(self, eqn: Equation, value: Agreement) -> None:
        if value != self.same:
            refuse_collectives(eqn)


def _numbered(values: Iterable[Hashable]) -> Agreement:
    """Returns equal numbers for equal values, counted in order of appearance."""
    numbers: dict[Hashable, int] = {}
    return tuple([numbers.setdefault(value, len(numbers)) for value in values])


def _is_source(eqn: Equation) -> bool:
    """Returns whether an equation gives replicas different values whatever its operands."""
    name = eqn.primitive.name
    if name in _OF_DEVICES or name in OUTSIDE or (name in _SCATTERING and is_collective(eqn)):
        return True
    return any(type(effect).__name__ not in _KNOWN_EFFECTS for effect in eqn.effects)


def refuse_collectives(eqn: Equation) -> None:
    """Refuses collectives in a `while` or `cond` that replicas decide differently."""
    is_loop = eqn.primitive.name == "while"
    what = "condition of jax.lax.while_loop" if is_loop else "predicate of jax.lax.cond or switch"
    for inner in walk([eqn]):
        _refuse_unknown(inner)
        if is_collective(inner):
            raise ContextError(
                f"A collective ({inner.primitive.name}, from all_reduce, all_gather, merge_call or"
                " an assignment with an aggregation) runs inside control flow where the"
                f" {what} can differ between replicas: the replicas that skip it would leave the"
                " others waiting forever. Make the decision the same on every replica (all_reduce"
                " it first), or move the collective out of the control flow and select its input"
                " with jnp.where."
            )


# Finds the values that the replicas of an uneven batch compute alike, by global value numbering.
#
# On an uneven batch every replica has a program of its own, in which its replica id and its number
# of rows are constants. The divergence analysis looks at one program and assumes that constants are
# equal on all replicas; this module compares the programs. Values get equal numbers if they are
# computed from equal values in the same way. For replicas with 3 and 2 rows:
#
#     { lambda ; a:f32[3] w:f32[]. let        { lambda ; a:f32[2] w:f32[]. let
#         b:f32[] = reduce_sum a                  b:f32[] = reduce_sum a
#         c:f32[] = psum[replica] b               c:f32[] = psum[replica] b    equal
#         d:f32[] = div c 3.0                     d:f32[] = div c 2.0          not equal
#         e:f32[] = sub w d                       e:f32[] = sub w d            not equal
#         f:f32[] = mul w 2.0                     f:f32[] = mul w 2.0          equal
#       in (e, f) }                             in (e, f) }
#
# `e` would be another value on each replica, although it is computed from a sum of both.
#
# A loop has a result with equal numbers if what it starts from and what its body computes for it
# have them. Replicas that decide differently whether they meet are found, too.


@final
class Numbering:
    """Numbers of the values of several programs; equal numbers mean equal values.

    Args:
        simplify: Called with an equation that has one result, and the numbers of its operands.
            Returns the number of the result if more is known of it than its operands tell, such as
            that it is zero; else None.

    Attributes:
        decisions: Every `cond` and `while` of the last program in which replicas meet, with the
            number of what decides; a replica that decides in another way leaves the others waiting.
    """

    def __init__(
        self, simplify: Callable[[Equation, Sequence[int]], int | None] | None = None
    ) -> None:
        self._simplify = simplify
        self._numbers: dict[Hashable, int] = {}
        self._num_joined = 0
        self._depth = 0  # of loops in loops
        self.decisions: list[tuple[Equation, int]] = []

    def outputs(self, jaxpr: Jaxpr, inputs: Sequence[Hashable]) -> list[int]:
        """Returns the numbers of the outputs of one program.

        Args:
            jaxpr: Program of one replica, without markers and constants.
            inputs: A key for every input; inputs of several programs have equal keys if they hold
                the same value.
        """
        self._num_joined = 0
        self.decisions = []
        return self._jaxpr(jaxpr, [self.input(key) for key in inputs])

    def input(self, key: Hashable) -> int:
        """Returns the number of the input with this key; see `outputs`."""
        return self._number(("input", key))

    def constant(self, value: Array | np.ndarray) -> Hashable:
        """Returns a key that is equal for equal constants."""
        if isinstance(value, jax.core.Tracer) or jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return id(value)
        array = np.asarray(value)
        return array.shape, str(array.dtype), array.tobytes()

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _jaxpr(self, jaxpr: AnyJaxpr, operands: Sequence[int]) -> list[int]:
        number = lambda value: self._number(self.constant(value))
        return interpret_with(jaxpr, operands, number, self._equation)[0]

    def _equation(self, eqn: Equation, operands: list[int]) -> list[int]:
        if self._simplify is not None and len(eqn.outvars) == 1:
            known = self._simplify(eqn, operands)
            if known is not None:
                return [known]
        call = call_of(eqn)
        if call is not None:
            return self._jaxpr(call, operands)
        match eqn.primitive.name:
            case "cond":
                return self._cond(eqn, operands)
            case "scan":
                return self._loop(eqn, *parts_of_scan(eqn, operands))
            case "while":
                of_condition, of_body, carry = parts_of_while(eqn, operands)
                return self._loop(eqn, of_body, carry, [], of_condition)
        key: Hashable
        if has_collective(eqn):
            # The replicas meet here. The divergence analysis finds out whether the result is the
            # same on all of them.
            key = self._joined()
        else:
            nested = tuple(
                [
                    tuple(self._jaxpr(inner, range(-len(open_jaxpr(inner)[0].invars), 0)))
                    for inner in sub_jaxprs(eqn)
                ]
            )
            params = tuple((name, _plain(value)) for name, value in sorted(eqn.params.items()))
            key = (eqn.primitive.name, params, tuple(operands), nested)
        return [self._number((key, i)) for i in range(len(eqn.outvars))]

    def _joined(self) -> Hashable:
        self._num_joined += 1
        return ("joined", self._num_joined)

    def _note_decision(self, eqn: Equation, number: int) -> None:
        if has_collective(eqn):
            self.decisions.append((eqn, number))

    def _cond(self, eqn: Equation, operands: Sequence[int]) -> list[int]:
        predicate, rest = operands[0], operands[1:]
        self._note_decision(eqn, predicate)
        branches = [self._jaxpr(branch, rest) for branch in eqn.params["branches"]]
        return [self._number(("cond", predicate, *outs)) for outs in zip(*branches, strict=True)]

    def _loop(
        self,
        eqn: Equation,
        consts: Sequence[int],
        carry: Sequence[int],
        rows: Sequence[int],
        of_condition: Sequence[int] = (),
    ) -> list[int]:
        """Returns the numbers of the results of a loop, given those of its operands."""
        # Replicas meet in the same loop. Others are alike if they begin and go on alike.
        rounds = eqn.params.get("length"), eqn.params.get("reverse"), self._depth
        loop = self._joined() if has_collective(eqn) else (eqn.primitive.name, *rounds)
        self._depth += 1
        carried = [self._number((loop, k)) for k in range(len(carry))]
        row = [self._number((loop, "row", x)) for x in rows]
        is_while = eqn.primitive.name == "while"
        body = eqn.params["body_jaxpr" if is_while else "jaxpr"]
        outs = self._jaxpr(body, [*consts, *carried, *row])
        needed = _carry_needed(body, len(consts), len(carry))
        for _ in carry:  # in the round before, then in all rounds
            needed = [parts.union(*[needed[k] for k in parts]) for parts in needed]

        def over_rounds(value: int, needs: Iterable[int]) -> int:
            return self._number((value, *[(k, carry[k], outs[k]) for k in sorted(needs)]))

        decision = None
        if is_while:
            condition = eqn.params["cond_jaxpr"]
            (value,) = self._jaxpr(condition, [*of_condition, *carried])
            (needs,) = _carry_needed(condition, len(of_condition), len(carry))
            decision = over_rounds(value, needs.union(*[needed[k] for k in needs]))
            self._note_decision(eqn, decision)
        self._depth -= 1
        results = [
            over_rounds(out, needs | {k} if k < len(carry) else needs)
            for k, (out, needs) in enumerate(zip(outs, needed, strict=True))
        ]
        return [self._number((loop, decision, k, result)) for k, result in enumerate(results)]


def _carry_needed(jaxpr: AnyJaxpr, num_consts: int, num_carry: int) -> list[frozenset[int]]:
    """Returns for every output which parts of the carry it is computed from.

    What replicas exchange counts as computed from nothing: it is the same on all of them.
    """
    nothing: frozenset[int] = frozenset()

    def evaluate(jaxpr: AnyJaxpr, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        return interpret_with(jaxpr, operands, lambda value: nothing, equation)[0]

    def equation(eqn: Equation, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        join = lambda values: nothing.union(*values)
        through = known_through(eqn, operands, evaluate, join)
        if through is not None:
            return through
        needs = nothing if is_collective(eqn) else join(operands)
        return [needs] * len(eqn.outvars)

    num_rows = len(open_jaxpr(jaxpr)[0].invars) - num_consts - num_carry
    carry = [frozenset([k]) for k in range(num_carry)]
    inputs = [*[nothing] * num_consts, *carry, *[nothing] * num_rows]
    return evaluate(jaxpr, inputs)


def _plain(value: object) -> Hashable:
    """Returns a parameter of an equation in a form that can be compared between programs."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, (Jaxpr, ClosedJaxpr)) or (callable(value) and not isinstance(value, type)):
        return type(value).__name__
    try:
        hash(value)
    except TypeError:
        return type(value).__name__
    return value
