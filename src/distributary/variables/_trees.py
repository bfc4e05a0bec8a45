"""Trees of variables: the parameters of a JAX library, and the state of its optimizer."""

from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from distributary.errors import InvalidTypeError, InvalidValueError
from distributary.variables._foreign import as_variable
from distributary.variables._variable import Variable


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
