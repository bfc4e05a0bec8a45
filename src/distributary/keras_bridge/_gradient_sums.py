"""Combines gradients over the replicas at the point where an optimizer receives them.

This is before clipping, loss-scale checks, accumulation and averages. So all of these see the
gradients of the whole batch, as on one device.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from distributary.checkpoint import settle
from distributary.context import current_mode, get_strategy
from distributary.devices import REPLICA_AXIS
from distributary.keras_bridge._custom_loops import build_optimizer
from distributary.keras_bridge._optimizers import as_keras, dense
from distributary.keras_bridge._replica import (
    in_optimizer,
    is_away_from_variables,
    is_for_servers,
    optimizing,
    replica_context,
)
from distributary.keras_bridge._variables import in_parts
from distributary.options import ReduceOp
from distributary.tracing import push


def _combined(gradients: Sequence[Any]) -> list[Any]:
    """Sums the gradients of all replicas of `Strategy.run`."""
    present = [gradient for gradient in gradients if gradient is not None]
    if is_for_servers() and current_mode().role != "replica":
        reduced = list(map(push, present))
    elif is_away_from_variables():
        # Everything after a collective is computed where the variables lie.
        reduced = lax.psum(present, REPLICA_AXIS)
    else:
        reduced = get_strategy().extended.reduce_gradients(ReduceOp.SUM, present)
    left = iter(reduced)
    return [None if gradient is None else next(left) for gradient in gradients]


def combining(original: Callable[..., Any]) -> Callable[..., Any]:
    """Combines the gradients that a method gets; inside another optimizer, they already are.

    Variables of ours become such of Keras.
    """
    signature = inspect.signature(original)

    def method(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        variables = given.get("trainable_variables")
        if variables is not None:
            given["trainable_variables"] = [as_keras(variable) for variable in variables]
            pairs = zip(given["grads"], given["trainable_variables"], strict=False)
            given["grads"] = [dense(gradient, variable) for gradient, variable in pairs]
            if not is_for_servers():
                build_optimizer(args[0], given["trainable_variables"])
        if args[0].built:
            settle(args[0])
        of_one = replica_context() is not None or is_for_servers() or is_away_from_variables()
        with in_parts():
            if in_optimizer() or not of_one:
                return original(**given)
            with optimizing():
                given["grads"] = _combined(given["grads"])
                return original(**given)

    return method
