"""The size of the thread pool on which XLA runs CPU devices."""

import os
import re
import threading
import warnings
from collections.abc import Callable, MutableMapping
from typing import Final, final

from distributary.errors import DistributaryWarning

__all__ = ["SHARE_VARIABLE", "CpuThreads", "num_cores", "threads_needed"]

# XLA:CPU runs every device of every dispatched program on one thread pool, and a device that waits
# in a collective holds its thread. With fewer than two threads per device, the devices of the next
# program can take the threads that the current one still needs: XLA then aborts the process with
# "Expected 8 threads to join the rendezvous". Measured on jax 0.10.2: pools of R + 1 threads
# deadlocked at R = 2, 4 and 8 devices, pools of 2R never did; larger ones only cost time.
_THREADS_PER_DEVICE = 2

# The value of PJRT_NPROC that `distributary launch` chose: this process's share of the cores.
SHARE_VARIABLE: Final = "DISTRIBUTARY_NPROC"

# In the order in which XLA looks; the first one that is an integer counts.
_VARIABLES = ("PJRT_NPROC", "NPROC")

_FRAMES_TO_CALLER_OF_PREPARE = 4


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # XLA counts them in the same way if it can
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def threads_needed(num_devices: int) -> int:
    """Returns the number of threads below which that many CPU devices can deadlock."""
    # A single device waits for no other.
    return _THREADS_PER_DEVICE * num_devices if num_devices > 1 else 0
