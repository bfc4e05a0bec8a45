"""Iterators over datasets, with a state that you can save and restore."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, final

from distributary.datasets._nodes import Node, describe, drawn_seeds, with_drawn_seeds
from distributary.datasets._streams import Stream
from distributary.datasets._structure import map_arrays
from distributary.errors import InvalidValueError, OutOfRangeError
from distributary.topology import inside_jax_trace
from distributary.tracing import next_of

_show: Callable[[Any], Any] | None = None


def show_arrays_by(show: Callable[[Any], Any] | None) -> None:
    """Makes loops over datasets get `show(array)` for every array; None gives the arrays again."""
    global _show
    _show = show


class _Restorable(Protocol):
    """A dataset whose passes can continue from a saved position."""

    def restore(self, node: Node, num_passes: int) -> None: ...


@final
class DatasetIterator:
    """One pass over a `Dataset`.

    Source: `tf.data.Iterator`.
    """

    def __init__(
        self, dataset: _Restorable, node: Node, number: int, is_plain: bool = False
    ) -> None:
        self._show = None if is_plain else _show
        self._dataset = dataset
        self._node = node
        self._number = number
        self._position = 0
        self._stream: Stream | None = None
        self._returned: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next_of(self) if inside_jax_trace() else self.pull()

    def pull(self) -> Any:
        """Returns the next element, also in a function that is traced."""
        if self._returned:
            element = self._returned.pop()
        else:
            if self._stream is None:
                self._stream = self._node.stream((self._number,))
            element = next(self._stream)
            if self._show is not None:
                element = map_arrays(self._show, element)
        self._position += 1
        return element

    def put_back(self, element: Any) -> None:
        """Puts back the element that was taken last, so that it comes next again."""
        self._returned.append(element)
        self._position -= 1

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
            OutOfRangeError: at the end.
        """
        return next_or_out_of_range(self)

    def get_next_as_optional(self) -> "Optional":
        """Returns the next element as an `Optional`, which has no value at the end."""
        return next_as_optional(self)

    def get_state(self) -> dict[str, Any]:
        """Returns the position for `set_state`, as a small dict of numbers and strings."""
        return state_of(self._node, self._number, self._position)

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to the position of an iterator over the same dataset, also from another process.

        The passes that you begin afterwards are those that would have come next there. Elements of
        arrays and files are skipped without reading them. Generators, `filter` and datasets of
        other libraries are iterated up to the position.

        Raises:
            InvalidValueError: if the state belongs to another dataset.
        """
        self._node, self._number, self._position = restored(self._node, state)
        self._returned.clear()
        self._dataset.restore(self._node, self._number + 1)
        self._stream = self._node.stream((self._number,))
        go_to(self._position, self._stream.advance)


@final
class Optional:
    """A value, or no value.

    Source: `tf.experimental.Optional`.
    """

    def __init__(self, *value: Any) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Returns whether there is a value."""
        return bool(self._value)

    def get_value(self) -> Any:
        """Returns the value.

        Raises:
            InvalidValueError: if there is none.
        """
        if not self._value:
            raise InvalidValueError(
                "Optional.get_value: there is no value; call has_value() first."
            )
        return self._value[0]


def next_or_out_of_range(iterator: Iterator[Any]) -> Any:
    """Returns the next element; raises OutOfRangeError at the end."""
    try:
        return next(iterator)
    except OutOfRangeError:
        raise
    except StopIteration:
        raise OutOfRangeError("The dataset has no more elements.") from None


def next_as_optional(iterator: Iterator[Any]) -> Optional:
    """Returns the next element as an `Optional`."""
    try:
        return Optional(next(iterator))
    except StopIteration:
        return Optional()


def state_of(node: Node, number: int, position: int) -> dict[str, Any]:
    """Returns the state of an iterator."""
    return {
        "dataset": describe(node),
        "iteration": number,
        "position": position,
        "seeds": drawn_seeds(node),
    }


def restored(node: Node, state: dict[str, Any]) -> tuple[Node, int, int]:
    """Returns the dataset, the number of the pass and the position that a state describes.

    Raises:
        InvalidValueError: if it is not a state, or belongs to another dataset.
    """
    if not isinstance(state, dict) or set(state) != {"dataset", "iteration", "position", "seeds"}:
        raise InvalidValueError(
            f"set_state: got {state!r}, expected what get_state() of an iterator returned."
        )
    if state["dataset"] != describe(node):
        raise InvalidValueError(
            "set_state: the state belongs to another dataset. It was saved from"
            f"\n  {state['dataset']}\nand this is\n  {describe(node)}"
        )
    node = with_drawn_seeds(node, [int(seed) for seed in state["seeds"]])
    return node, int(state["iteration"]), int(state["position"])


def go_to(position: int, advance: Callable[[int], int]) -> None:
    """Skips the elements before a position with `advance`, which returns how many there were.

    Raises:
        InvalidValueError: if there are fewer.
    """
    skipped = advance(position)
    if skipped < position:
        raise InvalidValueError(
            f"set_state: the position is {position}, but the dataset ends after {skipped} elements."
            " Did its files or arrays change?"
        )
