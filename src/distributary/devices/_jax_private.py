"""The only module that uses private names of JAX, and the versions in which all have been tested.

Each stands above the functions that use it, with what replaces it in a version of JAX without it:
something public that gives the same results, but is slower or says less.
`tests/topology/test_jax_versions.py` names those that have gone, and tries every replacement.

Other modules also use `jax.extend.core` and `jax.interpreters`, which JAX documents for those who
extend it; the same file tests that all names are there.
"""

import contextlib
import functools
import hashlib
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from distributary.errors import UnsupportedError

#: The oldest version with which the tests have passed, and the minor version after the newest.
TESTED = {"jax": ("0.10.2", "0.13"), "keras": ("3.15", "3.17")}

#: Private names that the installed versions of JAX and Keras do not have.
missing_names: list[str] = []

_log = logging.getLogger(__name__)
_NAMES = {"jax": "JAX", "keras": "Keras"}


@functools.cache
def warn_of_untested(package: str, version: str) -> None:
    """Logs a warning, once per process, if a version is newer than what was tested.

    Args:
        package: "jax" or "keras".
        version: The version of it that is installed.
    """
    if _minor(version) >= _minor(TESTED[package][1]):
        _log.warning(
            "%s %s is newer than what distributary is tested with. If a program fails that should"
            " not, install a tested version: %s.",
            _NAMES[package],
            version,
            _install_tested(package),
        )


def private(place: str, *otherwise: Any) -> Any:
    """Returns the object that has a private name of JAX or Keras.

    Args:
        place: The module, a colon, and the name in it, or the module alone.
        otherwise: What to return if the installed version does not have the name.

    Raises:
        UnsupportedError: if there is no such object, and nothing to return otherwise.
    """
    try:
        return pkgutil.resolve_name(place)
    except (ImportError, AttributeError) as error:
        missing_names.append(place)
        if otherwise:
            return otherwise[0]
        raise no_private_name(place) from error


def no_private_name(place: str) -> UnsupportedError:
    """Returns the error for a private name that the installed version of a package lacks."""
    package = place.partition(".")[0]
    version = pkgutil.resolve_name(f"{package}:__version__")
    return UnsupportedError(
        f"{_NAMES[package]} {version} has no {place.replace(':', '.')}, which distributary needs."
        f" Install a tested version: {_install_tested(package)}."
    )


def _install_tested(package: str) -> str:
    oldest, beyond = TESTED[package]
    return f"pip install '{package}>={oldest},<{beyond}'"


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _is_traced() -> bool:
    """Returns whether JAX traces an operation without operands."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _refuses_another_count() -> bool:
    """Returns whether JAX refuses another number of CPU devices, which it does once it runs."""
    config: Any = jax.config
    before = config.jax_num_cpu_devices
    try:
        config.update("jax_num_cpu_devices", max(before, 0) + 1)
    except RuntimeError:
        return True
    config.update("jax_num_cpu_devices", before)
    return False


def _copy_of(aval: Any, sharding: Any, arrays: list[jax.Array], **_: Any) -> jax.Array:
    """Returns an uncommitted copy of an array of one device."""
    return jnp.asarray(np.asarray(arrays[0]))


def _put_parts(aval: Any, sharding: Any, parts: list[Any], devices: list[jax.Device]) -> jax.Array:
    """Returns an array that is put together from parts on the host, one for each device."""
    return jax.make_array_from_single_device_arrays(
        aval.shape, sharding, jax.device_put(parts, devices)
    )


_current_trace = private("jax._src.core:trace_state_strong_ref", None)
_eval_trace = private("jax._src.core:eval_trace", None)
_axis_env = private("jax._src.core:axis_env_state", None)
_top_axis_env = private("jax._src.core:top_axis_env", None)
_knows_top = None not in (_current_trace, _eval_trace, _axis_env, _top_axis_env)
_is_under_jit = private("jax.extend.core:unsafe_am_i_under_a_jit_DO_NOT_USE", _is_traced)
_JitTracer = private("jax._src.interpreters.partial_eval:DynamicJaxprTracer", ())
_backends_started = private("jax._src.xla_bridge:backends_are_initialized", _refuses_another_count)
_distributed = private("jax._src.distributed:global_state", None)
_array = private("jax._src.array:ArrayImpl", _copy_of)
_put_batched = private("jax._src.interpreters.pxla:batched_device_put", _put_parts)
_LOWER = "jax._src.interpreters.partial_eval:lower_jaxpr2"
_lower = private(_LOWER, None)
_Trace = private("jax._src.core:Trace", None)
_take_trace = private("jax._src.core:take_current_trace", None)
_set_trace = private("jax._src.core:set_current_trace", None)
_cache_key = private("jax._src.cache_key", None)
_hash_devices = private("jax._src.cache_key:_hash_accelerator_config", None)


def inside_jax_trace() -> bool:
    """Returns whether `jax.jit` or JAX control flow is tracing the caller.

    True inside `jit`, `make_jaxpr`, `scan`, `cond` and `while_loop`; False inside an eager `grad`
    or `vmap`. In jax 0.12 this is in `jax.extend.core`, under a name that says not to rely on it.
    https://github.com/jax-ml/jax/issues/18544 asks for a better one, and is open as of that
    version.

    That function builds a string on each call. So the usual case, no trace at all, is checked
    first, in the same way as in `core.trace_ctx.is_top_level`, which needs three more calls.
    """
    if _knows_top and _current_trace.value is _eval_trace and _axis_env.value is _top_axis_env:
        return False
    return bool(_is_under_jit())


def is_left_over(tracer: object) -> bool:
    """Returns whether a traced value belongs to a compiled function whose trace has ended.

    `jax.grad` and `jax.vmap`, which also run eagerly, have tracers of other classes; checked with
    jax 0.10.2. Without the name of the class, the answer is no, and JAX raises an error of its own.
    """
    return isinstance(tracer, _JitTracer) and not inside_jax_trace()


def function_of_tracer(tracer: Any) -> str | None:
    """Returns the function whose trace made a value, such as `step at train.py:12`, if known.

    Only for messages; checked with jax 0.10.2.
    """
    info = getattr(getattr(tracer, "_debug_info", None), "func_src_info", None)
    return info if isinstance(info, str) else None


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
    if not getattr(closed, "is_high", False):
        return closed
    if _lower is None:
        raise no_private_name(_LOWER)
    lowered: jex_core.ClosedJaxpr = _lower(closed)
    return lowered


def backends_started() -> bool:
    """Returns whether JAX has started its backends, without starting them.

    JAX has no public name for this: https://github.com/jax-ml/jax/issues/23320, open as of jax
    0.10.2. The private name was checked with that version.
    """
    return bool(_backends_started())


def coordination_client() -> Any:
    """Returns the client of the service that connects the processes of a job; None for one process.

    We use its methods `key_value_set`, `blocking_key_value_get` and `key_value_delete`. With them,
    processes exchange texts with a time limit and without using their devices. The public module,
    `jax.experimental.multihost_utils`, only has collectives of devices, without a limit; checked
    with jax 0.10.2.
    """
    if _distributed is None and jax.distributed.is_initialized():
        raise no_private_name("jax._src.distributed:global_state")
    return getattr(_distributed, "client", None)


class _Recording(_Trace or object):  # type: ignore[misc]
    """A trace that computes each operation at once, in the trace around it, and reports it."""

    def __init__(self, around: Any, report: Callable[..., None]) -> None:
        super().__init__()
        self._around = around
        self._report = report

    def stage_value(self, value: object) -> Any:
        with _set_trace(self._around):
            return self._around.stage_value(value)

    def process_primitive(self, primitive: Any, operands: Any, params: Any, /) -> Any:
        with _set_trace(self._around):
            results = primitive.bind(*operands, **params)
        call = functools.partial(primitive.bind, **params)
        try:
            key = primitive, tuple(sorted(params.items()))
            hash(key)
        except TypeError:
            key = None
        if primitive.multiple_results:
            results = _distinct(results, operands)
            self._report(call, key, operands, results, params)
            return results
        (result,) = _distinct([results], operands)
        self._report(lambda *operands: [call(*operands)], key, operands, [result], params)
        return result

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, operands: Any, /, **params: Any
    ) -> Any:
        return self._of_functions(
            "process_custom_jvp_call", primitive, (fun, jvp), operands, params
        )

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, operands: Any, /, **params: Any
    ) -> Any:
        functions = fun, fwd, bwd
        return self._of_functions("process_custom_vjp_call", primitive, functions, operands, params)

    def _of_functions(
        self, name: str, primitive: Any, functions: Any, operands: Any, params: Any
    ) -> Any:
        """Computes an operation whose functions can be called only once: as its jaxpr."""

        def traced(*operands: Any) -> Any:
            with _take_trace() as trace:
                return getattr(trace, name)(primitive, *functions, operands, **params)

        key = None
        if _is_of_library(functions[0]):
            function = functions[0]
            identity = function.f, function.transforms, function.params
            key = (identity, *map(jax.typeof, operands))
        held = [] if key is None else _held(key)
        with _set_trace(self._around):
            if held:
                results = traced(*operands)
            else:
                held.append(jax.make_jaxpr(traced)(*operands))
                results = jex_core.jaxpr_as_fun(held[0])(*operands)
        (jaxpr,) = held
        results = _distinct(results, operands)
        call = jex_core.jaxpr_as_fun(jaxpr)
        self._report(call, key, operands, results, {"jaxpr": jaxpr})
        return results


def _distinct(results: Iterable[Any], operands: Iterable[Any]) -> list[Any]:
    """Returns results of which none is another one or an operand, as `stop_gradient` gives back.

    Records know arrays by their identity.
    """
    known, distinct = set(map(id, operands)), []
    for result in results:
        is_array = isinstance(result, jax.Array) and not isinstance(result, jax.core.Tracer)
        if id(result) in known and is_array and jnp.issubdtype(result.dtype, np.number):
            result = alias_of(result)
        known.add(id(result))
        distinct.append(result)
    return distinct


def _is_of_library(function: Any) -> bool:
    """Returns whether a function is one of JAX or Keras, which do the same in every call."""
    module = getattr(getattr(function, "f", None), "__module__", None) or ""
    return module.startswith(("jax.", "keras."))


@functools.lru_cache(maxsize=256)
def _held(key: Any) -> list[Any]:
    """Returns a list for the jaxpr that is made once for a key."""
    return []


@contextlib.contextmanager
def recorded_by(report: Callable[..., None]) -> Iterator[None]:
    """Reports every operation that JAX computes in the block, outside of `jit`.

    Args:
        report: Gets a function that computes the operation again and returns a list, a key that is
            equal for functions that do the same (None if not known), the operands, the results, and
            the parameters, in which jaxprs are.
    """
    if None in (_Trace, _take_trace, _set_trace):
        raise no_private_name("jax._src.core:Trace")
    with _take_trace() as around, _set_trace(_Recording(around, report)):
        yield


def alias_of(array: jax.Array) -> jax.Array:
    """Returns another array object for the same memory."""
    return _in_same_memory(array)


def uncommitted(array: jax.Array) -> jax.Array:
    """Returns the same array of one device, in the same memory, to combine with arrays of others.

    JAX refuses to compute with arrays that are committed to different devices, but moves
    uncommitted ones to where it computes. Public functions either commit the arrays that they
    return or copy them; checked with jax 0.10.2.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = uncommitted(jax.random.key_data(array))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return _in_same_memory(array, committed=False)


def _in_same_memory(parts: Any, committed: bool | None = None) -> jax.Array:
    committed = parts._committed if committed is None else committed
    array: jax.Array = _array(
        parts.aval, parts.sharding, parts._arrays, committed=committed, _skip_checks=True
    )
    return array


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
    put: jax.Array = _put_batched(aval, sharding, [array[p] for p in parts], devices)
    return put


@functools.lru_cache
def _parts_of_rows(
    shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding, num_devices: int, axis: int
) -> tuple[jax.core.ShapedArray, list[tuple[slice, ...]]]:
    """Returns the whole array's shape, and the slice for each device of this process."""
    per_replica = sharding.mesh.size // sharding.mesh.shape[sharding.spec[axis]]
    before, size = shape[:axis], shape[axis] * per_replica // num_devices
    num_rows = sharding.mesh.shape[sharding.spec[axis]] * size
    aval = jax.core.ShapedArray((*before, num_rows, *shape[axis + 1 :]), dtype)
    all_before = (slice(None),) * axis
    starts = [i // per_replica * size for i in range(num_devices)]
    return aval, [(*all_before, slice(start, start + size)) for start in starts]


def key_of_devices(devices: Iterable[jax.Device]) -> bytes:
    """Returns the part of the keys of compiled programs that stands for devices, b"" without one.

    With CPUs, it is another one in each process of a job.
    """
    if _hash_devices is None:
        return b""
    digest = hashlib.sha256()
    _hash_devices(digest, np.array(list(devices)))
    return digest.digest()


def set_key_of_devices(key: bytes) -> bool:
    """Sets this part of the keys of programs that span processes; returns whether there is one."""

    def hash_devices(digest: Any, devices: np.ndarray) -> None:
        if len({device.process_index for device in devices.flat}) > 1:
            digest.update(key)
        else:
            _hash_devices(digest, devices)

    if _hash_devices is None or not key:
        return False
    _cache_key._hash_accelerator_config = hash_devices
    return True
