"""Types of annotations, and a default of arguments, that all packages share."""

from typing import Any, TypeAlias

Nest: TypeAlias = Any
"""A nest of tuples, lists and dictionaries with arrays or numbers as leaves: a pytree of JAX."""

MISSING: Any = object()
"""Default of an argument that is required, but whose absence needs a message of its own."""
