"""Operations of `tf.random`; see `Operation` for how arguments are converted.

Their numbers differ in every call, step and replica, and repeat with the same seed.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distributary.tensorflow import _draws as draws
from distributary.tensorflow._operations import Shape


def _seeded(
    draw: Callable[..., Array], key: Callable[[Any], Array], place: int, **more: Any
) -> Callable[..., Array]:
    """Returns a function that draws with the key of its argument `seed`.

    Args:
        draw: Function of a key and other arguments.
        key: Function from a seed to the key.
        place: Number of the argument `seed` among them.
        **more: Names and defaults of arguments without an effect, after the others.
    """
    parameters = [*inspect.signature(draw).parameters.values()][1:]
    is_stateful = key is _next_key
    seed = inspect.Parameter(
        "seed",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None if is_stateful else inspect.Parameter.empty,
        annotation=int | None if is_stateful else Array,
    )
    parameters.insert(place, seed)
    parameters += [seed.replace(name=n, default=d, annotation=str) for n, d in more.items()]

    def operation(*values: Any) -> Array:
        rest = list(values[: len(values) - len(more)])
        return draw(key(rest.pop(place)), *rest)

    same = "the same numbers for the same `seed`."
    text = f"{draw.__name__}`." if is_stateful else f"stateless_{draw.__name__}`: {same}"
    operation.__doc__ = f"`tf.random.{text}"
    operation.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return operation


def _next_key(seed: int | None) -> Array:
    return draws.next_key(draws.seed_of(seed))


_ALG = {"name": None, "alg": "auto_select"}
normal = _seeded(draws.normal, _next_key, 4)
truncated_normal = _seeded(draws.truncated_normal, _next_key, 4)
uniform = _seeded(draws.uniform, _next_key, 4)
shuffle = _seeded(draws.shuffle, _next_key, 1)
categorical = _seeded(draws.categorical, _next_key, 3)
stateless_normal = _seeded(draws.normal, draws.key_of, 1, **_ALG)
stateless_truncated_normal = _seeded(draws.truncated_normal, draws.key_of, 1, **_ALG)
stateless_uniform = _seeded(draws.uniform, draws.key_of, 1, **_ALG)
stateless_categorical = _seeded(draws.categorical, draws.key_of, 2)
stateless_gamma = _seeded(draws.gamma, draws.key_of, 1)
stateless_poisson = _seeded(draws.poisson, draws.key_of, 1)


def gamma(
    shape: Shape,
    alpha: Array,
    beta: Array | float | None = None,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
) -> Array:
    """`tf.random.gamma`."""
    return draws.gamma(_next_key(seed), (*shape, *alpha.shape), alpha, beta, dtype)


def poisson(
    shape: Shape, lam: Array, dtype: DTypeLike = np.float32, seed: int | None = None
) -> Array:
    """`tf.random.poisson`."""
    return draws.poisson(_next_key(seed), (*shape, *lam.shape), lam, dtype)


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
