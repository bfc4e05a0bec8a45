"""Random numbers from keys, and the keys that a seed gives in every call, step and replica."""

import inspect
import random
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.context import get_strategy
from distributary.devices import inside_jax_trace
from distributary.errors import ContextError, InvalidValueError
from distributary.keras_bridge import import_keras
from distributary.tensorflow._operations import Shape, canonical
from distributary.tracing import current_scope, infers_shapes

Scale: TypeAlias = Array | float

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
    if current_scope() is None and inside_jax_trace() and not infers_shapes():
        raise ContextError(
            "tf.random and tf.nn.dropout keep a state, which a function that jax.jit compiles"
            " cannot change. Compile it with tf.function; create a Keras model in the scope of a"
            ' strategy, such as tf.distribute.OneDeviceStrategy("cpu:0"). Or use jax.random with a'
            " key, keras.random with a SeedGenerator."
        )
    seeds = _generators.setdefault(get_strategy(), {})
    if seed not in seeds:
        start = random.getrandbits(31) if _global_seed is None and seed is None else 0
        mixed = np.random.SeedSequence([start, _global_seed or 0, seed or 0, seed is not None])
        seeds[seed] = import_keras().random.SeedGenerator(int(mixed.generate_state(1)[0] >> 1))
    return seeds[seed]


def next_key(seeds: Any) -> Array:
    """Returns the next key of a `SeedGenerator` of Keras."""
    return jax.random.wrap_key_data(jnp.asarray(seeds.next()))


def key_of_number(seed: int | None) -> Array:
    """Returns the key of the next call with an operation's seed."""
    return next_key(seed_of(seed))


def seeded(
    draw: Callable[..., Array], key: Callable[[Any], Array], place: int, module: str, **more: Any
) -> Callable[..., Array]:
    """Returns a function that draws with the key of its argument `seed`.

    Args:
        draw: Function of a key and other arguments.
        key: Function from a seed to the key.
        place: Number of the argument `seed` among them.
        module: The module that defines the function, such as `"distributary.tensorflow._random"`.
        **more: Names and defaults of arguments without an effect, after the others.
    """
    parameters = [*inspect.signature(draw).parameters.values()][1:]
    is_stateful = key is key_of_number
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

    name, same = draw.__name__.lstrip("_"), "the same numbers for the same `seed`."
    text = f"{name}`." if is_stateful else f"stateless_{name}`: {same}"
    operation.__doc__ = f"`tf.{module.rpartition('._')[2]}.{text}"
    operation.__module__ = module
    operation.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return operation


def key_of(seed: Array) -> Array:
    """Returns the key that stands for a seed of two integers."""
    first, second = seed
    return jax.random.fold_in(jax.random.key(first), second)


def normal(
    key: Array, shape: Shape, mean: Scale = 0.0, stddev: Scale = 1.0, dtype: DTypeLike = np.float32
) -> Array:
    """Returns numbers of a normal distribution."""
    return jax.random.normal(key, tuple(shape), canonical(dtype)) * stddev + mean


def truncated_normal(
    key: Array, shape: Shape, mean: Scale = 0.0, stddev: Scale = 1.0, dtype: DTypeLike = np.float32
) -> Array:
    """Returns numbers of a normal distribution, within two deviations."""
    drawn = jax.random.truncated_normal(key, -2, 2, tuple(shape), canonical(dtype))
    return drawn * stddev + mean


def uniform(
    key: Array,
    shape: Shape,
    minval: Scale = 0,
    maxval: Scale | None = None,
    dtype: DTypeLike = np.float32,
) -> Array:
    """Returns numbers from `minval` up to but excluding `maxval`; integers need `maxval`."""
    dtype, sizes = canonical(dtype), tuple(shape)
    if not jnp.issubdtype(dtype, jnp.integer):
        return jax.random.uniform(key, sizes, dtype, minval, 1 if maxval is None else maxval)
    if maxval is None:
        raise InvalidValueError(f"tf.random: maxval is None, expected a number for {dtype}.")
    return jax.random.randint(key, sizes, minval, maxval, dtype)


def shuffle(key: Array, value: Array) -> Array:
    """Returns an array in another order along dim 0."""
    return jax.random.permutation(key, value)


def categorical(key: Array, logits: Array, num_samples: int, dtype: DTypeLike = np.int64) -> Array:
    """Returns numbers of classes, `[batch, num_samples]`."""
    shape = (int(num_samples), logits.shape[0])
    return jax.random.categorical(key, logits, shape=shape).T.astype(canonical(dtype))


def gamma(
    key: Array, shape: Shape, alpha: Array, beta: Scale | None = None, dtype: DTypeLike = np.float32
) -> Array:
    """Returns numbers of a gamma distribution."""
    drawn = jax.random.gamma(key, alpha, tuple(shape), dtype)
    return drawn if beta is None else drawn / beta


def poisson(key: Array, shape: Shape, lam: Array, dtype: DTypeLike = np.int32) -> Array:
    """Returns numbers of a Poisson distribution."""
    return jax.random.poisson(key, lam, tuple(shape)).astype(dtype)


def binomial(
    key: Array, shape: Shape, counts: ArrayLike, probs: ArrayLike, dtype: DTypeLike = np.int32
) -> Array:
    """Returns how many of `counts` draws succeed."""
    return jax.random.binomial(key, counts, probs, tuple(shape)).astype(canonical(dtype))


def stateless_shuffle(value: Array, seed: Array, alg: str = "auto_select") -> Array:
    """`tf.random.experimental.stateless_shuffle`: the same order for the same `seed`."""
    return shuffle(key_of(seed), value)
