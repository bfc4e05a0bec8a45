"""The context that code runs in: the strategy scope, replica and cross-replica contexts.

An empty stack is the default context: the default strategy's replica context. `Strategy.scope()`
pushes a cross-replica mode, `Strategy.run` a replica mode.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np

from distributary._late import Library, libraries, no_attribute
from distributary.devices import Nest
from distributary.errors import (
    ContextError,
    InvalidTypeError,
    InvalidValueError,
    check_takes,
    check_type,
    checked_int,
    shown,
)
from distributary.options import CommunicationOptions, ReduceOp
from distributary.tracing import advise

# What people look for in a replica context, and its name here.
_ELSEWHERE = {
    "replica_id rank id replica_id_in_sync get_rank": "Use replica_id_in_sync_group.",
    "num_replicas world_size": "Use num_replicas_in_sync.",
    "reduce psum pmean sum mean": 'Use all_reduce("SUM", value) or all_reduce("MEAN", value).',
    "gather": "Use all_gather(value, axis=0).",
    "device": "Use devices.",
}


@final
class ReplicaContext:
    """The replica that a step function runs on, and its collectives.

    Call `get_replica_context()` inside `Strategy.run` to get one; you do not construct it yourself.
    Outside every scope it stands for the single replica of the default strategy.

    Source: `tf.distribute.ReplicaContext`.
    """

    def __init__(
        self,
        strategy: Any,
        replica_id_in_sync_group: "int | np.integer[Any] | Callable[[], Any]",
    ) -> None:
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group

    @property
    def strategy(self) -> Any:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in all processes, over which gradients are summed."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Number of this replica, 0 to `num_replicas_in_sync - 1`, as an int32 scalar `[]`.

        The step is traced once for all replicas, so this is a traced value. If its Python code
        needs the number, as an index or a seed, the step is traced for every replica, which takes
        longer to compile; all replicas have to call the same collectives in the same order. A text
        needs it as `int(number)`; that of the traced value, as of every array in a step, has only
        its type.
        Outside of `run` it is the Python int 0.
        """
        if callable(self._replica_id):
            self._check_current("replica_id_in_sync_group")
            return self._replica_id()
        return self._replica_id

    @property
    def devices(self) -> tuple[str, ...]:
        """Canonical names of the devices of this process' replicas, on which the step runs.

        The step is traced once for all of them; `tf.distribute` gives only the device of the
        replica.

        Raises:
            ContextError: if this is not the current replica context.
        """
        self._check_current("devices")
        return self._strategy.extended.device_names()

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls `merge_fn(strategy, *args, **kwargs)` once for all replicas.

        Args:
            merge_fn: Runs in a cross-replica context. Arguments that are arrays of this replica
                arrive as `PerReplica`; other values arrive unchanged.
            args: Positional arguments, nests of arrays and Python values.
            kwargs: Keyword arguments, likewise.

        Returns:
            The result of `merge_fn`; in place of a `PerReplica`, this replica's component.

        Raises:
            ContextError: if this is not the current replica context.
            InvalidTypeError: if `args` is not a list or tuple.

        Source: `tf.distribute.ReplicaContext.merge_call`.
        """
        self._check_current("merge_call")
        expected = "a list or tuple; for one argument write args=(value,)"
        check_type("merge_call: args", args, list | tuple, expected)
        takes = ", ".join(["strategy", *(f"value{i or ''}" for i in range(len(args)))])
        if not kwargs:
            check_takes("merge_call", merge_fn, f"merge_fn({takes})")
        return self._strategy.extended._merge_call(merge_fn, tuple(args), dict(kwargs or {}))

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Nest,
        options: CommunicationOptions | None = None,
    ) -> Nest:
        """Sums or averages `value` over all replicas; every replica receives the result.

        You can differentiate it: the gradient of a sum is the sum of the replicas' gradients.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
            value: Nest of arrays and `IndexedSlices`, with the same structure and shapes on all
                replicas. All arrays of the nest travel in one collective. None, the gradient of
                what a loss does not depend on, stays None.
            options: Overrides of the strategy's communication options.

        Returns:
            A nest like `value`. SUM keeps the dtype; MEAN of integers is float32.

        Raises:
            ContextError: if this is not the current replica context.
            InvalidTypeError: for booleans and strings.
            ReplicaMismatchError: if replicas of an uneven batch pass different shapes.

        Source: `tf.distribute.ReplicaContext.all_reduce`.
        """
        self._check_current("all_reduce")
        return self._strategy.extended._all_reduce(reduce_op, value, options)

    def all_gather(
        self, value: Nest, axis: int, options: CommunicationOptions | None = None
    ) -> Nest:
        """Concatenates `value` of all replicas, in replica order, along dim `axis`.

        You can differentiate it.

        Args:
            value: Nest of arrays with at least one dim. On an uneven batch the replicas may
                differ in the size of dim `axis`.
            axis: The dim to concatenate; negative counts from the end.
            options: Overrides of the strategy's communication options.

        Returns:
            A nest like `value`, the same on every replica.

        Raises:
            ContextError: if this is not the current replica context.
            InvalidValueError: if an array is scalar or `axis` is out of range.
            UnsupportedError: for `IndexedSlices`.

        Source: `tf.distribute.ReplicaContext.all_gather`.
        """
        self._check_current("all_gather")
        return self._strategy.extended._all_gather(value, axis, options)

    def _check_current(self, what: str) -> None:
        current = current_mode().replica_context
        if current is self:
            return
        if current is None:
            where = "in a cross-replica context"
        elif in_default_context():
            where = "outside of Strategy.run"
        else:
            where = f"inside {shown(current.strategy)}.run"
        raise ContextError(
            f"{what}: this ReplicaContext of {shown(self._strategy)} is not the current one; the"
            f" code runs {where}. Call get_replica_context() inside the function given to"
            " Strategy.run and do not keep its result."
        )

    if not TYPE_CHECKING:  # or type checkers accept any name

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("ReplicaContext", name, _ELSEWHERE, dir(type(self)))

    def __repr__(self) -> str:
        return f"<ReplicaContext of {self._strategy!r}>"


# Arguments that tell input functions about the replicas that they feed.


@final
@dataclass(frozen=True, eq=False, repr=False)
class ValueContext:
    """Argument of the `value_fn` of `experimental_distribute_values_from_function`.

    Args:
        replica_id_in_sync_group: Number of the replica that the value is for, 0 to
            `num_replicas_in_sync - 1`.
        num_replicas_in_sync: Number of replicas in all processes.

    Source: `tf.distribute.experimental.ValueContext`.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __repr__(self) -> str:
        return (
            f"distributary.ValueContext(replica id {self.replica_id_in_sync_group}, total replicas"
            f" in sync: {self.num_replicas_in_sync})"
        )


@final
@dataclass(frozen=True, eq=False, repr=False)
class InputContext:
    """Argument of the `dataset_fn` of `distribute_datasets_from_function`.

    Args:
        num_input_pipelines: Number of times `dataset_fn` is called in the whole job.
        input_pipeline_id: Number of this call.
        num_replicas_in_sync: Number of replicas in the whole job.

    Source: `tf.distribute.InputContext`.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of one replica.

        Raises:
            InvalidTypeError: if `global_batch_size` is not an int.
            InvalidValueError: if it is not divisible by the number of replicas.
        """
        size = checked_int("get_per_replica_batch_size: global_batch_size", global_batch_size)
        num_replicas = self.num_replicas_in_sync
        if size % num_replicas:
            raise InvalidValueError(
                f"get_per_replica_batch_size: the global batch size {size} is not"
                f" divisible by the {num_replicas} replicas. Choose a multiple of {num_replicas},"
                f" such as {max(1, size // num_replicas) * num_replicas}."
            )
        return size // num_replicas

    def __repr__(self) -> str:
        return (
            f"distributary.InputContext(input pipeline id {self.input_pipeline_id}, total:"
            f" {self.num_input_pipelines}, replicas: {self.num_replicas_in_sync})"
        )


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
