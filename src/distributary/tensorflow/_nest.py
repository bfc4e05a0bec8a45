"""`tf.nest`: nests of lists, tuples and dicts."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from distributary.devices import Nest
from distributary.errors import InvalidValueError


def map_structure(func: Callable[..., Any], *structure: Nest, **kwargs: Any) -> Any:
    """`tf.nest.map_structure`."""
    return jax.tree.map(func, *structure, is_leaf=_is_none)


def flatten(structure: Nest, expand_composites: bool = False) -> list[Any]:
    """`tf.nest.flatten`."""
    return jax.tree.leaves(structure, is_leaf=_is_none)


def pack_sequence_as(
    structure: Nest, flat_sequence: Sequence[Any], expand_composites: bool = False
) -> Any:
    """`tf.nest.pack_sequence_as`."""
    return jax.tree.unflatten(jax.tree.structure(structure, is_leaf=_is_none), flat_sequence)


def assert_same_structure(
    nest1: Nest, nest2: Nest, check_types: bool = True, expand_composites: bool = False
) -> None:
    """`tf.nest.assert_same_structure`."""
    first, second = (jax.tree.structure(nest, is_leaf=_is_none) for nest in (nest1, nest2))
    if str(first) != str(second):
        raise InvalidValueError(f"tf.nest: the structures differ: {first} and {second}.")


def is_nested(seq: object) -> bool:
    """`tf.nest.is_nested`."""
    return isinstance(seq, (list, tuple, dict))


def _is_none(value: object) -> bool:
    return value is None
