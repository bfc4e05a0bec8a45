"""Variables of other libraries, as programs and tapes see them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from distributary._late import libraries
from distributary.errors import InvalidTypeError, InvalidValueError
from distributary.tracing import Handle
from distributary.variables._layout import VariableLayout
from distributary.variables._variable import Variable


class ForeignVariable:
    """A stand-in for a variable of another library, which keeps the value.

    Attributes:
        holder: A weak reference to that variable, which has the stored array as its `_value`.
    """

    holder: Callable[[], Any]
    _handle: Handle
    _layout: VariableLayout
    _stores_array = False

    @property
    def variable(self) -> Any:
        """The variable of the other library."""
        return self.holder()

    @property
    def trainable(self) -> bool:
        """True if `GradientTape` watches it automatically."""
        return bool(self.variable.trainable)

    @property
    def _value(self) -> Any:
        return self.holder()._value

    @_value.setter
    def _value(self, value: object) -> None:
        self.holder()._value = value

    @property
    def _shared(self) -> bool:
        return getattr(self.holder(), "_shared", False)

    @_shared.setter
    def _shared(self, value: bool) -> None:
        self.holder()._shared = value

    def begin_with(self, array: object) -> bool:
        """Makes an array the first value of a new variable; returns False if it has a value."""
        return False

    @property
    def name(self) -> str:
        """Name used in messages."""
        return self._handle.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self._handle.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the value."""
        return self._handle.dtype


def as_variable(value: object) -> Variable | ForeignVariable | None:
    """Returns `value`, or a stand-in for it, with a handle; None if it is not a variable."""
    if isinstance(value, Variable):
        return value
    for library in libraries():
        stand_in: ForeignVariable | None = library.variable(value)
        if stand_in is not None:
            return stand_in
    return None


# Trees of variables: the parameters of a JAX library, and the state of its optimizer.


def values(tree: Any) -> Any:
    """Returns a tree with the value of every variable in its place.

    Together with `assign`, it applies functions on trees of arrays, such as those of optax, to
    variables, which you create with `jax.tree.map(distributary.Variable, parameters)`.

    Args:
        tree: Nest of tuples, lists, dicts or other nodes that JAX knows. Its leaves are variables
            of distributary or Keras; other leaves stay as they are.

    Returns:
        The same structure. In a step, the values of the replica.
    """
    return jax.tree.map(_value, tree)


def assign(tree: Any, values: Any) -> None:
    """Assigns to every variable of a tree the value at its place in another tree.

    Args:
        tree: Nest of variables of distributary or Keras, see `values`.
        values: The same structure, with arrays or numbers that have the shapes of the variables.
            What replicas may assign in a step is that of `Variable.assign`.

    Raises:
        InvalidValueError: if the structures differ. Nothing is assigned.
        InvalidTypeError: if a leaf of `tree` is not a variable. Nothing is assigned.
    """
    expected: Any = jax.tree.structure(tree)
    structure: Any = jax.tree.structure(values)
    if structure != expected:
        raise InvalidValueError(
            f"assign got values of another structure than the variables: {structure}, expected"
            f" {expected}. Pass a tree that has the structure of distributary.values(tree)."
        )
    variables = tree_leaves_with_path(tree)
    for path, variable in variables:
        if as_variable(variable) is None:
            raise InvalidTypeError(
                f"assign got {type(variable).__name__} at tree{keystr(path)}, expected a variable."
                " Create it in the scope of the strategy:"
                " jax.tree.map(distributary.Variable, tree)."
            )
    for (_, variable), value in zip(variables, jax.tree.leaves(values), strict=True):
        variable.assign(value)


def _value(leaf: Any) -> Any:
    variable = as_variable(leaf)
    if variable is None:
        return leaf
    # Of Keras' variables, `value` is an attribute.
    return variable.value() if isinstance(variable, Variable) else leaf.value
