"""Parts of jaxprs, as all compiler passes see them: equations, the calls in them, and other types.

In

    { lambda ; a:f32[2]. let
        b:f32[2] = jit[jaxpr={ lambda ; c:f32[2]. let d:f32[2] = sin c in (d,) }] a
        e:f32[2] = mul b 2.0
      in (e,) }

`walk` gives the equations `jit`, `sin` and `mul`, `call_of` the jaxpr in the first of them, and
`leading_to` all that `e` needs.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax import lax
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

from distributary.devices import Nest, all_params, scan_counts

Array: TypeAlias = jax.Array  # or a tracer
AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
Equation: TypeAlias = JaxprEqn
Atom: TypeAlias = Var | Literal

_V = TypeVar("_V")

CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})
# JAX 0.12 calls `closed_call` and `call` `eval_jaxpr`.
_PLAIN_CALLS = frozenset({"call", "closed_call", "eval_jaxpr", "jit", "pjit"})
_CALLS = frozenset({"custom_jvp_call", "custom_vjp_call"}) | _PLAIN_CALLS | CHECKPOINTS
# Folders of code that is not the user's.
_INSTALLED = os.path.dirname(os.path.dirname(jax.__file__))
_LIBRARIES = (
    "<",  # code that is in no file
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    *(os.path.join(_INSTALLED, name, "") for name in ("jax", "keras", "optax", "flax")),
)


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


def value_of(env: Mapping[Any, _V], atom: Atom) -> _V:
    """Returns the value of a variable in `env`, or of a literal, which is a NumPy scalar then."""
    if not isinstance(atom, Literal):
        return env[atom]
    value: Any = np.asarray(atom.val, aval_of(atom).dtype)[()]  # it can be a Python number
    return value


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


def sub_jaxprs(eqn: Equation) -> list[AnyJaxpr]:
    """Returns the jaxprs in the parameters of an equation."""
    return list(jaxprs_in_params(all_params(eqn.params)))


def with_jaxprs(eqn: Equation, change: Callable[[AnyJaxpr], AnyJaxpr]) -> dict[str, Any]:
    """Returns the parameters of an equation with the jaxprs in them changed.

    Args:
        eqn: The equation.
        change: Returns the new jaxpr; the same object if nothing changes, so that parameters stay
            the same objects, too.
    """

    def changed(value: Any) -> Any:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            return change(value)
        if type(value) in (tuple, list):  # the branches of a `cond`
            values = list(map(changed, value))
            if any(new is not old for new, old in zip(values, value, strict=True)):
                return type(value)(values)
        return value

    return {name: changed(value) for name, value in eqn.params.items()}


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


def call_of(eqn: Equation) -> AnyJaxpr | None:
    """Returns the jaxpr of an equation that only calls it, else None."""
    if eqn.primitive.name not in _CALLS:
        return None
    jaxpr: AnyJaxpr = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
    return jaxpr


def plain_call_of(eqn: Equation) -> AnyJaxpr | None:
    """Returns the jaxpr of a nested `jax.jit` or the like, which the passes look through."""
    return call_of(eqn) if eqn.primitive.name in _PLAIN_CALLS else None


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


# Evaluation


def evaluate_all(eqns: Sequence[Equation], env: dict[Var, Array]) -> None:
    """Adds every result of `eqns` to `env`, which has the values of their inputs."""
    outs = variables_made(eqns)
    results = set(outs)
    used = dict.fromkeys(v for eqn in eqns for v in variables_of(eqn.invars) if v not in results)
    values = jax.core.eval_jaxpr(jaxpr_of(list(used), outs, eqns), (), *(env[v] for v in used))
    env.update(zip(outs, values, strict=True))


def evaluate_one(eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    """Returns the results of one equation."""
    env = {
        atom: value
        for atom, value in zip(eqn.invars, operands, strict=True)
        if not isinstance(atom, Literal)
    }
    evaluate_all([eqn], env)
    return [env[v] for v in eqn.outvars]


def interpret_with(
    jaxpr: AnyJaxpr,
    inputs: Iterable[_V],
    constant: Callable[[Array], _V],
    equation: Callable[[Equation, list[_V]], Iterable[_V]],
) -> tuple[list[_V], dict[Var, _V]]:
    """Evaluates a jaxpr with a rule of its own, on arrays or on something else in their place.

    Args:
        jaxpr: The jaxpr; the constants of one that is not closed are its first inputs.
        inputs: What stands for each input.
        constant: Returns what stands for a constant or literal.
        equation: Returns what stands for the results of an equation, given its operands.

    Returns:
        What stands for the outputs, and for every variable.
    """
    inner, consts = open_jaxpr(jaxpr)
    values = [*map(constant, consts), *inputs]
    env = dict(zip((*inner.constvars, *inner.invars), values, strict=True))

    def lookup(atom: Atom) -> _V:
        return constant(value_of({}, atom)) if isinstance(atom, Literal) else env[atom]

    for eqn in inner.eqns:
        outs = equation(eqn, [lookup(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [lookup(atom) for atom in inner.outvars], env


def with_pass(
    function: Callable[..., Nest], run: Callable[[ClosedJaxpr, Sequence[Array]], list[Array]]
) -> Callable[..., Nest]:
    """Returns `function` with its program evaluated by `run`.

    Args:
        function: From nests of arrays to nests of arrays.
        run: Returns the outputs of a program, given its inputs.
    """

    @functools.wraps(function)
    def passed(*args: Nest) -> Nest:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        outs = run(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return passed


def with_bodies(
    eqn: Equation,
    concerns: Callable[[Jaxpr], bool],
    run: Callable[[ClosedJaxpr, Sequence[Array]], list[Array]],
) -> Equation:
    """Returns a loop or branch with its bodies evaluated by `run`.

    Args:
        eqn: The equation.
        concerns: Returns whether a body is to be evaluated by `run`.
        run: Returns the outputs of a body, given its inputs.
    """

    def changed(body: Any) -> ClosedJaxpr:  # closed, as in all loops and branches
        if not concerns(body.jaxpr):
            return body
        new_body: ClosedJaxpr = jax.make_jaxpr(lambda *args: run(body, args))(*body.in_avals)
        # A loop would refuse a carry that is weakly typed only before or after it.
        kinds = [
            [(aval.shape, aval.dtype, aval.weak_type) for aval in jaxpr.out_avals]
            for jaxpr in (new_body, body)
        ]
        return new_body if kinds[0] == kinds[1] else body

    return eqn.replace(params=with_jaxprs(eqn, changed))


# Where equations come from


def place_of(eqn: Equation) -> str:
    """Returns the innermost place in the user's code that made an equation, else ""."""
    traceback = eqn.source_info.traceback
    frames: Iterable[Any] = () if traceback is None else traceback.frames
    outside = (f for f in frames if not f.file_name.startswith(_LIBRARIES))
    return next((f"{frame.file_name}:{frame.line_num}" for frame in outside), "")


#: A function of the operands of an equation with one result.
Version: TypeAlias = Callable[..., Array]
#: From an equation, and whether the only use of its result is to be transposed, to what takes its
#: place, or None.
Rule: TypeAlias = Callable[[Equation, bool], Version | None]


def rewritten(closed: ClosedJaxpr, rule: Rule) -> ClosedJaxpr:
    """Returns a closed jaxpr, and the jaxprs inside it, with equations replaced as `rule` says.

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
