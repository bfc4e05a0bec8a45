"""On CPUs, products stay apart from the transposition of their result.

The gradient of a kernel `[features, units]` that was applied to `[batch, length, features]` is a
product that contracts batch and length, and its result is transposed. XLA makes one product of the
two, of operands that are both transposed. For such a one XLA:CPU has no fast kernel: these products
took a third of the time of a transformer's step. With a barrier between the two, the product is one
that has a fast kernel, and the transposition is one of a small array.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex_core
from jax import lax

from distributary.tracing._markers import Equation, Jaxpr, open_jaxpr
from distributary.tracing._stages import variables_of

__all__ = ["products_apart", "with_products_apart"]


def with_products_apart(function: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """`function` with a barrier behind each product of many dimensions that is then transposed.

    Args:
        function: From trees of arrays to trees of arrays; about to be compiled.
        mesh: The devices it is compiled for; None for JAX's default device.
    """
    if _platform(mesh) != "cpu":
        return function

    @functools.wraps(function)
    def apart(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        outs = jex_core.jaxpr_as_fun(products_apart(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return apart


def products_apart(closed: Any) -> Any:
    """A closed jaxpr that CPUs run, with these barriers, in the jaxprs inside of it, too."""
    return _with_barriers(closed, {})


def _platform(mesh: Any) -> str:
    if mesh is None:
        return jax.default_backend()
    if isinstance(mesh, jax.sharding.Mesh):
        return str(mesh.devices.flat[0].platform)
    return "another machine's"


def _with_barriers(jaxpr: Any, known: dict[int, Any]) -> Any:
    """The jaxpr, closed or not, with barriers; the same object if it needs none.

    Args:
        jaxpr: The whole, or what an equation has as a parameter.
        known: What was made of others, by their identity; equations share them.
    """
    if id(jaxpr) not in known:
        inner, consts = open_jaxpr(jaxpr)
        made: Any = _inner_with_barriers(inner, known)
        if made is inner:
            made = jaxpr
        elif isinstance(jaxpr, jex_core.ClosedJaxpr):
            made = jex_core.ClosedJaxpr(made, consts)
        known[id(jaxpr)] = made
    return known[id(jaxpr)]


def _inner_with_barriers(jaxpr: Jaxpr, known: dict[int, Any]) -> Jaxpr:
    uses = Counter(variables_of([*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]))
    transposed = {
        v
        for eqn in jaxpr.eqns
        if eqn.primitive is lax.transpose_p
        for v in variables_of(eqn.invars)
        if uses[v] == 1
    }
    eqns: list[Equation] = []
    is_changed = False
    for eqn in jaxpr.eqns:
        params = {name: _param_with_barriers(value, known) for name, value in eqn.params.items()}
        if any(params[name] is not value for name, value in eqn.params.items()):
            eqn = eqn.replace(params=params)
            is_changed = True
        if _is_flattened(eqn) and eqn.outvars[0] in transposed:
            product = jex_core.Var(eqn.outvars[0].aval)
            eqns.append(eqn.replace(outvars=[product]))
            eqn = _barrier().replace(
                invars=[product], outvars=eqn.outvars, source_info=eqn.source_info
            )
            is_changed = True
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns) if is_changed else jaxpr


def _param_with_barriers(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr)):
        return _with_barriers(value, known)
    if isinstance(value, tuple) and any(isinstance(v, jex_core.ClosedJaxpr) for v in value):
        return tuple([_param_with_barriers(v, known) for v in value])  # branches
    return value


def _is_flattened(eqn: Equation) -> bool:
    """Whether XLA makes matrices of the operands of a product, with one dimension of several."""
    if eqn.primitive is not lax.dot_general_p:
        return False
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    return len(contracted) > 1 and not batch


@functools.cache
def _barrier() -> Equation:
    return jax.make_jaxpr(lax.optimization_barrier)(0.0).eqns[0]
