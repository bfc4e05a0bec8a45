"""Writes equations in other ways where XLA's partitioner aborts at them, or divides them wrongly.

A program of the whole batch is divided over its devices by XLA, on every platform. With ids without
a sign, as in the gradient of `jnp.sort`,

    c:f32[8] = gather[...] a b:u32[8,1]

becomes

    d:i32[8,1] = convert_element_type b
    c:f32[8] = gather[...] a d
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec as P

from distributary.devices import num_logical_devices
from distributary.jaxprs import Equation, Version, aval_of, rewritten
from distributary.programs._logical_devices import laid_out

_WITH_IDS = {
    *(lax.gather_p, lax.scatter_p, lax.scatter_add_p, lax.scatter_sub_p),
    *(lax.scatter_mul_p, lax.scatter_min_p, lax.scatter_max_p),
}


def divisible(closed: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """Returns a closed jaxpr, and the jaxprs inside it, in a form that XLA can divide.

    Args:
        closed: The jaxpr.
        mesh: The devices over which XLA divides it.
    """
    has_logical_devices = num_logical_devices(mesh) > 1

    def rule(eqn: Equation, only_transposed: bool) -> Version | None:
        if eqn.primitive in _WITH_IDS:
            return _with_signed_ids(eqn)
        if eqn.primitive is lax.conv_general_dilated_p and has_logical_devices:
            return _whole_convolution(eqn, mesh)
        if eqn.primitive is lax.select_and_scatter_add_p:
            return _with_whole_windows(eqn, mesh)
        if eqn.primitive is lax.pad_p:
            return _cut_after_padding(eqn)
        return None

    return rewritten(closed, rule)


def _with_signed_ids(eqn: Equation) -> Version | None:
    """Returns a gather or scatter with ids of which the partitioner can compute others.

    It (jaxlib 0.10.2 to 0.12) needs 32 bits or more, and a sign.
    """
    dtype = aval_of(eqn.invars[1]).dtype
    if jnp.issubdtype(dtype, jnp.signedinteger) and dtype.itemsize >= 4:
        return None
    # Larger ids are out of bounds, as the largest of 32 bits is.
    most = np.array(min(np.iinfo(dtype).max, np.iinfo(np.int32).max), dtype)

    def bind(x: Array, ids: Array, *updates: Array) -> Array:
        signed = jnp.minimum(ids, most).astype(np.int32)
        result: Array = eqn.primitive.bind(x, signed, *updates, **eqn.params)
        return result

    return bind


def _whole_convolution(eqn: Equation, mesh: Mesh) -> Version | None:
    """Returns a grouped convolution, or the gradient of one, that every device computes.

    The partitioner (jaxlib 0.10.2 to 0.12) may divide it into shapes that do not fit.
    """
    if eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1:
        return None
    return _laid_out_as(eqn, mesh, P())


def _with_whole_windows(eqn: Equation, mesh: Mesh) -> Version:
    """Returns a gradient of max-pooling of which XLA divides no dim along which windows move.

    The partitioner (jaxlib 0.10.2 to 0.12) loses what windows select from the rows of another
    device.
    """
    of_dims = [eqn.params[name] for name in ("window_dimensions", "window_strides", "padding")]
    in_one_row = [values == (1, 1, (0, 0)) for values in zip(*of_dims, strict=True)]
    return _laid_out_as(eqn, mesh, P(*[P.UNCONSTRAINED if one else None for one in in_one_row]))


def _cut_after_padding(eqn: Equation) -> Version | None:
    """Returns a pad that cuts off rows at the beginning of a dim after it has put rows between.

    The partitioner (jaxlib 0.10.2 to 0.12) aborts at one that does both.
    """
    config = eqn.params["padding_config"]
    if not any(low < 0 < between for low, _, between in config):
        return None
    wider = tuple([(max(low, 0), max(high, 0), between) for low, high, between in config])

    def bind(x: Array, value: Array) -> Array:
        wide: Array = lax.pad_p.bind(x, value, padding_config=wider)
        cuts = zip(wide.shape, config, strict=True)
        return wide[tuple([slice(max(-low, 0), n + min(high, 0)) for n, (low, high, _) in cuts])]

    return bind


def _laid_out_as(eqn: Equation, mesh: Mesh, spec: P) -> Version:
    """Returns an equation whose operands and result XLA must give one sharding."""
    fixed = lambda array: laid_out(array, mesh, spec)
    return lambda *operands: fixed(eqn.primitive.bind(*map(fixed, operands), **eqn.params))
