"""Settings and checks: `tf.config`, `tf.debugging`, `tf.test`, and what has no effect elsewhere.

Inside a step, values are known when the program runs. The call of the step then raises the error of
a check.
"""

import importlib.util
import os
import pkgutil
import platform
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.cluster_resolver import visible_gpus
from distributary.devices import (
    backends_started,
    local_devices_of,
    resolve_device,
    set_logical_cpu_devices,
)
from distributary.errors import BackendStartedError, InvalidValueError, UnsupportedError, shown
from distributary.options import CommunicationOptions
from distributary.tensorflow._operations import require

_KINDS = ("CPU", "GPU", "TPU")


@final
@dataclass(frozen=True)
class PhysicalDevice:
    """A device of this machine, with a `name` like "/physical_device:CPU:0" and a `device_type`."""

    name: str
    device_type: str


@final
@dataclass(frozen=True)
class LogicalDevice:
    """A JAX device, with a `name` like "/device:CPU:0" and a `device_type`."""

    name: str
    device_type: str


@final
@dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """One logical device of `set_logical_device_configuration`; `memory_limit` in MiB is refused.

    Source: `tf.config.LogicalDeviceConfiguration`.
    """

    memory_limit: int | None = None
    experimental_priority: int | None = None
    experimental_device_ordinal: int | None = None


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Lists the devices of this machine that JAX uses; does not start JAX.

    The CPU counts as one device. TPUs are listed only after JAX has started.

    Source: `tf.config.list_physical_devices`.
    """
    counts = {"CPU": 1, "GPU": _num_gpus(), "TPU": 0}
    if backends_started():
        counts |= {kind: len(local_devices_of(kind)) for kind in ("GPU", "TPU")}
    return [
        PhysicalDevice(f"/physical_device:{kind}:{i}", kind)
        for kind in _chosen(device_type)
        for i in range(counts[kind])
    ]


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """Lists the JAX devices of this process; starts JAX.

    Source: `tf.config.list_logical_devices`.
    """
    return [
        LogicalDevice(f"/device:{kind}:{i}", kind)
        for kind in _chosen(device_type)
        for i in range(len(local_devices_of(kind)))
    ]


def set_logical_device_configuration(
    device: PhysicalDevice, logical_devices: Sequence[LogicalDeviceConfiguration]
) -> None:
    """Makes the CPU act as several devices, before JAX starts.

    Raises:
        UnsupportedError: for devices other than the CPU, and for a memory limit.
        BackendStartedError: if JAX has already started with another number of devices.

    Source: `tf.config.set_logical_device_configuration`.
    """
    limits = [logical.memory_limit for logical in logical_devices]
    if device.device_type != "CPU" or any(limit is not None for limit in limits):
        raise UnsupportedError(
            f"tf.config.set_logical_device_configuration: {device.name} with the memory limits"
            f" {limits}. JAX divides the CPU only; the environment variable"
            " XLA_PYTHON_CLIENT_MEM_FRACTION limits the memory of a GPU."
        )
    set_logical_cpu_devices(len(limits))


def set_visible_devices(
    devices: PhysicalDevice | Sequence[PhysicalDevice], device_type: str | None = None
) -> None:
    """Hides all GPUs: `set_visible_devices([], "GPU")`, before JAX starts.

    Raises:
        UnsupportedError: for any other choice.
        BackendStartedError: if JAX has already started with GPUs.

    Source: `tf.config.set_visible_devices`.
    """
    chosen = devices if isinstance(devices, (list, tuple)) else [devices]
    if set(chosen) == set(list_physical_devices(device_type)):
        return
    if chosen or device_type != "GPU":
        raise UnsupportedError(
            f"tf.config.set_visible_devices({devices!r}, {device_type!r}): choose devices by the"
            " environment variable CUDA_VISIBLE_DEVICES, or pass them to the strategy,"
            " MirroredStrategy(['GPU:0', 'GPU:1'])."
        )
    _check_not_started("set_visible_devices")
    jax.config.update("jax_platforms", "cpu")


def set_memory_growth(device: PhysicalDevice, enable: bool) -> None:
    """Makes JAX take GPU memory as needed, or all at once, on all GPUs; call before JAX starts.

    Sets the environment variable `XLA_PYTHON_CLIENT_PREALLOCATE`.

    Raises:
        InvalidValueError: if the device is not a GPU.
        BackendStartedError: if JAX has already started.

    Source: `tf.config.experimental.set_memory_growth`.
    """
    if getattr(device, "device_type", None) != "GPU":  # such as a name
        raise InvalidValueError(
            f"tf.config.experimental.set_memory_growth: {device!r} is no GPU. Pass one of"
            " tf.config.list_physical_devices('GPU')."
        )
    _check_not_started("experimental.set_memory_growth")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false" if enable else "true"


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """`tf.config.get_visible_devices`: the devices that JAX uses."""
    return list_physical_devices(device_type)


def get_logical_device_configuration(
    device: PhysicalDevice,
) -> list[LogicalDeviceConfiguration] | None:
    """`tf.config.get_logical_device_configuration`: starts JAX."""
    count = len(local_devices_of(device.device_type)) if device.device_type == "CPU" else 1
    return [LogicalDeviceConfiguration()] * count if count > 1 else None


def get_memory_growth(device: PhysicalDevice) -> bool:
    """`tf.config.experimental.get_memory_growth`."""
    return os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0")


def get_memory_info(device: str) -> dict[str, int]:
    """`tf.config.experimental.get_memory_info`: bytes in use now and at most, of a GPU.

    Raises:
        InvalidValueError: for a device that does not count them, such as a CPU.
    """
    stats = resolve_device(device).memory_stats()
    if not stats:
        raise InvalidValueError(f"tf.config.experimental.get_memory_info: {device} does not count.")
    return {"current": stats["bytes_in_use"], "peak": stats["peak_bytes_in_use"]}


def get_device_details(device: PhysicalDevice) -> dict[str, str]:
    """`tf.config.experimental.get_device_details`: the `device_name` of a GPU or TPU."""
    kinds = local_devices_of(device.device_type) if device.device_type != "CPU" else ()
    number = int(device.name.rpartition(":")[2])
    return {"device_name": kinds[number].device_kind} if number < len(kinds) else {}


def enable_tensor_float_32_execution(enabled: bool) -> None:
    """`tf.config.experimental.enable_tensor_float_32_execution`: `jax_default_matmul_precision`."""
    jax.config.update("jax_default_matmul_precision", "tensorfloat32" if enabled else "float32")


def tensor_float_32_execution_enabled() -> bool:
    """`tf.config.experimental.tensor_float_32_execution_enabled`."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return precision != "float32"


def functions_run_eagerly() -> bool:
    """`tf.config.functions_run_eagerly`: False, because steps are always compiled."""
    return False


def get_soft_device_placement() -> bool:
    """`tf.config.get_soft_device_placement`: True, because JAX places programs itself."""
    return True


def get_num_threads() -> int:
    """`tf.config.threading.get_intra_op_parallelism_threads`: 0, because XLA chooses."""
    return 0


def _check_not_started(what: str) -> None:
    if backends_started():
        raise BackendStartedError(
            f"tf.config.{what}: JAX has already started, and its devices cannot change any more."
            " Call it at the top of the program, before an array, a strategy or a Keras model."
        )


def _chosen(device_type: str | None) -> tuple[str, ...]:
    if device_type is None:
        return _KINDS
    return tuple(kind for kind in _KINDS if kind == device_type.upper())


def _num_gpus() -> int:
    """Returns the number of GPUs that JAX will find."""
    # JAX adds options to `config` at run time, so type checkers do not see them.
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(",")):
        return 0
    plugins = importlib.util.find_spec("jax_plugins")
    folders = plugins.submodule_search_locations if plugins is not None else None
    names = [module.name for module in pkgutil.iter_modules(folders or [])]
    return len(visible_gpus()) if any(name.startswith("xla_cuda") for name in names) else 0


def enable_op_determinism() -> None:
    """`tf.config.experimental.enable_op_determinism`: before the first array, for GPUs.

    Programs of CPUs and TPUs are deterministic anyway, as is the order of datasets.

    Raises:
        BackendStartedError: if JAX already uses GPUs.
    """
    flag = "--xla_gpu_deterministic_ops=true"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag in flags.split():
        return
    if not backends_started():
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()
    elif local_devices_of("GPU"):
        raise BackendStartedError(
            "tf.config.experimental.enable_op_determinism: JAX already uses GPUs. Call it before"
            f" the first array, or set the environment variable XLA_FLAGS={flag}."
        )


def get_build_info() -> OrderedDict[str, bool]:
    """`tf.sysconfig.get_build_info`: for which GPUs JAX is installed."""
    kinds = {"cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "rocm": ("jax_rocm60_plugin",)}
    builds = {
        f"is_{kind}_build": any(importlib.util.find_spec(name) is not None for name in names)
        for kind, names in kinds.items()
    }
    return OrderedDict(**builds, is_tensorrt_build=False)


def nothing(*args: object, **kwargs: object) -> None:
    """Has no effect: JAX decides by itself."""


def collective_hints(
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """`tf.distribute.experimental.CollectiveHints`: the older name of `CommunicationOptions`."""
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


def run_functions_eagerly(run_eagerly: bool) -> None:
    """`tf.config.run_functions_eagerly`: True is refused, because steps are always compiled."""
    if run_eagerly:
        raise UnsupportedError(
            "tf.config.run_functions_eagerly(True): functions of a strategy are always compiled."
            " Print inside of them with tf.print or jax.debug.print, or call the Python function."
        )


@final
class ConfigProto:
    """`tf.compat.v1.ConfigProto`: takes any settings; none has an effect."""

    def __init__(self, **settings: object) -> None:
        self.gpu_options = types.SimpleNamespace()
        self.__dict__.update(settings)


def as_text(bytes_or_text: str | bytes, encoding: str = "utf-8") -> str:
    """`tf.compat.as_text`."""
    return bytes_or_text if isinstance(bytes_or_text, str) else bytes_or_text.decode(encoding)


def as_bytes(bytes_or_text: str | bytes, encoding: str = "utf-8") -> bytes:
    """`tf.compat.as_bytes`."""
    return bytes_or_text if isinstance(bytes_or_text, bytes) else bytes_or_text.encode(encoding)


def is_gpu_available(cuda_only: bool = False, min_cuda_compute_capability: object = None) -> bool:
    """`tf.test.is_gpu_available`: starts JAX."""
    return bool(local_devices_of("GPU"))


def gpu_device_name() -> str:
    """`tf.test.gpu_device_name`: "" without a GPU."""
    return "/device:GPU:0" if is_gpu_available() else ""


def is_built_with_cuda() -> bool:
    """`tf.test.is_built_with_cuda`: whether JAX can use GPUs here."""
    return is_gpu_available()


def is_built_with_rocm() -> bool:
    """`tf.test.is_built_with_rocm`: whether JAX uses GPUs of AMD here."""
    return any("rocm" in device.client.platform_version.lower() for device in jax.devices())


def is_cpu_target_available(target: str) -> bool:
    """`tf.test.is_cpu_target_available`: whether XLA runs on CPUs of this kind here."""
    return {"aarch64": "arm", "x86_64": "x86"}.get(platform.machine()) == target


def is_built_with_xla() -> bool:
    """`tf.test.is_built_with_xla`."""
    return True


def start_profiler(logdir: str, options: object = None) -> None:
    """`tf.profiler.experimental.start`: `jax.profiler.start_trace`, which TensorBoard shows."""
    jax.profiler.start_trace(logdir)


def stop_profiler(save: bool = True) -> None:
    """`tf.profiler.experimental.stop`: writes the trace."""
    jax.profiler.stop_trace()


_profiled: list[str] = []  # the folder of the profile that `trace_on` has started


def trace_on(
    graph: bool = True, profiler: bool = False, profiler_outdir: str | None = None
) -> None:
    """`tf.summary.trace_on`: starts a profile, if it has a folder; there is no graph to record."""
    if profiler and profiler_outdir is not None:
        start_profiler(profiler_outdir)
        _profiled.append(profiler_outdir)


def trace_export(name: str, step: object = None, profiler_outdir: str | None = None) -> None:
    """`tf.summary.trace_export`: ends and writes the profile."""
    if _profiled:
        _profiled.clear()
        stop_profiler()


def trace_off() -> None:
    """`tf.summary.trace_off`: the same as `trace_export`."""
    trace_export("")


# `tf.debugging`


def _comparison(name: str, compare: Callable[[Any, Any], Any]) -> Callable[..., None]:
    def assertion(
        x: ArrayLike, y: ArrayLike, message: str | None = None, summarize: int | None = None
    ) -> None:
        text = f"tf.debugging.{name}: does not hold for {shown(x)} and {shown(y)}."
        require(compare(x, y), message, text)

    assertion.__name__ = name
    assertion.__doc__ = f"`tf.debugging.{name}`: for all elements."
    return assertion


def _sign(name: str, compare: Callable[[Any, Any], Any]) -> Callable[..., None]:
    def assertion(x: ArrayLike, message: str | None = None, summarize: int | None = None) -> None:
        text = f"tf.debugging.{name}: does not hold for {shown(x)}."
        require(compare(x, 0), message, text)

    assertion.__name__ = name
    assertion.__doc__ = f"`tf.debugging.{name}`."
    return assertion


assert_equal = _comparison("assert_equal", jnp.equal)
assert_greater = _comparison("assert_greater", jnp.greater)
assert_greater_equal = _comparison("assert_greater_equal", jnp.greater_equal)
assert_less = _comparison("assert_less", jnp.less)
assert_less_equal = _comparison("assert_less_equal", jnp.less_equal)
assert_positive = _sign("assert_positive", jnp.greater)
assert_negative = _sign("assert_negative", jnp.less)
assert_non_negative = _sign("assert_non_negative", jnp.greater_equal)
assert_non_positive = _sign("assert_non_positive", jnp.less_equal)
_assert_not_equal = _comparison("assert_none_equal", jnp.not_equal)


def assert_none_equal(
    x: ArrayLike, y: ArrayLike, summarize: int | None = None, message: str | None = None
) -> None:
    """`tf.debugging.assert_none_equal`: for all elements."""
    _assert_not_equal(x, y, message)


def assert_near(
    x: ArrayLike,
    y: ArrayLike,
    rtol: float | None = None,
    atol: float | None = None,
    message: str | None = None,
    summarize: int | None = None,
) -> None:
    """`tf.debugging.assert_near`: with tolerances of 10 units in the last place by default."""
    unit = 10 * float(jnp.finfo(jnp.result_type(float, x)).eps)
    near = jnp.isclose(x, y, unit if rtol is None else rtol, unit if atol is None else atol)
    require(near, message, f"tf.debugging.assert_near: {shown(x)} is not near {shown(y)}.")


def assert_all_finite(x: Array, message: str) -> Array:
    """`tf.debugging.assert_all_finite`: returns the array."""
    require(jnp.isfinite(x), message, "tf.debugging.assert_all_finite: a value is not finite.")
    return x


def check_numerics(tensor: Array, message: str) -> Array:
    """`tf.debugging.check_numerics`: returns the array."""
    return assert_all_finite(tensor, message)


def Assert(  # noqa: N802
    condition: ArrayLike, data: Sequence[Any], summarize: int | None = None
) -> None:
    """`tf.Assert`: shows `data` if the condition does not hold."""
    require(condition, None, f"tf.Assert: {list(data)}")


def assert_rank(x: Array, rank: int, message: str | None = None) -> None:
    """`tf.debugging.assert_rank`."""
    _require_rank("assert_rank", x, x.ndim == rank, f"{rank}", message)


def assert_rank_at_least(x: Array, rank: int, message: str | None = None) -> None:
    """`tf.debugging.assert_rank_at_least`."""
    _require_rank("assert_rank_at_least", x, x.ndim >= rank, f"{rank} or more", message)


def assert_rank_in(x: Array, ranks: Sequence[int], message: str | None = None) -> None:
    """`tf.debugging.assert_rank_in`."""
    _require_rank("assert_rank_in", x, x.ndim in ranks, f"one of {list(ranks)}", message)


def assert_scalar(tensor: Array, message: str | None = None) -> Array:
    """`tf.debugging.assert_scalar`: returns the array."""
    _require_rank("assert_scalar", tensor, tensor.ndim == 0, "0", message)
    return tensor


def _require_rank(name: str, x: Array, holds: bool, wanted: str, message: str | None) -> None:
    if not holds:
        text = f"tf.debugging.{name}: an array has shape {x.shape}, expected {wanted} dims."
        raise InvalidValueError(message or text)


def assert_integer(x: Array, message: str | None = None) -> None:
    """`tf.debugging.assert_integer`."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(message or f"tf.debugging.assert_integer: {x.dtype} is not an integer.")


def assert_type(tensor: Array, tf_type: DTypeLike, message: str | None = None) -> None:
    """`tf.debugging.assert_type`."""
    if tensor.dtype != jax.dtypes.canonicalize_dtype(tf_type):
        raise TypeError(message or f"tf.debugging.assert_type: {tensor.dtype} is not {tf_type}.")


def assert_proper_iterable(values: object) -> None:
    """`tf.debugging.assert_proper_iterable`: not an array, and not text."""
    is_one = isinstance(values, (str, bytes, np.ndarray, jax.Array)) or not hasattr(
        values, "__iter__"
    )
    if is_one:
        raise TypeError(
            f"tf.debugging.assert_proper_iterable: got {shown(values)}, expected a list or a tuple."
        )


def assert_same_float_dtype(
    tensors: Sequence[Any] | None = None, dtype: DTypeLike | None = None
) -> np.dtype[Any]:
    """`tf.debugging.assert_same_float_dtype`: returns the dtype; float32 without arrays."""
    dtypes = {jnp.asarray(tensor).dtype for tensor in tensors or () if tensor is not None}
    wanted = dtypes | ({np.dtype(dtype)} if dtype is not None else set())
    if len(wanted) > 1 or any(not jnp.issubdtype(one, jnp.floating) for one in wanted):
        raise InvalidValueError(
            f"tf.debugging.assert_same_float_dtype: dtypes are {sorted(map(str, wanted))}, expected"
            " one of floating point."
        )
    return wanted.pop() if wanted else np.dtype(np.float32)


def assert_shapes(
    shapes: Sequence[tuple[Array, Sequence[Any]]],
    data: object = None,
    summarize: int | None = None,
    message: str | None = None,
    name: str | None = None,
) -> None:
    """`tf.debugging.assert_shapes`: pairs of arrays and shapes; equal names are equal sizes."""
    pairs = shapes.items() if isinstance(shapes, dict) else shapes
    sizes: dict[str, int] = {}
    for x, names in pairs:
        shape = np.shape(x)
        fits = len(shape) == len(names)
        for size, name in zip(shape, names, strict=False):
            if isinstance(name, str) and not name.isdigit():
                fits &= sizes.setdefault(name, size) == size
            else:
                fits &= name is None or int(name) == size
        if not fits:
            raise InvalidValueError(
                message
                or f"tf.debugging.assert_shapes: an array has shape {shape}, expected"
                f" {tuple(names)} where {sizes}."
            )


def disable_check_numerics() -> None:
    """`tf.debugging.disable_check_numerics`: switches `jax_debug_nans` off."""
    jax.config.update("jax_debug_nans", False)


def enable_check_numerics(stack_height_limit: int = 30, path_length_limit: int = 50) -> None:
    """`tf.debugging.enable_check_numerics`: switches `jax_debug_nans` on."""
    jax.config.update("jax_debug_nans", True)


def is_numeric_tensor(tensor: object) -> bool:
    """`tf.debugging.is_numeric_tensor`."""
    return isinstance(tensor, jax.Array) and tensor.dtype != bool


def set_log_device_placement(enabled: bool) -> None:
    """`tf.debugging.set_log_device_placement`: has no effect."""


def get_log_device_placement() -> bool:
    """`tf.debugging.get_log_device_placement`: False."""
    return False
