"""Synchronous training on all devices of one machine, with the variables on one of them."""

import logging
from collections.abc import Sequence
from typing import final

import jax
from jax.sharding import SingleDeviceSharding

from distributary.devices import HOST_MEMORY, current_target, has_host_memory, replica_devices
from distributary.engine import Placement
from distributary.errors import DeviceError, UnsupportedError
from distributary.strategies._base import Strategy
from distributary.strategies._extended import StrategyExtended

_log = logging.getLogger(__name__)


@final
class CentralStorageStrategy(Strategy):
    """One replica per device of this machine, and one copy of each variable on one device.

    A step first copies the variables that the replicas read, once, to all their devices. It then
    reduces the gradients there and sends one copy to the parameter device, which computes the rest
    of the step. So the slots of optimizers are never on the replicas' devices, and other variables
    only while the replicas compute. Variables with `synchronization=ON_READ` have one value per
    replica, each on the device of its replica.

    The replicas' devices compute everything that depends on the batch, on other arrays with dims
    that are passed to the step, or on the replica id, and everything that such values need. The
    parameter device computes everything that depends only on variables, scalar arguments and
    reduced values.

    Args:
        compute_devices: Devices of the replicas, like `devices` of `MirroredStrategy`. None takes
            all GPUs, else all TPUs, else all CPU devices.
        parameter_device: Device of the variables, such as `"CPU:0"`. A
            `jax.sharding.SingleDeviceSharding` with `memory_kind="pinned_host"` keeps the variables
            in the memory of the device's host: the device computes updates, but stores nothing.
            None takes the compute device if there is only one. With several GPUs or TPUs, it takes
            the host memory of the first if JAX has it there; otherwise `"CPU:0"`.

    Raises:
        DeviceError: for devices that do not exist, are named twice or are of different kinds, and
            for other kinds of memory.
        UnsupportedError: under `distributary compile`.

    Source: `tf.distribute.experimental.CentralStorageStrategy`.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | None = None,
        parameter_device: str | jax.Device | SingleDeviceSharding | None = None,
    ) -> None:
        if current_target() is not None:
            raise UnsupportedError(
                "CentralStorageStrategy: `distributary compile` reports steps that are one program,"
                " and these are two. Take MirroredStrategy for the report: the replicas compute the"
                " same."
            )
        devices = replica_devices(compute_devices)
        several = len(devices) > 1
        in_host_memory = False
        if isinstance(parameter_device, SingleDeviceSharding):
            in_host_memory = _names_host_memory(parameter_device)
            (parameter_device,) = parameter_device.device_set
        elif parameter_device is None:
            accelerated = several and devices[0].platform != "cpu"
            in_host_memory = accelerated and has_host_memory(devices[0])
            parameter_device = devices[0] if in_host_memory or not several else "CPU:0"
        (home,) = replica_devices([parameter_device])
        if devices == (home,) and not in_host_memory:
            placement = Placement.on_one_device(home)
        else:
            placement = Placement.around_home(devices, home, in_host_memory)
        super().__init__(StrategyExtended(self, placement))
        _log.info("Using %r", self)


def _names_host_memory(sharding: SingleDeviceSharding) -> bool:
    if sharding.memory_kind not in (None, "device", HOST_MEMORY):
        raise DeviceError(
            f"parameter_device is {sharding!r}, expected memory_kind={HOST_MEMORY!r}, the memory of"
            " the device's host, or 'device', its own."
        )
    return sharding.memory_kind == HOST_MEMORY
