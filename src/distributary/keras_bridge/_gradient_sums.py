"""Combines gradients over the replicas at the point where an optimizer receives them.

This is before clipping, loss-scale checks, accumulation and averages. So all of these see the
gradients of the whole batch, as on one device.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
from jax import lax

from distributary.collectives import ReduceOp
from distributary.context import current_mode, get_strategy
from distributary.keras_bridge._custom_loops import build_optimizer
from distributary.keras_bridge._optimizers import as_keras, dense
from distributary.keras_bridge._replica import (
    in_optimizer,
    in_trainer,
    is_away_from_variables,
    is_for_servers,
    is_uneven,
    optimizing,
    replica_context,
    weight_of_rows,
)
from distributary.topology import REPLICA_AXIS
from distributary.tracing import push
from distributary.variables import tell_new_state


def _must_combine() -> bool:
    """Returns whether an optimizer receives the gradients of a single replica."""
    if in_optimizer():
        return False
    return replica_context() is not None or is_for_servers() or is_away_from_variables()


def _combined(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Combines the gradients of all replicas: mean in a step of `fit`, sum in `Strategy.run`.

    Gradients of a scaled loss are summed in `fit`, too, see `scale_loss`.
    """
    given = [i for i, gradient in enumerate(gradients) if gradient is not None]
    present = [gradients[i] for i in given]
    if is_for_servers() and current_mode().role != "replica":
        reduced = [push(value) for value in present]
    elif is_away_from_variables():
        # Everything after a collective is computed where the variables lie.
        reduced = lax.psum(present, REPLICA_AXIS)
    else:
        is_mean = in_trainer() and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        op = ReduceOp.MEAN if is_mean else ReduceOp.SUM
        if in_trainer() and is_uneven():
            present = [(value * weight_of_rows()).astype(value.dtype) for value in present]
        reduced = get_strategy().extended.reduce_gradients(op, present)
    result = list(gradients)
    for i, gradient in zip(given, reduced, strict=True):
        result[i] = gradient
    return result


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
            tell_new_state(args[0])
        if not _must_combine():
            return original(**given)
        with optimizing():
            given["grads"] = _combined(args[0], given["grads"])
            return original(**given)

    return method


def scale_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Scales the loss of a replica as its part of the whole batch.

    In a step of `fit`, the loss of a replica counts `num_replicas` times. Its gradients would be
    larger than those of one device, and would leave the range of float16 sooner.
    """

    def scale_loss(self: object, loss: Any) -> Any:
        context = replica_context()
        if context is not None and in_trainer():
            loss = loss / context.num_replicas_in_sync
        return original(self, loss)

    return scale_loss
