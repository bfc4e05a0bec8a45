"""Strategies of one device: the one that you choose, and the default outside of every scope."""

from typing import final

from distributary.context import Mode, ReplicaContext, register_default_mode
from distributary.devices import replica_devices
from distributary.engine import Placement
from distributary.errors import ContextError, InvalidTypeError
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


# The strategy that is current outside of every scope.


@final
class DefaultStrategy(Strategy):
    """One replica on the device that JAX chooses; `get_strategy()` returns it outside of scopes.

    Source: the default strategy of `tf.distribute`.
    """

    def __init__(self) -> None:
        # Not `super().__init__`: nobody asks for this strategy.
        self._extended = StrategyExtended(self, Placement(num_replicas=1))

    def __deepcopy__(self, memo: object) -> Strategy:
        raise ContextError("There is one default strategy; it cannot be copied.")

    def __repr__(self) -> str:
        return "<the default strategy: 1 replica on JAX's default device>"


def _make_default_mode() -> Mode:
    strategy = DefaultStrategy()
    return Mode(strategy, "replica", ReplicaContext(strategy, 0))


register_default_mode(_make_default_mode)
