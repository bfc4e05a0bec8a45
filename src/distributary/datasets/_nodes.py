"""The operations that a dataset consists of: a tree, from the sources to the last operation.

Nodes hold no state; `stream` starts a pass.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from distributary.datasets._streams import Path, Picked, Rows, Stream
from distributary.datasets._structure import spec_of
from distributary.errors import InvalidValueError

# Upper bound of the numbers drawn for shuffles without a seed.
MAX_SEED = 2**63


class Node(abc.ABC):
    """An operation; its fields hold the nodes that it reads from."""

    @abc.abstractmethod
    def cardinality(self) -> int:
        """Returns the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""

    @abc.abstractmethod
    def label(self) -> str:
        """Returns the operation and its arguments, by which a pipeline is recognized."""

    def source(self) -> Rows | None:
        """Returns the rows that this node only reorders; None if it makes new elements."""
        return None

    def order(self, path: Path) -> Stream:
        """Returns the numbers of the rows of `source`, in order."""
        raise NotImplementedError

    def elements(self, path: Path) -> Stream:
        """Starts a pass over the elements, for nodes without a `source`."""
        raise NotImplementedError

    def stream(self, path: Path) -> Stream:
        """Starts a pass over the elements."""
        source = self.source()
        if source is not None:
            return Picked(source, self.order(path))
        return self.elements(path)

    def is_identity(self) -> bool:
        """Returns whether `order` is 0, 1, 2, ... in every pass."""
        return False

    def spec(self) -> Any:
        """Returns a nest of `TensorSpec` like the elements; may have to read the first element."""
        for element in self.stream((0,)):
            return spec_of(element)
        raise InvalidValueError(
            f"element_spec: the dataset {describe(self)} is empty, so nothing is known about its"
            " elements."
        )

    def fixed_spec(self) -> Any | None:
        """Returns the nest of `TensorSpec` that all elements have; None if elements may differ."""
        return None

    def is_batched(self) -> bool | None:
        """Returns whether dim 0 of the arrays counts examples; None if only the user knows."""
        inputs = self.inputs()
        return inputs[0].is_batched() if inputs else None

    def makes_arrays(self) -> bool:
        """Returns whether every element has arrays of its own, to which nobody writes."""
        inputs = self.inputs()
        return bool(inputs) and all(node.makes_arrays() for node in inputs)

    def is_in_memory(self) -> bool:
        """Returns whether elements are made of arrays in memory, without files and user code."""
        inputs = self.inputs()
        return bool(inputs) and all(node.is_in_memory() for node in inputs)

    def inputs(self) -> tuple["Node", ...]:
        """Returns the nodes that it reads from."""
        found: list[Node] = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Node):
                found.append(value)
            elif isinstance(value, tuple):
                found.extend(item for item in value if isinstance(item, Node))
        return tuple(found)


def rewrite(node: Node, change: Callable[[Node], Node]) -> Node:
    """Returns the tree with `change` applied to every node, inputs first."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(node):  # type: ignore[arg-type]
        value = getattr(node, field.name)
        new = value
        if isinstance(value, Node):
            new = rewrite(value, change)
        elif isinstance(value, tuple) and any(isinstance(item, Node) for item in value):
            new = tuple(rewrite(item, change) for item in value)
            new = value if all(a is b for a, b in zip(new, value, strict=True)) else new
        if new is not value:
            changes[field.name] = new
    return change(dataclasses.replace(node, **changes) if changes else node)  # type: ignore[type-var]


def all_nodes(node: Node) -> Iterator[Node]:
    """Yields the nodes of a tree, inputs first."""
    for upstream in node.inputs():
        yield from all_nodes(upstream)
    yield node


def describe(node: Node) -> str:
    """Returns the operations of a tree, in the order in which data goes through them."""
    inputs = node.inputs()
    if not inputs:
        return node.label()
    before = describe(inputs[0])
    if len(inputs) > 1:
        before = "(" + ", ".join(describe(upstream) for upstream in inputs) + ")"
    return f"{before} > {node.label()}"


class Random(Node):
    """Base class of nodes with an order of their own, from `seed` or, without one, from `drawn`."""

    seed: int | None
    drawn: int

    def seed_of(self, path: Path) -> list[int]:
        """Returns the numbers that determine the order of a pass."""
        return [self.drawn if self.seed is None else self.seed, *path]


def drawn_seeds(node: Node) -> list[int]:
    """Returns the numbers that determine the orders without a seed, inputs first."""
    return [n.drawn for n in all_nodes(node) if isinstance(n, Random) and n.seed is None]


def with_drawn_seeds(node: Node, seeds: Sequence[int]) -> Node:
    """Returns the same dataset with other numbers in place of `drawn_seeds`."""
    left = iter(seeds)

    def change(own: Node) -> Node:
        if isinstance(own, Random) and own.seed is None:
            return dataclasses.replace(own, drawn=next(left))  # type: ignore[type-var]
        return own

    return rewrite(node, change)


def with_drawn(node: Node, seed: Sequence[int], number: int) -> Node:
    """Returns the same dataset, with orders without a seed derived from `seed` and a number."""
    count = len(drawn_seeds(node))
    if not count:
        return node
    words = np.random.SeedSequence([*seed, number]).generate_state(count, np.uint64)
    return with_drawn_seeds(node, [int(word) % MAX_SEED for word in words])
