"""The stack of contexts of each thread: the current strategy and the role the code runs in.

An empty stack is the default context: the default strategy's replica context. `Strategy.scope()`
pushes a cross-replica mode, `Strategy.run` a replica mode.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from distributary._late import Library, libraries
from distributary.errors import ContextError, InvalidTypeError, shown
from distributary.tracing import advise

if TYPE_CHECKING:
    from distributary.context._replica_context import ReplicaContext

Role = Literal["cross", "replica", "update"]


@dataclass(frozen=True, slots=True)
class Mode:
    """One entry of the stack.

    `update` is a cross-replica mode in which code runs once per component of a variable. In the
    global view, one replica computes on the rows of all.
    """

    strategy: Any
    role: Role
    replica_context: "ReplicaContext | None" = None
    is_global: bool = False


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.modes: list[Mode] = []
        self.global_scope: AbstractContextManager[Any] | None = None


_state = _ThreadState()
_default_mode: Mode | None = None
_make_default_mode: Callable[[], Mode] | None = None
_default_lock = threading.Lock()
# The thread of every open scope, for the warning about variables created in helper threads.
_threads_in_scope: list[int] = []


def register_default_mode(factory: Callable[[], Mode]) -> None:
    """Sets the function that makes the mode of an empty stack; `strategies` calls this once."""
    global _make_default_mode
    _make_default_mode = factory


def default_mode() -> Mode:
    """Returns the mode of a thread outside every scope."""
    global _default_mode
    if _default_mode is None:
        libraries()  # imports the package that registers the mode
        with _default_lock:
            if _default_mode is None:
                assert _make_default_mode is not None
                _default_mode = _make_default_mode()
    return _default_mode


def current_mode() -> Mode:
    """Returns the mode on top of this thread's stack, or the default one."""
    modes = _state.modes
    return modes[-1] if modes else default_mode()


def in_default_context() -> bool:
    """Returns whether no strategy scope, run or update is active in this thread."""
    return not _state.modes


@contextmanager
def entered(mode: Mode) -> Iterator[None]:
    """Makes `mode` current in this thread while the block runs."""
    _state.modes.append(mode)
    try:
        yield
    finally:
        _leave(mode)


def _leave(mode: Mode) -> None:
    if not _state.modes or _state.modes[-1] is not mode:
        raise ContextError(
            "A strategy scope was left in another order than it was entered. Leave scopes in"
            " reverse order; a `with` statement does that by itself."
        )
    _state.modes.pop()


def in_global_view() -> bool:
    """Returns whether the code computes on the whole batch, as the only replica of a strategy."""
    return any(mode.is_global for mode in _state.modes)


def another_thread_in_scope() -> bool:
    """Returns whether another thread has an open strategy scope."""
    me = threading.get_ident()
    return any(thread != me for thread in tuple(_threads_in_scope))


def get_strategy() -> Any:
    """Returns the current `Strategy`, or the default strategy outside every scope.

    Source: `tf.distribute.get_strategy`.
    """
    return current_mode().strategy


def has_strategy() -> bool:
    """Returns whether a strategy other than the default one is current.

    Source: `tf.distribute.has_strategy`.
    """
    return current_mode().strategy is not default_mode().strategy


def get_replica_context() -> "ReplicaContext | None":
    """Returns the current `ReplicaContext`; None in a cross-replica context.

    Outside every scope this is the replica context of the default strategy.

    Source: `tf.distribute.get_replica_context`.
    """
    return current_mode().replica_context


def in_cross_replica_context() -> bool:
    """Returns whether the code runs once for all replicas: in a scope, but not in `Strategy.run`.

    Source: `tf.distribute.in_cross_replica_context`.
    """
    return current_mode().role != "replica"


def experimental_set_strategy(strategy: Any) -> None:
    """Makes `strategy` current in this thread until the next call; None ends it.

    For notebooks, where a `with strategy.scope()` block cannot span cells.

    Args:
        strategy: A `Strategy`, or None to only end the previous one.

    Raises:
        ContextError: inside a `with strategy.scope()` or `run`.
        InvalidTypeError: if `strategy` is not a strategy.

    Source: `tf.distribute.experimental_set_strategy`.
    """
    if strategy is not None and not hasattr(strategy, "extended"):
        raise InvalidTypeError(
            f"experimental_set_strategy: got {shown(strategy)}, expected a Strategy or None."
        )
    previous = _state.global_scope
    if len(_state.modes) > (1 if previous is not None else 0):
        raise ContextError(
            "experimental_set_strategy: a strategy scope entered with `with` is open. Call it"
            " outside of every `with strategy.scope()` block."
        )
    if previous is not None:
        _state.global_scope = None
        previous.__exit__(None, None, None)
    if strategy is None:
        return
    scope = strategy.scope()
    scope.__enter__()
    _state.global_scope = scope


class _Entered(threading.local):
    def __init__(self) -> None:
        self.modes: list[tuple[Mode, list[tuple[Library, object]]] | None] = []


class StrategyScope:
    """The context manager behind `Strategy.scope()`; you may enter it again, also nested.

    `with` binds the strategy itself. Entering the default strategy's scope changes nothing.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._entered = _Entered()

    def __enter__(self) -> Any:
        if not _state.modes and self._strategy is default_mode().strategy:
            self._entered.modes.append(None)
            return self._strategy
        check_same_strategy(self._strategy, "scope()")
        if _state.modes and _state.modes[-1].role == "replica":
            raise ContextError(
                "scope() was entered inside Strategy.run. A scope is for cross-replica code:"
                " enter it before run, or use get_replica_context().merge_call."
            )
        mode = Mode(self._strategy, "cross")
        entries = [(library, library.scope_entered(self._strategy)) for library in libraries()]
        _state.modes.append(mode)
        self._entered.modes.append((mode, entries))
        _threads_in_scope.append(threading.get_ident())
        return self._strategy

    def __exit__(self, _: object, error: object, *__: object) -> None:
        if not self._entered.modes:
            raise ContextError(
                "This strategy scope is not open. Enter it with `with strategy.scope():`."
            )
        entry = self._entered.modes[-1]
        if entry is None:
            self._entered.modes.pop()
            return
        mode, entries = entry
        _leave(mode)
        if isinstance(error, Exception):
            advise(error)
        self._entered.modes.pop()
        _threads_in_scope.remove(threading.get_ident())
        for library, result in entries:
            library.scope_left(self._strategy, result)


def check_same_strategy(strategy: Any, what: str) -> None:
    """Raises `ContextError` if a strategy other than `strategy` is current."""
    current = _state.modes[-1].strategy if _state.modes else strategy
    if current is not strategy:
        raise ContextError(
            f"{what} of {shown(strategy)} was called while {shown(current)} is current: strategies"
            " cannot be mixed or nested. Leave the other strategy's scope first, or use one"
            " strategy for everything."
        )


def require_cross_replica(strategy: Any, what: str) -> None:
    """Raises inside `Strategy.run`, or if a strategy other than `strategy` is current."""
    check_same_strategy(strategy, what)
    if _state.modes and _state.modes[-1].role == "replica":
        raise ContextError(
            f"{what} needs a cross-replica context, but was called inside Strategy.run, where the"
            " code runs once per replica. Call it after run, or inside"
            " get_replica_context().merge_call(fn); to combine values of the replicas use"
            " get_replica_context().all_reduce or all_gather."
        )
