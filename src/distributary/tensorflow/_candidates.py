"""Losses over many classes, computed with some of them that are drawn, and what draws them."""

import jax
import jax.numpy as jnp
from jax import Array

from distributary.errors import InvalidValueError
from distributary.tensorflow._draws import key_of_number
from distributary.tensorflow._nn import (
    sigmoid_cross_entropy_with_logits,
    softmax_cross_entropy_with_logits,
)


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
