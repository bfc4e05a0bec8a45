"""Gradients of one replica; `Strategy.reduce` and optimizers combine those of all replicas."""

import enum
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax

from distributary.context import Mode, ReplicaContext, current_mode, entered, get_replica_context
from distributary.devices import Nest, inside_jax_trace
from distributary.engine import function
from distributary.errors import (
    ContextError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    described,
    shown,
)
from distributary.tracing import EagerRecord, TapeRecord, TraceScope, current_scope, infers_shapes
from distributary.variables import ForeignVariable, IndexedSlices, Variable, as_variable

_logger = logging.getLogger(__name__)


class UnconnectedGradients(enum.Enum):
    """The result of `GradientTape.gradient` for a source the target does not depend on.

    Source: `tf.UnconnectedGradients`.
    """

    NONE = "none"
    ZERO = "zero"


@final
class GradientTape:
    """A recorder of a computation that then differentiates it.

    Inside `Strategy.run` and `distributary.function` it costs nothing at run time: the recorded
    part is differentiated by `jax.vjp` while the step is traced. Gradients are those of the
    replica; nothing is summed over replicas. Elsewhere, every operation of JAX is computed at once
    and recorded, as in TensorFlow. Trainable variables are watched automatically.

    Args:
        persistent: Whether `gradient` may be called more than once.
        watch_accessed_variables: Whether trainable variables are watched automatically.

    Raises:
        ContextError: if you enter it inside a raw `jax.jit`.

    Source: `tf.GradientTape`.
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self._persistent = persistent
        self._watch_accessed_variables = watch_accessed_variables
        self._scope: TraceScope | None = None
        self._record: TapeRecord | EagerRecord | None = None  # outside of traces, the latter
        self._recording = False
        self._used = False
        self._watched: list[Any] = []

    def __enter__(self) -> "GradientTape":
        if self._recording:
            raise InvalidValueError("GradientTape: the tape is already recording.")
        scope = current_scope()
        has_recorded = self._record is not None and scope is self._scope
        if has_recorded and (self._persistent or not self._used):
            raise UnsupportedError(
                "GradientTape: the tape is entered a second time, and would forget what it recorded"
                " before. Record everything in one `with` block, or use another tape."
            )
        if scope is None and inside_jax_trace() and not infers_shapes():
            raise ContextError(
                "GradientTape does not record inside a raw jax.jit. Use distributary.function or"
                " Strategy.run in place of jax.jit, or jax.grad in place of the tape."
            )
        self._start(scope)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._recording:
            self._mark("stop")

    def _start(self, scope: TraceScope | None) -> None:
        self._scope = scope
        self._record = EagerRecord() if scope is None else scope.new_tape()
        self._used = False
        self._mark("start")

    def _mark(self, event: str) -> None:
        assert self._record is not None
        self._record.mark(event)
        self._recording = event in ("start", "resume")

    def watch(self, tensor: Nest) -> None:
        """Watches an array or variable, or a nest of them.

        You need to watch variables that are not trainable. Arrays need not be watched. Integers
        are logged as a warning: gradients with respect to them are None.

        Raises:
            InvalidTypeError: for values that are not arrays or variables.
        """
        for leaf in jax.tree.leaves(tensor):
            if not hasattr(leaf, "dtype"):
                raise InvalidTypeError(
                    f"GradientTape.watch: got {shown(leaf)}, expected an array or variable."
                )
            _is_differentiable("watched value", leaf)
            variable = as_variable(leaf)
            self._watched.append(leaf if variable is None else variable)

    def watched_variables(self) -> tuple[Variable, ...]:
        """Returns the variables watched and read so far."""
        read = [] if self._record is None else self._record.variables()
        if isinstance(self._record, EagerRecord):
            read = list(map(as_variable, read))
        return tuple([_read_as(v) for v in read if v is not None and self._watches(v)])

    def _watches(self, variable: Variable | ForeignVariable) -> bool:
        if any(watched is variable for watched in self._watched):
            return True
        return self._watch_accessed_variables and variable.trainable

    @contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Runs the block without recording it; its results count as constants.

        Raises:
            UnsupportedError: while another tape would have to record the block.
        """
        if not self._recording:
            raise ContextError("GradientTape.stop_recording: the tape is not recording.")
        if self._scope is not None and len(self._scope.recording) > 1:
            raise UnsupportedError(
                "GradientTape.stop_recording is not possible while another tape records too. Use"
                " jax.lax.stop_gradient on the values that are to count as constant."
            )
        self._mark("pause")
        try:
            yield
        finally:
            # A gradient taken inside the block has ended a tape that is not persistent.
            if self._persistent or not self._used:
                self._mark("resume")

    def reset(self) -> None:
        """Forgets everything recorded so far and starts again."""
        if not self._recording:
            raise ContextError("GradientTape.reset: the tape is not recording.")
        scope = self._scope
        self._mark("stop")
        self._watched.clear()
        self._start(scope)

    def gradient(
        self,
        target: Nest,
        sources: Nest,
        output_gradients: Nest = None,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
    ) -> Nest:
        """Returns the gradient of the sum of `target` with respect to `sources`.

        Args:
            target: Array, or nest of arrays whose sums are added up.
            sources: Nest of variables and arrays.
            output_gradients: Nest like `target` with weights for its elements; None for 1.
            unconnected_gradients: `UnconnectedGradients.NONE` or `ZERO`, or its value.

        Returns:
            A nest like `sources`: arrays; `IndexedSlices` for variables that are read only by
            `sparse_read`; None for sources that are integers, or on which the target does not
            depend, as integers never do.

        Raises:
            ContextError: if the tape recorded nothing, or was used before and is not persistent.
            InvalidTypeError: if a target is not an array, or a source not an array or variable.

        Source: `tf.GradientTape.gradient`.
        """
        self._use("gradient")
        return self._gradient(target, sources, output_gradients, unconnected_gradients)

    def jacobian(
        self,
        target: jax.Array,
        sources: Nest,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Nest:
        """Returns the Jacobians of `target`: arrays `[*target.shape, *source.shape]`.

        The result is a nest like `sources`, with None for those without influence. A gradient is
        computed for every element of `target`. The last two arguments have no effect.

        Raises:
            ContextError, InvalidTypeError: as `gradient` does.

        Source: `tf.GradientTape.jacobian`.
        """
        self._use("jacobian")
        shape = jnp.shape(target)
        seeds = jnp.eye(math.prod(shape), dtype=_target(target).dtype).reshape(-1, *shape)
        rows = [self._gradient(target, sources, seed, unconnected_gradients) for seed in seeds]
        return jax.tree.map(lambda *parts: _stacked(parts, shape), *rows, is_leaf=_is_gradient)

    def batch_jacobian(
        self,
        target: jax.Array,
        source: jax.Array,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """Returns the Jacobians of the rows of `target`, each by its own row of `source`.

        Args:
            target: Array `[batch, ...]`; its rows depend on their own rows of `source` alone.
            source: Array `[batch, ...]`.
            unconnected_gradients: As in `gradient`.
            parallel_iterations: Has no effect.
            experimental_use_pfor: Has no effect.

        Returns:
            Array `[batch, *target.shape[1:], *source.shape[1:]]`.

        Raises:
            ContextError, InvalidTypeError: as `gradient` does.

        Source: `tf.GradientTape.batch_jacobian`.
        """
        self._use("batch_jacobian")
        num_rows, *shape = jnp.shape(target)
        of_row = jnp.eye(math.prod(shape), dtype=_target(target).dtype).reshape(-1, 1, *shape)
        seeds = [jnp.broadcast_to(seed, (num_rows, *shape)) for seed in of_row]
        rows = [self._gradient(target, source, seed, unconnected_gradients) for seed in seeds]
        jacobian = _stacked(rows, tuple(shape))
        return jacobian if jacobian is None else jnp.moveaxis(jacobian, len(shape), 0)

    def _use(self, method: str) -> None:
        """Checks that the tape may be asked now, and ends it if it is not persistent."""
        if self._record is None or current_scope() is not self._scope:
            raise ContextError(
                f"GradientTape.{method}: the tape recorded nothing in this function. Call {method}"
                " in the function that has `with GradientTape() as tape:`."
            )
        if self._used and not self._persistent:
            raise ContextError(
                f"GradientTape.{method}: the tape is asked a second time. Use"
                " GradientTape(persistent=True) for several gradients of one tape."
            )
        self._used = True
        if self._recording and not self._persistent:
            self._mark("stop")

    def _gradient(
        self,
        target: Nest,
        sources: Nest,
        output_gradients: Nest,
        unconnected_gradients: UnconnectedGradients | str,
    ) -> Nest:
        zero = UnconnectedGradients(unconnected_gradients) is UnconnectedGradients.ZERO
        targets, seeds, of_itself = _targets(target, output_gradients)
        leaves, tree = jax.tree.flatten(sources, is_leaf=lambda x: x is None)
        differentiated = [self._differentiated(leaf) for leaf in leaves]
        # By identity: a source that is given twice is one.
        distinct = {id(source): source for source in differentiated if source is not None}.values()
        arrays = [source for source in distinct if isinstance(source, jax.Array)]
        variables = [source for source in distinct if not isinstance(source, jax.Array)]
        if (
            of_itself
            and not (targets or zero)
            and leaves
            and all(isinstance(leaf, jax.Array) for leaf in leaves)
        ):
            raise InvalidTypeError(
                f"GradientTape.gradient: target is {described(target)}, and sources are arrays, on"
                " which no variable depends. Write tape.gradient(loss, variables)."
            )
        results: Sequence[Any] = [None] * len(distinct)
        if targets:
            assert self._record is not None
            is_eager = isinstance(self._record, EagerRecord)
            noted = [_read_as(v) if is_eager else v._handle for v in variables]
            results = self._record.gradient(targets, seeds, arrays, noted)
        gradient_of = dict(zip(map(id, (*arrays, *variables)), results, strict=True))
        gradients = []
        for leaf, source in zip(leaves, differentiated, strict=True):
            gradient = gradient_of.get(id(source))
            if isinstance(gradient, tuple):
                gradient = IndexedSlices(gradient[0], gradient[1], leaf.shape)
            if id(source) in of_itself:
                gradient = of_itself[id(source)] + (
                    0 if gradient is None else jnp.asarray(gradient)
                )
            if gradient is None and zero:
                gradient = jnp.zeros(jnp.shape(leaf), leaf.dtype)
            gradients.append(gradient)
        return jax.tree.unflatten(tree, gradients)

    def _differentiated(self, leaf: object) -> jax.Array | Variable | ForeignVariable | None:
        """Returns the array or variable of a source; None if its gradient is None."""
        variable = as_variable(leaf)
        if variable is not None:
            is_inexact = jnp.issubdtype(variable.dtype, jnp.inexact)
            return variable if is_inexact and self._watches(variable) else None
        if isinstance(leaf, jax.Array):
            return leaf if _is_differentiable("source", leaf) else None
        if isinstance(leaf, float):
            return None
        raise InvalidTypeError(
            f"GradientTape.gradient: source is {described(leaf)}, expected variables and arrays."
        )


def _is_gradient(value: object) -> bool:
    return value is None or isinstance(value, IndexedSlices)


def _stacked(rows: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """Returns gradients as one array whose first dims have `shape`; None if there are none."""
    if any(row is None for row in rows):
        return None
    dense = [jnp.asarray(row) for row in rows]
    return jnp.stack(dense).reshape(*shape, *dense[0].shape)


def _read_as(variable: Variable | ForeignVariable) -> Any:
    """Returns the object that is noted when a variable is read."""
    return variable.variable if isinstance(variable, ForeignVariable) else variable


def _targets(
    target: Nest, output_gradients: Nest
) -> tuple[list[jax.Array], list[jax.Array], dict[int, Any]]:
    """Returns the differentiable targets and their seeds; and the seeds of variables.

    A variable that is a target depends on itself alone: its seed, by its identity, is its gradient.
    """
    leaves = jax.tree.leaves(target)
    targets, seeds = [], []
    of_variables: dict[int, Any] = {}
    arrays = [_target(leaf) for leaf in leaves]
    for leaf, array, seed in zip(leaves, arrays, _seeds(output_gradients, arrays), strict=True):
        variable = as_variable(leaf)
        if not _is_differentiable("target", array):
            continue
        if variable is None:
            targets.append(array)
            seeds.append(seed)
        else:
            of_variables[id(variable)] = of_variables.get(id(variable), 0) + seed
    return targets, seeds, of_variables


def _target(leaf: object) -> jax.Array:
    if not isinstance(leaf, (jax.Array, float)) and as_variable(leaf) is None:
        raise InvalidTypeError(
            f"GradientTape.gradient: target is {described(leaf)}, expected an array."
        )
    return jnp.asarray(leaf)


def _is_differentiable(role: str, value: Any) -> bool:
    """Returns whether a value has a gradient, and logs a warning if not."""
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return True
    _logger.warning(
        "GradientTape: the %s has dtype %s, so its gradient is None; only floating point values can"
        " be differentiated.",
        *(role, value.dtype),
    )
    return False


def _seeds(output_gradients: Nest, targets: Sequence[jax.Array]) -> list[jax.Array]:
    entries: list[Any] = [None] * len(targets)
    if output_gradients is not None:
        entries = jax.tree.leaves(output_gradients, is_leaf=lambda x: x is None)
    if len(entries) != len(targets):
        raise InvalidValueError(
            f"GradientTape.gradient: output_gradients has {len(entries)} entries for"
            f" {len(targets)} targets."
        )
    seeds = []
    for seed, target in zip(entries, targets, strict=True):
        array = jnp.ones_like(target) if seed is None else jnp.asarray(seed, target.dtype)
        if array.shape != target.shape:
            raise InvalidValueError(
                f"GradientTape.gradient: an output gradient has shape {array.shape}, but its target"
                f" {target.shape}."
            )
        seeds.append(array)
    return seeds


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
