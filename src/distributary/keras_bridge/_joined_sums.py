"""One vector for the sums of a step's metrics and of its gradients.

Keras updates the optimizer before the metrics, so these are two arrays; gloo, which sums between
processes of CPUs, pays for each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from distributary.collectives import all_reduce_of_vectors
from distributary.tracing import (
    evaluate_all,
    is_of_devices,
    is_sum_of_replicas,
    opened,
    value_of,
    variables_of,
)

__all__ = ["METRICS", "with_joined_sums"]

METRICS = "sums_of_metrics"
"""Name of the scope in which metrics are summed."""


def with_joined_sums(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` with the sums of metrics in the vector of the last other sum.

    They stay where they are if that needs one of them or the other way round, if there is no such
    vector of their dtype, and if the step has side effects, whose order could change.

    Args:
        step: From trees of arrays to trees of arrays; the step of one replica. Metrics are summed
            in the scope `METRICS`.
    """

    def joined(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        jaxpr = opened(closed)
        values = dict(zip(jaxpr.invars, [*closed.consts, *jax.tree.leaves(args)], strict=True))
        sums, before = _joinable(jaxpr.eqns)
        if sums:
            evaluate_all(before, values)
            operands = [eqn.invars[0] for eqn in sums]
            arrays = [values[operand] for operand in operands]
            filled = _filled_with(operands[0], arrays[1:], before, values)
            totals = all_reduce_of_vectors(arrays if filled is None else [filled])
            if filled is not None:
                ends = np.cumsum([array.size for array in arrays])[:-1]
                totals = [
                    part.reshape(array.shape)
                    for part, array in zip(jnp.split(totals[0], ends), arrays, strict=True)
                ]
            values.update((eqn.outvars[0], t) for eqn, t in zip(sums, totals, strict=True))
        done = {id(eqn) for eqn in (*before, *sums)}
        evaluate_all([eqn for eqn in jaxpr.eqns if id(eqn) not in done], values)
        outs = [value_of(values, atom) for atom in jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return joined


def _filled_with(vector: Any, more: Sequence[Any], eqns: Sequence[Any], values: Any) -> Any:
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
    first = vector
    while first in makers and makers[first].primitive is lax.dynamic_update_slice_p:
        fillings.append(makers[first])
        first = makers[first].invars[0]
    is_of_zeros = first in makers and makers[first].primitive is lax.broadcast_in_dim_p
    if not fillings or not is_of_zeros:
        return None
    (zero,) = makers[first].invars
    size = vector.aval.size
    num_elements = size + sum(array.size for array in more)
    filled = jnp.full(num_elements, value_of(values, zero), vector.aval.dtype)
    for eqn in reversed(fillings):
        _, update, start = eqn.invars
        filled = lax.dynamic_update_slice(
            filled, value_of(values, update), (value_of(values, start),)
        )
    rest = jnp.concatenate([array.reshape(-1) for array in more])
    return lax.dynamic_update_slice(filled, rest, (size,))


def _joinable(eqns: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The sums that can be one, and the equations they need, in order; both may be empty."""
    sums = [eqn for eqn in eqns if is_sum_of_replicas(eqn)]
    of_metrics = [eqn for eqn in sums if METRICS in str(eqn.source_info.name_stack)]
    others = [eqn for eqn in sums if eqn not in of_metrics and eqn.invars[0].aval.ndim == 1]
    # A named axis is an effect, too.
    has_effects = any(eqn.effects and not is_of_devices(eqn) for eqn in eqns)
    if not others or has_effects:
        return [], []
    last = others[-1]
    alike = [e for e in of_metrics if e.invars[0].aval.dtype == last.invars[0].aval.dtype]
    chosen = [last, *alike]
    needed = set(variables_of(v for eqn in chosen for v in eqn.invars))
    before = []
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            before.append(eqn)
            needed.update(variables_of(eqn.invars))
    if not alike or any(eqn in before for eqn in chosen):
        return [], []
    return chosen, before[::-1]
