"""Errors of branches and turns: Python raises them only if the step runs these."""

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, final

import jax

from distributary.tracing import current_scope

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.raised: Exception | None = None  # by a `raise` of converted code


_state = _ThreadState()


def raised(error: Any) -> Any:
    """Returns the error that a statement raises: in a block, only if the block runs."""
    if isinstance(error, type) and issubclass(error, Exception):
        error = error()
    _state.raised = error
    return error


def was_raised(error: Exception) -> bool:
    """Returns whether the last `raise` of converted code has raised an error."""
    return error is _state.raised


def not_to_be_handled(statement: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks errors of a statement whose blocks are recorded: Python may not run the block at all.

    `check_handler` raises them again, where code of the user handles them.
    """

    @functools.wraps(statement)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return statement(*args, **kwargs)
        except Exception as error:
            error.__dict__["of_recorded"] = True
            raise

    return run


def check_handler(handled: BaseException | None) -> None:
    """Raises an error that code of the user handles, if it is one of a branch or loop."""
    error, seen = handled, set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if handled is not None and "of_recorded" in error.__dict__:
            handled.add_note(
                "A branch or loop has raised this while it was traced. Whether it runs at all is"
                " known only when the step runs, so code around it cannot handle the error."
            )
            raise handled
        error = error.__cause__ or error.__context__


@final
class Context:
    """A context of converted code, in whose place `check_handler` looks at errors.

    Args:
        manager: The user's own context manager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __enter__(self) -> Any:
        return self._manager.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        is_handled = self._manager.__exit__(kind, error, trace)
        if is_handled:
            check_handler(error)
        return is_handled


class _CheckFailedError(Exception):
    """Ends a program; who has called it gets the error that is in this one."""


def _is_unknown(record: logging.LogRecord) -> bool:
    """Returns whether a report of JAX is about an error that nobody else reports."""
    return not (record.exc_info and isinstance(record.exc_info[1], _CheckFailedError))


def check_when_run(
    holds: object, error: Exception | Callable[..., Exception], values: Sequence[Any] = ()
) -> None:
    """Raises an error when the step runs, unless a traced condition holds.

    Args:
        holds: The condition.
        error: The error, or what makes it of values.
        values: These values; the arrays among them are known when the step runs.
    """
    arrays = [value for value in values if isinstance(value, jax.Array)]
    failed: list[Exception] = []
    scope = current_scope()
    if scope is not None:
        scope.checks.append(failed)
        logging.getLogger("jax._src.debugging").addFilter(_is_unknown)

    def check(value: object, *known: Any) -> None:
        if value:
            return
        by_id = dict(zip(map(id, arrays), known, strict=True))
        failure = (
            error if isinstance(error, Exception) else error(*(by_id.get(id(v), v) for v in values))
        )
        failed.append(failure.with_traceback(None))
        raise _CheckFailedError(failure)

    jax.debug.callback(check, holds, *arrays)
