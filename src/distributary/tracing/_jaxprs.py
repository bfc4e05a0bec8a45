"""Parts of jaxprs, as all compiler passes see them: equations, the calls in them, what they need.

In

    { lambda ; a:f32[2]. let
        b:f32[2] = jit[jaxpr={ lambda ; c:f32[2]. let d:f32[2] = sin c in (d,) }] a
        e:f32[2] = mul b 2.0
      in (e,) }

`walk` gives the equations `jit`, `sin` and `mul`, `call_of` the jaxpr in the first of them, and
`leading_to` all that `e` needs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    jaxprs_in_params,
)

from distributary.topology import all_params, scan_counts

Array: TypeAlias = jax.Array  # or a tracer
AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
Equation: TypeAlias = JaxprEqn
Atom: TypeAlias = Var | Literal

_V = TypeVar("_V")

_JIT = frozenset({"jit", "pjit"})
CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})
_CALLS = frozenset({"closed_call", "core_call"}) | CHECKPOINTS


# Variables and constants


def aval_of(atom: Atom) -> jax.core.ShapedArray:
    """Returns the shape and dtype of a variable or literal that is an array."""
    aval: Any = atom.aval
    return aval


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Returns the shape of a variable or literal; () if it is no array."""
    return tuple(getattr(atom.aval, "shape", ()))


def variables_of(atoms: Iterable[Atom]) -> list[Var]:
    """Returns the atoms that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def variables_made(eqns: Iterable[Equation]) -> list[Var]:
    """Returns the results of equations."""
    return [v for eqn in eqns for v in eqn.outvars]


def value_of(env: Mapping[Var, Array], atom: Atom) -> Array:
    """Returns the value of a literal, or of a variable in `env`."""
    return atom.val if isinstance(atom, Literal) else env[atom]


# Building jaxprs, and looking into them


def open_jaxpr(jaxpr: AnyJaxpr) -> tuple[Jaxpr, Sequence[Array]]:
    """Returns a jaxpr, closed or not, and its constants."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def jaxpr_of(
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[Equation],
    constvars: Sequence[Var] = (),
) -> Jaxpr:
    """Builds a jaxpr from its parts."""
    debug_info = DebugInfo("distributary", "step", ("",) * len(invars), ("",) * len(outvars))
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), effects, debug_info)


def opened(closed: ClosedJaxpr) -> Jaxpr:
    """Returns a closed jaxpr with its constants as first inputs."""
    jaxpr = closed.jaxpr
    return jaxpr_of([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)


def sub_jaxprs(eqn: Equation) -> Iterator[Jaxpr]:
    """Yields the jaxprs in the parameters of an equation, opened."""
    for sub in jaxprs_in_params(all_params(eqn.params)):
        yield open_jaxpr(sub)[0]


def walk(eqns: Iterable[Equation]) -> Iterator[Equation]:
    """Yields all equations in program order, those of nested jaxprs included."""
    for eqn in eqns:
        yield eqn
        for sub in sub_jaxprs(eqn):
            yield from walk(sub.eqns)


def contains(eqn: Equation, primitives: Collection[Primitive]) -> bool:
    """Returns whether `eqn` is, or carries, an equation of one of `primitives`."""
    return any(inner.primitive in primitives for inner in walk([eqn]))


def has_replicas(eqns: Iterable[Equation]) -> bool:
    """Returns whether replicas run some of the equations."""
    return any(eqn.primitive.name == "shard_map" for eqn in walk(eqns))


def is_jit(eqn: Equation) -> bool:
    """Returns whether `eqn` is a nested `jax.jit`, which the passes look through."""
    return eqn.primitive.name in _JIT


def call_of(eqn: Equation) -> AnyJaxpr | None:
    """Returns the jaxpr of an equation that only calls it, else None."""
    if is_jit(eqn) or eqn.primitive.name in _CALLS:
        return eqn.params["jaxpr"]
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return eqn.params["call_jaxpr"]
    return None


def parts_of_scan(eqn: Equation, operands: list[_V]) -> tuple[list[_V], list[_V], list[_V]]:
    """Returns the operands of `scan`: constants, the carry, and what it goes through."""
    num_consts, num_carry = scan_counts(eqn.params)
    start = num_consts + num_carry
    return operands[:num_consts], operands[num_consts:start], operands[start:]


def parts_of_while(eqn: Equation, operands: list[_V]) -> tuple[list[_V], list[_V], list[_V]]:
    """Returns the operands of `while`: constants of the condition and of the body, the carry."""
    num_condition = eqn.params["cond_nconsts"]
    start = num_condition + eqn.params["body_nconsts"]
    return operands[:num_condition], operands[num_condition:start], operands[start:]


# Dependencies


def leading_to(
    eqns: Sequence[Equation],
    outs: Iterable[Atom],
    keep: Callable[[Equation], bool] = lambda eqn: False,
) -> tuple[list[bool], set[Var]]:
    """Finds the equations that some results need, directly or through others.

    Args:
        eqns: Equations, in order.
        outs: The results; literals do not count.
        keep: Whether an equation counts as needed in any case.

    Returns:
        For every equation whether it is needed, and all variables that are.
    """
    needed = set(variables_of(outs))
    is_needed = [False] * len(eqns)
    for i in reversed(range(len(eqns))):
        is_needed[i] = keep(eqns[i]) or not needed.isdisjoint(eqns[i].outvars)
        if is_needed[i]:
            needed.update(variables_of(eqns[i].invars))
    return is_needed, needed


def computed_from(
    eqns: Iterable[Equation],
    sources: Iterable[Var],
    follow: Callable[[Equation], bool] = lambda eqn: True,
) -> set[Var]:
    """Returns the sources, and what equations for which `follow` is true compute from them."""
    reached = set(sources)
    for eqn in eqns:
        if follow(eqn) and not reached.isdisjoint(variables_of(eqn.invars)):
            reached.update(eqn.outvars)
    return reached


def interpret_with(
    jaxpr: Jaxpr,
    inputs: Iterable[_V],
    literal: Callable[[Literal], _V],
    equation: Callable[[Equation, list[_V]], Iterable[_V]],
) -> tuple[list[_V], dict[Var, _V]]:
    """Evaluates a jaxpr with a rule of its own, on arrays or on something else in their place.

    Args:
        jaxpr: The jaxpr.
        inputs: What stands for each constant, and then for each input.
        literal: Returns what stands for a literal.
        equation: Returns what stands for the results of an equation, given its operands.

    Returns:
        What stands for the outputs, and for every variable.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def lookup(atom: Atom) -> _V:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        outs = equation(eqn, [lookup(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [lookup(atom) for atom in jaxpr.outvars], env


# Where equations come from


def user_frame(eqn: Equation, inside: tuple[str, ...]) -> Any | None:
    """Returns the innermost frame of the code that made an equation, outside of some folders."""
    traceback = eqn.source_info.traceback
    frames: Iterable[Any] = () if traceback is None else traceback.frames
    outside = (f for f in frames if not f.file_name.startswith(inside))
    return next(outside, None)
