"""Removes the meshes of captured arrays from the types in a program.

An array that lies on several devices has their mesh in its type, and so has everything that is
computed from it. With a captured `b` on the mesh of two replicas,

    { lambda b:f32[4]@replica ; x:f32[4]. let        { lambda b:f32[4] ; x:f32[4]. let
        c:f32[4]@replica = jit[{ ... }] b x     ->       c:f32[4] = jit[{ ... }] b x
      in (c,) }                                        in (c,) }

because JAX refuses the types on the left in the code of a replica, where the mesh is another one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex_core

from distributary.tracing._jaxprs import AnyJaxpr, open_jaxpr, with_jaxprs


def without_meshes(closed: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """Returns a jaxpr whose types name no mesh; the same one if its constants lie on none."""
    if not any(map(_has_mesh, closed.consts)):
        return closed
    changed: jex_core.ClosedJaxpr = _jaxpr(closed)
    return changed


def _has_mesh(const: object) -> bool:
    sharding = getattr(jax.typeof(const), "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def _jaxpr(program: AnyJaxpr) -> Any:
    """Returns the jaxpr, closed or not, without meshes."""
    jaxpr, consts = open_jaxpr(program)
    renamed: dict[jex_core.Var, Any] = {}

    def atom(old: object) -> Any:
        if not isinstance(old, jex_core.Var):
            return old  # a literal
        if old not in renamed:
            renamed[old] = _renamed(old)
        return renamed[old]

    constvars, invars = list(map(atom, jaxpr.constvars)), list(map(atom, jaxpr.invars))
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reshard":  # gradients begin with it
            renamed[eqn.outvars[0]] = atom(eqn.invars[0])
        else:
            eqns.append(_equation(eqn, atom))
    outvars = list(map(atom, jaxpr.outvars))
    changed = jaxpr.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outvars)
    if not isinstance(program, jex_core.ClosedJaxpr):
        return changed
    return jex_core.ClosedJaxpr(changed, consts)


def _renamed(var: jex_core.Var) -> jex_core.Var:
    aval: Any = var.aval
    if not isinstance(aval, jax.core.ShapedArray) or str(var) == "_":  # an output without a use
        return var
    return jex_core.Var(jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type))


def _equation(eqn: jex_core.JaxprEqn, atom: Callable[[Any], Any]) -> jex_core.JaxprEqn:
    params = with_jaxprs(eqn, _jaxpr)
    if "sharding" in params and eqn.primitive.name != "sharding_constraint":  # the user wrote that
        params["sharding"] = None
    return eqn.replace(
        invars=list(map(atom, eqn.invars)), outvars=list(map(atom, eqn.outvars)), params=params
    )
