"""Moves the sums of a step's metrics into the vector with the sums of its gradients.

With a vector of gradients `a`, and the sum of a metric `d` marked as `JOINABLE`,

    b:f32[4] = psum[axes=('replica',)] a
    c:f32[4] = sub w b
    e:f32[] = psum[axes=('replica',)] d

becomes

    f:f32[5] = concatenate a d
    g:f32[5] = psum[axes=('replica',)] f
    b:f32[4] e:f32[] = split g
    c:f32[4] = sub w b

gloo, which sums between processes of CPUs, pays for every array. A step updates the weights before
the metrics, so XLA does not combine the two.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Literal, Var

from distributary._types import Nest
from distributary.collectives import all_reduce_of_vectors
from distributary.tracing import (
    Equation,
    aval_of,
    evaluate_all,
    is_of_devices,
    is_sum_of_replicas,
    leading_to,
    opened,
    shape_of,
    value_of,
    variables_of,
    with_pass,
)

JOINABLE = "joinable_sums"
"""Name of the scope for sums that may travel in another vector, such as those of metrics."""


def with_joined_sums(step: Callable[..., Nest]) -> Callable[..., Nest]:
    """Returns `step` with its joinable sums in the vector of the last other sum.

    They stay where they are if that needs one of them or the other way round, if there is no such
    vector of their dtype, and if the step has side effects, whose order could change.

    Args:
        step: From trees of arrays to trees of arrays; the step of one replica. Sums in the scope
            `JOINABLE` are moved.
    """
    return with_pass(step, _run)


def _run(closed: ClosedJaxpr, args: Sequence[Array]) -> list[Array]:
    jaxpr = opened(closed)
    values = dict(zip(jaxpr.invars, [*closed.consts, *args], strict=True))
    sums, before = _joinable(jaxpr.eqns)
    if sums:
        evaluate_all(before, values)
        totals = _sums(variables_of(eqn.invars[0] for eqn in sums), before, values)
        values.update((eqn.outvars[0], t) for eqn, t in zip(sums, totals, strict=True))
    done = {id(eqn) for eqn in (*before, *sums)}
    evaluate_all([eqn for eqn in jaxpr.eqns if id(eqn) not in done], values)
    return [value_of(values, atom) for atom in jaxpr.outvars]


def _joinable(eqns: Sequence[Equation]) -> tuple[list[Equation], list[Equation]]:
    """Returns the sums that can be one, and the equations they need; both may be empty."""
    sums = [eqn for eqn in eqns if is_sum_of_replicas(eqn)]
    joinable = [eqn for eqn in sums if JOINABLE in str(eqn.source_info.name_stack)]
    others = [eqn for eqn in sums if eqn not in joinable and len(shape_of(eqn.invars[0])) == 1]
    # A named axis is an effect, too.
    has_effects = any(eqn.effects and not is_of_devices(eqn) for eqn in eqns)
    if not others or has_effects:
        return [], []
    dtype = aval_of(others[-1].invars[0]).dtype
    chosen = [others[-1], *(e for e in joinable if aval_of(e.invars[0]).dtype == dtype)]
    is_needed, _ = leading_to(eqns, [v for eqn in chosen for v in eqn.invars])
    before = list(itertools.compress(eqns, is_needed))
    if len(chosen) == 1 or any(eqn in before for eqn in chosen):
        return [], []
    return chosen, before


def _sums(
    operands: Sequence[Var], eqns: Sequence[Equation], values: Mapping[Var, Array]
) -> list[Array]:
    """Returns the sums of a vector of gradients and of other values; `eqns` have made them."""
    arrays = [values[operand] for operand in operands]
    filled = _filled_with(operands[0], arrays[1:], eqns, values)
    if filled is None:
        return all_reduce_of_vectors(arrays)
    (total,) = all_reduce_of_vectors([filled])
    ends = np.cumsum([array.size for array in arrays])[:-1]
    parts = zip(jnp.split(total, ends), arrays, strict=True)
    return [part.reshape(array.shape) for part, array in parts]


def _filled_with(
    vector: Var,
    more: Sequence[Array],
    eqns: Sequence[Equation],
    values: Mapping[Var, Array],
) -> Array | None:
    """Returns a vector of gradients with more arrays behind them.

    A vector of zeros was filled with the gradients; here a longer one is. To put the finished
    vector into a longer one is the same, but then XLA:CPU fuses the last steps of filling with the
    padding, and computes what they put in for every element of the vector: steps of a CNN took 20
    times as long.

    Args:
        vector: The variable.
        more: What follows.
        eqns: The equations that make it.
        values: Their values.

    Returns:
        None if the vector was made in another way.
    """
    makers = {out: eqn for eqn in eqns for out in eqn.outvars}
    fillings = []
    maker = makers.get(vector)
    while maker is not None and maker.primitive is lax.dynamic_update_slice_p:
        fillings.append(maker)
        before = maker.invars[0]
        maker = None if isinstance(before, Literal) else makers.get(before)
    if not fillings or maker is None or maker.primitive is not lax.broadcast_in_dim_p:
        return None
    aval = aval_of(vector)
    num_elements = aval.size + sum(array.size for array in more)
    filled = jnp.full(num_elements, value_of(values, maker.invars[0]), aval.dtype)
    for eqn in reversed(fillings):
        _, update, start = [value_of(values, atom) for atom in eqn.invars]
        filled = lax.dynamic_update_slice(filled, update, (start,))
    rest = jnp.concatenate([array.reshape(-1) for array in more])
    return lax.dynamic_update_slice(filled, rest, (aval.size,))
