"""Keras variables under a strategy."""

from collections.abc import Callable
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary.context import get_strategy, has_strategy
from distributary.errors import UnsupportedError
from distributary.topology import make_mesh


def sharding_of(strategy: Any) -> Any:
    """Where the variables of a strategy lie; None leaves it to JAX.

    Raises:
        UnsupportedError: if the strategy spans several workers.
    """
    if strategy.extended.num_workers > 1:
        raise UnsupportedError(
            f"Keras variables and models do not work under {strategy!r} yet. Write the training"
            " loop with distributary.Variable and strategy.run, or train on one machine with"
            " MirroredStrategy."
        )
    sharding = strategy.extended.variable_layout().replicated
    if sharding is None or isinstance(sharding, NamedSharding):
        return sharding
    # Keras asks shardings for their mesh.
    return NamedSharding(make_mesh(tuple(sharding.device_set)), P())


def initialize_layout(original: Callable[..., Any]) -> Callable[..., Any]:
    """Variables created in a scope get a copy on every device, and keep it when assigned."""

    def _initialize_layout(self: Any) -> None:
        original(self)
        if self._layout is None and has_strategy():
            self._distributary_strategy = get_strategy()
            self._layout = sharding_of(get_strategy())

    return _initialize_layout


def place(variable: Any, sharding: Any) -> None:
    """Moves a variable created elsewhere to the devices of a strategy."""
    if sharding is None:
        return
    variable._layout = sharding
    value = variable._value
    if value is not None and value.sharding.device_set != sharding.device_set:
        with jax.ensure_compile_time_eval():  # a function may be being traced
            variable._value = jax.device_put(value, sharding)


def refuse(original: Callable[..., Any]) -> Callable[..., Any]:
    """With another backend than JAX, variables cannot be created in a scope."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if has_strategy():
            raise UnsupportedError(
                f"Keras runs on the backend {keras.backend.backend()!r}, but {get_strategy()!r}"
                " distributes JAX. Set the environment variable KERAS_BACKEND=jax before keras is"
                ' imported, for example with os.environ["KERAS_BACKEND"] = "jax" in the first lines'
                " of the script."
            )
        original(self, *args, **kwargs)

    return __init__
