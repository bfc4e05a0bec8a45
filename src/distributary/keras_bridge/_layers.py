"""Random numbers and batch statistics of layers, in a step of several replicas."""

import logging
import weakref
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from distributary.context import current_mode, in_global_view
from distributary.errors import UnsupportedError
from distributary.keras_bridge._replica import is_for_servers, is_uneven, replica_context, total

_logger = logging.getLogger(__name__)
_noted: weakref.WeakSet[Any] = weakref.WeakSet()  # strategies

# An odd number, so that up to 2**32 replicas get distinct seeds.
_SEED_STRIDE = 0x9E3779B1


def next_seed(original: Callable[..., Any], self: object, ordered: bool = True) -> Any:
    """Gives every replica its own seed; the state of the generator advances equally on all."""
    seed = original(self, ordered)
    if is_for_servers():
        # Workers may have read the same state. A step that is repeated draws the same numbers
        # again.
        number = current_mode().strategy.extended.remote_steps.number()
        if number is not None:
            seed = seed.at[1].add(_spread(number, seed.dtype))
    context = replica_context()
    if context is not None:
        seed = seed.at[0].add(_spread(context.replica_id_in_sync_group, seed.dtype))
    return seed


def _spread(number: Any, dtype: Any) -> Any:
    return jnp.asarray(number).astype(dtype) * jnp.asarray(_SEED_STRIDE, jnp.uint32).astype(dtype)


def batch_normalization_init(
    original: Callable[..., Any], self: Any, *args: Any, synchronized: bool = False, **kwargs: Any
) -> None:
    """Accepts `synchronized=True`, which Keras supports only for TensorFlow."""
    original(self, *args, **kwargs)
    self.synchronized = synchronized


@final
class _Unsynchronized:
    """A layer of batch normalization as one whose statistics are those of the rows that it gets."""

    synchronized = False

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def batch_normalization_moments(
    original: Callable[..., Any], self: Any, inputs: Any, mask: Any
) -> Any:
    """Uses the mean and variance of the whole batch in `Strategy.run`, with `synchronized=True`."""
    context = replica_context()
    if context is None or not self.synchronized:
        _note_own_statistics(self, context)
        return original(_Unsynchronized(self), inputs, mask)
    mean, variance = original(_Unsynchronized(self), inputs, mask)
    wide = jnp.promote_types(mean.dtype, jnp.float32)
    count = _count(self, inputs, mask, wide)
    weight: Any = 1.0 / context.strategy.extended.num_replicas
    if mask is not None or is_uneven():
        everything = total(context, count)
        weight = count / jnp.maximum(everything, 1)
    # Without entries, a replica's own mean and variance are undefined.
    parts = (jnp.where(count > 0, x.astype(wide), 0.0) for x in (mean, variance))
    wide_mean, wide_variance = parts
    global_mean = total(context, wide_mean * weight)
    spread = wide_variance + jnp.square(wide_mean - global_mean)
    global_variance = total(context, spread * weight)
    return global_mean.astype(mean.dtype), global_variance.astype(variance.dtype)


def batch_normalization_call(
    original: Callable[..., Any], self: Any, inputs: Any, training: Any = None, mask: Any = None
) -> Any:
    """Normalizes each replica's part of a whole batch by itself, if the strategy asks for it."""
    num_parts = _num_parts(self, inputs, training, mask)
    if num_parts == 1:
        return original(self, inputs, training=training, mask=mask)
    return _normalized_parts(self, inputs, num_parts)


def _normalized_parts(layer: Any, inputs: Any, num_parts: int) -> Any:
    """Returns what a layer makes of a batch in parts, and updates its moving averages."""
    dtype = keras.backend.result_type(inputs.dtype, "float32")
    num_rows = inputs.shape[0]
    each = -(-num_rows // num_parts)
    # Rows are divided as on the devices; XLA keeps the parts where they are.
    rows = keras.ops.cast(inputs, dtype)
    rows = jnp.pad(rows, [(0, num_parts * each - num_rows), *[(0, 0)] * (rows.ndim - 1)])
    parts = rows.reshape(num_parts, each, *rows.shape[1:])
    counts = np.clip(num_rows - each * np.arange(num_parts), 0, each)
    present = np.arange(each) < counts[:, None]
    present = present.reshape(num_parts, each, *[1] * (parts.ndim - 2))
    shape = [num_parts, *[1] * (parts.ndim - 1)]
    shape[layer.axis if layer.axis < 0 else layer.axis + 1] = inputs.shape[layer.axis]
    axes = tuple([i + 1 for i in layer._reduction_axes])
    entries = np.maximum(counts * (inputs.size // num_rows // inputs.shape[layer.axis]), 1)
    entries = entries.reshape(num_parts, *[1] * (parts.ndim - 1)).astype(dtype)
    mean = jnp.sum(jnp.where(present, parts, 0), axes, keepdims=True) / entries
    squares = jnp.square(jnp.where(present, parts - mean, 0))
    variance = jnp.sum(squares, axes, keepdims=True) / entries
    weights = (counts / num_rows).astype(dtype)
    for moving, statistic in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        of_all = jnp.tensordot(weights, statistic.reshape(num_parts, -1), 1)
        old = keras.ops.cast(moving, dtype)
        moving.assign(old * layer.momentum + of_all * (1.0 - layer.momentum))
    scale = jax.lax.rsqrt(variance + layer.epsilon)
    if layer.scale:
        scale *= keras.ops.cast(layer.gamma, dtype).reshape(shape[1:])
    normalized = (parts - mean) * scale
    if layer.center:
        normalized += keras.ops.cast(layer.beta, dtype).reshape(shape[1:])
    return keras.ops.cast(normalized.reshape(rows.shape)[:num_rows], layer.compute_dtype)


def _num_parts(layer: Any, inputs: Any, training: Any, mask: Any) -> int:
    """Returns of how many parts of a batch a layer takes statistics."""
    if not (training and layer.trainable and in_global_view()) or not inputs.shape[0]:
        return 1
    strategy = current_mode().strategy
    if not strategy.extended.experimental_batch_statistics_of_replicas:
        return 1
    if mask is not None or layer.renorm or layer.axis in (0, -len(inputs.shape)):
        raise UnsupportedError(
            f"{layer.name}: experimental_batch_statistics_of_replicas is for BatchNormalization"
            " without a mask, without renorm and with another axis than that of the rows. Leave"
            " the option out; statistics are then those of the whole batch."
        )
    return int(strategy.extended.placement.num_replicas)


def _note_own_statistics(layer: Any, context: Any) -> None:
    if context is not None and context.strategy not in _noted:
        _noted.add(context.strategy)
        _logger.warning(
            "%s: in Strategy.run, batch normalization uses the statistics of each replica's part of"
            " the batch, as with tf.distribute and torch. BatchNormalization(synchronized=True)"
            " uses those of the whole batch.",
            layer.name,
        )


def _count(layer: Any, inputs: Any, mask: Any, dtype: Any) -> Any:
    """Returns the number of entries in a replica's statistics."""
    channels = inputs.shape[layer.axis]
    if mask is None:
        return jnp.asarray(inputs.size / channels, dtype)
    return jnp.sum(jnp.broadcast_to(mask[..., None], inputs.shape).astype(dtype)) / channels
