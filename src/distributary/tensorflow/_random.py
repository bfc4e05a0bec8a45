"""Random numbers from keys, which a seed or a generator gives in every call, step and replica.

They repeat with the same seed.
"""

import inspect
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

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
    draw: Callable[..., Array],
    key: Callable[[Any], Array],
    place: int,
    module: str = "random",
    seed: str = "seed",
    **more: Any,
) -> Callable[..., Array]:
    """Returns a function that draws with the key of one of its arguments.

    Args:
        draw: Function of a key and other arguments.
        key: Function from the argument to the key.
        place: Number of the argument.
        module: The module of TensorFlow that has the function.
        seed: Name of the argument.
        **more: Names and defaults of arguments without an effect, after the others.
    """
    parameters = [*inspect.signature(draw).parameters.values()][1:]
    is_stateful = key is key_of_number
    given = inspect.Parameter(
        seed,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None if is_stateful else inspect.Parameter.empty,
        annotation=int | None if is_stateful else Array,
    )
    parameters.insert(place, given)
    parameters += [given.replace(name=n, default=d, annotation=str) for n, d in more.items()]
    signature = inspect.Signature(parameters)

    def operation(*args: Any, **kwargs: Any) -> Array:
        values = signature.bind(*args, **kwargs).arguments
        drawn = key(values.pop(seed, None))
        return draw(drawn, **{name: v for name, v in values.items() if name not in more})

    name, same = draw.__name__.lstrip("_"), "the same numbers for the same `seed`."
    text = f"{name}`." if is_stateful else f"stateless_{name}`: {same}"
    operation.__doc__ = f"`tf.{module}.{text}"
    operation.__signature__ = signature  # type: ignore[attr-defined]
    return operation


def key_of(seed: Array) -> Array:
    """Returns the key that stands for a seed of two integers."""
    first, second = seed
    return jax.random.fold_in(jax.random.key(first), second)


def _normal(
    key: Array, shape: Shape, mean: Scale = 0.0, stddev: Scale = 1.0, dtype: DTypeLike = np.float32
) -> Array:
    """Returns numbers of a normal distribution."""
    return jax.random.normal(key, tuple(shape), canonical(dtype)) * stddev + mean


def _truncated_normal(
    key: Array, shape: Shape, mean: Scale = 0.0, stddev: Scale = 1.0, dtype: DTypeLike = np.float32
) -> Array:
    """Returns numbers of a normal distribution, within two deviations."""
    drawn = jax.random.truncated_normal(key, -2, 2, tuple(shape), canonical(dtype))
    return drawn * stddev + mean


def _uniform(
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


def _shuffle(key: Array, value: Array) -> Array:
    """Returns an array in another order along dim 0."""
    return jax.random.permutation(key, value)


def _categorical(key: Array, logits: Array, num_samples: int, dtype: DTypeLike = np.int64) -> Array:
    """Returns numbers of classes, `[batch, num_samples]`."""
    shape = (int(num_samples), logits.shape[0])
    return jax.random.categorical(key, logits, shape=shape).T.astype(canonical(dtype))


def _gamma(
    key: Array, shape: Shape, alpha: Array, beta: Scale | None = None, dtype: DTypeLike = np.float32
) -> Array:
    """Returns numbers of a gamma distribution."""
    drawn = jax.random.gamma(key, alpha, tuple(shape), dtype)
    return drawn if beta is None else drawn / beta


def _poisson(key: Array, shape: Shape, lam: Array, dtype: DTypeLike = np.int32) -> Array:
    """Returns numbers of a Poisson distribution."""
    return jax.random.poisson(key, lam, tuple(shape)).astype(dtype)


def _binomial(
    key: Array, shape: Shape, counts: ArrayLike, probs: ArrayLike, dtype: DTypeLike = np.int32
) -> Array:
    """Returns how many of `counts` draws succeed."""
    return jax.random.binomial(key, counts, probs, tuple(shape)).astype(canonical(dtype))


_ALG: dict[str, Any] = {"name": None, "alg": "auto_select"}
normal = seeded(_normal, key_of_number, 4)
truncated_normal = seeded(_truncated_normal, key_of_number, 4)
uniform = seeded(_uniform, key_of_number, 4)
shuffle = seeded(_shuffle, key_of_number, 1)
categorical = seeded(_categorical, key_of_number, 3)
stateless_normal = seeded(_normal, key_of, 1, **_ALG)
stateless_truncated_normal = seeded(_truncated_normal, key_of, 1, **_ALG)
stateless_uniform = seeded(_uniform, key_of, 1, **_ALG)
stateless_categorical = seeded(_categorical, key_of, 2)
stateless_gamma = seeded(_gamma, key_of, 1)
stateless_poisson = seeded(_poisson, key_of, 1)


def gamma(
    shape: Shape,
    alpha: Array,
    beta: Array | float | None = None,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
) -> Array:
    """`tf.random.gamma`."""
    return _gamma(key_of_number(seed), (*shape, *alpha.shape), alpha, beta, dtype)


def poisson(
    shape: Shape, lam: Array, dtype: DTypeLike = np.float32, seed: int | None = None
) -> Array:
    """`tf.random.poisson`."""
    return _poisson(key_of_number(seed), (*shape, *lam.shape), lam, dtype)


def stateless_binomial(
    shape: Shape, seed: Array, counts: Array, probs: Array, output_dtype: DTypeLike = np.int32
) -> Array:
    """`tf.random.stateless_binomial`: the same numbers for the same `seed`."""
    return _binomial(key_of(seed), shape, counts, probs, output_dtype)


def stateless_shuffle(value: Array, seed: Array, alg: str = "auto_select") -> Array:
    """`tf.random.experimental.stateless_shuffle`: the same order for the same `seed`."""
    return _shuffle(key_of(seed), value)


def split(seed: Array, num: int = 2, alg: str = "auto_select") -> Array:
    """`tf.random.split`: seeds that depend on a seed, int32 `[num, 2]`."""
    return _seeds_of(jax.random.split(key_of(seed), int(num)))


def fold_in(seed: Array, data: Array, alg: str = "auto_select") -> Array:
    """`tf.random.fold_in`: a seed that depends on a seed and a number."""
    return _seeds_of(jax.random.fold_in(key_of(seed), data))


def _seeds_of(keys: Array) -> Array:
    return jax.lax.bitcast_convert_type(jax.random.key_data(keys), jnp.int32)


def _method(draw: Callable[..., Array]) -> Callable[..., Array]:
    """Returns a method of generators that draws with the next key."""
    method = seeded(draw, lambda generator: next_key(generator._seeds), 0, seed="self", name=None)
    method.__doc__, method.__name__ = draw.__doc__, draw.__name__.lstrip("_")
    return method


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
            self._seeds = import_keras().random.SeedGenerator(0)
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
        generator = cls.from_seed(key)
        generator.skip(counter)
        return generator

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

    normal = _method(_normal)
    truncated_normal = _method(_truncated_normal)
    uniform = _method(_uniform)
    binomial = _method(_binomial)

    def uniform_full_int(
        self, shape: Shape, dtype: DTypeLike = np.uint64, name: str | None = None
    ) -> Array:
        """Returns any whole numbers of the dtype."""
        bits = jax.random.bits(next_key(self._seeds), tuple(shape))
        return jax.lax.bitcast_convert_type(bits, canonical(dtype))


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
