"""Random generators, whose state differs in every call, step and replica."""

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distributary.errors import InvalidValueError
from distributary.keras_bridge import import_keras
from distributary.tensorflow import _draws as draws
from distributary.tensorflow._operations import Shape, canonical


def _method(draw: Callable[..., Array]) -> Callable[..., Array]:
    """Returns a method of generators that draws with the next key."""
    _, *parameters = inspect.signature(draw).parameters.values()
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    ends = inspect.Parameter("self", place), inspect.Parameter("name", place, default=None)
    signature = inspect.Signature([ends[0], *parameters, ends[1]])

    def method(*args: Any, **kwargs: Any) -> Array:
        generator, *values = signature.bind(*args, **kwargs).arguments.items()
        return draw(draws.next_key(generator[1]._seeds), **{k: v for k, v in values if k != "name"})

    method.__doc__, method.__name__ = draw.__doc__, draw.__name__
    method.__signature__ = signature  # type: ignore[attr-defined]
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

    normal = _method(draws.normal)
    truncated_normal = _method(draws.truncated_normal)
    uniform = _method(draws.uniform)
    binomial = _method(draws.binomial)

    def uniform_full_int(
        self, shape: Shape, dtype: DTypeLike = np.uint64, name: str | None = None
    ) -> Array:
        """Returns any whole numbers of the dtype."""
        bits = jax.random.bits(draws.next_key(self._seeds), tuple(shape))
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
