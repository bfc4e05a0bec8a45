"""Gradients with respect to variables, in JAX's style."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

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
