"""The loss of one replica as its part of the loss of the whole batch.

In a step of `fit`, gradients are averaged over the replicas, and count as much as a replica has
rows. So its part of the loss counts `num_replicas` times, and less if it has more rows: without
masks and weights, this is the mean over its own rows. In `Strategy.run`, gradients are summed, as
in tf.distribute. Divisors are those of the whole batch, so the result equals that of one device,
even with masks and weights. In tf.distribute, it is the mean of the replicas' means.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from distributary.keras_bridge._keras_private import apply_mask
from distributary.keras_bridge._replica import (
    in_trainer,
    is_uneven,
    replica_context,
    total,
    weight_of_rows,
)
from distributary.rows import MEANS

_AVERAGING = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def aggregate_additional_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes what a layer adds, a mean over a replica's rows, its part of the loss of the batch."""

    def _aggregate_additional_loss(self: object, loss: Any) -> Any:
        loss = original(self, loss)
        context = replica_context()
        if context is None:
            return loss
        return _mean(loss if in_trainer() else loss / context.num_replicas_in_sync)

    return _aggregate_additional_loss


def _mean(loss: Any) -> Any:
    """Returns a loss that is a mean over this replica's rows, marked for the analysis of rows."""
    with jax.named_scope(MEANS):
        return loss * 1  # an equation, which the scope can mark


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
            return _mean(losses) if in_trainer() else losses
        if losses.shape == (0,) and not is_uneven():  # the whole batch is empty
            return losses
        num_replicas = context.num_replicas_in_sync
        loss = jnp.sum(losses) * (num_replicas if in_trainer() else 1)
        if in_trainer() and is_uneven():
            loss = (loss / weight_of_rows()).astype(loss.dtype)
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
