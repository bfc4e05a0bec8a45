"""Finds the values that the replicas of an uneven batch compute alike, by global value numbering.

On an uneven batch every replica has a program of its own, in which its replica id and its number of
rows are constants. The divergence analysis looks at one program and assumes that constants are
equal on all replicas; this module compares the programs. Values get equal numbers if they are
computed from equal values in the same way. For replicas with 3 and 2 rows:

    { lambda ; a:f32[3] w:f32[]. let        { lambda ; a:f32[2] w:f32[]. let
        b:f32[] = reduce_sum a                  b:f32[] = reduce_sum a
        c:f32[] = psum[replica] b               c:f32[] = psum[replica] b    equal
        d:f32[] = div c 3.0                     d:f32[] = div c 2.0          not equal
        e:f32[] = sub w d                       e:f32[] = sub w d            not equal
        f:f32[] = mul w 2.0                     f:f32[] = mul w 2.0          equal
      in (e, f) }                             in (e, f) }

`e` would be another value on each replica, although it is computed from a sum of both.

A loop has a result with equal numbers if what it starts from and what its body computes for it have
them. Replicas that decide differently whether they meet are found, too.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params

from distributary.tracing._control_flow import known_through
from distributary.tracing._divergence import has_collective, is_collective
from distributary.tracing._jaxprs import (
    AnyJaxpr,
    Equation,
    call_of,
    interpret_with,
    open_jaxpr,
    parts_of_scan,
    parts_of_while,
)


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
                    for inner in jaxprs_in_params(eqn.params)
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
