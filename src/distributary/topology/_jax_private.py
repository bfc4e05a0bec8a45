"""The only module that uses private names of JAX."""

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
from jax.sharding import NamedSharding


def inside_jax_trace() -> bool:
    """Returns whether `jax.jit` or JAX control flow is tracing the caller.

    True inside `jit`, `make_jaxpr`, `scan`, `cond` and `while_loop`; False inside an eager `grad`
    or `vmap`. In jax 0.10.2 this is in `jax.extend.core`, under a name that says not to rely on it.
    https://github.com/jax-ml/jax/issues/18544 asks for a better one, and is open as of that
    version.

    That function builds a string on each call. So the usual case, no trace at all, is checked
    first, in the same way as in `core.trace_ctx.is_top_level`, which needs three more calls.
    """
    if (
        core.trace_state_strong_ref.value is core.eval_trace
        and core.axis_env_state.value is core.top_axis_env
    ):
        return False
    return bool(jex_core.unsafe_am_i_under_a_jit_DO_NOT_USE())  # type: ignore[attr-defined]


def is_left_over(tracer: object) -> bool:
    """Returns whether a traced value belongs to a compiled function whose trace has ended.

    `jax.grad` and `jax.vmap`, which also run eagerly, have tracers of other classes; checked with
    jax 0.10.2.
    """
    return isinstance(tracer, partial_eval.DynamicJaxprTracer) and not inside_jax_trace()


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a `scan` are constants, and how many the loop carries.

    Up to jax 0.10, the parameters of the equation contain both numbers. From 0.11 on, they contain
    a tree of the operands, whose class is private.
    """
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def all_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of an equation, with those of its high-level primitive if it has one.

    From jax 0.11 on, some functions (`jax.lax.custom_root`, in 0.12 also `jnp.searchsorted`,
    `jnp.nonzero`, `jnp.ldexp` and `jnp.frexp`) stay one equation, `call_hi_primitive`, until JAX
    compiles them. Its only parameter is an object that holds the jaxprs.
    """
    return {**params, **getattr(params.get("_prim"), "params", {})}


def without_high_primitives(closed: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """Replaces the high-level primitives of a closed jaxpr by their equations; see `all_params`.

    `jax.jit` does the same before it compiles. Take derivatives before you call this.
    """
    return partial_eval.lower_jaxpr2(closed) if getattr(closed, "is_high", False) else closed


def backends_started() -> bool:
    """Returns whether JAX has started its backends, without starting them.

    JAX has no public name for this: https://github.com/jax-ml/jax/issues/23320, open as of jax
    0.10.2. The private name was checked with that version.
    """
    return bool(xla_bridge.backends_are_initialized())


def coordination_client() -> Any:
    """Returns the client of the service that connects the processes of a job; None for one process.

    We use its methods `key_value_set`, `blocking_key_value_get` and `key_value_delete`. With them,
    processes exchange texts with a time limit and without using their devices. The public module,
    `jax.experimental.multihost_utils`, only has collectives of devices, without a limit; checked
    with jax 0.10.2.
    """
    return distributed.global_state.client


def uncommitted(array: jax.Array) -> jax.Array:
    """Returns the same array of one device, in the same memory, to combine with arrays of others.

    JAX refuses to compute with arrays that are committed to different devices, but moves
    uncommitted ones to where it computes. Public functions either commit the arrays that they
    return or copy them; checked with jax 0.10.2.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = uncommitted(jax.random.key_data(array))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    parts: Any = array
    return ArrayImpl(parts.aval, parts.sharding, parts._arrays, committed=False, _skip_checks=True)


def put_rows(
    array: np.ndarray, sharding: NamedSharding, devices: list[jax.Device], axis: int = 0
) -> jax.Array:
    """Returns the rows of this process's replicas as an array that is sharded over dim `axis`.

    Every replica has the same number of rows. `devices` are the devices of these replicas, the same
    number for each, with those of one replica next to each other.

    The result is that of `jax.device_put`. In jax 0.10.2, that takes 90 us for two devices and 150
    us for four, nearly all of it in Python; its last step alone takes 16 and 47 us.
    """
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype != array.dtype:
        array = array.astype(dtype)
    aval, parts = _parts_of_rows(array.shape, dtype, sharding, len(devices), axis)
    put: jax.Array = pxla.batched_device_put(aval, sharding, [array[p] for p in parts], devices)
    return put


@functools.lru_cache
def _parts_of_rows(
    shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding, num_devices: int, axis: int
) -> tuple[core.ShapedArray, list[tuple[slice, ...]]]:
    """Returns the whole array's shape, and the slice for each device of this process."""
    per_replica = sharding.mesh.size // sharding.mesh.shape[sharding.spec[axis]]
    before, size = shape[:axis], shape[axis] * per_replica // num_devices
    num_rows = sharding.mesh.shape[sharding.spec[axis]] * size
    aval = core.ShapedArray((*before, num_rows, *shape[axis + 1 :]), dtype)
    all_before = (slice(None),) * axis
    starts = [i // per_replica * size for i in range(num_devices)]
    return aval, [(*all_before, slice(start, start + size)) for start in starts]
