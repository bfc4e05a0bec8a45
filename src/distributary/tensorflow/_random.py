"""Random numbers that differ in every call, step and replica, and repeat with the same seed.

See `Operation` for how arguments are converted.
"""

import random
import weakref
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distributary.context import get_strategy
from distributary.devices import inside_jax_trace
from distributary.errors import ContextError, InvalidValueError
from distributary.tensorflow._operations import Shape, resolve
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


@final
class Generator:
    """Random numbers from a state of its own, which differ in every call, step and replica.

    They are not those of TensorFlow. The state belongs to the strategy in whose scope the generator
    is made, and a checkpoint saves it.

    Args:
        copy_from: A generator to begin like.
        state: What `state` of a generator returned.
        alg: No effect: JAX's algorithm.

    Source: `tf.random.Generator`.
    """

    #: Number of TensorFlow's algorithm; there is one.
    algorithm = 1

    def __init__(
        self, copy_from: "Generator | None" = None, state: object = None, alg: object = None
    ) -> None:
        if copy_from is None and state is None:
            raise InvalidValueError(
                "tf.random.Generator: there is neither copy_from nor state. Use"
                " tf.random.Generator.from_seed(seed)."
            )
        with jax.ensure_compile_time_eval():
            self._seeds = resolve("keras.random.SeedGenerator")(0)
        self.reset(state if copy_from is None else copy_from.state)

    @classmethod
    def from_seed(cls, seed: int | Sequence[int], alg: object = None) -> "Generator":
        """Makes a generator from a number or several."""
        return cls(state=_state_of(seed))

    @classmethod
    def from_non_deterministic_state(cls, alg: object = None) -> "Generator":
        """Makes a generator that begins differently in every process."""
        return cls(state=_state_of(random.getrandbits(62)))

    @classmethod
    def from_state(cls, state: object, alg: object) -> "Generator":
        """Makes a generator that goes on where another one was."""
        return cls(state=state)

    @classmethod
    def from_key_counter(cls, key: int, counter: object, alg: object) -> "Generator":
        """Makes a generator from a number, after `counter` calls."""
        made = cls.from_seed(key)
        made.skip(counter)
        return made

    @property
    def state(self) -> Any:
        """The state, a variable uint32 `[2]`."""
        return self._seeds.state

    @property
    def key(self) -> Any:
        """The part of the state that stays the same."""
        return self.state.value[0]

    def reset(self, state: object) -> None:
        """Goes to a state."""
        self.state.assign(np.asarray(state, np.uint32))

    def reset_from_seed(self, seed: int | Sequence[int]) -> None:
        """Begins anew from a number or several."""
        self.reset(_state_of(seed))

    def reset_from_key_counter(self, key: int, counter: object) -> None:
        """Begins anew from a number, after `counter` calls."""
        self.reset_from_seed(key)
        self.skip(counter)

    def skip(self, delta: Any) -> None:
        """Goes on as after `delta` calls."""
        calls = np.array([0, np.sum(delta)], np.uint32)
        self.reset(np.asarray(self.state) + calls)

    def make_seeds(self, count: int = 1) -> Array:
        """Returns seeds for functions such as `tf.random.stateless_normal`, `[2, count]`."""
        return self.uniform_full_int((2, count), np.int32)

    def split(self, count: int = 1) -> "list[Generator]":
        """Returns generators that begin at random."""
        return [Generator.from_seed(np.abs(seed)) for seed in np.asarray(self.make_seeds(count)).T]

    def normal(
        self,
        shape: Shape,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: DTypeLike = np.float32,
        name: str | None = None,
    ) -> Array:
        """Returns numbers of a normal distribution."""
        return _draw("normal", shape, dtype, self._seeds) * stddev + mean

    def truncated_normal(
        self,
        shape: Shape,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: DTypeLike = np.float32,
        name: str | None = None,
    ) -> Array:
        """Returns numbers of a normal distribution, within two deviations."""
        return _draw("truncated_normal", shape, dtype, self._seeds) * stddev + mean

    def uniform(
        self,
        shape: Shape,
        minval: object = 0,
        maxval: object = None,
        dtype: DTypeLike = np.float32,
        name: str | None = None,
    ) -> Array:
        """Returns numbers from `minval` up to but excluding `maxval`."""
        return _uniform(shape, minval, maxval, jax.dtypes.canonicalize_dtype(dtype), self._seeds)

    def uniform_full_int(
        self, shape: Shape, dtype: DTypeLike = np.uint64, name: str | None = None
    ) -> Array:
        """Returns any whole numbers of the dtype."""
        bits = jax.random.bits(_key_of(self._seeds), tuple(shape))
        return jax.lax.bitcast_convert_type(bits, jax.dtypes.canonicalize_dtype(dtype))

    def binomial(
        self,
        shape: Shape,
        counts: object,
        probs: object,
        dtype: DTypeLike = np.int32,
        name: str | None = None,
    ) -> Array:
        """Returns how many of `counts` draws succeed."""
        draw = resolve("keras.random.binomial")
        return draw(tuple(shape), counts, probs, seed=self._seeds).astype(dtype)


def _state_of(seed: object) -> np.ndarray:
    """Returns the state of a generator that begins with a number or several."""
    mixed = np.random.SeedSequence([int(one) for one in np.atleast_1d(np.asarray(seed))])
    return np.array([mixed.generate_state(1)[0], 0], np.uint32)


_global_generator: list[Generator] = []


def get_global_generator() -> Generator:
    """Returns the generator of `set_global_generator`, or one that begins differently each time.

    Source: `tf.random.get_global_generator`.
    """
    if not _global_generator:
        _global_generator.append(Generator.from_non_deterministic_state())
    return _global_generator[0]


def set_global_generator(generator: Generator) -> None:
    """Sets what `get_global_generator` returns.

    Source: `tf.random.set_global_generator`.
    """
    _global_generator[:] = [generator]


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
    return _uniform(shape, minval, maxval, dtype, seed_of(seed))


def _uniform(shape: Shape, minval: Any, maxval: Any, dtype: DTypeLike, seeds: object) -> Array:
    if _is_integer(dtype, maxval):
        draw = resolve("keras.random.randint")
        return draw(tuple(shape), minval, maxval, str(dtype), seeds)
    drawn = _draw("uniform", shape, dtype, seeds)
    return drawn * ((1 if maxval is None else maxval) - minval) + minval


def shuffle(value: Array, seed: int | None = None) -> Array:
    """`tf.random.shuffle`: along dim 0."""
    return resolve("keras.random.shuffle")(value, 0, seed_of(seed))


def flip_randomly(image: Array, seed: int | None = None) -> Array:
    """`tf.image.random_flip_left_right`: one image, or every image of a batch by itself."""
    draw = _drawn("uniform", (*image.shape[:-3], 1, 1, 1), np.float32, seed)
    return jnp.where(draw < 0.5, jnp.flip(image, -2), image)


def crop_randomly(value: Array, size: Shape, seed: int | None = None) -> Array:
    """`tf.image.random_crop`: a part of this size."""
    free = [own - int(part) for own, part in zip(value.shape, size, strict=True)]
    if min(free) < 0:
        raise InvalidValueError(
            f"tf.image.random_crop: size is {tuple(size)}, but the image has {value.shape}."
        )
    draws = _drawn("uniform", (value.ndim,), np.float32, seed)
    starts = [jnp.int32(draws[i] * (room + 1)) for i, room in enumerate(free)]
    return jax.lax.dynamic_slice(value, starts, [int(part) for part in size])


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
    name: str | None = None,
    alg: str = "auto_select",
) -> Array:
    """`tf.random.stateless_normal`: the same numbers for the same `seed` of two integers."""
    return jax.random.normal(_key(seed), tuple(shape), dtype) * stddev + mean


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
    if _is_integer(dtype, maxval):
        assert maxval is not None
        return jax.random.randint(_key(seed), tuple(shape), minval, maxval, dtype)
    last = 1 if maxval is None else maxval
    return jax.random.uniform(_key(seed), tuple(shape), dtype, minval, last)


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
    return jax.random.truncated_normal(_key(seed), -2, 2, tuple(shape), dtype) * stddev + mean


def stateless_categorical(
    logits: Array,
    num_samples: int,
    seed: Array,
    dtype: DTypeLike = np.int64,
) -> Array:
    """`tf.random.stateless_categorical`: the same numbers for the same `seed`."""
    shape = (int(num_samples), logits.shape[0])
    return jax.random.categorical(_key(seed), logits, shape=shape).T.astype(dtype)


def stateless_shuffle(value: Array, seed: Array, alg: str = "auto_select") -> Array:
    """`tf.random.experimental.stateless_shuffle`: the same order for the same `seed`."""
    return jax.random.permutation(_key(seed), value)


def gamma(
    shape: Shape,
    alpha: Array,
    beta: Array | float | None = None,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
) -> Array:
    """`tf.random.gamma`."""
    sizes = (*shape, *alpha.shape)
    ones = jnp.broadcast_to(alpha, sizes)
    drawn = resolve("keras.random.gamma")(sizes, ones, str(dtype), seed_of(seed))
    return drawn if beta is None else drawn / beta


def poisson(
    shape: Shape, lam: Array, dtype: DTypeLike = np.float32, seed: int | None = None
) -> Array:
    """`tf.random.poisson`."""
    return _poisson(_key_of(seed_of(seed)), shape, lam, dtype)


def stateless_poisson(shape: Shape, seed: Array, lam: Array, dtype: DTypeLike = np.int32) -> Array:
    """`tf.random.stateless_poisson`: the same numbers for the same `seed`."""
    sizes = tuple(shape)
    return jax.random.poisson(_key(seed), lam, sizes).astype(dtype)


def _poisson(key: Array, shape: Shape, lam: Array, dtype: DTypeLike) -> Array:
    return jax.random.poisson(key, lam, (*shape, *lam.shape)).astype(dtype)


def stateless_gamma(
    shape: Shape,
    seed: Array,
    alpha: Array,
    beta: Array | float | None = None,
    dtype: DTypeLike = np.float32,
) -> Array:
    """`tf.random.stateless_gamma`: the same numbers for the same `seed`."""
    drawn = jax.random.gamma(_key(seed), alpha, tuple(shape), dtype)
    return drawn if beta is None else drawn / beta


def stateless_binomial(
    shape: Shape,
    seed: Array,
    counts: Array,
    probs: Array,
    output_dtype: DTypeLike = np.int32,
) -> Array:
    """`tf.random.stateless_binomial`: the same numbers for the same `seed`."""
    return jax.random.binomial(_key(seed), counts, probs, tuple(shape)).astype(output_dtype)


def split(seed: Array, num: int = 2, alg: str = "auto_select") -> Array:
    """`tf.random.split`: seeds that depend on a seed, int32 `[num, 2]`."""
    return _seeds_of(jax.random.split(_key(seed), int(num)))


def fold_in(seed: Array, data: Array, alg: str = "auto_select") -> Array:
    """`tf.random.fold_in`: a seed that depends on a seed and a number."""
    return _seeds_of(jax.random.fold_in(_key(seed), data))


def _seeds_of(keys: Array) -> Array:
    return jax.lax.bitcast_convert_type(jax.random.key_data(keys), jnp.int32)


def _is_integer(dtype: DTypeLike, maxval: Array | float | None) -> bool:
    """Returns whether to draw integers, which need a `maxval`."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if is_integer and maxval is None:
        raise InvalidValueError(f"tf.random: maxval is None, expected a number for {dtype}.")
    return is_integer


def _drawn(name: str, shape: Shape, dtype: DTypeLike, seed: int | None) -> Array:
    return _draw(name, shape, dtype, seed_of(seed))


def _draw(name: str, shape: Shape, dtype: DTypeLike, seeds: object) -> Array:
    draw = resolve(f"keras.random.{name}")
    return draw(tuple(shape), dtype=str(np.dtype(dtype)), seed=seeds)


def _key_of(seeds: Any) -> Array:
    """Returns the next key of a generator of Keras."""
    return jax.random.wrap_key_data(jnp.asarray(seeds.next()))


def _key(seed: Array) -> Array:
    first, second = seed
    return jax.random.fold_in(jax.random.key(first), second)
