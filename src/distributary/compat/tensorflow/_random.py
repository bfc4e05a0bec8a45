"""Random numbers that differ in every call, step and replica, and repeat with the same seed.

See `Operation` for how arguments are converted.
"""

import random
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distributary.compat.tensorflow._operations import Shape, resolve
from distributary.context import get_strategy
from distributary.errors import ContextError, InvalidValueError
from distributary.topology import inside_jax_trace
from distributary.tracing import current_scope

# A generator is a Keras variable, which belongs to one strategy.
_generators: "weakref.WeakKeyDictionary[Any, dict[int | None, Any]]" = weakref.WeakKeyDictionary()
_global_seed: int | None = None


def set_seed(seed: int | None) -> None:
    """Restarts the random numbers of `tf.random`, which are not the same as TensorFlow's.

    With None, they start from a different number in every process.

    The initial weights and dropout layers of Keras depend on `keras.utils.set_random_seed`, as with
    TensorFlow.

    Source: `tf.random.set_seed`.
    """
    global _global_seed
    _global_seed = None if seed is None else int(seed)
    _generators.clear()


def seed_of(seed: int | None) -> Any:
    """Returns the random generator of the current strategy for a `seed`.

    Its state is a variable, so that a compiled step draws different numbers each time.

    Raises:
        ContextError: inside a `jax.jit` of the user, which would repeat the same numbers.
    """
    if current_scope() is None and inside_jax_trace():
        raise ContextError(
            "tf.random and tf.nn.dropout keep a state, which a function that jax.jit compiles"
            " cannot change. Compile it with tf.function, or use jax.random with a key."
        )
    own = _generators.setdefault(get_strategy(), {})
    if seed not in own:
        start = random.getrandbits(31) if _global_seed is None and seed is None else 0
        mixed = np.random.SeedSequence([start, _global_seed or 0, seed or 0, seed is not None])
        own[seed] = resolve("keras.random.SeedGenerator")(int(mixed.generate_state(1)[0] >> 1))
    return own[seed]


def normal(
    shape: Shape,
    mean: Array | float = 0.0,
    stddev: Array | float = 1.0,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
) -> Array:
    """`tf.random.normal`."""
    return _drawn("normal", shape, dtype, seed) * stddev + mean


def truncated_normal(
    shape: Shape,
    mean: Array | float = 0.0,
    stddev: Array | float = 1.0,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
) -> Array:
    """`tf.random.truncated_normal`."""
    return _drawn("truncated_normal", shape, dtype, seed) * stddev + mean


def uniform(
    shape: Shape,
    minval: Array | float = 0,
    maxval: Array | float | None = None,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
) -> Array:
    """`tf.random.uniform`: from `minval` up to but excluding `maxval`; integers need `maxval`."""
    if _is_integer(dtype, maxval):
        draw = resolve("keras.random.randint")
        return draw(tuple(shape), minval, maxval, str(dtype), seed_of(seed))
    drawn = _drawn("uniform", shape, dtype, seed)
    return drawn * ((1 if maxval is None else maxval) - minval) + minval


def shuffle(value: Array, seed: int | None = None) -> Array:
    """`tf.random.shuffle`: along dim 0."""
    return resolve("keras.random.shuffle")(value, 0, seed_of(seed))


def categorical(
    logits: Array, num_samples: int, dtype: DTypeLike = np.int64, seed: int | None = None
) -> Array:
    """`tf.random.categorical`."""
    return resolve("keras.random.categorical")(logits, num_samples, str(dtype), seed_of(seed))


def stateless_normal(
    shape: Shape,
    seed: Array,
    mean: Array | float = 0.0,
    stddev: Array | float = 1.0,
    dtype: DTypeLike = np.float32,
) -> Array:
    """`tf.random.stateless_normal`: the same numbers for the same `seed` of two integers."""
    return jax.random.normal(_key(seed), tuple(shape), dtype) * stddev + mean


def stateless_uniform(
    shape: Shape,
    seed: Array,
    minval: Array | float = 0,
    maxval: Array | float | None = None,
    dtype: DTypeLike = np.float32,
) -> Array:
    """`tf.random.stateless_uniform`: the same numbers for the same `seed` of two integers."""
    if _is_integer(dtype, maxval):
        assert maxval is not None
        return jax.random.randint(_key(seed), tuple(shape), minval, maxval, dtype)
    last = 1 if maxval is None else maxval
    return jax.random.uniform(_key(seed), tuple(shape), dtype, minval, last)


def _is_integer(dtype: DTypeLike, maxval: Array | float | None) -> bool:
    """Returns whether to draw integers, which need a `maxval`."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if is_integer and maxval is None:
        raise InvalidValueError(f"tf.random: maxval is None, expected a number for {dtype}.")
    return is_integer


def _drawn(name: str, shape: Shape, dtype: DTypeLike, seed: int | None) -> Array:
    draw = resolve(f"keras.random.{name}")
    return draw(tuple(shape), dtype=str(dtype), seed=seed_of(seed))


def _key(seed: Array) -> Array:
    first, second = seed
    return jax.random.fold_in(jax.random.key(first), second)
