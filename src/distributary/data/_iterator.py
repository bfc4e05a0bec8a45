"""Iterators over datasets, with a state that you can save and restore."""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, final

from distributary.data._nodes import Node
from distributary.data._streams import Stream
from distributary.data._structure import spec_of
from distributary.devices import Nest, inside_jax_trace
from distributary.errors import InvalidValueError
from distributary.tracing import at_end, next_of

if TYPE_CHECKING:
    from distributary.data._dataset import Dataset


class PassIterator(abc.ABC):
    """Base class of iterators over one pass of a dataset.

    Args:
        number: Number of the pass.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._position = 0

    @abc.abstractmethod
    def current_node(self) -> Node:
        """Returns the dataset of the pass."""

    def __iter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __next__(self) -> Any: ...

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
            OutOfRangeError: at the end; it is also a `StopIteration`.
        """
        return next(self)

    def get_next_as_optional(self) -> "Optional":
        """Returns the next element as an `Optional`, which has no value at the end."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()

    def get_state(self) -> dict[str, Any]:
        """Returns the position for `set_state`, as a small dict of numbers and strings.

        It counts the elements that you were given, not those that were made ahead of time.
        """
        node = self.current_node()
        return {
            "dataset": node.describe(),
            "iteration": self._number,
            "position": self._position,
            "seeds": node.drawn_seeds(),
        }

    def take_state(self, state: dict[str, Any]) -> Node:
        """Takes over the numbers of a state, and returns the dataset in the order of that time.

        Raises:
            InvalidValueError: if it is not a state, or belongs to another dataset.
        """
        keys = {"dataset", "iteration", "position", "seeds"}
        if not isinstance(state, dict) or set(state) != keys:
            raise InvalidValueError(
                f"set_state: got {state!r}, expected what get_state() of an iterator returned."
            )
        node = self.current_node()
        if state["dataset"] != node.describe():
            raise InvalidValueError(
                "set_state: the state belongs to another dataset. It was saved from"
                f"\n  {state['dataset']}\nand this is\n  {node.describe()}"
            )
        self._number, self._position = int(state["iteration"]), int(state["position"])
        return node.with_drawn_seeds([int(seed) for seed in state["seeds"]])

    def go_to_position(self, advance: Callable[[int], int]) -> None:
        """Skips the elements before the position by `advance`, which returns how many there were.

        Raises:
            InvalidValueError: if there are fewer.
        """
        skipped = advance(self._position)
        if skipped < self._position:
            raise InvalidValueError(
                f"set_state: the position is {self._position}, but the dataset ends after"
                f" {skipped} elements. Did its files or arrays change?"
            )


@final
class DatasetIterator(PassIterator):
    """One pass over a `Dataset`.

    Source: `tf.data.Iterator`.
    """

    def __init__(
        self, dataset: "Dataset", number: int, show: Callable[[Nest], Nest] | None = None
    ) -> None:
        super().__init__(number)
        self._show = show
        self._dataset = dataset
        self._node = dataset.node
        self._stream: Stream | None = None
        self._returned: list[Nest] = []

    def current_node(self) -> Node:
        return self._node

    def __next__(self) -> Any:
        return next_of(self) if inside_jax_trace() else self.pull()

    def pull(self) -> Any:
        """Returns the next element, also in a function that is traced."""
        if self._returned:
            element = self._returned.pop()
        else:
            if self._stream is None:
                self._stream = self._node.stream((self._number,))
            try:
                element = next(self._stream)
            except StopIteration:
                raise at_end() from None
            if self._show is not None:
                element = self._show(element)
        self._position += 1
        return element

    def put_back(self, element: Nest) -> None:
        """Puts back the element that was taken last, so that it comes next again."""
        self._returned.append(element)
        self._position -= 1

    @property
    def element_spec(self) -> Any:
        """Nest of `TensorSpec` that describes an element."""
        return self._node.spec()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to the position of an iterator over the same dataset, also from another process.

        The passes that you begin afterwards are those that would have come next there. Elements of
        arrays and files are skipped without reading them. Generators, `filter` and datasets of
        other libraries are iterated up to the position.

        Raises:
            InvalidValueError: if the state belongs to another dataset.
        """
        self._node = self.take_state(state)
        self._returned.clear()
        self._dataset.restore(self._node, self._number + 1)
        self._stream = self._node.stream((self._number,))
        self.go_to_position(self._stream.advance)


@final
class Optional:
    """A value, or no value.

    Source: `tf.experimental.Optional`.
    """

    def __init__(self, *value: Any) -> None:
        self._value = value

    @staticmethod
    def empty(element_spec: object) -> "Optional":
        """Makes one without a value."""
        return Optional()

    @staticmethod
    def from_value(value: object) -> "Optional":
        """Makes one with a value."""
        return Optional(value)

    @property
    def element_spec(self) -> Any:
        """Nest of `TensorSpec` that describes the value; None without one."""
        return spec_of(self._value[0]) if self._value else None

    def has_value(self, name: str | None = None) -> bool:
        """Returns whether there is a value."""
        return bool(self._value)

    def get_value(self, name: str | None = None) -> Any:
        """Returns the value.

        Raises:
            InvalidValueError: if there is none.
        """
        if not self._value:
            raise InvalidValueError(
                "Optional.get_value: there is no value; call has_value() first."
            )
        return self._value[0]
