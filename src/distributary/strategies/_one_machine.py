"""Strategies of one machine: of one device, of all of them, with the variables on one of them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
from jax.sharding import SingleDeviceSharding

from distributary.context import Mode, ReplicaContext, register_default_mode
from distributary.devices import HOST_MEMORY, current_target, has_host_memory, replica_devices
from distributary.engine import Placement
from distributary.errors import (
    ContextError,
    DeviceError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    check_type,
    shown,
)
from distributary.strategies._base import Strategy
from distributary.strategies._extended import Sharded, StrategyExtended
from distributary.strategies._layout_rules import LayoutRules
from distributary.variables import CrossDeviceOps


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


_log = logging.getLogger(__name__)


@final
class MirroredStrategy(Strategy):
    """One replica per device of this machine, with variables mirrored on all of them.

    With `experimental_model_parallel=k`, k devices are one replica, and divide its layers.

    Args:
        devices: Device strings such as `"GPU:0"` or `"/cpu:1"`, or `jax.Device` objects. Replica
            ids follow their order. None takes all GPUs, else all TPUs, else all CPU devices.
            `["CPU:0", "CPU:1"]` makes logical CPU devices if JAX has not started yet.
        cross_device_ops: Algorithm that combines gradients: `NcclAllReduce` (the default),
            `HierarchicalCopyAllReduce`, `ReductionToOneDevice` or a subclass of `CrossDeviceOps`.
        experimental_shard_optimizer_state: Whether every device holds and updates only one part of
            the state of Keras optimizers. Gradients are then reduce-scattered, and new weights
            all-gathered. The results are those of mirrored state, up to rounding.
        experimental_shard_parameters: Whether every device holds only one part of each variable of
            a Keras model and of its optimizer's state, and of each `Variable` of floating-point
            numbers with one value for all replicas, from 1 KiB on. A step gathers a weight where
            it needs it and again for its backward pass, at most twice, and
            reduce-scatters gradients. The results are those of mirrored variables, up to rounding.
        experimental_model_parallel: Number of devices of each replica, which divide the layers of
            Keras models as `experimental_layout_map` says. The devices of a replica are next to
            each other in `devices`. None takes the number from the layout map, else 1.
        experimental_layout_map: The variables that the devices of a replica divide, and along which
            dim: a `keras.distribution.LayoutMap`, or a dict from regular expressions, which fit the
            whole path of a variable, to tuples with `"model"`, `"batch"` or None for each dim.
            `"batch"` divides over the replicas. "auto" divides attention, feed-forward layers and
            embeddings. A layout changes no result, except for rounding.

    Raises:
        DeviceError: for devices that do not exist, are named twice or are of different kinds.
        InvalidTypeError: if `cross_device_ops` is not a `CrossDeviceOps`.
        InvalidValueError: for `cross_device_ops` together with sharded state, and for rules that
            cannot be used. A rule that fits no variable is an error when a model's first step
            begins.

    Source: `tf.distribute.MirroredStrategy`.
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        experimental_shard_optimizer_state: bool = False,
        experimental_shard_parameters: bool | str = False,
        experimental_model_parallel: int | None = None,
        experimental_layout_map: Mapping[str, Any] | str | None = "auto",
    ) -> None:
        what = "MirroredStrategy: cross_device_ops"
        expected = "an object such as distributary.NcclAllReduce()"
        check_type(what, cross_device_ops, CrossDeviceOps | None, expected)
        sharded = Sharded.of(experimental_shard_optimizer_state, experimental_shard_parameters)
        if cross_device_ops is not None and sharded:
            raise InvalidValueError(
                f"{what} is {shown(cross_device_ops)}, but with {sharded.value} in parts, XLA"
                " scatters sums of gradients to the devices itself. Leave out one of the two."
            )
        rules = LayoutRules(
            "MirroredStrategy", experimental_layout_map, experimental_model_parallel
        )
        super().__init__(
            StrategyExtended(
                self,
                Placement.on_each(rules.replicas_of(replica_devices(devices))),
                cross_device_ops=cross_device_ops,
                sharded=sharded,
                layout_rules=rules,
            )
        )
        _log.info("Using %r", self)


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
