"""The loss of one replica of `Strategy.run` as its part of the loss of the whole batch.

Gradients are summed over the replicas, as in tf.distribute. Divisors are those of the whole batch,
so the result equals that of one device, even with masks and weights. In tf.distribute, it is the
mean of the replicas' means.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras

from distributary.keras_bridge._keras_private import apply_mask
from distributary.keras_bridge._replica import (
    is_uneven,
    replica_context,
    total,
)

_AVERAGING = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def aggregate_additional_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes what a layer adds, a mean over a replica's rows, its part of the loss of the batch."""

    def _aggregate_additional_loss(self: object, loss: Any) -> Any:
        loss = original(self, loss)
        context = replica_context()
        if context is None:
            return loss
        return loss / context.num_replicas_in_sync

    return _aggregate_additional_loss


def reduce_weighted_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Divides by the count or weight of the whole batch instead of the replica's own."""

    def reduce_weighted_values(
        values: object,
        sample_weight: object = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        context = replica_context()
        if context is None or reduction in (None, "none"):
            return original(values, sample_weight, mask, reduction, dtype)
        losses = original(values, sample_weight, mask, "none", dtype)
        if losses.shape == ():  # the mean over this replica's rows
            return losses
        if losses.shape == (0,) and not is_uneven():  # the whole batch is empty
            return losses
        num_replicas = context.num_replicas_in_sync
        loss = jnp.sum(losses)
        if reduction not in _AVERAGING:
            return loss
        divisor: Any
        weights = None
        if reduction == "mean_with_sample_weight":
            weights = apply_mask(sample_weight, mask, losses.dtype, reduction)
        if weights is not None:
            divisor = total(context, jnp.sum(jnp.asarray(weights)).astype(loss.dtype))
        elif is_uneven():
            divisor = total(context, jnp.asarray(losses.size, loss.dtype))
        else:
            divisor = jnp.asarray(losses.size * num_replicas, loss.dtype)
        if mask is not None and reduction != "mean_with_sample_weight":
            # Weights of valid entries are scaled by total over valid, so that they count for all.
            valid = jnp.sum(jnp.asarray(mask).astype(losses.dtype))
            counts = jnp.stack([jnp.asarray(mask.size, losses.dtype), valid])
            everything, valid = total(context, counts)
            loss = loss * keras.ops.divide_no_nan(everything, valid)
        return keras.ops.divide_no_nan(loss, divisor)

    return reduce_weighted_values
