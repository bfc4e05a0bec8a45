"""The operations that a dataset consists of: a tree, from the sources to the last operation.

Nodes hold no state; `stream` starts a pass.
"""

import abc
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, Literal, TypeAlias

import numpy as np

from distributary.data._streams import PEEK, Numbers, Path, Picked, Rows, Stream
from distributary.data._structure import spec_of
from distributary.devices import Nest
from distributary.errors import InvalidValueError

# Upper bound of the numbers drawn for shuffles without a seed.
MAX_SEED = 2**63


Trait: TypeAlias = Literal["batched", "own_arrays", "in_memory"]


class Node(abc.ABC):
    """An operation; its fields hold the nodes that it reads from.

    Attributes:
        batched: Whether dim 0 of the arrays counts examples; None if the inputs tell.
        own_arrays: Whether every element has arrays of its own, to which nobody writes; None if
            the inputs tell.
        in_memory: Whether elements are made of arrays in memory, without files and user code; None
            if the inputs tell.
        pattern: Label, with names of fields in braces.
    """

    batched: bool | None = None
    own_arrays: bool | None = None
    in_memory: bool | None = None
    pattern: ClassVar[str]

    @abc.abstractmethod
    def cardinality(self) -> int:
        """Returns the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""

    def label(self) -> str:
        """Returns the operation and its arguments, by which a pipeline is recognized."""
        return self.pattern.format_map(vars(self))

    def source(self) -> Rows | None:
        """Returns the rows that this node only reorders; None if it makes new elements."""
        return None

    def order(self, path: Path) -> Stream:
        """Returns the numbers of the rows of `source`, in order."""
        return Numbers(self.cardinality())

    def elements(self, path: Path) -> Stream:
        """Starts a pass over the elements, for nodes without a `source`."""
        raise NotImplementedError

    def stream(self, path: Path) -> Stream:
        """Starts a pass over the elements."""
        source = self.source()
        return self.elements(path) if source is None else Picked(source, self.order(path))

    def source_in_order(self) -> Rows | None:
        """Returns the finite `source` if `order` is 0, 1, 2, ... in every pass, else None."""
        source = self.source()
        in_order = source is not None and isinstance(self.order(PEEK), Numbers)
        return source if in_order and self.cardinality() >= 0 else None

    def first(self) -> list[Nest]:
        """Returns a list with the first element, which is still there for other passes."""
        for element in self.stream(PEEK):
            return [element]
        return []

    def spec(self) -> Nest:
        """Returns a nest of `TensorSpec` like the elements; may have to read the first element."""
        for element in self.first():
            return spec_of(element)
        raise InvalidValueError(
            f"element_spec: the dataset {self.describe()} is empty, so nothing is known about its"
            " elements. For a generator, output_signature says what they are."
        )

    def trait(self, name: Trait) -> bool | None:
        """Returns an attribute of the elements; None if it is not known."""
        value: bool | None = getattr(self, name)
        if value is not None:
            return value
        answers = {node.trait(name) for node in self.inputs()}
        return answers.pop() if len(answers) == 1 else None

    # The tree

    def inputs(self) -> "tuple[Node, ...]":
        """Returns the nodes that it reads from."""
        values = vars(self).values()
        items = [item for v in values for item in (v if isinstance(v, tuple) else (v,))]
        return tuple(item for item in items if isinstance(item, Node))

    def tree(self) -> "Iterator[Node]":
        """Yields the nodes of the tree, inputs first."""
        for upstream in self.inputs():
            yield from upstream.tree()
        yield self

    def replace(self, **changes: object) -> "Node":
        """Returns the node with other values of some fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def rewrite(self, change: "Callable[[Node], Node]") -> "Node":
        """Returns the tree with `change` applied to every node, inputs first."""

        def rewritten(value: object) -> object:
            if isinstance(value, Node):
                return value.rewrite(change)
            if isinstance(value, tuple) and any(isinstance(item, Node) for item in value):
                new = tuple(map(rewritten, value))
                return value if all(map(operator.is_, new, value)) else new
            return value

        fields = vars(self)
        new = {name: rewritten(value) for name, value in fields.items()}
        changes = {name: value for name, value in new.items() if value is not fields[name]}
        return change(self.replace(**changes) if changes else self)

    def describe(self) -> str:
        """Returns the operations of the tree, in the order in which data goes through them."""
        inputs = [node.describe() for node in self.inputs()]
        if not inputs:
            return self.label()
        before = inputs[0] if len(inputs) == 1 else f"({', '.join(inputs)})"
        return f"{before} > {self.label()}"

    def drawn_seeds(self) -> list[int]:
        """Returns the numbers that determine the orders without a seed, inputs first."""
        return [n.drawn for n in self.tree() if isinstance(n, Random) and n.seed is None]

    def with_drawn_seeds(self, seeds: Sequence[int]) -> "Node":
        """Returns the same dataset with other numbers in place of `drawn_seeds`."""
        left = iter(seeds)

        def change(node: Node) -> Node:
            if not isinstance(node, Random) or node.seed is not None:
                return node
            seed = next(left)
            return node if seed == node.drawn else node.replace(drawn=seed)

        return self.rewrite(change)

    def with_drawn(self, seed: Sequence[int], number: int) -> "Node":
        """Returns the same dataset, orders without a seed derived from `seed` and a number."""
        count = len(self.drawn_seeds())
        if not count:
            return self
        words = np.random.SeedSequence([*seed, number]).generate_state(count, np.uint64)
        return self.with_drawn_seeds([int(word) % MAX_SEED for word in words])


class FileSource(Node):
    """Base class of nodes that read files, or list them.

    Attributes:
        files: Names of the files.
    """

    files: tuple[str, ...]


class NumberedNode(Node, Rows):
    """Base class of nodes whose elements have numbers."""

    def source(self) -> Rows | None:
        return self


class SameElements(Node):
    """Base class of operations that make no new elements, and usually keep their number."""

    input: Node

    def cardinality(self) -> int:
        return self.input.cardinality()

    def spec(self) -> Nest:
        return self.input.spec()


def drawn_seed() -> int:
    """Draws a number from NumPy's global generator, for an order without a seed."""
    return int(np.random.randint(0, MAX_SEED, dtype=np.int64))


class Random(Node):
    """Base class of nodes with an order of their own, from `seed` or, without one, from `drawn`."""

    seed: int | None
    drawn: int

    def seed_of(self, path: Path) -> list[int]:
        """Returns the numbers that determine the order of a pass."""
        return [self.drawn if self.seed is None else self.seed, *path]


#: For `num_parallel_calls` and `prefetch`: chooses a number that suits the machine.
AUTOTUNE: Final = -1
#: Result of `Dataset.cardinality` for a dataset without end.
INFINITE_CARDINALITY: Final = -1
#: Result of `Dataset.cardinality` if only reading the data would tell.
UNKNOWN_CARDINALITY: Final = -2


def combined(cardinalities: Sequence[int], combine: Callable[[Sequence[int]], int] = max) -> int:
    """Returns the number of elements of several datasets together, if none of them is unusual."""
    for unusual in (INFINITE_CARDINALITY, UNKNOWN_CARDINALITY):
        if unusual in cardinalities:
            return unusual
    return combine(cardinalities)
