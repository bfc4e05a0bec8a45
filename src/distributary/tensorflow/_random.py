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

_ALG = {"name": None, "alg": "auto_select"}
normal = draws.seeded(draws.normal, draws.key_of_number, 4, __name__)
truncated_normal = draws.seeded(draws.truncated_normal, draws.key_of_number, 4, __name__)
uniform = draws.seeded(draws.uniform, draws.key_of_number, 4, __name__)
shuffle = draws.seeded(draws.shuffle, draws.key_of_number, 1, __name__)
categorical = draws.seeded(draws.categorical, draws.key_of_number, 3, __name__)
stateless_normal = draws.seeded(draws.normal, draws.key_of, 1, __name__, **_ALG)
stateless_truncated_normal = draws.seeded(draws.truncated_normal, draws.key_of, 1, __name__, **_ALG)
stateless_uniform = draws.seeded(draws.uniform, draws.key_of, 1, __name__, **_ALG)
stateless_categorical = draws.seeded(draws.categorical, draws.key_of, 2, __name__)
stateless_gamma = draws.seeded(draws.gamma, draws.key_of, 1, __name__)
stateless_poisson = draws.seeded(draws.poisson, draws.key_of, 1, __name__)


def gamma(
    shape: Shape,
    alpha: Array,
    beta: Array | float | None = None,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
) -> Array:
    """`tf.random.gamma`."""
    return draws.gamma(draws.key_of_number(seed), (*shape, *alpha.shape), alpha, beta, dtype)


def poisson(
    shape: Shape, lam: Array, dtype: DTypeLike = np.float32, seed: int | None = None
) -> Array:
    """`tf.random.poisson`."""
    return draws.poisson(draws.key_of_number(seed), (*shape, *lam.shape), lam, dtype)


def stateless_binomial(
    shape: Shape, seed: Array, counts: Array, probs: Array, output_dtype: DTypeLike = np.int32
) -> Array:
    """`tf.random.stateless_binomial`: the same numbers for the same `seed`."""
    return draws.binomial(draws.key_of(seed), shape, counts, probs, output_dtype)


def split(seed: Array, num: int = 2, alg: str = "auto_select") -> Array:
    """`tf.random.split`: seeds that depend on a seed, int32 `[num, 2]`."""
    return _seeds_of(jax.random.split(draws.key_of(seed), int(num)))


def fold_in(seed: Array, data: Array, alg: str = "auto_select") -> Array:
    """`tf.random.fold_in`: a seed that depends on a seed and a number."""
    return _seeds_of(jax.random.fold_in(draws.key_of(seed), data))


def _seeds_of(keys: Array) -> Array:
    return jax.lax.bitcast_convert_type(jax.random.key_data(keys), jnp.int32)
