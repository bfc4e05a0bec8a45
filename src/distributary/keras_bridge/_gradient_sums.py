"""Combines gradients over the replicas at the point where an optimizer receives them.

This is before clipping, loss-scale checks, accumulation and averages. So all of these see the
gradients of the whole batch, as on one device.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from distributary.checkpoint import settle
from distributary.context import current_mode, get_strategy
from distributary.devices import REPLICA_AXIS
from distributary.errors import InvalidTypeError, shown
from distributary.keras_bridge._custom_loops import build_optimizer
from distributary.keras_bridge._keras_private import signature_of
from distributary.keras_bridge._optimizers import as_keras, dense
from distributary.keras_bridge._replica import (
    in_optimizer,
    is_away_from_variables,
    is_for_servers,
    optimizing,
    replica_context,
)
from distributary.keras_bridge._variables import in_parts
from distributary.options import ReduceOp
from distributary.tracing import current_scope, push

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
        arguments["trainable_variables"] = [as_keras(variable) for variable in variables]
        pairs = zip(arguments["grads"], arguments["trainable_variables"], strict=False)
        arguments["grads"] = [dense(gradient, variable) for gradient, variable in pairs]
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
