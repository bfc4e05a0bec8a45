"""A strategy that keeps everything on one device."""

from typing import final

from distributary.devices import replica_devices
from distributary.engine import Placement
from distributary.errors import InvalidTypeError
from distributary.strategies._base import Strategy
from distributary.strategies._extended import StrategyExtended


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device, which also stores all variables.

    It runs the same code as the other strategies.

    Args:
        device: Device string such as `"GPU:0"` or `"/cpu:0"`, or a `jax.Device`.

    Raises:
        DeviceError: if the device cannot be parsed or does not exist.

    Source: `tf.distribute.OneDeviceStrategy`.
    """

    def __init__(self, device: object) -> None:
        if isinstance(device, (list, tuple)) or device is None:
            raise InvalidTypeError(
                f"OneDeviceStrategy: device is {device!r}, expected one device such as 'CPU:0'."
            )
        (replica_device,) = replica_devices([device])
        super().__init__(StrategyExtended(self, Placement.on_one_device(replica_device)))
