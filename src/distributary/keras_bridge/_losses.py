"""The loss of one replica of `Strategy.run` as its part of the loss of the whole batch.

Gradients are summed over the replicas, as in tf.distribute. Divisors are those of the whole batch,
so the result equals that of one device, even with masks and weights. In tf.distribute, it is the
mean of the replicas' means.
"""

import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from distributary._threads import bound
from distributary.errors import DistributaryWarning, user_stacklevel
from distributary.keras_bridge._keras_private import apply_mask
from distributary.keras_bridge._replica import in_own_step, is_uneven, replica_context, total

_AVERAGING = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def aggregate_additional_loss(original: Callable[..., Any], self: object, loss: Any) -> Any:
    """Makes what a layer adds, a mean over a replica's rows, its part of the loss of the batch."""
    loss, context = original(self, loss), replica_context()
    return loss if context is None else loss / context.num_replicas_in_sync


# The arguments of the losses that are being called, the outermost first.
_calls: ContextVar[tuple[tuple[Any, Any, Any], ...]] = ContextVar("calls of losses", default=())


def call(
    original: Callable[..., Any], self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Notes a loss that is called, for `reduce_weighted_values`."""
    with bound(_calls, (*_calls.get(), (self, y_true, y_pred))):
        return original(self, y_true, y_pred, sample_weight)


def _of_whole_batch(context: Any, value: Any) -> Any:
    """Returns the one number that a loss gives for the rows of all replicas."""
    if not _calls.get():
        return value
    loss, *y = _calls.get()[0]
    y = jax.tree.map(lambda leaf: keras.ops.convert_to_tensor(leaf, loss.dtype), y)
    if any(leaf.ndim == 0 for leaf in jax.tree.leaves(y)):
        return value
    return loss.call(*context.all_gather(y, axis=0))


def _nan_without_class(values: Any) -> Any:
    """Returns losses, NaN for labels that are no class, as TensorFlow has it on GPUs; not 0."""
    if not _calls.get() or not in_own_step():
        return values
    loss, labels, outputs = _calls.get()[-1]
    # What a subclass makes of the losses of its rows is not known.
    is_sparse = type(loss) is keras.losses.SparseCategoricalCrossentropy
    if not is_sparse or loss.ignore_class is not None or not values.size:
        return values
    labels = jnp.reshape(jnp.asarray(labels), values.shape)
    is_class = (labels >= 0) & (labels < jnp.size(outputs) // values.size)
    return values * jnp.where(is_class, 1, jnp.nan).astype(values.dtype)


def reduce_weighted_values(
    original: Callable[..., Any],
    values: Any,
    sample_weight: object = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Divides by the count or weight of the whole batch instead of the replica's own.

    In a step of one's own, losses of labels without a class are NaN, unless weights or a mask may
    drop them.
    """
    if sample_weight is None and mask is None:
        values = _nan_without_class(values)
    context = replica_context()
    is_part = len(_calls.get()) > 1  # of a loss, which is divided as a whole
    if context is None or is_part or reduction in (None, "none"):
        return original(values, sample_weight, mask, reduction, dtype)
    if jnp.shape(values) == ():
        values = _of_whole_batch(context, values)
        # One entry, or Keras would make weights of a single row a number, too.
        values = values if sample_weight is None and mask is None else values[None]
    losses = original(values, sample_weight, mask, "none", dtype)
    if losses.shape == ():
        return losses / context.num_replicas_in_sync
    if losses.shape == (0,) and not is_uneven():  # the whole batch is empty
        return losses
    loss = jnp.sum(losses)
    if reduction not in _AVERAGING:
        return loss
    is_weighted = reduction == "mean_with_sample_weight"
    weights = apply_mask(sample_weight, mask, losses.dtype, reduction) if is_weighted else None
    if weights is not None:
        divisor = total(context, jnp.sum(jnp.asarray(weights)).astype(loss.dtype))
    elif is_uneven():
        divisor = total(context, jnp.asarray(losses.size, loss.dtype))
    else:
        divisor = jnp.asarray(losses.size * context.num_replicas_in_sync, loss.dtype)
    if mask is not None and not is_weighted:
        # Weights of valid entries are scaled by total over valid, so that they count for all.
        valid = jnp.sum(jnp.asarray(mask).astype(losses.dtype))
        counts = jnp.stack([jnp.asarray(mask.size, losses.dtype), valid])
        everything, valid = total(context, counts)
        loss = loss * keras.ops.divide_no_nan(everything, valid)
    return keras.ops.divide_no_nan(loss, divisor)


def warn_of_labels(model: Any, y: Any) -> None:
    """Warns of labels for which a model has no class: on JAX, the loss of such a row is 0."""
    loss = getattr(model, "loss", None)
    is_sparse = isinstance(loss, keras.losses.SparseCategoricalCrossentropy) or loss in (
        "sparse_categorical_crossentropy",
        keras.losses.sparse_categorical_crossentropy,
    )
    shape = getattr(model, "output_shape", None)
    if getattr(loss, "ignore_class", None) is not None:  # which is no class of the output
        return
    if not is_sparse or not isinstance(y, np.ndarray) or y.dtype.kind not in "iuf" or not y.size:
        return
    if isinstance(shape, tuple) and shape and isinstance(shape[-1], int):
        label = y.max() if y.max() >= shape[-1] else y.min()
        if label < 0 or label >= shape[-1]:  # not NaN
            warnings.warn(
                f"{model.name}: y has the label {label}, but the {shape[-1]} classes of the"
                f" output are 0 to {shape[-1] - 1}. The loss of such a row is 0. Number the classes"
                " from 0, or give the last layer more units.",
                DistributaryWarning,
                stacklevel=user_stacklevel(),
            )
