"""Synchronous training on all devices of one machine."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax

from distributary.devices import replica_devices
from distributary.engine import Placement
from distributary.errors import InvalidValueError, check_type, shown
from distributary.strategies._base import Strategy
from distributary.strategies._extended import Sharded, StrategyExtended
from distributary.strategies._layout_rules import LayoutRules
from distributary.variables import CrossDeviceOps

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
