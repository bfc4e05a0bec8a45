"""Numbers of one replica of `Strategy.run` as parts of those of the whole batch.

Gradients are summed over the replicas, as in tf.distribute. Divisors of losses are those of the
whole batch, so the result equals that of one device, even with masks and weights. In tf.distribute,
it is the mean of the replicas' means.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

from distributary._threads import bound
from distributary.checkpoint import settle
from distributary.context import current_mode, get_strategy, in_global_view
from distributary.devices import REPLICA_AXIS
from distributary.errors import InvalidTypeError, UnsupportedError, shown
from distributary.keras_bridge._custom_loops import (
    build_optimizer,
    in_own_step,
    is_away_from_variables,
    is_for_servers,
    is_uneven,
    replica_context,
    total,
)
from distributary.keras_bridge._data import check_columns
from distributary.keras_bridge._keras_private import apply_mask, signature_of
from distributary.keras_bridge._variables import in_optimizer, optimizing
from distributary.options import ReduceOp, VariableAggregation
from distributary.tracing import current_scope, push
from distributary.variables import IndexedSlices, ShardedVariable, Variable

_log = logging.getLogger(__name__)

# Losses


_AVERAGING = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def aggregate_additional_loss(original: Callable[..., Any], self: object, loss: Any) -> Any:
    """Makes what a layer adds, a mean over a replica's rows, its part of the loss of the batch."""
    loss, context = original(self, loss), replica_context()
    return loss if context is None else loss / context.num_replicas_in_sync


# The arguments of the losses that are being called, the outermost first.
_calls: ContextVar[tuple[tuple[Any, Any, Any], ...]] = ContextVar("calls of losses", default=())


def call_loss(
    original: Callable[..., Any], self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Notes a loss that is called, for `reduce_weighted_values`."""
    check_columns(self, y_true, y_pred)
    with bound(_calls, (*_calls.get(), (self, y_true, y_pred))):
        return original(self, y_true, y_pred, sample_weight)


def _of_whole_batch(context: Any, value: Any) -> Any:
    """Returns the one number that a loss gives for the rows of all replicas."""
    if not _calls.get():
        return value
    loss, *y = _calls.get()[0]
    y = jax.tree.map(lambda leaf: keras.ops.convert_to_tensor(leaf, loss.dtype), y)
    if any(leaf.ndim == 0 for leaf in jax.tree.leaves(y)):
        return value
    return loss.call(*context.all_gather(y, axis=0))


def _nan_without_class(values: Any) -> Any:
    """Returns losses, NaN for labels that are no class, as TensorFlow has it on GPUs; not 0."""
    if not _calls.get() or not in_own_step():
        return values
    loss, labels, outputs = _calls.get()[-1]
    # What a subclass makes of the losses of its rows is not known.
    is_sparse = type(loss) is keras.losses.SparseCategoricalCrossentropy
    if not is_sparse or loss.ignore_class is not None or not values.size:
        return values
    labels = jnp.reshape(jnp.asarray(labels), values.shape)
    is_class = (labels >= 0) & (labels < jnp.size(outputs) // values.size)
    return values * jnp.where(is_class, 1, jnp.nan).astype(values.dtype)


def reduce_weighted_values(
    original: Callable[..., Any],
    values: Any,
    sample_weight: object = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Divides by the count or weight of the whole batch instead of the replica's own.

    In a step of one's own, losses of labels without a class are NaN, unless weights or a mask may
    drop them.
    """
    if sample_weight is None and mask is None:
        values = _nan_without_class(values)
    context = replica_context()
    is_part = len(_calls.get()) > 1  # of a loss, which is divided as a whole
    if context is None or is_part or reduction in (None, "none"):
        return original(values, sample_weight, mask, reduction, dtype)
    # Read in any case, which tells the scope that the loss is one of the whole batch.
    num_replicas = context.num_replicas_in_sync
    if jnp.shape(values) == ():
        values = _of_whole_batch(context, values)
        # One entry, or Keras would make weights of a single row a number, too.
        values = values if sample_weight is None and mask is None else values[None]
    losses = original(values, sample_weight, mask, "none", dtype)
    if losses.shape == ():
        return losses / num_replicas
    if losses.shape == (0,) and not is_uneven():  # the whole batch is empty
        return losses
    loss = jnp.sum(losses)
    if reduction not in _AVERAGING:
        return loss
    is_weighted = reduction == "mean_with_sample_weight"
    weights = apply_mask(sample_weight, mask, losses.dtype, reduction) if is_weighted else None
    if weights is not None:
        divisor = total(context, jnp.sum(jnp.asarray(weights)).astype(loss.dtype))
    elif is_uneven():
        divisor = total(context, jnp.asarray(losses.size, loss.dtype))
    else:
        divisor = jnp.asarray(losses.size * num_replicas, loss.dtype)
    if mask is not None and not is_weighted:
        # Weights of valid entries are scaled by total over valid, so that they count for all.
        valid = jnp.sum(jnp.asarray(mask).astype(losses.dtype))
        counts = jnp.stack([jnp.asarray(mask.size, losses.dtype), valid])
        everything, valid = total(context, counts)
        loss = loss * keras.ops.divide_no_nan(everything, valid)
    return keras.ops.divide_no_nan(loss, divisor)


# Random numbers and batch statistics of layers


# An odd number, so that up to 2**32 replicas get distinct seeds.
_SEED_STRIDE = 0x9E3779B1


def next_seed(original: Callable[..., Any], self: object, ordered: bool = True) -> Any:
    """Gives every replica its own seed; the state of the generator advances equally on all."""
    seed = original(self, ordered)
    if is_for_servers():
        # Workers may have read the same state. A step that is repeated draws the same numbers
        # again.
        number = current_mode().strategy.extended.remote_steps.number()
        if number is not None:
            seed = seed.at[1].add(_spread(number, seed.dtype))
    context = replica_context()
    if context is not None:
        seed = seed.at[0].add(_spread(context.replica_id_in_sync_group, seed.dtype))
    return seed


def _spread(number: Any, dtype: Any) -> Any:
    return jnp.asarray(number).astype(dtype) * jnp.asarray(_SEED_STRIDE, jnp.uint32).astype(dtype)


def batch_normalization_init(
    original: Callable[..., Any], self: Any, *args: Any, synchronized: bool = False, **kwargs: Any
) -> None:
    """Accepts `synchronized=True`, which Keras supports only for TensorFlow."""
    original(self, *args, **kwargs)
    self.synchronized = synchronized


@final
class _Unsynchronized:
    """A layer of batch normalization as one whose statistics are those of the rows that it gets."""

    synchronized = False

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def batch_normalization_moments(
    original: Callable[..., Any], self: Any, inputs: Any, mask: Any
) -> Any:
    """Uses the mean and variance of the whole batch in `Strategy.run`, with `synchronized=True`."""
    mean, variance = original(_Unsynchronized(self), inputs, mask)
    context = replica_context()
    if context is None or not self.synchronized:
        return mean, variance
    wide = jnp.promote_types(mean.dtype, jnp.float32)
    channels = inputs.shape[self.axis]
    count = jnp.asarray(inputs.size / channels, wide)
    if mask is not None:
        entries = jnp.broadcast_to(mask[..., None], inputs.shape)
        count = jnp.sum(entries.astype(wide)) / channels
    # Without entries, a replica's own mean and variance are undefined.
    wide_mean, wide_variance = (jnp.where(count > 0, x.astype(wide), 0.0) for x in (mean, variance))
    total_count, sums = total(context, (count, wide_mean * count))
    total_count = jnp.maximum(total_count, 1)
    global_mean = sums / total_count
    spread = wide_variance + jnp.square(wide_mean - global_mean)
    global_variance = total(context, spread * count) / total_count
    return global_mean.astype(mean.dtype), global_variance.astype(variance.dtype)


def batch_normalization_call(
    original: Callable[..., Any], self: Any, inputs: Any, training: Any = None, mask: Any = None
) -> Any:
    """Normalizes each replica's part of a whole batch by itself, if the strategy asks for it."""
    num_parts = _num_parts(self, inputs, training, mask)
    if num_parts == 1:
        return original(self, inputs, training=training, mask=mask)
    # Rows are divided as on the devices; XLA keeps the parts where they are.
    num_rows, *sizes = inputs.shape
    each = -(-num_rows // num_parts)
    rows = jnp.pad(inputs, [(0, num_parts * each - num_rows), *[(0, 0)] * len(sizes)])
    counts = np.clip(num_rows - each * np.arange(num_parts), 0, each)
    moving = self.moving_mean, self.moving_variance
    values = [(variable, variable.value) for variable in self.variables]

    def of_part(rows: Any, count: Any) -> Any:
        present = jnp.arange(each) < count
        present = jnp.broadcast_to(present.reshape(each, *[1] * (len(sizes) - 1)), rows.shape[:-1])
        with keras.StatelessScope(values) as scope:
            is_full = num_rows == num_parts * each
            out = original(self, rows, training=training, mask=None if is_full else present)
        return out, [scope.get_current_value(variable) for variable in moving]

    parts = rows.reshape(num_parts, each, *sizes)
    out, averages = jax.vmap(of_part)(parts, counts)
    for variable, average in zip(moving, averages, strict=True):
        variable.assign(jnp.tensordot((counts / num_rows).astype(average.dtype), average, 1))
    return out.reshape(rows.shape)[:num_rows]


def _num_parts(layer: Any, inputs: Any, training: Any, mask: Any) -> int:
    """Returns of how many parts of a batch a layer takes statistics."""
    if not (training and layer.trainable and in_global_view()) or not inputs.shape[0]:
        return 1
    strategy = current_mode().strategy
    if not strategy.extended.experimental_batch_statistics_of_replicas:
        return 1
    if mask is not None or layer.renorm or layer.axis in (0, -len(inputs.shape)):
        raise UnsupportedError(
            f"{layer.name}: experimental_batch_statistics_of_replicas is for BatchNormalization"
            " without a mask, without renorm and with another axis than that of the rows. Leave"
            " the option out; statistics are then those of the whole batch."
        )
    return int(strategy.extended.placement.num_replicas)


# Gradients, combined over the replicas at the point where an optimizer receives them.
#
# This is before clipping, loss-scale checks, accumulation and averages. So all of these see the
# gradients of the whole batch, as on one device.
#
# An optimizer of Keras also takes a `distributary.Variable`. Keras reads attributes such as `value`
# and `path`. A `_View` has them for one variable of ours.


_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # strategies


def _combined(gradients: Sequence[Any]) -> list[Any]:
    """Sums the gradients of all replicas of `Strategy.run`."""
    _tell_that_gradients_are_summed()
    if is_for_servers() and current_mode().role != "replica":
        return [None if gradient is None else push(gradient) for gradient in gradients]
    if is_away_from_variables():
        # Everything after a collective is computed where the variables lie.
        return list(lax.psum(list(gradients), REPLICA_AXIS))
    return list(get_strategy().extended.reduce_gradients(ReduceOp.SUM, gradients))


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
    is_part = replica_context() is not None or is_for_servers() or is_away_from_variables()
    is_outermost = not in_optimizer()
    with optimizing():
        if is_part and is_outermost:
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
        self._autocast = self._overwrite_with_gradient = False
        self._initializer = self._layout = self._regularizer = self._constraint = None

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
