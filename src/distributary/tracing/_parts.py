"""Variables in parts, each a state of its own."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax.core
import jax.extend.core as jex_core
from jax import lax

from distributary.tracing._markers import Equation, jaxpr_of
from distributary.tracing._row_wise import row_operands, with_rows
from distributary.tracing._stages import variables_of

__all__ = ["in_parts"]


def in_parts(
    jaxpr: Any, inputs: Mapping[int, Sequence[int]], outputs: Mapping[int, Sequence[int]]
) -> Any:
    """A program with parts in the place of whole variables.

    A part of a value that is computed from parts, row by row, is computed from its part of them.
    So every part has an update of its own, and what is pushed for it is a part, too.

    Args:
        jaxpr: The program, without calls of functions.
        inputs: By position, the sizes of the parts along dim 0 that take the place of an input.
        outputs: The same for outputs.
    """
    invars: list[Any] = []
    eqns: list[Equation] = []
    for i, v in enumerate(jaxpr.invars):
        sizes = inputs.get(i)
        if sizes is None:
            invars.append(v)
            continue
        parts = [jex_core.Var(v.aval.update(shape=(size, *v.aval.shape[1:]))) for size in sizes]
        invars += parts
        eqns.append(_equation(lambda *own: lax.concatenate(own, 0), parts, v))
    eqns += jaxpr.eqns
    parting = _Parting(eqns, invars)
    outvars: list[Any] = []
    for i, v in enumerate(jaxpr.outvars):
        start = 0
        if i not in outputs:
            outvars.append(parting.unsliced(v))
        for size in outputs.get(i, ()):
            outvars.append(parting.part(v, start, start + size))
            start += size
    return jaxpr_of(invars, outvars, [*eqns, *parting.eqns], jaxpr.constvars)


@final
class _Parting:
    """Computes parts of the values of a program.

    Attributes:
        eqns: What computes them, to come after the program.
    """

    def __init__(self, eqns: Sequence[Equation], inputs: Sequence[Any]) -> None:
        self.eqns: list[Equation] = []
        self._makers = {v: eqn for eqn in eqns for v in eqn.outvars}
        self._made: dict[tuple[Any, int, int], Any] = {}
        # What is computed row by row from pushes or parts.
        self._divisible: set[Any] = set()
        states = set(inputs)
        for eqn in eqns:
            operands = row_operands(eqn)
            is_joined = _is_joined(eqn) and states.issuperset(eqn.invars)
            if (
                is_joined
                or (operands is not None and eqn.primitive.name == "push")
                or (operands and not self._divisible.isdisjoint(operands))
            ):
                self._divisible.update(eqn.outvars)

    def part(self, v: Any, start: int, end: int) -> Any:
        """A variable with the rows from `start` to `end` of one."""
        key = v, start, end
        if key not in self._made:
            self._made[key] = self._part(v, start, end)
        return self._made[key]

    def unsliced(self, v: Any) -> Any:
        """A variable with the value of `v`, computed from parts if it is one."""
        eqn = None if isinstance(v, jex_core.Literal) else self._makers.get(v)
        if eqn is None or eqn.primitive.name != "slice":
            return v
        params, operand = eqn.params, eqn.invars[0]
        if (
            operand in self._divisible
            and params["strides"] is None
            and v.aval.shape[1:] == operand.aval.shape[1:]
        ):
            return self.part(operand, params["start_indices"][0], params["limit_indices"][0])
        return v

    def _part(self, v: Any, start: int, end: int) -> Any:
        eqn = self._makers.get(v)
        new = jex_core.Var(v.aval.update(shape=(end - start, *v.aval.shape[1:])))
        operands = None if eqn is None else row_operands(eqn)
        if eqn is not None and _is_joined(eqn):
            first = 0
            for own in eqn.invars:
                size = own.aval.shape[0]
                if (first, first + size) == (start, end):
                    return own
                first += size
        elif (
            eqn is not None
            and operands is not None
            and len(eqn.outvars) == 1
            and (not operands or v in self._divisible)
        ):
            invars = [
                self.part(own, start, end)
                if not isinstance(own, jex_core.Literal) and own in operands
                else own
                for own in eqn.invars
            ]
            params = with_rows(eqn, end - start)
            self.eqns.append(eqn.replace(invars=invars, outvars=[new], params=params))
            return new
        self.eqns.append(_equation(lambda whole: lax.slice_in_dim(whole, start, end), [v], new))
        return new


def _is_joined(eqn: Equation) -> bool:
    return eqn.primitive.name == "concatenate" and eqn.params["dimension"] == 0


def _equation(function: Any, invars: Sequence[Any], outvar: Any) -> Equation:
    """The only equation of a function, with other variables."""
    closed = jax.make_jaxpr(function)(
        *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars)
    )
    (eqn,) = closed.jaxpr.eqns
    assert len(variables_of(eqn.invars)) == len(invars)
    return eqn.replace(invars=list(invars), outvars=[outvar])
