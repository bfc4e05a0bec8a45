"""The losses and layers of `tf.nn`; see `Operation` for how arguments are converted."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from distributary.context import ReplicaContext, get_replica_context
from distributary.errors import ContextError, InvalidValueError
from distributary.keras_bridge import import_keras
from distributary.tensorflow._operations import (
    Axes,
    Operation,
    Shape,
    TensorLike,
    array,
    named,
    taking,
)
from distributary.tensorflow._random import key_of_number, seed_of
from distributary.tracing import current_scope

Sizes: TypeAlias = int | Sequence[int]


def compute_average_loss(
    per_example_loss: TensorLike,
    sample_weight: TensorLike | None = None,
    global_batch_size: TensorLike | None = None,
) -> Array:
    """Returns the replica's part of the mean loss of the global batch; sum it over the replicas.

    Args:
        per_example_loss: Array `[examples, ...]` of this replica.
        sample_weight: Array to multiply it with. A last dim of 1 may be missing, or be too many.
        global_batch_size: Number to divide the sum by. By default, it is the number of examples of
            all replicas, even if they have different numbers.

    Raises:
        ContextError: in a cross-replica context.
        InvalidValueError: if the loss is a scalar and you do not pass `global_batch_size`.

    Source: `tf.nn.compute_average_loss`.
    """
    context = _replica_context("compute_average_loss")
    losses = array(per_example_loss)
    num_replicas = context.num_replicas_in_sync  # always: it says that the step divides
    if global_batch_size is None:
        if losses.ndim == 0:
            raise InvalidValueError(
                "tf.nn.compute_average_loss: per_example_loss is a scalar, expected a loss for"
                " every example, [examples, ...]. Create the loss with reduction=None, or pass"
                " global_batch_size."
            )
        global_batch_size = losses.shape[0] * num_replicas
        scope = current_scope()
        if scope is not None and scope.uneven is not None:
            global_batch_size = context.all_reduce("SUM", jnp.float32(losses.shape[0]))
    if sample_weight is not None:
        weights = array(sample_weight, losses.dtype)
        if weights.ndim == losses.ndim + 1 and weights.shape[-1] == 1:
            weights = weights[..., 0]
        elif 0 < weights.ndim == losses.ndim - 1:
            weights = weights[..., None]
        losses = losses * weights
    return jnp.sum(losses) / jnp.asarray(global_batch_size, losses.dtype)


def scale_regularization_loss(regularization_loss: TensorLike) -> Array:
    """Returns the replica's part of a loss that does not depend on the batch.

    Raises:
        ContextError: in a cross-replica context.

    Source: `tf.nn.scale_regularization_loss`.
    """
    context = _replica_context("scale_regularization_loss")
    return jnp.sum(array(regularization_loss)) / context.num_replicas_in_sync


def _replica_context(name: str) -> ReplicaContext:
    context = get_replica_context()
    if context is None:
        raise ContextError(
            f"tf.nn.{name} is called in a cross-replica context, where there is no batch of one"
            " replica. Call it inside the function that is given to strategy.run."
        )
    return context


def softmax_cross_entropy_with_logits(labels: Array, logits: Array, axis: int = -1) -> Array:
    """`tf.nn.softmax_cross_entropy_with_logits`: labels are distributions."""
    return -jnp.sum(labels.astype(logits.dtype) * jax.nn.log_softmax(logits, axis), axis)


def sparse_softmax_cross_entropy_with_logits(labels: Array, logits: Array) -> Array:
    """`tf.nn.sparse_softmax_cross_entropy_with_logits`; NaN for a label that is not a class."""
    ids = labels[..., None]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids, axis=-1, mode="fill")[..., 0]


def sigmoid_cross_entropy_with_logits(labels: Any = None, logits: Any = None) -> Array:
    """`tf.nn.sigmoid_cross_entropy_with_logits`."""
    scores = array(logits)
    targets = array(labels, scores.dtype)
    if targets.shape != scores.shape:
        raise InvalidValueError(
            f"tf.nn.sigmoid_cross_entropy_with_logits: labels of shape {targets.shape} and logits"
            f" of shape {scores.shape}, expected the same shape."
        )
    return jax.nn.softplus(scores) - scores * targets


def l2_loss(t: Array) -> Array:
    """`tf.nn.l2_loss`: half the sum of squares."""
    return jnp.sum(t**2) / 2


def moments(
    x: Array, axes: Axes, shift: TensorLike | None = None, keepdims: bool = False
) -> tuple[Array, Array]:
    """`tf.nn.moments`: mean and variance."""
    return jnp.mean(x, axes, keepdims=keepdims), jnp.var(x, axes, keepdims=keepdims)


def bias_add(value: Array, bias: Array, data_format: str | None = None) -> Array:
    """`tf.nn.bias_add`."""
    if data_format is not None and data_format.startswith("NC"):
        bias = bias.reshape(-1, *[1] * (value.ndim - 2))
    return value + bias


def dropout(
    x: Array, rate: float, noise_shape: Shape | None = None, seed: int | None = None
) -> Array:
    """`tf.nn.dropout`: different random numbers in every step and on every replica."""
    sizes = None if noise_shape is None else tuple(noise_shape)
    return import_keras().random.dropout(x, rate, sizes, seed_of(seed))


def conv2d(
    input: Array,
    filters: Array,
    strides: Sizes,
    padding: str | Sequence[Sequence[int]],
    data_format: str = "NHWC",
    dilations: Sizes | None = None,
) -> Array:
    """`tf.nn.conv2d`."""
    return _convolved("conv", input, filters, strides, padding, data_format, dilations)


def _pooling(name: str, of_keras: str) -> Callable[..., Array]:
    def pool(
        input: Array, ksize: Sizes, strides: Sizes, padding: str, data_format: str = "NHWC"
    ) -> Array:
        sizes, steps = _of_space(ksize, data_format), _of_space(strides, data_format)
        layout = _KERAS_FORMATS[data_format]
        return getattr(import_keras().ops, of_keras)(input, sizes, steps, padding.lower(), layout)

    pool.__doc__ = f"`tf.nn.{name}`: `keras.ops.{of_keras}` of images."
    return pool


max_pool2d = _pooling("max_pool2d", "max_pool")
avg_pool2d = _pooling("avg_pool2d", "average_pool")


def depthwise_conv2d(
    input: Array,
    filter: Array,
    strides: Sizes,
    padding: str | Sequence[Sequence[int]],
    data_format: str | None = None,
    dilations: Sizes | None = None,
) -> Array:
    """`tf.nn.depthwise_conv2d`."""
    layout = data_format or "NHWC"
    return _convolved("depthwise_conv", input, filter, strides, padding, layout, dilations)


def _convolved(
    of_keras: str,
    images: Array,
    filters: Array,
    strides: Sizes,
    padding: str | Sequence[Sequence[int]],
    data_format: str,
    dilations: Sizes | None,
) -> Array:
    steps = _of_space(strides, data_format)
    rates = _of_space(1 if dilations is None else dilations, data_format)
    layout = _KERAS_FORMATS[data_format]
    if not isinstance(padding, str):  # rows to add before and after, by dim
        images, padding = jnp.pad(images, padding), "valid"
    convolve = getattr(import_keras().ops, of_keras)
    return convolve(images, filters, steps, padding.lower(), layout, rates)


_KERAS_FORMATS = {"NHWC": "channels_last", "NCHW": "channels_first"}


def _of_space(sizes: Sizes, data_format: str) -> tuple[int, int]:
    """Returns height and width, for which TensorFlow accepts 1, 2 or 4 numbers."""
    numbers = [sizes] if isinstance(sizes, int) else list(sizes)
    if len(numbers) == 4:
        first = data_format.index("H")
        numbers = numbers[first : first + 2]
    return numbers[0], numbers[-1]


def leaky_relu(features: ArrayLike, alpha: float = 0.2) -> Array:
    """`tf.nn.leaky_relu`: with the gradient `alpha` at 0."""
    return jnp.where(jnp.greater(features, 0), features, alpha * features)


#: Operations with the same meaning in JAX.
ACTIVATIONS: dict[str, Operation] = {
    **taking(named(jax.nn, "elu relu relu6 selu silu softplus"), "features"),
    "gelu": Operation(jax.nn.gelu, "features", approximate=False),
    "sigmoid": Operation(jax.nn.sigmoid, "x"),
    "swish": Operation(jax.nn.silu, "features"),
    "tanh": Operation(jnp.tanh, "x"),
}


# Losses over many classes, computed with some of them that are drawn, and what draws them.


def log_uniform_candidate_sampler(
    true_classes: Array,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: int | None = None,
) -> tuple[Array, Array, Array]:
    """`tf.random.log_uniform_candidate_sampler`: classes, the lower ones more often.

    Returns:
        Classes `[num_sampled]`, how often each of `true_classes` is expected among them, and how
        often each of the classes is.

    Raises:
        InvalidValueError: if there are fewer classes than different ones are to be drawn.
    """
    if unique and num_sampled > range_max:
        raise InvalidValueError(
            f"tf.random.log_uniform_candidate_sampler: num_sampled is {num_sampled}, but there are"
            f" only {range_max} classes. Pass a smaller num_sampled, or unique=False."
        )
    key, top = key_of_number(seed), jnp.log(range_max + 1.0)

    def draw(key: Array, count: int) -> Array:
        numbers = jnp.exp(jax.random.uniform(key, (count,)) * top).astype(jnp.int32)
        return jnp.minimum(numbers, range_max) - 1

    def again(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        """Draws one class, which counts if it is new."""
        number, tries, seen, drawn = state
        (value,) = draw(jax.random.fold_in(key, tries), 1)
        seen, is_new = seen.at[value].set(True), ~seen[value]
        return number + is_new, tries + 1, seen, drawn.at[number].set(value)

    drawn, tries = draw(key, num_sampled), jnp.int32(num_sampled)
    if unique:
        start = (jnp.int32(0), jnp.int32(0), jnp.zeros(range_max, bool), drawn)
        _, tries, _, drawn = jax.lax.while_loop(lambda s: s[0] < num_sampled, again, start)

    def expected(classes: Array) -> Array:
        odds = jnp.log((classes + 2.0) / (classes + 1.0)) / top
        return -jnp.expm1(tries * jnp.log1p(-odds)) if unique else tries * odds

    return drawn, expected(true_classes), expected(drawn)


_Drawn = tuple[Array, Array, Array]


def nce_loss(
    weights: Array,
    biases: Array,
    labels: Array,
    inputs: Array,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: _Drawn | None = None,
    remove_accidental_hits: bool = False,
) -> Array:
    """`tf.nn.nce_loss`: noise-contrastive estimation, `[batch]`."""
    true = labels.reshape(-1, num_true)
    draw = num_true, num_sampled, True, num_classes
    drawn = sampled_values or log_uniform_candidate_sampler(true, *draw)
    scores = _scores(weights, biases, true, inputs, drawn, remove_accidental_hits)
    return jnp.sum(sigmoid_cross_entropy_with_logits(*scores), 1)


def sampled_softmax_loss(
    weights: Array,
    biases: Array,
    labels: Array,
    inputs: Array,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: _Drawn | None = None,
    remove_accidental_hits: bool = True,
    seed: int | None = None,
) -> Array:
    """`tf.nn.sampled_softmax_loss`, `[batch]`."""
    true = labels.reshape(-1, num_true)
    draw = num_true, num_sampled, True, num_classes, seed
    drawn = sampled_values or log_uniform_candidate_sampler(true, *draw)
    scores = _scores(weights, biases, true, inputs, drawn, remove_accidental_hits)
    return softmax_cross_entropy_with_logits(*scores)


def _scores(
    weights: Array, biases: Array, true: Array, inputs: Array, drawn: _Drawn, without_hits: bool
) -> tuple[Array, Array]:
    """Returns targets and logits of the true classes and those that are drawn."""
    others, true_counts, counts = map(jnp.asarray, drawn)
    scores = jnp.einsum("bd,btd->bt", inputs, weights[true]) + biases[true] - jnp.log(true_counts)
    other_scores = inputs @ weights[others].T + biases[others] - jnp.log(counts)
    if without_hits:
        is_hit = (true[:, :, None] == others).any(1)
        other_scores = jnp.where(is_hit, jnp.finfo(scores.dtype).min, other_scores)
    targets = jnp.full_like(scores, 1 / true.shape[1]), jnp.zeros_like(other_scores)
    return jnp.concatenate(targets, 1), jnp.concatenate([scores, other_scores], 1)
