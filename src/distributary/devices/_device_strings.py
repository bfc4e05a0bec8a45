"""Device strings as TensorFlow users write them, and the `jax.Device` that each one names."""

import re
from dataclasses import dataclass
from typing import final

import jax

from distributary.devices._jax_private import backends_started
from distributary.devices._target import current_target
from distributary.errors import DeviceError, a_kind

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
