"""Gradients are combined over the replicas where an optimizer receives them.

That is before clipping, loss-scale checks, accumulation and averages, so that all of these see the
gradients of the whole batch, as on one device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import keras
from jax import lax

from distributary.collectives import ReduceOp
from distributary.keras_bridge._replica import (
    in_optimizer,
    in_trainer,
    is_repeated,
    optimizing,
    replica_context,
)
from distributary.topology import REPLICA_AXIS


def _combined(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Gradients of all replicas: their mean in a step of `fit`, their sum in `Strategy.run`.

    Gradients of a scaled loss are summed in `fit`, too, see `scale_loss`.
    """
    context = replica_context()
    if context is None:
        # All are equal, but only a collective says so: what follows it is computed once.
        first = lax.axis_index(REPLICA_AXIS) == 0
        parts = [None if g is None else jnp.where(first, g, jnp.zeros_like(g)) for g in gradients]
        return [None if part is None else lax.psum(part, REPLICA_AXIS) for part in parts]
    is_mean = in_trainer() and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    op = ReduceOp.MEAN if is_mean else ReduceOp.SUM
    given = [i for i, gradient in enumerate(gradients) if gradient is not None]
    reduced = context.all_reduce(op, [gradients[i] for i in given])
    result = list(gradients)
    for i, gradient in zip(given, reduced, strict=True):
        result[i] = gradient
    return result


def stateless_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """Combines the gradients; inside another optimizer they are combined already."""

    def stateless_apply(
        self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        if in_optimizer() or (replica_context() is None and not is_repeated()):
            return original(self, optimizer_variables, grads, trainable_variables)
        with optimizing():
            return original(self, optimizer_variables, _combined(self, grads), trainable_variables)

    return stateless_apply


def apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """Combines the gradients; inside another optimizer they are combined already."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if in_optimizer() or (replica_context() is None and not is_repeated()):
            return original(self, grads, trainable_variables)
        with optimizing():
            return original(self, _combined(self, grads), trainable_variables)

    return apply


def scale_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Scales the loss of a replica as its part of the whole batch.

    In a step of `fit` the loss of a replica counts `num_replicas` times. Its gradients would be
    larger than those of one device, and leave the range of float16 sooner.
    """

    def scale_loss(self: Any, loss: Any) -> Any:
        context = replica_context()
        if context is not None and in_trainer():
            loss = loss / context.num_replicas_in_sync
        return original(self, loss)

    return scale_loss
