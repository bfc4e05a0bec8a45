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

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import final

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, Literal, Var

from distributary.jaxprs import Array, Atom, Equation, aval_of, jaxpr_of
from distributary.programs import row_operands, with_rows, without_calls
from distributary.servers._row_flow import rows_between


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
