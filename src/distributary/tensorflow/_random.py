"""Operations of `tf.random`; see `Operation` for how arguments are converted.

Their numbers differ in every call, step and replica, and repeat with the same seed.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distributary.tensorflow import _draws as draws
from distributary.tensorflow._operations import Shape


def normal(
    shape: Shape,
    mean: Array | float = 0.0,
    stddev: Array | float = 1.0,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
) -> Array:
    """`tf.random.normal`."""
    return draws.normal(_next_key(seed), shape, mean, stddev, dtype)


def truncated_normal(
    shape: Shape,
    mean: Array | float = 0.0,
    stddev: Array | float = 1.0,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
) -> Array:
    """`tf.random.truncated_normal`."""
    return draws.truncated_normal(_next_key(seed), shape, mean, stddev, dtype)


def uniform(
    shape: Shape,
    minval: Array | float = 0,
    maxval: Array | float | None = None,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
) -> Array:
    """`tf.random.uniform`: from `minval` up to but excluding `maxval`; integers need `maxval`."""
    return draws.uniform(_next_key(seed), shape, minval, maxval, dtype)


def shuffle(value: Array, seed: int | None = None) -> Array:
    """`tf.random.shuffle`: along dim 0."""
    return jax.random.permutation(_next_key(seed), value)


def categorical(
    logits: Array, num_samples: int, dtype: DTypeLike = np.int64, seed: int | None = None
) -> Array:
    """`tf.random.categorical`."""
    return _categorical(_next_key(seed), logits, num_samples, dtype)


def stateless_normal(
    shape: Shape,
    seed: Array,
    mean: Array | float = 0.0,
    stddev: Array | float = 1.0,
    dtype: DTypeLike = np.float32,
    name: str | None = None,
    alg: str = "auto_select",
) -> Array:
    """`tf.random.stateless_normal`: the same numbers for the same `seed` of two integers."""
    return draws.normal(draws.key_of(seed), shape, mean, stddev, dtype)


def stateless_uniform(
    shape: Shape,
    seed: Array,
    minval: Array | float = 0,
    maxval: Array | float | None = None,
    dtype: DTypeLike = np.float32,
    name: str | None = None,
    alg: str = "auto_select",
) -> Array:
    """`tf.random.stateless_uniform`: the same numbers for the same `seed` of two integers."""
    return draws.uniform(draws.key_of(seed), shape, minval, maxval, dtype)


def stateless_truncated_normal(
    shape: Shape,
    seed: Array,
    mean: Array | float = 0.0,
    stddev: Array | float = 1.0,
    dtype: DTypeLike = np.float32,
    name: str | None = None,
    alg: str = "auto_select",
) -> Array:
    """`tf.random.stateless_truncated_normal`: the same numbers for the same `seed`."""
    return draws.truncated_normal(draws.key_of(seed), shape, mean, stddev, dtype)


def stateless_categorical(
    logits: Array,
    num_samples: int,
    seed: Array,
    dtype: DTypeLike = np.int64,
) -> Array:
    """`tf.random.stateless_categorical`: the same numbers for the same `seed`."""
    return _categorical(draws.key_of(seed), logits, num_samples, dtype)


def _categorical(key: Array, logits: Array, num_samples: int, dtype: DTypeLike) -> Array:
    shape = (int(num_samples), logits.shape[0])
    return jax.random.categorical(key, logits, shape=shape).T.astype(dtype)


def gamma(
    shape: Shape,
    alpha: Array,
    beta: Array | float | None = None,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
) -> Array:
    """`tf.random.gamma`."""
    drawn = jax.random.gamma(_next_key(seed), alpha, (*shape, *alpha.shape), dtype)
    return drawn if beta is None else drawn / beta


def poisson(
    shape: Shape, lam: Array, dtype: DTypeLike = np.float32, seed: int | None = None
) -> Array:
    """`tf.random.poisson`."""
    return jax.random.poisson(_next_key(seed), lam, (*shape, *lam.shape)).astype(dtype)


def stateless_poisson(shape: Shape, seed: Array, lam: Array, dtype: DTypeLike = np.int32) -> Array:
    """`tf.random.stateless_poisson`: the same numbers for the same `seed`."""
    return jax.random.poisson(draws.key_of(seed), lam, tuple(shape)).astype(dtype)


def stateless_gamma(
    shape: Shape,
    seed: Array,
    alpha: Array,
    beta: Array | float | None = None,
    dtype: DTypeLike = np.float32,
) -> Array:
    """`tf.random.stateless_gamma`: the same numbers for the same `seed`."""
    drawn = jax.random.gamma(draws.key_of(seed), alpha, tuple(shape), dtype)
    return drawn if beta is None else drawn / beta


def stateless_binomial(
    shape: Shape,
    seed: Array,
    counts: Array,
    probs: Array,
    output_dtype: DTypeLike = np.int32,
) -> Array:
    """`tf.random.stateless_binomial`: the same numbers for the same `seed`."""
    return jax.random.binomial(draws.key_of(seed), counts, probs, tuple(shape)).astype(output_dtype)


def split(seed: Array, num: int = 2, alg: str = "auto_select") -> Array:
    """`tf.random.split`: seeds that depend on a seed, int32 `[num, 2]`."""
    return _seeds_of(jax.random.split(draws.key_of(seed), int(num)))


def fold_in(seed: Array, data: Array, alg: str = "auto_select") -> Array:
    """`tf.random.fold_in`: a seed that depends on a seed and a number."""
    return _seeds_of(jax.random.fold_in(draws.key_of(seed), data))


def _seeds_of(keys: Array) -> Array:
    return jax.lax.bitcast_convert_type(jax.random.key_data(keys), jnp.int32)


def _next_key(seed: int | None) -> Array:
    return draws.next_key(draws.seed_of(seed))
