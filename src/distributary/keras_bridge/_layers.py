"""Layers that behave differently on replicas: random numbers and batch statistics."""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from distributary.keras_bridge._replica import (
    is_for_servers,
    is_uneven,
    replica_context,
    total,
)

_logger = logging.getLogger(__name__)
_noted: weakref.WeakSet[Any] = weakref.WeakSet()  # strategies

# An odd number, so that up to 2**32 replicas get distinct seeds.
_SEED_STRIDE = 0x9E3779B1


def next_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives every replica its own seed; the state of the generator advances equally on all."""

    def next(self: object, ordered: bool = True) -> Any:
        seed = original(self, ordered)
        if is_for_servers():
            # Workers may have read the same state. A step that is repeated draws the same numbers
            # again.
            from distributary.coordinator import closure_number

            number = closure_number()
            if number is not None:
                seed = seed.at[1].add(_spread(number, seed.dtype))
        context = replica_context()
        if context is None:
            return seed
        number = context.replica_id_in_sync_group
        return seed.at[0].add(_spread(number, seed.dtype))

    return next


def _spread(number: Any, dtype: Any) -> Any:
    return jnp.asarray(number).astype(dtype) * jnp.asarray(_SEED_STRIDE, jnp.uint32).astype(dtype)


def batch_normalization_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Accepts `synchronized=True`, which Keras supports only for TensorFlow."""

    def __init__(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        self.synchronized = synchronized

    return __init__


def batch_normalization_moments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Uses the mean and variance of the whole batch, with `synchronized=True`."""

    def _moments(self: Any, inputs: object, mask: object) -> Any:
        if not self.synchronized:
            _note_own_statistics(self)
            return original(self, inputs, mask)
        self.synchronized = False
        try:
            mean, variance = original(self, inputs, mask)
        finally:
            self.synchronized = True
        context = replica_context()
        if context is None:
            return mean, variance
        wide = jnp.promote_types(mean.dtype, jnp.float32)
        count = _count(self, inputs, mask, wide)
        weight: Any = 1.0 / context.num_replicas_in_sync
        if mask is not None or is_uneven():
            everything = total(context, count)
            weight = count / jnp.maximum(everything, 1)
        # Without entries, a replica's own mean and variance are undefined.
        wide_mean, wide_variance = (
            jnp.where(count > 0, x.astype(wide), 0.0) for x in (mean, variance)
        )
        global_mean = total(context, wide_mean * weight)
        spread = wide_variance + jnp.square(wide_mean - global_mean)
        global_variance = total(context, spread * weight)
        return global_mean.astype(mean.dtype), global_variance.astype(variance.dtype)

    return _moments


def _note_own_statistics(layer: Any) -> None:
    context = replica_context()
    if context is not None and context.strategy not in _noted:
        _noted.add(context.strategy)
        _logger.warning(
            "%s: batch normalization uses the statistics of each replica's part of the batch, as"
            " with tf.distribute and torch. BatchNormalization(synchronized=True) uses those of the"
            " whole batch.",
            layer.name,
        )


def _count(layer: Any, inputs: Any, mask: Any, dtype: Any) -> Any:
    """Returns the number of entries in a replica's statistics."""
    channels = inputs.shape[layer.axis]
    if mask is None:
        return jnp.asarray(inputs.size / channels, dtype)
    return jnp.sum(jnp.broadcast_to(mask[..., None], inputs.shape).astype(dtype)) / channels
