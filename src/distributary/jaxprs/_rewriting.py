"""Jaxprs with other equations, or with other types.

A rule has a function for the gradient of a kernel that was applied to sequences, as here:

    h:f32[2,5] = dot_general[dimension_numbers=(([0, 1], [0, 1]), ([], []))] g a
    i:f32[5,2] = transpose[permutation=(1, 0)] h

becomes

    h:f32[2,5] = jit[
      jaxpr={ lambda ; g:f32[4,3,2] a:f32[4,3,5]. let
          b:f32[2,5] = dot_general[dimension_numbers=(([0, 1], [0, 1]), ([], []))] g a
          c:f32[2,5] = optimization_barrier b
        in (c,) }
    ] g a
    i:f32[5,2] = transpose[permutation=(1, 0)] h
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from distributary.jaxprs._equations import (
    AnyJaxpr,
    Atom,
    Equation,
    aval_of,
    open_jaxpr,
    variables_of,
    with_jaxprs,
)

#: A function of the operands of an equation with one result.
Version: TypeAlias = Callable[..., Array]
#: From an equation, and whether the only use of its result is to be transposed, to what takes its
#: place, or None.
Rule: TypeAlias = Callable[[Equation, bool], Version | None]


def rewritten(closed: ClosedJaxpr, rule: Rule) -> ClosedJaxpr:
    """Returns a closed jaxpr, and the jaxprs inside it, with equations replaced as `rule` says.

    The same object comes back if there is nothing to replace.
    """
    known: dict[int, AnyJaxpr] = {}  # by identity, because equations share jaxprs

    def of_jaxpr(jaxpr: AnyJaxpr) -> Any:
        if id(jaxpr) not in known:
            inner, consts = open_jaxpr(jaxpr)
            transposed = _only_transposed(inner)
            eqns = [of_equation(eqn, not transposed.isdisjoint(eqn.outvars)) for eqn in inner.eqns]
            result = jaxpr
            if any(new is not old for new, old in zip(eqns, inner.eqns, strict=True)):
                result = inner.replace(eqns=eqns)
                if isinstance(jaxpr, ClosedJaxpr):
                    result = ClosedJaxpr(result, consts)
            known[id(jaxpr)] = result
        return known[id(jaxpr)]

    def of_equation(eqn: Equation, only_transposed: bool) -> Equation:
        params = with_jaxprs(eqn, of_jaxpr)
        if any(params[name] is not value for name, value in eqn.params.items()):
            return eqn.replace(params=params)
        version = rule(eqn, only_transposed)
        if version is None:
            return eqn
        call = jax.make_jaxpr(jax.jit(version))(*[atom.aval for atom in eqn.invars]).eqns[0]
        return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)

    result: ClosedJaxpr = of_jaxpr(closed)
    return result


def _only_transposed(jaxpr: Jaxpr) -> set[Var]:
    """Returns the variables whose only use is to be transposed."""
    uses = Counter(variables_of([*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]))
    transposes = [eqn for eqn in jaxpr.eqns if eqn.primitive is lax.transpose_p]
    return {v for eqn in transposes for v in variables_of(eqn.invars) if uses[v] == 1}


# Removes the meshes of captured arrays from the types in a program.
#
# An array that lies on several devices has their mesh in its type, and so has everything that is
# computed from it. With a captured `b` on the mesh of two replicas,
#
#     { lambda b:f32[4]@replica ; x:f32[4]. let        { lambda b:f32[4] ; x:f32[4]. let
#         c:f32[4]@replica = jit[{ ... }] b x     ->       c:f32[4] = jit[{ ... }] b x
#       in (c,) }                                        in (c,) }
#
# because JAX refuses the types on the left in the code of a replica, where the mesh is another one.


def without_meshes(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr whose types name no mesh; the same one if its constants lie on none."""
    if not any(map(_has_mesh, closed.consts)):
        return closed
    changed: ClosedJaxpr = _with_plain_types(closed)
    return changed


def _has_mesh(const: object) -> bool:
    sharding = getattr(jax.typeof(const), "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def _with_plain_types(program: AnyJaxpr) -> Any:
    """Returns a jaxpr, closed or not, without meshes in its types."""
    jaxpr, consts = open_jaxpr(program)
    renamed: dict[Var, Atom] = {}

    def plain(atoms: Sequence[Atom]) -> list[Any]:
        for v in variables_of(atoms):
            if v not in renamed:
                renamed[v] = _with_plain_type(v)
        return [atom if isinstance(atom, Literal) else renamed[atom] for atom in atoms]

    constvars, invars, eqns = plain(jaxpr.constvars), plain(jaxpr.invars), []
    for eqn in jaxpr.eqns:
        operands = plain(eqn.invars)
        if eqn.primitive.name == "reshard":  # gradients begin with it
            renamed[eqn.outvars[0]] = operands[0]
            continue
        params = with_jaxprs(eqn, _with_plain_types)
        # The user wrote a `sharding_constraint`.
        if "sharding" in params and eqn.primitive.name != "sharding_constraint":
            params["sharding"] = None
        eqns.append(eqn.replace(invars=operands, outvars=plain(eqn.outvars), params=params))
    outvars = plain(jaxpr.outvars)
    changed = jaxpr.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outvars)
    return ClosedJaxpr(changed, consts) if isinstance(program, ClosedJaxpr) else changed


def _with_plain_type(v: Var) -> Var:
    if not isinstance(v.aval, jax.core.ShapedArray) or str(v) == "_":  # an output without a use
        return v
    aval = aval_of(v)
    return Var(jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type))
