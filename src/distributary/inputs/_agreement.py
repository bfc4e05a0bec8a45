"""What workers have to agree on when they read different data."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import jax
import numpy as np

from distributary.errors import ClusterError
from distributary.values import PerReplica


class Exchange(Protocol):
    """Gives every worker the messages of all."""

    names: tuple[str, ...]
    number: int

    def __call__(self, message: bytes) -> list[bytes]: ...


@final
class Agreement:
    """Places in the program at which every worker tells the others something.

    All workers come to the same places in the same order; a worker that fails on its way says so.

    Args:
        exchange: Carries the messages.
        place_rows: Puts stacked values where the replicas are.

    Attributes:
        names: Of the workers.
        number: Of this one.
    """

    def __init__(self, exchange: Exchange, place_rows: Callable[[PerReplica], PerReplica]) -> None:
        self._exchange = exchange
        self.place_rows = place_rows
        self.names = exchange.names
        self.number = exchange.number
        self._num_named = 0

    def name(self) -> str:
        """The name of another dataset, the same on every worker."""
        self._num_named += 1
        return f"distributed dataset {self._num_named}"

    def tell(self, place: str, say: Callable[[], Any]) -> list[Any]:
        """What `say()` returns on every worker, in worker order; something JSON can carry.

        Raises:
            Exception: see `tell_text`.
        """
        return [json.loads(text) for text in self.tell_text(place, lambda: json.dumps(say()))]

    def tell_text(self, place: str, say: Callable[[], str]) -> list[str]:
        """The texts that `say()` returns on every worker, in worker order.

        Raises:
            Exception: what `say` raises, after the others were told.
            ClusterError: if `say` raised on another worker, or that is at another place.
        """
        failure = None
        try:
            text = say()
            own = f"{place}\n={text}".encode()
        except Exception as error:
            failure = error
            own = f"{place}\n!{type(error).__name__}: {error}".encode()
        heard = self._exchange(own)
        if failure is not None:
            raise failure
        if heard.count(own) == len(heard):
            return [text] * len(heard)
        said = []
        for name, message in zip(self.names, heard, strict=True):
            its_place, _, text = message.decode().partition("\n")
            if its_place != place:
                raise ClusterError(
                    f"This worker is at {place}, and {name} at {its_place}. All workers must"
                    " distribute and iterate over the same datasets, in the same order, with the"
                    " same number of steps."
                )
            if text[0] == "!":
                raise ClusterError(f"{name} failed at {place}: {text[1:]}")
            said.append(text[1:])
        return said


Shape = tuple[int, ...]
# Per leaf dtype and shape.
Leaves = tuple[tuple[str, Shape], ...]


@functools.lru_cache(maxsize=1024)
def signature(tree: Any, parts: tuple[tuple[tuple[Any, Shape], ...], ...]) -> str:
    """The shapes of a worker's part of a step, as text.

    Args:
        tree: Structure of what each replica gets.
        parts: Per replica and leaf dtype and shape.
    """
    named = [[[_dtype_name(dtype), shape] for dtype, shape in leaves] for leaves in parts]
    return json.dumps([str(tree), named])


def _dtype_name(dtype: Any) -> str:
    # As it is on the devices.
    return str(jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True))


@functools.lru_cache(maxsize=1024)
def parts_of(text: str) -> tuple[str, tuple[Leaves, ...]]:
    """Structure, and per replica and leaf dtype and shape, of a signature."""
    tree, parts = json.loads(text)
    return tree, tuple(tuple((dtype, tuple(shape)) for dtype, shape in leaves) for leaves in parts)


def signature_of_specs(parts: Sequence[Any]) -> str:
    """The signature of what replicas get, nests of `TensorSpec`."""
    flat = [jax.tree.flatten(part) for part in parts]
    return signature(
        flat[0][1],
        tuple(tuple((np.dtype(leaf.dtype), leaf.shape) for leaf in leaves) for leaves, _ in flat),
    )
