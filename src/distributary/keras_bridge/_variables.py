"""Keras variables under a strategy."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import NamedSharding, PartitionSpec as P
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from distributary.context import get_strategy, has_strategy
from distributary.dispatch import JobEvent, fetch_whole, job_programs
from distributary.errors import UnsupportedError
from distributary.topology import (
    in_device_memory,
    in_host_memory,
    local_copy,
    make_mesh,
    put_replicated,
    put_sharded,
    shard_dim,
)
from distributary.tracing import describe_value
from distributary.variables import ShardedVariable, Variable, colocated_with

# The classes that keep the values of Keras variables on servers.
ON_SERVERS = (Variable, ShardedVariable)


def sharding_of(strategy: Any) -> Any:
    """Returns the sharding of the variables of a strategy; None leaves it to JAX."""
    sharding = strategy.extended.variable_layout().replicated
    if sharding is None or isinstance(sharding, NamedSharding):
        return sharding
    return _with_mesh(sharding)


@functools.lru_cache(maxsize=32)
def _with_mesh(sharding: Any) -> NamedSharding:
    # Keras needs the mesh of a sharding.
    return NamedSharding(make_mesh(tuple(sharding.device_set)), P())


def initialize_layout(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives variables created in a scope a copy on every device, which assignments keep."""

    def _initialize_layout(self: Any) -> None:
        original(self)
        if self._layout is None and has_strategy():
            strategy = get_strategy()
            self._distributary_strategy = strategy
            if keeps_on_servers(strategy):
                return
            # With several workers, each one computes the value, see `initialize`.
            if strategy.extended.num_workers == 1:
                self._layout = sharding_of(strategy)

    return _initialize_layout


def initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives variables created in a scope the chief's value on all workers."""

    def _initialize(self: Any, value: Any) -> None:
        if has_strategy() and keeps_on_servers(get_strategy()):
            self._distributary_strategy = get_strategy()
            self._shape = self._validate_shape(value.shape)
            self._value = on_servers(self, value)
            return
        if has_strategy() and get_strategy().extended.num_workers > 1:
            value = get_strategy().extended.variable_layout().initial(value, _description(self))
            if shard_dim(self._layout) is None:
                self._layout = sharding_of(get_strategy())
                value = put_replicated(value, self._layout)
        original(self, value)

    return _initialize


def _description(variable: Any) -> str:
    """Returns a text that has to be the same on all workers."""
    return (
        f"Keras variable {variable.path!r} {variable.dtype}{list(variable.shape or ())} with"
        f" {variable.synchronization}, {variable.aggregation}, trainable={variable.trainable}"
    )


def initialize_with_initializer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Computes values that are stored in parts as a whole, and splits them afterwards."""

    def _initialize_with_initializer(self: Any, initializer: Any) -> None:
        if shard_dim(self._layout) is None:
            original(self, initializer)
        else:
            self._initialize(initializer(self._shape, dtype=self._dtype))

    return _initialize_with_initializer


def distribute_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Places values that are assigned; they have to be equal on all workers.

    Values always get their layout. If the layout has only one device, Keras leaves a value that is
    already there as it is. But `jax.jit` sees another type then, and compiles the step once more.
    """

    def distribute_tensor(tensor: Any, layout: Any) -> Any:
        if not isinstance(layout, NamedSharding) or isinstance(tensor, jax.core.Tracer):
            return original(tensor, layout)
        if shard_dim(layout) is not None:
            return put_sharded(tensor, layout)
        return put_replicated(tensor, layout)

    return distribute_tensor


def value(original: property) -> property:
    """Makes a variable of several workers read this worker's copy, outside of a step.

    A variable in host memory is copied to its device for every read. One that is stored in parts is
    put together.
    """
    assert original.fget is not None
    read = original.fget

    def value(self: Any) -> Any:
        kept = self._value
        if not isinstance(kept, ON_SERVERS):
            return whole_value(self, read(self))
        scope = get_stateless_scope() if in_stateless_scope() else None
        current = None if scope is None else scope.get_current_value(self)
        if current is None:
            # In a symbolic scope only shapes matter, so do not fetch the value.
            current = jnp.zeros(kept.shape, kept.dtype) if in_symbolic_scope() else kept._peek()
        return self._maybe_autocast(current)

    return property(value, doc=original.__doc__)


def direct_assign(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sends assignments of a variable on servers to them; all workers assign the same value."""

    def _direct_assign(self: Any, value: Any) -> None:
        current = getattr(self, "_value", None)
        if isinstance(current, ON_SERVERS):
            current.assign(value)
        else:
            layout = getattr(self, "_layout", None)
            if isinstance(layout, NamedSharding) and not layout.is_fully_addressable:
                what = f"assign of Keras variable {self.path!r}"
                job_programs.begin(JobEvent(what), (describe_value(value),))
            original(self, value)

    return _direct_assign


def keeps_on_servers(strategy: Any) -> bool:
    """Returns whether the variables of a strategy are kept elsewhere than in this process."""
    return strategy.extended.variable_layout().kind is not None


def on_servers(variable: Any, value: Any) -> Any:
    """Makes the variable that keeps the value of a Keras variable, for strategies with servers."""
    beside = getattr(variable, "_distributary_beside", None)
    with get_strategy().scope(), nullcontext() if beside is None else colocated_with(beside):
        return Variable(value, bool(variable._trainable), variable.path, variable._dtype)


def whole_value(variable: Any, value: Any) -> Any:
    """Turns the stored array of a variable into a value that this process can use."""
    layout = variable._layout
    if (
        shard_dim(layout) is None
        or not isinstance(value, jax.Array)
        or isinstance(value, jax.core.Tracer)
        or value.is_fully_replicated
    ):
        return in_device_memory(local_copy(value))
    with jax.ensure_compile_time_eval():
        whole = fetch_whole(value, variable.shape)
        if layout.is_fully_addressable:
            return jax.device_put(whole, NamedSharding(layout.mesh, P()))
        return jnp.asarray(whole)


@contextmanager
def together(model: Any) -> Iterator[None]:
    """Runs the block with whole values in the variables of a model's optimizer, on every worker.

    There, each worker can read and assign these variables by itself. All workers enter and leave
    the block together. At the end, assigned values must be the same on all workers, or be replaced
    by such values.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()  # during fit, the values are not in the variables
    variables = getattr(getattr(model, "optimizer", None), "variables", ())
    divided = [v for v in variables if not getattr(v._layout, "is_fully_addressable", True)]
    divided = [v for v in divided if shard_dim(v._layout) is not None]
    before = [(v._layout, v._value, fetch_whole(v._value, v.shape)) for v in divided]
    for variable, (_, _, whole) in zip(divided, before, strict=True):
        variable._layout, variable._value = None, whole
    try:
        yield
    finally:
        for variable, (layout, stored, whole) in zip(divided, before, strict=True):
            current, variable._layout = variable._value, layout
            variable._value = stored if current is whole else put_sharded(current, layout)


def place(variable: Any, strategy: Any) -> None:
    """Moves a variable that was created elsewhere to the devices or servers of a strategy."""
    if keeps_on_servers(strategy):
        value = variable._value
        if value is not None and not isinstance(value, ON_SERVERS):
            with strategy.scope(), jax.ensure_compile_time_eval():
                variable._value = on_servers(variable, whole_value(variable, value))
                variable._layout = None
        return
    sharding = sharding_of(strategy)
    if sharding is None:
        return
    value = variable._value
    is_elsewhere = value is not None and (
        value.sharding.device_set != sharding.device_set
        or in_host_memory(value.sharding) != in_host_memory(sharding)
    )
    if shard_dim(variable._layout) is not None and not is_elsewhere:
        return
    # On a single device, a value can have two layouts, see `distribute_tensor`.
    if is_elsewhere or (value is not None and _lies_otherwise(value, sharding)):
        with jax.ensure_compile_time_eval():  # in case a function is being traced
            whole = whole_value(variable, value)
            initial = strategy.extended.variable_layout().initial(whole, _description(variable))
            variable._value = put_replicated(initial, sharding)
    variable._layout = sharding


def _lies_otherwise(value: Any, sharding: NamedSharding) -> bool:
    return bool(sharding.is_fully_addressable and value.sharding != sharding)


def place_in_parts(variable: Any, strategy: Any) -> None:
    """Splits a variable of an optimizer that was built elsewhere, if the strategy does that."""
    place(variable, strategy)
    sharding = strategy.extended.optimizer_layout(variable.shape)
    if sharding is None or variable._layout == sharding:
        return
    variable._layout = sharding
    variable._value = put_sharded(variable._value, sharding)
    variable._distributary_stand_in = None


def refuse(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses to create variables in a scope if Keras runs on another backend than JAX."""

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
