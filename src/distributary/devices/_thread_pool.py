"""Logical CPU devices, and the size of the thread pool on which XLA runs them."""

import operator
import os
import re
import threading
import warnings
from collections.abc import Callable, MutableMapping
from typing import SupportsIndex, final

import jax

from distributary._threads import SHARE_VARIABLE, num_cores, threads_needed
from distributary.devices._device_strings import local_devices_of
from distributary.devices._jax_private import backends_started
from distributary.devices._target import devices_are_given
from distributary.errors import BackendStartedError, DistributaryWarning, InvalidValueError

# A larger number is a typing error: it would cost minutes and tens of thousands of threads.
_MAX_LOGICAL_CPU_DEVICES = 1024
# In the order in which XLA looks; the first one that is an integer counts.
_VARIABLES = ("PJRT_NPROC", "NPROC")
_FRAMES_TO_CALLER_OF_PREPARE = 4


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


@final
class CpuThreads:
    """The size of the thread pool, set before JAX starts; remembers what it has set.

    Args:
        environ: Environment to read and to change.
        num_cores: Returns the number of cores that this process may use.
    """

    def __init__(
        self, environ: MutableMapping[str, str], num_cores: Callable[[], int] = num_cores
    ) -> None:
        self._environ = environ
        self._num_cores = num_cores
        self._lock = threading.RLock()  # guards the rest
        self._prepared_for = 1  # number of devices
        self._written: str | None = None  # our value of PJRT_NPROC
        self._reported = False

    def enlarge(self, num_devices: int) -> None:
        """Sets `PJRT_NPROC` if the pool would have fewer than two threads per device.

        The new value is the number of cores, or the number of threads that the devices need if that
        is higher. If a launcher has given this process a share of the cores, the value is always
        the number of threads that the devices need.

        Args:
            num_devices: Number of CPU devices with which JAX will start.

        Warns:
            DistributaryWarning: if this replaces a value of the user.
        """
        with self._lock:
            share = self._environ.get(SHARE_VARIABLE)
            if self._written is not None and self._environ.get("PJRT_NPROC") == self._written:
                del self._environ["PJRT_NPROC"]  # was for an earlier number of devices
                if share is not None:
                    self._environ["PJRT_NPROC"] = share
            self._written = None
            self._prepared_for = num_devices
            needed = threads_needed(num_devices)
            variable, size = self._asked_for()
            if size >= needed:
                return
            is_share = variable == "PJRT_NPROC" and self._environ[variable] == share
            size = needed if is_share else max(self._num_cores(), needed)
            if variable is not None and not is_share:
                warnings.warn(
                    f"{variable}={self._environ[variable]} in the environment is too small for"
                    f" {num_devices} CPU devices, which would wait for each other for ever; using"
                    f" PJRT_NPROC={size}. Remove the variable, or set PJRT_NPROC to {needed} or"
                    " more.",
                    DistributaryWarning,
                    stacklevel=_FRAMES_TO_CALLER_OF_PREPARE,
                )
            self._written = self._environ["PJRT_NPROC"] = str(size)

    def report(self, num_devices: int, *, num_existing: int) -> None:
        """Warns, once, if JAX has started with fewer than two threads per device.

        Args:
            num_devices: Number of CPU devices that take part in one program.
            num_existing: Number of all CPU devices of this process.

        Warns:
            DistributaryWarning: if the pool is too small, as far as the environment tells.
        """
        with self._lock:
            if self._reported or self.is_large_enough(num_devices, num_existing=num_existing):
                return
            self._reported = True
            size, needed = self.size(num_existing), threads_needed(num_devices)
            warnings.warn(
                f"JAX was started before distributary could prepare it: {num_devices} CPU devices"
                f" share a pool of {size} threads and need {needed}. The steps of a strategy are"
                " safe, because only a few are in flight at a time, but other programs with"
                " collectives can wait for each other for ever. Call"
                f" distributary.config.set_logical_cpu_devices({num_existing}) at the top of the"
                " program, before anything uses JAX, or start the program with the environment"
                f" variable PJRT_NPROC={needed}.",
                DistributaryWarning,
                stacklevel=_FRAMES_TO_CALLER_OF_PREPARE,
            )

    def is_large_enough(self, num_devices: int, *, num_existing: int) -> bool:
        """Returns whether the pool has two threads per device, as far as the environment tells.

        Args:
            num_devices: Number of CPU devices that take part in one program.
            num_existing: Number of all CPU devices of this process.
        """
        with self._lock:
            is_prepared = num_devices <= self._prepared_for
            return is_prepared or self.size(num_existing) >= threads_needed(num_devices)

    def size(self, num_existing: int) -> int:
        """Returns the size of the pool, as far as the environment tells.

        Args:
            num_existing: Number of all CPU devices of this process.
        """
        # XLA gives every CPU device of the process at least one thread.
        return max(self._asked_for()[1], num_existing)

    def _asked_for(self) -> tuple[str | None, int]:
        """Returns the variable that sets the size of the pool, None if none does, and the size."""
        for variable in _VARIABLES:
            text = self._environ.get(variable, "")
            if re.fullmatch(r"\s*[+-]?\d+\s*", text, re.ASCII):
                return variable, int(text)
        return None, self._num_cores()


_threads = CpuThreads(os.environ)
