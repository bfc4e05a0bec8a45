"""Gradients are combined over the replicas where an optimizer receives them.

That is before clipping, loss-scale checks, accumulation and averages, so that all of these see the
gradients of the whole batch, as on one device.
"""

from collections.abc import Callable, Sequence
from typing import Any

from distributary.collectives import ReduceOp
from distributary.keras_bridge._replica import (
    in_optimizer,
    in_trainer,
    optimizing,
    replica_context,
)


def _combined(gradients: Sequence[Any]) -> list[Any]:
    """Gradients of all replicas: their mean in a step of `fit`, their sum in `Strategy.run`."""
    context = replica_context()
    assert context is not None
    op = ReduceOp.MEAN if in_trainer() else ReduceOp.SUM
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
        if in_optimizer() or replica_context() is None:
            return original(self, optimizer_variables, grads, trainable_variables)
        with optimizing():
            return original(self, optimizer_variables, _combined(grads), trainable_variables)

    return stateless_apply


def apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """Combines the gradients; inside another optimizer they are combined already."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if in_optimizer() or replica_context() is None:
            return original(self, grads, trainable_variables)
        with optimizing():
            return original(self, _combined(grads), trainable_variables)

    return apply
