"""Divides the variables of a program into parts, each a state of its own.

With a variable of 4 rows in two parts, the update

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
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import jax.extend.core as jex_core
import numpy as np
from jax import lax

from distributary.rows import row_operands, rows_between, with_rows
from distributary.tracing import Equation, jaxpr_of, without_calls

__all__ = ["in_parts"]


def in_parts(
    jaxpr: Any, inputs: Mapping[int, Sequence[int]], outputs: Mapping[int, Sequence[int]]
) -> tuple[Any, dict[Any, Any]]:
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
    invars: list[Any] = []
    joined: list[Equation] = []
    for i, v in enumerate(jaxpr.invars):
        if i not in inputs:
            invars.append(v)
            continue
        parts = [jex_core.Var(v.aval.update(shape=(n, *v.aval.shape[1:]))) for n in inputs[i]]
        invars += parts
        joined.append(_equation(lambda *own: lax.concatenate(own, 0), parts, v))
    parting = _Parting(invars)
    for eqn in (*joined, *jaxpr.eqns):
        parting.add(eqn)
    outvars: list[Any] = []
    for i, v in enumerate(jaxpr.outvars):
        ends = np.cumsum(outputs.get(i, ()), dtype=int).tolist()
        whole = parting.renamed(v)
        pairs = zip([0, *ends], ends, strict=False)
        outvars += [parting.part(whole, *pair) for pair in pairs] if ends else [whole]
    return jaxpr_of(invars, outvars, parting.eqns), constants


@final
class _Parting:
    """A program that is being put together, in which parts are computed from parts.

    Args:
        inputs: Its inputs.

    Attributes:
        eqns: Its equations.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.eqns: list[Equation] = []
        self._inputs = set(inputs)
        self._makers: dict[Any, Equation] = {}
        self._names: dict[Any, Any] = {}
        self._made: dict[tuple[Any, int, int], Any] = {}
        # Variables that are computed row by row from pushes or parts.
        self._divisible: set[Any] = set()

    def add(self, eqn: Equation) -> None:
        """Adds the next equation of the program."""
        eqn = eqn.replace(invars=[self.renamed(v) for v in eqn.invars])
        if eqn.primitive.name == "split" and eqn.params["axis"] == 0:  # gradient of a concatenation
            ends = np.cumsum(eqn.params["sizes"]).tolist()
            for v, start, end in zip(eqn.outvars, [0, *ends], ends, strict=False):
                self.add(_slice(eqn.invars[0], start, end, v))
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

    def renamed(self, atom: Any) -> Any:
        """Returns the variable that has taken the place of one."""
        return atom if isinstance(atom, jex_core.Literal) else self._names.get(atom, atom)

    def part(self, v: Any, start: int, end: int) -> Any:
        """Returns a variable with the rows of `v` from `start` to `end`."""
        key = v, start, end
        if key not in self._made:
            self._made[key] = self._part(v, start, end)
        return self._made[key]

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
            self._append(eqn.replace(invars=invars, outvars=[new], params=params))
            return new
        self._append(_slice(v, start, end, new))
        return new

    def _append(self, eqn: Equation) -> None:
        self.eqns.append(eqn)
        self._makers.update((v, eqn) for v in eqn.outvars)


def _is_joined(eqn: Equation) -> bool:
    return eqn.primitive.name == "concatenate" and eqn.params["dimension"] == 0


def _slice(v: Any, start: int, end: int, outvar: Any) -> Equation:
    return _equation(lambda whole: lax.slice_in_dim(whole, start, end), [v], outvar)


def _equation(function: Any, invars: Sequence[Any], outvar: Any) -> Equation:
    """Returns the only equation of a function, with the given variables."""
    closed = jax.make_jaxpr(function)(
        *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars)
    )
    (eqn,) = closed.jaxpr.eqns
    return eqn.replace(invars=list(invars), outvars=[outvar])
