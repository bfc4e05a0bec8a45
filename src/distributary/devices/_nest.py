"""The type of nests, for annotations."""

from typing import Any, TypeAlias

Nest: TypeAlias = Any
"""A nest of tuples, lists and dictionaries with arrays or numbers as leaves: a pytree of JAX."""
