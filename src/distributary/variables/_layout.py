"""The arrays that variables store: their placement on devices, and lists of them for programs."""

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary._threads import bound
from distributary.context import in_global_view
from distributary.devices import (
    JobEvent,
    fetch_whole,
    in_device_memory,
    in_host_memory,
    job_programs,
    local_copy,
    own_copies,
    put_replicated,
    put_sharded,
    put_stacked,
    sharding_on,
)
from distributary.errors import InvalidTypeError, InvalidValueError, described, shown
from distributary.tracing import describe_value, gathered, native
from distributary.variables._values import ArrayOperators


@final
@dataclass(frozen=True, slots=True)
class VariableLayout:
    """The layout in which a strategy stores its variables.

    Args:
        strategy: The strategy, which its variables keep alive.
        num_replicas: Number of replicas.
        mirrored: Whether variables are distributed values. False for strategies with one device.
        replicated: Sharding of a value that all replicas share. The value is on all of their
            devices, or on one device for all of them, possibly in host memory. None leaves it to
            JAX.
        stacked: Sharding of values `[replica, *shape]`, one row per replica.
        from_chief: Returns the chief's arrays on all workers. None with one worker.
        kind: Class of the variables. None if they hold their values themselves.
        parts: Sharding of a variable of which every device holds a part; None for others.
    """

    strategy: Any
    num_replicas: int
    mirrored: bool
    replicated: Any
    stacked: Any
    from_chief: Callable[[list[np.ndarray], str], list[np.ndarray]] | None = None
    kind: Any = None
    parts: Any = None

    def of_variable(self, shape: Sequence[int], dtype: Any) -> "VariableLayout":
        """Returns the layout of a variable that has one value for all replicas."""
        if self.kind is not None or not jnp.issubdtype(dtype, jnp.inexact):
            return self
        parts = self.strategy.extended.parameter_layout(shape, dtype)
        return self if parts is None else replace(self, parts=parts)

    def whole(self, stored: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Returns a stored value, put together if it is in parts; all workers call this then."""
        if self.parts is None:
            # What a step of a job has written is computed with on this worker alone.
            return stored if self.replicated is not None else local_copy(stored)
        with jax.ensure_compile_time_eval():
            return put_replicated(fetch_whole(stored, shape), self.replicated)

    def read(self, value: jax.Array) -> jax.Array:
        """Returns a value of a variable that is read in a trace."""
        if self.parts is None or not in_global_view():
            return value
        return gathered(value, sharding_on(self.strategy.extended.mesh, self.parts.spec))

    def initial(self, value: object, what: str) -> Any:
        """Returns the initial value of a variable: with several workers, the chief's.

        Args:
            value: The value on this worker.
            what: Description of the variable, with everything that must be the same on all workers.

        Raises:
            WorkerMismatchError: if the other workers create another variable.
        """
        if self.from_chief is None:
            return value
        host = np.asarray(local_copy(value))
        return self.from_chief([host], f"the creation of {what}")[0]

    def assigned(self, what: str, value: Any) -> None:
        """Checks that all workers assign the same value to a variable outside of a program.

        Args:
            what: Description of the assignment, with the name of the variable.
            value: The array or number that is assigned.

        Raises:
            WorkerMismatchError: if the other workers do something else, or assign another value.
        """
        if self.from_chief is not None:
            job_programs.begin(JobEvent(what), (describe_value(value),))

    def place(self, value: Any, dtype: Any, stacked: bool = False) -> jax.Array:
        """Returns a copy of `value` on the strategy's devices that nobody else holds.

        It must be a copy, because steps donate the buffers of the variables they write.
        """
        sharding = self.stacked if stacked else self.replicated
        if self.parts is not None:
            return put_sharded(np.asarray(holding(local_copy(value), dtype), dtype), self.parts)
        if sharding is not None and not sharding.is_fully_addressable:
            # All processes pass the same value, and JAX must do the same with it on each.
            host = np.array(holding(local_copy(value), dtype), dtype)
            if stacked:
                return put_stacked(host, sharding)
            return put_replicated(host, sharding)
        if isinstance(value, jax.Array):
            if in_host_memory(sharding):
                converted = jax.lax.convert_element_type(in_device_memory(value), dtype)
                return jax.device_put(converted, sharding, may_alias=False)
            placed = value if sharding is None else jax.device_put(value, sharding)
            if placed.dtype == dtype and not placed.weak_type:
                return own_copies([placed])[0]
            return jax.lax.convert_element_type(placed, dtype)
        host = np.array(holding(value, dtype), dtype)
        if sharding is None:
            return jnp.array(host)
        return jax.device_put(host, sharding)

    def bring(self, value: Any, dtype: Any = None, stacked: bool = False) -> jax.Array:
        """Returns `value` on the devices of the variables; not necessarily a copy."""
        array = jnp.asarray(value, dtype)
        if stacked:
            sharding = NamedSharding(self.stacked.mesh, P())
        else:
            sharding = in_device_memory(self.replicated)
            array = in_device_memory(array)
        if sharding is None or array.sharding.device_set == sharding.device_set:
            return array
        return put_replicated(array, sharding)


def holding(value: Any, dtype: Any) -> np.ndarray:
    """Returns a value as an array on the host, not a copy, if a dtype holds its whole numbers.

    Raises:
        InvalidValueError: for a whole number that the dtype does not hold.
    """
    array, dtype = np.asarray(value), np.dtype(dtype)
    if array.dtype.kind in "iu" and dtype.kind in "iu" and array.dtype != dtype:
        wrong = array.astype(dtype) != array
        if wrong.any():
            raise InvalidValueError(
                f"A variable of dtype {dtype} cannot hold {array[wrong][0]}. Choose another dtype;"
                " for int64, call jax.config.update('jax_enable_x64', True) at the start."
            )
    return array


_neighbor: ContextVar[Any] = ContextVar("variable beside which others are placed", default=None)


def colocated_with(variable: object) -> AbstractContextManager[None]:
    """Runs the block; variables created in it are placed beside `variable`, on the same server."""
    return bound(_neighbor, variable)


def neighbor() -> Any:
    """Returns the variable beside which new variables are placed, or None."""
    return _neighbor.get()


def array_of(value: object, what: str) -> Any:
    """Returns `value` as a NumPy or JAX array of a dtype that JAX can hold.

    Raises:
        InvalidTypeError: for strings, objects and anything else that is not made of numbers.
    """
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise InvalidTypeError(
                f"{what}: got an array of dtype {value.dtype}; expected numbers. For a random key,"
                " keep jax.random.key_data(key), and get the key back with"
                " jax.random.wrap_key_data."
            )
        return value
    try:
        leaves = jax.tree.leaves(value) if isinstance(value, (list, tuple)) else ()
        if any(isinstance(leaf, (jax.core.Tracer, ArrayOperators)) for leaf in leaves):
            return jnp.asarray(value)  # NumPy could not take it
        array = native(np.asarray(value))
    except (ValueError, TypeError) as error:
        raise InvalidTypeError(f"{what}: {shown(value)} is not an array of numbers.") from error
    if array.dtype == object or (array.dtype.kind in "USV" and array.dtype.itemsize > 2):
        hint = " To get gradients, call what distributary.grad returns." if callable(value) else ""
        if value is None:
            hint = " A gradient is None if the loss does not use the variable in the tape's block."
        raise InvalidTypeError(f"{what}: got {described(value)}; expected numbers.{hint}")
    if isinstance(value, (bool, int, float, complex, list, tuple)):
        # Python numbers get JAX's default dtypes, float32 and int32, if they fit.
        held = np.asarray(array, dtype=jnp.asarray(array.ravel()[:0]).dtype)
        return array if held.dtype.kind == "i" and (held != array).any() else held
    return array


# Lists of stored arrays, which programs take and return as a whole.

_DISSOLVED = -1  # marks a list whose variables are in other lists now


@final
class StateList:
    """The stored arrays of some variables.

    At first, every variable has a list of its own. `joined` then makes one list for all variables
    that a program writes, in the order of the program. The program takes this list and leaves
    another in its place, without looking at any variable.

    Args:
        arrays: One array per variable.

    Attributes:
        arrays: One array per variable.
        withheld: The reasons, if any, why the list must not be taken as it is: numbers of arrays
            whose buffer is held elsewhere or whose variable is gone, or `_DISSOLVED`.
    """

    __slots__ = ("__weakref__", "_variables", "arrays", "withheld")

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.withheld: set[int] = set()
        self._variables: list[weakref.ref[Any]] = []  # empty for the list of a single variable

    def _keep(self, variables: Sequence[Any]) -> None:
        forget, states = _forget, weakref.ref(self)
        self._variables = [
            weakref.ref(variable, functools.partial(forget, states, i))
            for i, variable in enumerate(variables)
        ]
        for i, variable in enumerate(variables):
            # A single assignment, as other threads may be reading.
            variable._slot = self, i

    def _dissolve(self) -> None:
        """Gives each variable a list of its own."""
        self.withheld.add(_DISSOLVED)
        for i, reference in enumerate(self._variables):
            variable = reference()
            # A variable may be in another list, if Ctrl-C has interrupted `_keep`.
            if variable is not None and variable._slot[0] is self:
                state = StateList([self.arrays[i]])
                if i in self.withheld:
                    state.withheld.add(0)
                variable._slot = state, 0


def joined(variables: Sequence[Any]) -> StateList | None:
    """Moves variables from their lists into a new common one, which they keep alive.

    Returns:
        The list, or None if there are no variables or one of them does not store its array itself.
    """
    if not variables or not all(
        getattr(variable, "_stores_array", False) for variable in variables
    ):
        return None
    for variable in variables:
        variable._slot[0]._dissolve()
    states = StateList([variable._value for variable in variables])
    states.withheld.update(i for i, variable in enumerate(variables) if variable._shared)
    states._keep(variables)
    return states


def _forget(states: "weakref.ref[StateList]", number: int, _: object) -> None:
    """Frees the array of a variable that was collected."""
    kept = states()
    if kept is not None:
        kept.withheld.add(number)
        kept.arrays[number] = None
