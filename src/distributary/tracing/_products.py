"""On CPUs, products of which XLA would transpose both operands.

The gradient of a kernel `[features, units]` that was applied to `[batch, length, features]` is a
product that contracts batch and length, and its result is transposed. XLA makes one product of the
two, of operands that are both transposed. For such a one XLA:CPU has no fast kernel: these products
took a third of the time of a transformer's step. It has one for rows times columns as they lie, and
for that only one of the operands is transposed, the smaller one. Barriers keep XLA from undoing it.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex_core
from jax import lax
from jax.sharding import AxisType

from distributary.tracing._markers import Array, Equation, Jaxpr, open_jaxpr
from distributary.tracing._stages import variables_of

__all__ = ["fast_products", "with_fast_products"]


def with_fast_products(function: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """`function` with no product of which XLA would transpose both operands.

    Args:
        function: From trees of arrays to trees of arrays; about to be compiled.
        mesh: The devices it is compiled for; None for JAX's default device.
    """
    if _platform(mesh) != "cpu":
        return function

    @functools.wraps(function)
    def fast(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        outs = jex_core.jaxpr_as_fun(fast_products(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return fast


def fast_products(closed: Any) -> Any:
    """A closed jaxpr, for CPUs, without such products, also in the jaxprs inside of it."""
    return _with_fast_products(closed, {})


def _platform(mesh: Any) -> str:
    if mesh is None:
        return jax.default_backend()
    if isinstance(mesh, jax.sharding.Mesh):
        return str(mesh.devices.flat[0].platform)
    return "another machine's"


def _with_fast_products(jaxpr: Any, known: dict[int, Any]) -> Any:
    """The jaxpr, closed or not, without such products; the same object if it has none.

    Args:
        jaxpr: The whole, or what an equation has as a parameter.
        known: What was made of others, by their identity; equations share them.
    """
    if id(jaxpr) not in known:
        inner, consts = open_jaxpr(jaxpr)
        made: Any = _of_open_jaxpr(inner, known)
        if made is inner:
            made = jaxpr
        elif isinstance(jaxpr, jex_core.ClosedJaxpr):
            made = jex_core.ClosedJaxpr(made, consts)
        known[id(jaxpr)] = made
    return known[id(jaxpr)]


def _of_open_jaxpr(jaxpr: Jaxpr, known: dict[int, Any]) -> Jaxpr:
    uses = Counter(variables_of([*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]))
    transposed = {
        v
        for eqn in jaxpr.eqns
        if eqn.primitive is lax.transpose_p
        for v in variables_of(eqn.invars)
        if uses[v] == 1
    }
    eqns = []
    for eqn in jaxpr.eqns:
        params = {name: _of_param(value, known) for name, value in eqn.params.items()}
        if any(params[name] is not value for name, value in eqn.params.items()):
            eqns.append(eqn.replace(params=params))
        elif _is_flattened(eqn) and eqn.outvars[0] in transposed:
            eqns.append(_fast(eqn))
        else:
            eqns.append(eqn)
    is_same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if is_same else jaxpr.replace(eqns=eqns)


def _of_param(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr)):
        return _with_fast_products(value, known)
    if type(value) is tuple:  # the branches of a `cond`
        made = [_of_param(v, known) for v in value]
        if any(new is not old for new, old in zip(made, value, strict=True)):
            return tuple(made)
    return value


def _is_flattened(eqn: Equation) -> bool:
    """Whether XLA makes matrices of the operands of a product, with one dimension of several."""
    if eqn.primitive is not lax.dot_general_p:
        return False
    sharding = eqn.params["out_sharding"]
    if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types:
        return False  # the user wants it there
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    return len(contracted) > 1 and not batch


def _fast(eqn: Equation) -> Equation:
    """The same product, for which XLA transposes the smaller of the operands and not the other."""
    params = eqn.params
    (of_first, of_second), _ = params["dimension_numbers"]
    first, second = [atom.aval for atom in eqn.invars]
    rest = [k for k in range(second.ndim) if k not in of_second]

    @jax.jit
    def product(x: Array, y: Array) -> Array:
        if second.size > first.size:
            return lax.optimization_barrier(lax.dot_general_p.bind(x, y, **params))
        rows = lax.optimization_barrier(lax.transpose(y, (*rest, *of_second)))
        precision = params["precision"]
        made = lax.dot_general(
            rows,
            x,
            ((tuple(range(len(rest), y.ndim)), of_first), ((), ())),
            precision=precision[::-1] if isinstance(precision, tuple) else precision,
            preferred_element_type=params["preferred_element_type"],
        )
        return lax.transpose(made, (*range(len(rest), made.ndim), *range(len(rest))))

    call = jax.make_jaxpr(product)(first, second).eqns[0]
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
