"""The devices of this process: as strings, as TensorFlow users write them, and logical CPU devices.

It also says how large the thread pool is on which XLA runs those.
"""

import operator
import os
import re
import threading
import warnings
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import SupportsIndex, final

import jax

from distributary._threads import SHARE_VARIABLE, num_cores, threads_needed
from distributary.devices._jax_private import backends_started
from distributary.devices._target import current_target, devices_are_given
from distributary.errors import (
    BackendStartedError,
    DeviceError,
    DistributaryWarning,
    InvalidValueError,
    a_kind,
)

_KINDS = ("GPU", "TPU", "CPU")

_PATTERN = re.compile(
    r"/?(?:job:(?P<job>[^/:]+)/)?(?:replica:(?P<replica>\d+)/)?(?:task:(?P<task>\d+)/)?"
    r"(?:device:)?(?P<kind>cpu|gpu|tpu)(?::(?P<index>\d+))?",
    re.ASCII | re.IGNORECASE,
)


@final
@dataclass(frozen=True)
class DeviceName:
    """The name of a device of this process; as text, `"CPU:0"`.

    Args:
        kind: `"CPU"`, `"GPU"` (NVIDIA and AMD) or `"TPU"`. For other backends of JAX, the name of
            the platform in upper case.
        index: Position among the local devices of this kind. It is not `jax.Device.id`, which
            counts over all processes.
    """

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


def parse_device(text: str) -> DeviceName:
    """Parses a device string without checking that the device exists.

    Args:
        text: `"GPU:1"`, `"/gpu:1"`, `"/device:GPU:1"`, `"/cpu"` (index 0), or with the job in
            front: `"/job:localhost/replica:0/task:0/device:CPU:0"`. Upper and lower case are the
            same.

    Returns:
        Kind and index.

    Raises:
        DeviceError: if the string cannot be parsed or names a device of another process.

    Source: `tf.DeviceSpec.from_string`, limited to the devices that JAX has.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise DeviceError(
            f"{text!r} is not a device. Write the kind (CPU, GPU or TPU) and its number on this"
            " machine, such as 'GPU:0', '/gpu:0' or '/device:GPU:0'; AMD and NVIDIA devices are"
            " both called GPU."
        )
    job = match["job"]
    remote_job = job is not None and job.lower() != "localhost"
    if remote_job or int(match["replica"] or 0) or int(match["task"] or 0):
        raise DeviceError(
            f"{text!r} names a device of another process. A list of devices may hold only devices"
            f" of this one, such as '{match['kind'].upper()}:0'; to train on several machines use"
            " MultiWorkerMirroredStrategy, which takes no list of devices."
        )
    return DeviceName(match["kind"].upper(), int(match["index"] or 0))


def name_of(device: str | jax.Device) -> DeviceName:
    """Returns the name of a device of this process; for a string, even if it does not exist.

    Args:
        device: A device string or a `jax.Device`.

    Raises:
        DeviceError: if the string cannot be parsed, the device belongs to another process, or
            `device` is neither a string nor a device.
    """
    if isinstance(device, str):
        return parse_device(device)
    if not isinstance(device, jax.Device):
        raise DeviceError(
            f"{device!r} is {a_kind(type(device))}, expected a device string such as 'GPU:0' or"
            " a jax.Device."
        )
    kind = _kind_of(device)
    peers = local_devices_of(kind)
    if device not in peers:
        if current_target() is not None:
            raise DeviceError(f"{device!r} is a device of this machine. {_cure(kind, 0, 1)}")
        raise DeviceError(
            f"{device!r} belongs to process {device.process_index}, and this is process"
            f" {jax.process_index()}. Name devices of this process, as in jax.local_devices()."
        )
    return DeviceName(kind, peers.index(device))


def canonical_name(device: str | jax.Device) -> str:
    """Returns `"/job:localhost/replica:0/task:0/device:CPU:0"` for a device of this process.

    Raises:
        DeviceError: if the string cannot be parsed, or the device belongs to another process.
    """
    return f"/job:localhost/replica:0/task:0/device:{name_of(device)}"


def short_name(device: str | jax.Device) -> str:
    """Returns `"CPU:0"` for a device of this process, or for a string that names one.

    Raises:
        DeviceError: if the string cannot be parsed, or the device belongs to another process.
    """
    return str(name_of(device))


def resolve_device(device: str | jax.Device, *, num_cpu_devices_wanted: int = 1) -> jax.Device:
    """Finds the device of this process that a string names; starts the JAX backends.

    Args:
        device: A device string, or a `jax.Device`, which is returned unchanged.
        num_cpu_devices_wanted: Number of CPU devices that the caller needs in total; only used in
            the text of the error.

    Returns:
        The device.

    Raises:
        DeviceError: if the string cannot be parsed, no such device exists, or the device belongs
            to another process.
    """
    name = name_of(device)
    if isinstance(device, jax.Device):
        return device
    candidates = local_devices_of(name.kind)
    if name.index < len(candidates):
        return candidates[name.index]
    wanted = max(name.index + 1, num_cpu_devices_wanted)
    raise DeviceError(
        f"There is no device {device!r}: this process has {_existing_devices()}."
        f" {_cure(name.kind, len(candidates), wanted)}"
    )


def local_devices_of(kind: str) -> tuple[jax.Device, ...]:
    """Returns the devices of one kind that this process has, by index; starts the JAX backends.

    Args:
        kind: Kind of device, as in `DeviceName`.

    Returns:
        The devices; an empty tuple if there are none of this kind.
    """
    target = current_target()
    if target is not None:
        return target.local_devices(kind)
    try:
        # "gpu" is JAX's common name for the platforms "cuda" and "rocm".
        return tuple(jax.local_devices(backend=kind.lower()))
    except RuntimeError:  # no backend of this kind
        jax.local_devices()  # if JAX cannot start at all, its error says why
        return ()


def _kind_of(device: jax.Device) -> str:
    platform = str(device.platform)
    return "GPU" if platform in ("cuda", "rocm") else platform.upper()


def _existing_devices() -> str:
    counts = {kind: len(local_devices_of(kind)) for kind in _KINDS}
    names = [
        f"{kind}:0" if count == 1 else f"{kind}:0 to {kind}:{count - 1}"
        for kind, count in counts.items()
        if count
    ]
    return " and ".join(names) or "no CPU, GPU or TPU"


def _cure(kind: str, num_existing: int, num_wanted: int) -> str:
    target = current_target()
    if target is not None:
        return (
            f"The script is compiled for {target.name}: let the strategy find its devices, or name"
            f" those it has there, such as '{target.kind}:0'."
        )
    if num_existing == 0:
        return (
            f"JAX has started no {kind} backend: install the one for this hardware (such as"
            " jax[cuda13]) and see that JAX_PLATFORMS does not exclude it, or name another device."
        )
    if kind == "CPU" and backends_started():
        return (
            "The number of CPU devices is fixed once JAX has started. For more, call"
            f" distributary.config.set_logical_cpu_devices({num_wanted}) at the top of the program,"
            " before anything uses JAX."
        )
    return "Name one of these."


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
