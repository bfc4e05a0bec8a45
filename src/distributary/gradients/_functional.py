"""Gradients with respect to variables, in JAX's style."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from distributary.context import Mode, ReplicaContext, current_mode, entered, get_replica_context
from distributary.devices import Nest
from distributary.engine import function
from distributary.errors import InvalidTypeError, InvalidValueError, described, shown
from distributary.gradients._tape import GradientTape
from distributary.tracing import current_scope
from distributary.variables import as_variable


def value_and_grad(
    fn: Callable[..., Any], variables: Nest, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns a function that computes `fn` and its gradient with respect to `variables`.

    The gradient is that of the replica; nothing is summed over replicas. Assignments that `fn`
    makes take effect. Outside of `Strategy.run` and `distributary.function` the function is
    compiled by itself.

    Args:
        fn: Returns a scalar, or with `has_aux` a pair of a scalar and a nest.
        variables: Nest of variables.
        has_aux: Whether `fn` returns a pair.

    Returns:
        A function with the arguments of `fn` that returns `(value, gradients)`, or
        `((value, aux), gradients)`. `gradients` is a nest like `variables`: arrays, zeros where
        `fn` does not depend on the variable, and `IndexedSlices` for variables that are read only
        by `sparse_read`.

    Raises:
        InvalidTypeError: if `variables` holds anything but variables.
        InvalidValueError: when called, if the value is not a scalar.

    Source: `jax.value_and_grad`.
    """
    if not callable(fn):
        raise InvalidTypeError(
            f"grad and value_and_grad take a function that computes the loss, got {shown(fn)}."
            " Write def loss(): return ..., and dist.value_and_grad(loss, variables)()."
        )
    _check_variables(variables)

    def traced(*args: Any, **kwargs: Any) -> Any:
        with GradientTape(watch_accessed_variables=False) as tape:
            for variable in jax.tree.leaves(variables):
                tape.watch(variable)
            result = fn(*args, **kwargs)
            value = _scalar(result, has_aux)
        gradients = tape.gradient(value, variables, unconnected_gradients="zero")
        return result, gradients

    compiled = function(traced)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (compiled if current_scope() is None else traced)(*args, **kwargs)

    return call


def grad(fn: Callable[..., Any], variables: Nest, has_aux: bool = False) -> Callable[..., Any]:
    """Returns a function that computes the gradient of `fn` with respect to `variables`.

    Like `value_and_grad`, but the function returns `gradients`, or `(gradients, aux)` with
    `has_aux`.

    Source: `jax.grad`.
    """
    both = value_and_grad(fn, variables, has_aux)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        result, gradients = both(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return call


def _check_variables(variables: Nest) -> None:
    leaves = jax.tree.leaves(variables)
    for leaf in leaves:
        if as_variable(leaf) is None:
            raise InvalidTypeError(
                f"value_and_grad: variables holds {shown(leaf)}; expected"
                " variables, distributary.Variable or keras.Variable. For gradients with respect to"
                " arrays use jax.grad."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise InvalidTypeError(
                f"value_and_grad: variable {leaf.name!r} has dtype {leaf.dtype}; only floating"
                " point variables have gradients."
            )


def _scalar(result: Nest, has_aux: bool) -> jax.Array:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise InvalidTypeError(
            f"value_and_grad: with has_aux=True the function must return (value, aux), got"
            f" {shown(result)}."
        )
    value = result[0] if has_aux else result
    if jnp.shape(value) != ():
        raise InvalidValueError(
            f"value_and_grad: the function returned a value of shape {jnp.shape(value)}, expected a"
            " scalar. Sum or average it first."
        )
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        raise InvalidTypeError(
            f"value_and_grad: the function returned {described(value)}, expected a floating point"
            " scalar; nothing else can be differentiated."
        )
    return value


# Losses that need all rows of the batch, for replicas that each have only some of them.


def global_batch_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a loss that relates rows of the batch use the rows of all replicas.

    Some losses are different on a part of the batch: a softmax over the other rows of the batch, a
    batch's variance, a product of two means. The returned function gathers the rows of all replicas
    before it calls `loss`, and gives every replica its part of the result. Losses, gradients and
    therefore weights are those of one device with the whole batch, also if the replicas have
    different numbers of rows. Every replica computes the whole of `loss`; the computation before it
    stays divided. Keras' `fit` and `evaluate` see the whole batch anyway: there, and with one
    replica, the function is `loss`.

    Args:
        loss: From arrays with one row per example to a scalar, or to an array with one row per
            example; or a loss of Keras. It may read variables. Random numbers in it must be the
            same on all replicas.

    Returns:
        A function like `loss`. Arrays in its positional arguments, which may be nests, are gathered
        along dim 0; scalars and keyword arguments reach `loss` unchanged. If `loss` returns an
        array, you get the replica's own rows. A scalar is divided by the number of replicas, over
        which gradients are summed. `model.compute_loss` divides what layers add to the loss, too,
        so multiply a scalar by the number of replicas before you give it to `add_loss`.

    Raises:
        InvalidTypeError: if `loss` cannot be called.
        InvalidValueError: when called, if no argument has rows, if arguments differ in their number
            of rows, or if the result is neither a scalar nor has a row per example.
    """
    if not callable(loss):
        raise InvalidTypeError(
            f"global_batch_loss: loss is {shown(loss)}, expected a function of arrays. Decorate the"
            " loss function, or give it a loss of Keras such as keras.losses.Dice()."
        )
    named = getattr(loss, "__name__", None) or getattr(loss, "name", None)
    name = str(named or type(loss).__name__)

    def of_global_batch(*args: Any, **kwargs: Any) -> Any:
        context = get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return loss(*args, **kwargs)
        num_rows = _num_rows(name, args)
        arrays = jax.tree.map(lambda x: jnp.asarray(x) if jnp.ndim(x) else x, args)
        leaves, tree = jax.tree.flatten(arrays)
        places = [i for i, leaf in enumerate(leaves) if jnp.ndim(leaf)]
        number = context.replica_id_in_sync_group
        # Tells where the rows of a replica begin, as replicas may differ in their number of rows.
        owners = jnp.full((num_rows,), number, jnp.int32)
        *gathered, owners = context.all_gather([*(leaves[i] for i in places), owners], axis=0)
        for i, value in zip(places, gathered, strict=True):
            leaves[i] = value
        mode = Mode(
            current_mode().strategy,
            "replica",
            ReplicaContext(context.strategy, lambda: number),
            is_global=True,
        )
        with entered(mode):
            result = jnp.asarray(loss(*jax.tree.unflatten(tree, leaves), **kwargs))
        if result.ndim == 0:
            return result / context.num_replicas_in_sync
        if result.shape[0] != owners.shape[0]:
            raise InvalidValueError(
                f"global_batch_loss: {name} returned an array of shape {result.shape} for"
                f" {owners.shape[0]} examples. Return a scalar, or one row per example."
            )
        start = jnp.sum(owners < number)
        return lax.dynamic_slice_in_dim(result, start, num_rows, axis=0)

    if hasattr(loss, "__name__"):
        return functools.wraps(loss)(of_global_batch)
    of_global_batch.__name__ = name
    of_global_batch.__doc__ = loss.__doc__
    return of_global_batch


def _num_rows(name: str, args: Nest) -> int:
    sizes = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(args) if jnp.ndim(leaf)}
    if len(sizes) != 1:
        text = f"arrays of {sorted(sizes)} rows" if sizes else "no array"
        raise InvalidValueError(
            f"global_batch_loss: {name} was called with {text} in its positional arguments,"
            " expected arrays with one row per example. Pass other arrays by keyword."
        )
    return int(sizes.pop())
