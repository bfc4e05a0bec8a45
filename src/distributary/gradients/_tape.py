"""`tf.GradientTape` for traced functions."""

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import jax
import jax.numpy as jnp

from distributary._types import Nest
from distributary.errors import (
    ContextError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    shown,
)
from distributary.tracing import TapeRecord, TraceScope, current_scope
from distributary.values import IndexedSlices
from distributary.variables import ForeignVariable, Variable, as_variable


class UnconnectedGradients(enum.Enum):
    """The result of `GradientTape.gradient` for a source the target does not depend on.

    Source: `tf.UnconnectedGradients`.
    """

    NONE = "none"
    ZERO = "zero"


@final
class GradientTape:
    """A recorder of a computation that then differentiates it.

    Use it inside `Strategy.run` and `distributary.function`. It costs nothing at run time: the
    recorded part is differentiated by `jax.vjp` while the step is traced. Trainable variables are
    watched automatically. Gradients are those of the replica; nothing is summed over replicas.

    Args:
        persistent: Whether `gradient` may be called more than once.
        watch_accessed_variables: Whether trainable variables are watched automatically.

    Raises:
        ContextError: if you enter it outside of a traced function.

    Source: `tf.GradientTape`.
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self._persistent = persistent
        self._watch_accessed_variables = watch_accessed_variables
        self._scope: TraceScope | None = None
        self._record: TapeRecord | None = None
        self._recording = False
        self._used = False
        self._watched: list[Any] = []

    def __enter__(self) -> "GradientTape":
        if self._recording:
            raise InvalidValueError("GradientTape: the tape is already recording.")
        scope = current_scope()
        if scope is not None and scope is self._scope and (self._persistent or not self._used):
            raise UnsupportedError(
                "GradientTape: the tape is entered a second time, and would forget what it recorded"
                " before. Record everything in one `with` block, or use another tape."
            )
        if scope is None:
            raise ContextError(
                "GradientTape records only inside Strategy.run or distributary.function, where the"
                " code is traced. Put the training step into a function and call it with"
                " strategy.run(step, args=...), or decorate it with @distributary.function. For"
                " plain arrays jax.grad works anywhere."
            )
        self._start(scope)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._recording:
            self._stop()

    def _start(self, scope: TraceScope) -> None:
        self._scope = scope
        self._record = scope.new_tape()
        scope.mark_tape(self._record.number, "start")
        scope.recording.append(self._record)
        self._recording = True
        self._used = False

    def _stop(self) -> None:
        assert self._scope is not None
        assert self._record is not None
        self._scope.recording.remove(self._record)
        self._scope.mark_tape(self._record.number, "stop")
        self._recording = False

    def watch(self, tensor: Nest) -> None:
        """Watches an array or variable, or a nest of them.

        You need to watch variables that are not trainable. Arrays need not be watched.

        Raises:
            InvalidTypeError: for values that are not floating point arrays or variables.
        """
        for leaf in jax.tree.leaves(tensor):
            dtype = getattr(leaf, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
                raise InvalidTypeError(
                    f"GradientTape.watch: got {shown(leaf)}, expected a floating point array or"
                    " variable; nothing can be differentiated with respect to it."
                )
            variable = as_variable(leaf)
            self._watched.append(leaf if variable is None else variable)

    def watched_variables(self) -> tuple[Variable, ...]:
        """Returns the variables watched and read so far."""
        if self._record is None or self._scope is None:
            return ()
        self._scope.asked.append(self._record)
        read = [handle.cell() for handle in self._record.watched]
        watched = [v for v in read if v is not None and self._watches(v)]
        return tuple([v.variable if isinstance(v, ForeignVariable) else v for v in watched])

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
        if not self._recording or self._scope is None or self._record is None:
            raise ContextError("GradientTape.stop_recording: the tape is not recording.")
        if len(self._scope.recording) > 1:
            raise UnsupportedError(
                "GradientTape.stop_recording is not possible while another tape records too. Use"
                " jax.lax.stop_gradient on the values that are to count as constant."
            )
        self._scope.mark_tape(self._record.number, "pause")
        self._scope.recording.remove(self._record)
        self._recording = False
        try:
            yield
        finally:
            # A gradient taken inside the block has ended a tape that is not persistent.
            if self._persistent or not self._used:
                self._scope.recording.append(self._record)
                self._scope.mark_tape(self._record.number, "resume")
                self._recording = True

    def reset(self) -> None:
        """Forgets everything recorded so far and starts again."""
        if self._scope is None or not self._recording:
            raise ContextError("GradientTape.reset: the tape is not recording.")
        scope = self._scope
        self._stop()
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
            `sparse_read`; None for sources the target does not depend on.

        Raises:
            ContextError: if the tape recorded nothing, or was used before and is not persistent.
            InvalidTypeError: if a target is not floating point, or a source is not an array or
                variable.

        Source: `tf.GradientTape.gradient`.
        """
        scope, record = self._scope, self._record
        if scope is None or record is None or current_scope() is not scope:
            raise ContextError(
                "GradientTape.gradient: the tape recorded nothing in this function. Use it inside"
                " the function that ran `with GradientTape() as tape:`, within Strategy.run or"
                " distributary.function."
            )
        if self._used and not self._persistent:
            raise ContextError(
                "GradientTape.gradient was called a second time. Use"
                " GradientTape(persistent=True) for several gradients of one tape."
            )
        self._used = True
        zero = UnconnectedGradients(unconnected_gradients) is UnconnectedGradients.ZERO
        if self._recording and not self._persistent:
            self._stop()

        targets = [_target(leaf) for leaf in jax.tree.leaves(target)]
        seeds = _seeds(output_gradients, targets)
        leaves, tree = jax.tree.flatten(sources, is_leaf=lambda x: x is None)
        differentiated = [self._differentiated(leaf) for leaf in leaves]
        arrays = [source for source in differentiated if isinstance(source, jax.Array)]
        variables = {  # by identity: a source that is given twice is one
            id(source): source
            for source in differentiated
            if source is not None and not isinstance(source, jax.Array)
        }
        handles = [variable._handle for variable in variables.values()]
        results = scope.gradient(record, targets, seeds, arrays, handles)
        of_arrays = iter(results[: len(arrays)])
        of_variables = dict(zip(variables, results[len(arrays) :], strict=True))
        gradients = []
        for leaf, source in zip(leaves, differentiated, strict=True):
            is_array = isinstance(source, jax.Array)
            gradient = next(of_arrays) if is_array else of_variables.get(id(source))
            if isinstance(gradient, tuple):
                gradient = IndexedSlices(gradient[0], gradient[1], leaf.shape)
            if gradient is None and zero:
                gradient = jnp.zeros(jnp.shape(leaf), leaf.dtype)
            gradients.append(gradient)
        return jax.tree.unflatten(tree, gradients)

    def _differentiated(self, leaf: Any) -> jax.Array | Variable | ForeignVariable | None:
        """Returns the array or variable of a source; None if its gradient is None."""
        variable = as_variable(leaf)
        if variable is not None:
            is_inexact = jnp.issubdtype(variable.dtype, jnp.inexact)
            return variable if is_inexact and self._watches(variable) else None
        if isinstance(leaf, jax.Array):
            return leaf
        if isinstance(leaf, float):
            return None
        raise InvalidTypeError(
            f"GradientTape.gradient: source {shown(leaf)} is a {type(leaf).__name__}, expected"
            " variables and arrays."
        )


def _target(leaf: object) -> jax.Array:
    if not isinstance(leaf, (jax.Array, Variable, float)):
        raise InvalidTypeError(
            f"GradientTape.gradient: target {shown(leaf)} is a {type(leaf).__name__}, expected an"
            " array."
        )
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise InvalidTypeError(
            f"GradientTape.gradient: the target has dtype {array.dtype}; only floating point values"
            " can be differentiated."
        )
    return array


def _seeds(output_gradients: Nest, targets: Sequence[jax.Array]) -> list[jax.Array]:
    if output_gradients is None:
        return [jnp.ones_like(target) for target in targets]
    given = jax.tree.leaves(output_gradients, is_leaf=lambda x: x is None)
    if len(given) != len(targets):
        raise InvalidValueError(
            f"GradientTape.gradient: output_gradients has {len(given)} entries for"
            f" {len(targets)} targets."
        )
    seeds = []
    for seed, target in zip(given, targets, strict=True):
        if seed is None:
            seeds.append(jnp.ones_like(target))
            continue
        array = jnp.asarray(seed, target.dtype)
        if array.shape != target.shape:
            raise InvalidValueError(
                f"GradientTape.gradient: an output gradient has shape {array.shape}, but its target"
                f" {target.shape}."
            )
        seeds.append(array)
    return seeds
