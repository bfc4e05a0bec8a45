"""Data that a traced function takes from iterators over datasets, anew in every call.

    batches = iter(dataset)

    @dist.function
    def step():
        return strategy.run(train_step, args=(next(batches),))

In the trace `next(batches)` gives a tracer that reads a handle. The program gets the batch as an
input, and each call takes the next one:

    { lambda ; . let
        a:f32[8,2] = variable_read[handle=element 1 of a dataset]
        ...
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distributary.devices import Nest
from distributary.errors import (
    ContextError,
    InvalidTypeError,
    InvalidValueError,
    OutOfRangeError,
    shown,
)
from distributary.tracing._markers import Handle
from distributary.tracing._scope import current_scope, is_outside_of_trace, outside_of_trace

# A loop over a dataset is unrolled; with more elements it would take too long to compile.
_MAX_TAKEN = 100

#: Stands in for an element: the iterator has ended.
END = "end"


class Feedable(Protocol):
    """An iterator over a dataset, outside of every trace."""

    def pull(self) -> Nest:
        """Returns the next element."""

    def put_back(self, element: Nest) -> None:
        """Gives back the last element that was pulled and not put back, to be the next again."""


class Iterated(Protocol):
    """A dataset, outside of every trace."""

    def begin_pass(self, is_plain: bool) -> Any:
        """Returns a new iterator."""

    def take_back_pass(self) -> None:
        """Undoes the beginning of the last pass."""


class Feeding(Protocol):
    """The source of data for code that is being traced.

    Attributes:
        position: Number of elements, ends and passes taken before the present place of the code. It
            is set back when the code is traced again.
    """

    position: int

    def give(self, iterator: Feedable) -> Any:
        """Returns the next element, with tracers as leaves."""

    def begin(self, dataset: Iterated, is_plain: bool) -> Any:
        """Returns a new iterator over a dataset."""

    def leave(self, error: Exception) -> None:
        """Stops the trace if the code can run on the host instead; else raises `error`."""


class LeaveTrace(BaseException):
    """A stop of the trace of a function that must run on the host; it never reaches the user."""


def leave_trace() -> None:
    """Stops the trace of a function, which then runs on the host; has no effect in a step."""
    scope = current_scope()
    if current_feeding() is not None and scope is not None and scope.kind == "function":
        raise LeaveTrace


@final
@dataclass(frozen=True, eq=False, slots=True)
class Origin:
    """The place from which a function gets an iterator or a dataset.

    Attributes:
        find: Returns the object, given the data of a call; None if it was collected.
        begins_pass: None if an element is taken. If a pass over a dataset begins, whether it gives
            plain arrays.
    """

    find: Callable[["Feeds"], object]
    begins_pass: bool | None = None


@dataclass(slots=True)
class _Event:
    """An element that was taken, the end of the data, or a pass that began.

    Attributes:
        origin: The place of the iterator or dataset.
        of: The iterator or dataset.
        outcome: The facts about the event that the course of the function can depend on.
        item: The element, or the iterator over the pass.
        values: Arrays of the element.
        tree: Structure of the element.
        handles: Handles that stand for the arrays in the trace.
    """

    origin: Origin
    of: Any
    outcome: Any
    item: Any = None
    values: Sequence[Array | np.ndarray] = ()
    tree: Any = None
    handles: list[Handle] = field(default_factory=list)


@final
class Feeds:
    """The data that one call of a function takes.

    First it takes what earlier calls took, until its course differs from all of theirs. Then the
    function is traced, and takes data itself.

    Args:
        leaves: The leaves of the function's arguments.

    Attributes:
        position: See `Feeding`.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = leaves
        self._events: list[_Event] = []
        self.position = 0

    # Without a trace

    def follow(self, origin: Origin) -> Any:
        """Takes what an earlier call took; returns the outcome, on which the next step depended.

        Raises:
            ReferenceError: if an iterator that the function captured does not exist any more.
        """
        of = origin.find(self)
        if of is None:
            raise ReferenceError
        self._events.append(_taken(origin, of))
        return self._events[-1].outcome

    @property
    def values(self) -> list[Array | np.ndarray]:
        """Arrays of all elements."""
        return [value for event in self._events for value in event.values]

    @property
    def handles(self) -> list[Handle]:
        """Handles that stand for `values` in the trace."""
        return [handle for event in self._events for handle in event.handles]

    @property
    def course(self) -> list[tuple[Origin, Any]]:
        """Everything that was taken: its origin and outcome."""
        return [(event.origin, event.outcome) for event in self._events]

    def put_back(self, position: int = 0) -> None:
        """Gives back everything that was taken after `position`."""
        while len(self._events) > position:
            event = self._events.pop()
            if event.origin.begins_pass is not None:
                event.of.take_back_pass()
            elif event.outcome is not END:
                event.of.put_back(event.item)

    # In a trace

    def give(self, iterator: Feedable) -> Nest:
        event = self._next(iterator, None)
        scope = current_scope()
        assert scope is not None
        if event.outcome is END:
            raise at_end()
        if not event.handles:
            event.handles = [
                Handle(None, f"element {self.position} of a dataset", np.shape(value), dtype)
                for value, dtype in zip(event.values, event.outcome[2], strict=True)
            ]
        return jax.tree.unflatten(event.tree, [scope.read(handle) for handle in event.handles])

    def begin(self, dataset: Iterated, is_plain: bool) -> Any:
        return self._next(dataset, is_plain).item

    def leave(self, error: Exception) -> None:
        scope = current_scope()
        if scope is None or not scope.tapes:  # with one, it trains: op by op, or without end
            leave_trace()
        raise error

    def _next(self, of: Any, begins_pass: bool | None) -> _Event:
        if self.position < len(self._events):
            event = self._events[self.position]
            if event.of is of and event.origin.begins_pass == begins_pass:
                self.position += 1
                return event
            self.put_back(self.position)
        if len(self._events) >= _MAX_TAKEN:
            self.leave(
                InvalidValueError(
                    f"A compiled function takes more than {_MAX_TAKEN} elements from datasets in"
                    " one call; its loop is unrolled, so it would take too long to compile. Loop"
                    " outside, and call the function for every batch."
                )
            )
        origin = self._origin_of(of, begins_pass)
        with outside_of_trace():
            event = _taken(origin, of)
        self._events.append(event)
        self.position += 1
        return event

    def _origin_of(self, of: object, begins_pass: bool | None) -> Origin:
        arguments = [i for i, leaf in enumerate(self._leaves) if leaf is of]
        if arguments:
            return Origin(lambda feeds: feeds._leaves[arguments[0]], begins_pass)
        passes = [i for i, event in enumerate(self._events) if event.item is of]
        if passes:  # that the function has begun itself
            return Origin(lambda feeds: feeds._events[passes[0]].item)
        # The code that made an iterator keeps it. A dataset may be made by the function itself.
        captured = weakref.ref(of) if begins_pass is None else lambda: of
        return Origin(lambda feeds: captured(), begins_pass)


def at_end() -> OutOfRangeError:
    """Returns the error of an iterator that has no more elements."""
    return OutOfRangeError(
        "The dataset has no more elements. Call iter(dataset) again for another pass."
    )


def _taken(origin: Origin, of: Any) -> _Event:
    """Takes an element of an iterator, or begins a pass over a dataset."""
    if origin.begins_pass is not None:
        return _Event(origin, of, "pass", of.begin_pass(origin.begins_pass))
    try:
        element = of.pull()
    except StopIteration:
        return _Event(origin, of, END)
    leaves, tree = jax.tree.flatten(element, is_leaf=_is_list)
    values = [_array_of(leaf) for leaf in leaves]
    dtypes = tuple([jax.dtypes.canonicalize_dtype(value.dtype) for value in values])
    outcome = tree, tuple([value.shape for value in values]), dtypes
    return _Event(origin, of, outcome, element, values, tree)


def _is_list(value: object) -> bool:
    return type(value) is list


def _array_of(leaf: object) -> Array | np.ndarray:
    value = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if value.dtype != bool and not jnp.issubdtype(value.dtype, np.number):
        raise InvalidTypeError(
            f"A compiled function takes an element that holds {shown(leaf)} from a dataset; strings"
            " and objects cannot go to a device. Map them to numbers, or take the element outside"
            " and pass its arrays."
        )
    return value


class _ThreadState(threading.local):
    feeding: Feeding | None = None


_state = _ThreadState()


def current_feeding() -> Feeding | None:
    """Returns the source of data for the code that this thread traces."""
    return _state.feeding


@contextmanager
def fed_by(feeding: Feeding | None) -> Iterator[None]:
    """Runs the block with `feeding` as the source of data for code that is traced in it."""
    before, _state.feeding = _state.feeding, feeding
    try:
        yield
    finally:
        _state.feeding = before


def next_of(iterator: Feedable) -> Nest:
    """Returns the next element of an iterator over a dataset; for calls inside a trace of JAX.

    While a program is traced, the element has tracers as leaves.

    Raises:
        ContextError: where JAX would keep one element forever.
        InvalidValueError: in a step of several replicas.
    """
    scope = current_scope()
    if scope is None:
        if is_outside_of_trace():
            return iterator.pull()
        raise _frozen()
    feeding = current_feeding()
    if feeding is None or scope.num_replicas > 1:
        raise InvalidValueError(
            "next() of a dataset's iterator was called inside Strategy.run, where it would give one"
            " batch, once, while the step is traced. Take the batch outside,"
            " strategy.run(step, args=(next(iterator),))."
        )
    if not scope.is_outermost():
        if scope.converts:  # a loop of the function, which can run on the host
            feeding.leave(_frozen())
        raise _frozen()
    return feeding.give(iterator)


def iterator_of(dataset: Iterated, is_plain: bool) -> Any:
    """Returns a new iterator over a dataset; traced code gets a new one in each of its calls."""
    feeding = current_feeding()
    if feeding is None or current_scope() is None:
        return dataset.begin_pass(is_plain)
    return feeding.begin(dataset, is_plain)


def refuse_in_trace(error: Exception) -> None:
    """Raises `error` while code is traced, or makes the code run on the host if it can."""
    if current_scope() is None:
        return
    feeding = current_feeding()
    if feeding is None:
        raise error
    feeding.leave(error)


def _frozen() -> ContextError:
    return ContextError(
        "next() of a dataset's iterator was called inside jax.jit, jax.grad, jax.lax control flow"
        " or another JAX transformation, which would keep one element forever. Take the element"
        " before, and pass it as an argument."
    )
