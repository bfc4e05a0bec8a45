"""Synchronous training on all devices of one machine, with the variables on one of them."""

import logging
from collections.abc import Sequence
from typing import final

import jax

from distributary.strategies._base import Strategy
from distributary.strategies._extended import StrategyExtended
from distributary.topology import replica_devices

_log = logging.getLogger(__name__)


@final
class CentralStorageStrategy(Strategy):
    """One replica per device of this machine, and one copy of each variable on one device.

    A step fetches the variables that the replicas read once, to all their devices, reduces the
    gradients there, and sends one copy to the parameter device, where the rest of the step is
    computed: optimizers' slots never lie on the replicas' devices, other variables as long as the
    replicas compute. Variables with `synchronization=ON_READ` have a value per replica, each on the
    device of its replica.

    What is computed from the batch, from other arrays with dims that a step is given and from the
    number of the replica runs on the replicas' devices, like all that such values need. What
    depends on variables, scalar arguments and reduced values only runs on the parameter device.

    Args:
        compute_devices: Devices of the replicas, like `devices` of `MirroredStrategy`. None takes
            all GPUs, else all TPUs, else all CPU devices.
        parameter_device: Device of the variables, such as `"CPU:0"`. None takes the only compute
            device, else `"CPU:0"`.

    Raises:
        DeviceError: for devices that do not exist, are named twice or mixed.

    Source: `tf.distribute.experimental.CentralStorageStrategy`.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | None = None,
        parameter_device: str | jax.Device | None = None,
    ) -> None:
        devices = replica_devices(compute_devices)
        if parameter_device is None:
            parameter_device = devices[0] if len(devices) == 1 else "CPU:0"
        (home,) = replica_devices([parameter_device])
        several = len(devices) > 1
        super().__init__(
            StrategyExtended(
                self,
                devices,
                distributed=several,
                parameter_device=home if devices != (home,) else None,
            )
        )
        _log.info("Using %r", self)
