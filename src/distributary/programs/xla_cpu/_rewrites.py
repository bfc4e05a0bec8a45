"""The last pass over programs for CPUs: rewrites operations that XLA:CPU is slow at.

`_rules` has the operations. A rewritten one becomes the call of a function, as here the
gradient of a kernel that was applied to sequences:

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

Results are the same but for rounding. `DISTRIBUTARY_CPU_REWRITES=0` switches this pass off.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh

from distributary.devices import Nest
from distributary.programs.xla_cpu._rules import (
    REWRITTEN,
    Fast,
    divisible_version,
    fast_version,
    working_version,
)
from distributary.tracing import (
    AnyJaxpr,
    Equation,
    open_jaxpr,
    sub_jaxprs,
    variables_of,
    with_jaxprs,
    with_pass,
)

_Known: TypeAlias = dict[int, AnyJaxpr]
_Rule: TypeAlias = Callable[[Equation, bool], Fast | None]


def with_cpu_rewrites(
    function: Callable[..., Nest], mesh: Mesh | AbstractMesh | None
) -> Callable[..., Nest]:
    """Returns `function` in a form that XLA:CPU runs fast, if it is for CPUs.

    Args:
        function: From trees of arrays to trees of arrays; about to be compiled.
        mesh: The devices it is compiled for; None for JAX's default device.
    """
    if not is_for_cpus(mesh) or not _are_on():
        return function

    def run(closed: ClosedJaxpr, args: Sequence[Array]) -> list[Array]:
        return jaxpr_as_fun(_rewritten(closed, {}, _on_one_cpu))(*args)

    return with_pass(function, run)


def rewritten_for_cpus(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a closed jaxpr, and the jaxprs inside it, in a form that XLA:CPU runs fast."""
    return _rewritten(closed, {}, _on_one_cpu) if _are_on() else closed


def rewritten_for_partitioner(closed: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """Returns a closed jaxpr, and the jaxprs inside it, in a form that XLA can divide.

    The forms that are fast on one CPU are not among them: XLA cannot divide those.

    Args:
        closed: The jaxpr.
        mesh: The devices over which XLA divides it.
    """
    on_cpus = is_for_cpus(mesh) and _are_on()
    return _rewritten(closed, {}, _divided_over_cpus if on_cpus else _divided)


def _on_one_cpu(eqn: Equation, only_transposed: bool) -> Fast | None:
    return working_version(eqn) or fast_version(eqn, only_transposed)


def _divided(eqn: Equation, only_transposed: bool) -> Fast | None:
    return divisible_version(eqn)


def _divided_over_cpus(eqn: Equation, only_transposed: bool) -> Fast | None:
    return working_version(eqn) or divisible_version(eqn)


def may_be_rewritten(eqn: Equation) -> bool:
    """Returns whether the rewrites may change an equation; a quick test, without its shapes."""
    return eqn.primitive in REWRITTEN or any(True for _ in sub_jaxprs(eqn))


def is_for_cpus(mesh: Mesh | AbstractMesh | None) -> bool:
    """Returns whether programs for a mesh, or for JAX's default device, run on CPUs here."""
    if mesh is None:
        return jax.default_backend() == "cpu"
    return isinstance(mesh, Mesh) and bool(mesh.devices.flat[0].platform == "cpu")


def _are_on() -> bool:
    """Returns whether programs that are made now are rewritten."""
    return os.environ.get("DISTRIBUTARY_CPU_REWRITES") != "0"


def _rewritten(jaxpr: AnyJaxpr, known: _Known, rule: _Rule) -> Any:
    """Returns the jaxpr, closed or not, rewritten; the same object if there is nothing to rewrite.

    Args:
        jaxpr: The whole program, or a jaxpr in the parameters of an equation.
        known: Results for other jaxprs, by their identity, because equations share jaxprs.
        rule: Returns what takes the place of an equation, given whether the only use of its result
            is to be transposed.
    """
    if id(jaxpr) not in known:
        inner, consts = open_jaxpr(jaxpr)
        result: Any = _of_open_jaxpr(inner, known, rule)
        if result is inner:
            result = jaxpr
        elif isinstance(jaxpr, ClosedJaxpr):
            result = ClosedJaxpr(result, consts)
        known[id(jaxpr)] = result
    return known[id(jaxpr)]


def _of_open_jaxpr(jaxpr: Jaxpr, known: _Known, rule: _Rule) -> Jaxpr:
    uses = Counter(variables_of([*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]))
    transposed = {
        v
        for eqn in jaxpr.eqns
        if eqn.primitive is lax.transpose_p
        for v in variables_of(eqn.invars)
        if uses[v] == 1
    }
    eqns = [
        _of_equation(eqn, any(v in transposed for v in eqn.outvars), known, rule)
        for eqn in jaxpr.eqns
    ]
    is_same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if is_same else jaxpr.replace(eqns=eqns)


def _of_equation(eqn: Equation, only_transposed: bool, known: _Known, rule: _Rule) -> Equation:
    params = with_jaxprs(eqn, lambda jaxpr: _rewritten(jaxpr, known, rule))
    if any(params[name] is not value for name, value in eqn.params.items()):
        return eqn.replace(params=params)
    version = rule(eqn, only_transposed)
    if version is None:
        return eqn
    call = jax.make_jaxpr(jax.jit(version))(*[atom.aval for atom in eqn.invars]).eqns[0]
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
