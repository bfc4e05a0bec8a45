"""The loss of one replica as its part of the loss of the whole batch.

In a step of `fit`, gradients are averaged over the replicas, so a replica's part of the loss counts
`num_replicas` times. In `Strategy.run`, they are summed, as in tf.distribute. Divisors are those of
the whole batch, so the result equals that of one device, even with masks and weights. In
tf.distribute, it is the mean of the replicas' means.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras

from distributary.keras_bridge._replica import (
    in_trainer,
    is_uneven,
    note_scaled_loss,
    replica_context,
    total,
    weight_of_rows,
)

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def reduce_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Divides by the count or weight of the whole batch instead of the replica's own."""

    def reduce_values(
        values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
    ) -> Any:
        context = replica_context()
        if context is None or reduction in (None, "none"):
            return original(values, sample_weight, reduction)
        if values.shape == ():  # the mean over this replica's rows
            loss = original(values, sample_weight, reduction)
            if in_trainer() and is_uneven():
                note_scaled_loss()
                loss = (loss * weight_of_rows()).astype(loss.dtype)
            return loss
        if values.shape == (0,) and not is_uneven():  # the whole batch is empty
            return original(values, sample_weight, reduction)
        num_replicas = context.num_replicas_in_sync
        scale = num_replicas if in_trainer() else 1
        loss = jnp.sum(values) * scale
        if in_trainer():
            note_scaled_loss()
        if reduction not in _MEANS:
            return loss
        divisor: Any
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            divisor = total(context, jnp.sum(sample_weight).astype(loss.dtype))
        elif is_uneven():
            divisor = total(context, jnp.asarray(values.size, loss.dtype))
        else:
            divisor = jnp.asarray(values.size * num_replicas, loss.dtype)
        return keras.ops.divide_no_nan(loss, divisor)

    return reduce_values


def apply_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Scales weights of valid entries by total over valid, of the whole batch, not the replica."""

    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: str | None) -> Any:
        context = replica_context()
        if context is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return original(sample_weight, mask, dtype, reduction)
        own = original(sample_weight, mask, dtype, "none")
        valid = jnp.sum(jnp.asarray(mask).astype(dtype))
        counts = jnp.stack([jnp.asarray(mask.size, dtype), valid])
        everything, valid = total(context, counts)
        return own * keras.ops.divide_no_nan(everything, valid)

    return apply_mask
