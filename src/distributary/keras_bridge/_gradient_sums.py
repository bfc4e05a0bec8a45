"""Combines gradients over the replicas at the point where an optimizer receives them.

This is before clipping, loss-scale checks, accumulation and averages. So all of these see the
gradients of the whole batch, as on one device.

An optimizer of Keras also takes a `distributary.Variable`. Keras reads attributes such as `value`
and `path`. A `_View` has them for one variable of ours.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import jax.numpy as jnp
import keras
from jax import lax

from distributary.checkpoint import settle
from distributary.context import current_mode, get_strategy
from distributary.devices import REPLICA_AXIS
from distributary.errors import InvalidTypeError, UnsupportedError, shown
from distributary.keras_bridge._custom_loops import build_optimizer
from distributary.keras_bridge._keras_private import signature_of
from distributary.keras_bridge._replica import (
    in_optimizer,
    is_away_from_variables,
    is_for_servers,
    optimizing,
    replica_context,
)
from distributary.keras_bridge._variables import in_parts
from distributary.options import ReduceOp, VariableAggregation
from distributary.tracing import current_scope, push
from distributary.variables import IndexedSlices, ShardedVariable, Variable

_log = logging.getLogger(__name__)
_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # strategies


def _combined(gradients: Sequence[Any]) -> list[Any]:
    """Sums the gradients of all replicas of `Strategy.run`."""
    present = [gradient for gradient in gradients if gradient is not None]
    _tell_that_gradients_are_summed()
    if is_for_servers() and current_mode().role != "replica":
        reduced = list(map(push, present))
    elif is_away_from_variables():
        # Everything after a collective is computed where the variables lie.
        reduced = lax.psum(present, REPLICA_AXIS)
    else:
        reduced = get_strategy().extended.reduce_gradients(ReduceOp.SUM, present)
    left = iter(reduced)
    return [None if gradient is None else next(left) for gradient in gradients]


def _tell_that_gradients_are_summed() -> None:
    """Says it once to a step that has not asked for the number of replicas, or had a loss do so."""
    context, scope = replica_context(), current_scope()
    if context is None or scope is None or scope.asked_for_replicas or context.strategy in _warned:
        return
    _warned.add(context.strategy)
    _log.warning(
        "apply_gradients adds the gradients of %d replicas, as tf.distribute does. If the loss is a"
        " sum divided by the rows of the global batch, as of tf.nn.compute_average_loss, ignore"
        " this. A jnp.mean over the replica's own rows makes the step %d times as large: divide its"
        " sum by the rows of the global batch, or take a loss of Keras.",
        context.strategy.extended.num_replicas,
        context.strategy.extended.num_replicas,
    )


def combining(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Combines the gradients that a method gets; inside another optimizer, they already are.

    Variables of ours become such of Keras.
    """
    arguments = signature_of(original).bind(*args, **kwargs).arguments
    variables = arguments.get("trainable_variables")
    if variables is not None:
        arguments["grads"], variables = list(arguments["grads"]), list(variables)
        for gradient, variable in zip(arguments["grads"], variables, strict=False):
            if hasattr(gradient, "assign") and not hasattr(variable, "assign"):
                raise InvalidTypeError(
                    f"An optimizer got {shown(variable)} in the place of a variable. Write"
                    " optimizer.apply_gradients(zip(gradients, variables))."
                )
        arguments["trainable_variables"] = [_as_keras(variable) for variable in variables]
        pairs = zip(arguments["grads"], arguments["trainable_variables"], strict=False)
        arguments["grads"] = [_dense(gradient, variable) for gradient, variable in pairs]
        if not is_for_servers():
            build_optimizer(args[0], arguments["trainable_variables"])
    if args[0].built:
        settle(args[0])
    of_one = replica_context() is not None or is_for_servers() or is_away_from_variables()
    with in_parts():
        if in_optimizer() or not of_one:
            return original(**arguments)
        with optimizing():
            arguments["grads"] = _combined(arguments["grads"])
            return original(**arguments)


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


def _as_keras(variable: object) -> Any:
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


def _dense(gradient: object, variable: object) -> Any:
    """Returns the gradient of a view as one array."""
    if isinstance(gradient, IndexedSlices) and isinstance(variable, _View):
        return IndexedSlices(gradient.values, gradient.indices, variable.shape).to_dense()
    return gradient
