"""The outer compile boundary, like `tf.function`."""

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from distributary.context import current_mode, in_default_context
from distributary.errors import InvalidTypeError
from distributary.inputs import DistributedInput
from distributary.strategies._cache import Inner, ProgramCache
from distributary.strategies._compiled import (
    Compiled,
    VariableGoneError,
    is_dynamic,
    signature_of,
    split_result,
    struct_of,
)
from distributary.tracing import FunctionProgram, current_scope


def function(
    func: Callable[..., Any] | None = None,
    *,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    autograph: bool = True,
) -> Any:
    """Compiles a function with everything in it, several `run`s and `reduce`s included.

    The function is traced on the first call and whenever shapes, dtypes, structures, static
    arguments or the current strategy change. Variables that it assigns keep their new values.
    A function that is given a distributed dataset or iterator runs its Python code each time, and
    compiles each `Strategy.run` in it, once for a step function that it defines itself.

    Args:
        func: The function; without it a decorator is returned.
        jit_compile: Accepted for compatibility; it is always compiled.
        reduce_retracing: Accepted for compatibility, without effect.
        autograph: Accepted for compatibility; Python control flow is not converted, use
            `jax.lax.cond`, `scan` and `while_loop` where it depends on array values.

    Returns:
        The compiled function; usable as a method.

    Raises:
        InvalidTypeError: if `func` is not callable.

    Source: `tf.function`.
    """
    if func is None:
        return function
    if not callable(func):
        raise InvalidTypeError(f"function: got {func!r}, expected a function.")
    return Function(func)


@final
class Function:
    """A compiled function; made by `function`."""

    def __init__(self, python_function: Callable[..., Any]) -> None:
        self.python_function = python_function
        self._programs: weakref.WeakKeyDictionary[Any, dict[Any, _Entry]] = (
            weakref.WeakKeyDictionary()
        )
        self._cache = ProgramCache("distributary.function")
        self._inner = Inner()
        functools.update_wrapper(self, python_function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if current_scope() is not None:
            return self.python_function(*args, **kwargs)
        if any(isinstance(leaf, DistributedInput) for leaf in leaves):
            with self._inner.active():
                return self.python_function(*args, **kwargs)
        mode = current_mode()
        programs = self._programs.setdefault(mode.strategy, {})
        signature = tuple([signature_of(leaf, "distributary.function") for leaf in leaves])
        key = (tree, signature, mode.role, in_default_context())
        entry = programs.get(key)
        if entry is not None:
            try:
                return entry.compiled([leaves[i] for i in entry.picks])
            except VariableGoneError:
                del programs[key]
        entry = self._build(leaves, tree, mode.strategy)
        mode.strategy.extended.step_counts.num_retraces += bool(programs)
        self._cache.note_trace(self.python_function, programs, key)
        programs[key] = entry
        return entry.compiled([leaves[i] for i in entry.picks])

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _build(self, leaves: list[Any], tree: Any, strategy: Any) -> "_Entry":
        picks = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]
        static = [None if is_dynamic(leaf) else leaf for leaf in leaves]
        results: list[Callable[..., Any]] = []

        def flat(*arrays: Any) -> list[Any]:
            parts = list(static)
            for i, array in zip(picks, arrays, strict=True):
                parts[i] = array
            args, kwargs = jax.tree.unflatten(tree, parts)
            result = self.python_function(*args, **kwargs)
            outs, rebuild = split_result(result, "distributary.function")
            results[:] = [rebuild]
            return outs

        avals = [struct_of(leaves[i]) for i in picks]
        program = FunctionProgram(flat, avals)
        # The devices are those of the strategies whose replicas run in the function.
        used = [s for s in (*program.strategies, strategy) if s.num_replicas_in_sync > 1]
        owners = [handle.cell()._layout.strategy for handle in program.handles]
        used += [s for s in owners if s.num_replicas_in_sync > 1]
        owner = used[0] if used else (owners or [strategy])[0]
        program.strategies.clear()  # a function keeps no strategy alive
        (rebuild,) = results
        name = getattr(self.python_function, "__name__", repr(self.python_function))
        return _Entry(owner.extended.runner.compiled(program, rebuild, name), picks)

    def __repr__(self) -> str:
        return f"<distributary.function {getattr(self.python_function, '__qualname__', '?')}>"


@final
class _Entry:
    """One compiled version of a function."""

    __slots__ = ("compiled", "picks")

    def __init__(self, compiled: Compiled, picks: Sequence[int]) -> None:
        self.compiled = compiled
        self.picks = picks
