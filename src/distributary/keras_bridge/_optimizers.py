"""Optimizers of Keras on variables of `distributary.Variable`.

Keras reads attributes such as `value` and `path`. A `_View` has them for one variable of ours.
"""

import weakref
from typing import Any, final

import jax.numpy as jnp
import keras

from distributary.errors import UnsupportedError
from distributary.keras_bridge._replica import replica_context
from distributary.options import VariableAggregation
from distributary.variables import IndexedSlices, ShardedVariable, Variable


@final
class _View(keras.Variable):
    """A Keras variable whose value is that of a `distributary.Variable`."""

    def __init__(self, variable: Variable) -> None:
        # Not that of the base class, which would create a variable.
        self._variable = variable
        self._name = self._path = variable.name.removesuffix(":0")
        self._shape = variable.shape
        self._ndim = variable.ndim
        self._dtype = variable.dtype.name
        self._trainable = variable.trainable
        self._autocast = False
        self._initializer = self._layout = None
        self._regularizer = self._constraint = None
        self._overwrite_with_gradient = False

    @property
    def value(self) -> Any:
        """The value, traced in a step."""
        return self._variable.value()

    def assign(self, value: object) -> Any:
        """Sets the value, which all replicas share."""
        adds_up = self._variable.aggregation is VariableAggregation.SUM
        if adds_up and replica_context() is not None:
            raise UnsupportedError(
                f"Variable {self.path!r} has aggregation SUM, so that what an optimizer of Keras"
                " assigns in each replica would be added up. Create it without an aggregation: the"
                " optimizer sums the gradients."
            )
        self._variable.assign(jnp.asarray(value, self._variable.dtype))
        return value

    def numpy(self) -> Any:
        """Returns the value as a NumPy array."""
        return self._variable.numpy()


_views: weakref.WeakValueDictionary[int, _View] = weakref.WeakValueDictionary()


def as_keras(variable: object) -> Any:
    """Returns what an optimizer of Keras can use for a variable: the same for the same variable.

    Raises:
        UnsupportedError: for a variable whose values servers keep.
    """
    if not isinstance(variable, (Variable, ShardedVariable)):
        return variable
    if isinstance(variable, ShardedVariable) or variable._layout.kind is not None:
        raise UnsupportedError(
            f"Variable {variable.name!r} is on parameter servers, where optimizers of Keras update"
            " only variables of Keras. Create it in a layer by add_weight, or update it by"
            " assign_sub."
        )
    view = _views.get(id(variable))
    if view is None:
        view = _views[id(variable)] = _View(variable)
    return view


def dense(gradient: object, variable: object) -> Any:
    """Returns the gradient of a view as one array."""
    if isinstance(gradient, IndexedSlices) and isinstance(variable, _View):
        zeros = jnp.zeros(variable.shape, gradient.values.dtype)
        return zeros.at[gradient.indices].add(gradient.values)
    return gradient
