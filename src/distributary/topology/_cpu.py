"""Logical CPU devices."""

import operator
import os
import re
from typing import SupportsIndex

import jax

from distributary.errors import BackendStartedError, InvalidValueError
from distributary.topology._device_strings import local_devices_of
from distributary.topology._jax_private import backends_started
from distributary.topology._target import devices_are_given
from distributary.topology._thread_pool import CpuThreads

__all__ = [
    "cpu_thread_pool_size",
    "cpu_threads_suffice",
    "prepare_cpu_threads",
    "prepare_local_devices",
    "requested_cpu_devices",
    "set_logical_cpu_devices",
]

# A larger number is a typing error: it would cost minutes and tens of thousands of threads.
_MAX_LOGICAL_CPU_DEVICES = 1024

_threads = CpuThreads(os.environ)


def set_logical_cpu_devices(num_devices: SupportsIndex) -> None:
    """Makes JAX show the CPU of this machine as several devices.

    Replicas on logical devices compute the same as on the same number of GPUs, which is useful for
    tests and development. Call this at the top of the program, before anything uses JAX. Until JAX
    starts, you can call it again to change the number. If the devices could otherwise deadlock, it
    also sets the environment variable `PJRT_NPROC`, the size of XLA's thread pool.

    Args:
        num_devices: Number of CPU devices for this process, 1 to 1024.

    Raises:
        InvalidValueError: if the number is not an int from 1 to 1024.
        BackendStartedError: if JAX has started with another number of CPU devices.

    Source: `tf.config.set_logical_device_configuration`.
    """
    count = _checked_count(num_devices)
    if devices_are_given():
        return
    if not backends_started():
        jax.config.update("jax_num_cpu_devices", count)
    elif (num_existing := len(local_devices_of("CPU"))) != count:
        raise BackendStartedError(
            f"set_logical_cpu_devices({count}): JAX has already started, and its number of CPU"
            f" devices ({num_existing}) cannot change any more. Call it at the top of the program,"
            " before anything uses JAX: jax.devices(), an array or a strategy starts it. Or start"
            f" the program with the environment variable JAX_NUM_CPU_DEVICES={count}."
        )
    prepare_cpu_threads(count)


def requested_cpu_devices() -> int:
    """Returns the number of CPU devices with which JAX would start now."""
    # Type checkers do not see the options of `config`: JAX adds them as it defines them.
    configured = int(jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]
    if configured >= 1:  # -1 means that it is not set
        return configured
    flags = os.environ.get("XLA_FLAGS", "")
    counts: list[str] = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return max(1, int(counts[-1])) if counts else 1


def prepare_cpu_threads(num_devices: int) -> None:
    """Gives XLA's CPU thread pool two threads per device, as long as JAX has not started.

    Once JAX has started, it only warns, once per process, if the pool looks too small. You can call
    it any number of times.

    Args:
        num_devices: Number of CPU devices of this process that take part in one program. Before JAX
            has started, the number of all CPU devices that it will have.

    Warns:
        DistributaryWarning: if it replaces a `PJRT_NPROC` or `NPROC` of the user that is too small,
            or JAX has started with a pool that is too small.
    """
    if backends_started():
        _threads.report(num_devices, num_existing=len(local_devices_of("CPU")))
    else:
        _threads.enlarge(num_devices)


def prepare_local_devices() -> None:
    """Prepares the thread pool for the CPU devices this process will have, before JAX starts."""
    prepare_cpu_threads(requested_cpu_devices())


def cpu_thread_pool_size() -> int:
    """Returns the number of threads on which XLA runs all CPU devices of this process."""
    return _threads.size(len(local_devices_of("CPU")))


def cpu_threads_suffice(num_devices: int) -> bool:
    """Returns whether XLA's CPU thread pool has two threads for each of `num_devices` devices."""
    return _threads.is_large_enough(num_devices, num_existing=len(local_devices_of("CPU")))


def _checked_count(num_devices: SupportsIndex) -> int:
    try:
        count = -1 if isinstance(num_devices, bool) else operator.index(num_devices)
    except TypeError:
        count = -1
    if not 1 <= count <= _MAX_LOGICAL_CPU_DEVICES:
        raise InvalidValueError(
            f"set_logical_cpu_devices: num_devices is {num_devices!r}, expected an int from 1 to"
            f" {_MAX_LOGICAL_CPU_DEVICES}."
        )
    return count
