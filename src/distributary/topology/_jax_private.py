"""The one place that uses private names of JAX."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax._src import core, distributed, xla_bridge
from jax._src.array import ArrayImpl
from jax._src.interpreters import partial_eval, pxla

__all__ = [
    "all_params",
    "backends_started",
    "coordination_client",
    "inside_jax_trace",
    "is_left_over",
    "put_rows",
    "scan_counts",
    "uncommitted",
    "without_high_primitives",
]


def inside_jax_trace() -> bool:
    """Whether the caller is being traced by `jax.jit` or JAX control flow.

    True below `jit`, `make_jaxpr`, `scan`, `cond` and `while_loop`, False below an eager `grad` or
    `vmap`. jax 0.10.2 has it in `jax.extend.core` under a name that says not to rely on it; a
    better one is asked for in https://github.com/jax-ml/jax/issues/18544, open as of that version.
    It builds a string each time, so the usual case, no trace at all, is looked up before, as
    `core.trace_ctx.is_top_level` does with three more calls.
    """
    if (
        core.trace_state_strong_ref.value is core.eval_trace
        and core.axis_env_state.value is core.top_axis_env
    ):
        return False
    return bool(jex_core.unsafe_am_i_under_a_jit_DO_NOT_USE())  # type: ignore[attr-defined]


def is_left_over(tracer: Any) -> bool:
    """Whether a traced value belongs to a compiled function whose trace has ended.

    `jax.grad` and `jax.vmap`, which also run eagerly, have tracers of other classes; checked with
    jax 0.10.2.
    """
    return isinstance(tracer, partial_eval.DynamicJaxprTracer) and not inside_jax_trace()


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a `scan` are constants, and how many the loop carries.

    Up to jax 0.10 the equation's parameters hold both numbers; from 0.11 on they hold a tree of the
    operands, whose class is private.
    """
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def all_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of an equation, with those of its high-level primitive if it has one.

    From jax 0.11 on some functions (`jax.lax.custom_root`, in 0.12 also `jnp.searchsorted`,
    `jnp.nonzero`, `jnp.ldexp` and `jnp.frexp`) stay one equation, `call_hi_primitive`, until JAX
    compiles them. Its only parameter is an object that holds the jaxprs.
    """
    return {**params, **getattr(params.get("_prim"), "params", {})}


def without_high_primitives(closed: Any) -> Any:
    """Returns a closed jaxpr with the equations of its high-level primitives; see `all_params`.

    `jax.jit` does the same before it compiles. Derivatives have to be taken before.
    """
    return partial_eval.lower_jaxpr2(closed) if getattr(closed, "is_high", False) else closed


def backends_started() -> bool:
    """Whether JAX has started its backends; the question itself starts nothing.

    JAX has no public name for this: https://github.com/jax-ml/jax/issues/23320, open as of
    jax 0.10.2, the version in which this place of the private name was checked.
    """
    return bool(xla_bridge.backends_are_initialized())


def coordination_client() -> Any:
    """The client of the service that connects the processes of a job; None in a process alone.

    Of it are used `key_value_set`, `blocking_key_value_get` and `key_value_delete`, with which
    processes exchange texts with a time limit and without their devices. What JAX has a public name
    for, `jax.experimental.multihost_utils`, are collectives of devices without a limit; checked
    with jax 0.10.2.
    """
    return distributed.global_state.client


def uncommitted(array: jax.Array) -> jax.Array:
    """The same array of one device, in the same memory, for computing with arrays of others.

    JAX refuses to compute with arrays that are committed to different devices, and brings others to
    where it computes. Public functions either commit what they give or copy it; checked with
    jax 0.10.2.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = uncommitted(jax.random.key_data(array))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    parts: Any = array
    return ArrayImpl(parts.aval, parts.sharding, parts._arrays, committed=False, _skip_checks=True)


def put_rows(
    array: np.ndarray, sharding: Any, devices: list[jax.Device], axis: int = 0
) -> jax.Array:
    """The rows of this process' replicas, as many for each, as an array sharded over dim `axis`.

    `devices` are theirs, as many for each replica and next to each other.

    The same as `jax.device_put`, which takes 90 us for two devices and 150 us for four in
    jax 0.10.2, nearly all of it Python; its last step alone takes 16 and 47 us.
    """
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype != array.dtype:
        array = array.astype(dtype)
    aval, parts = _parts_of_rows(array.shape, dtype, sharding, len(devices), axis)
    put: jax.Array = pxla.batched_device_put(aval, sharding, [array[p] for p in parts], devices)
    return put


@functools.lru_cache
def _parts_of_rows(
    shape: tuple[int, ...], dtype: np.dtype, sharding: Any, num_devices: int, axis: int
) -> tuple[Any, list[tuple[slice, ...]]]:
    """What the array is on all devices, and what of it each of this process gets."""
    per_replica = sharding.mesh.size // sharding.mesh.shape[sharding.spec[axis]]
    before, size = shape[:axis], shape[axis] * per_replica // num_devices
    num_rows = sharding.mesh.shape[sharding.spec[axis]] * size
    aval = core.ShapedArray((*before, num_rows, *shape[axis + 1 :]), dtype)
    all_before = (slice(None),) * axis
    starts = [i // per_replica * size for i in range(num_devices)]
    return aval, [(*all_before, slice(start, start + size)) for start in starts]
