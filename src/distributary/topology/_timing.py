"""Times what devices do, and marks steps in a profile."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, final

import jax

__all__ = ["ProfiledSteps", "ProgramTimer", "profiled_steps", "wait_for_output"]

_MAX_PROGRAMS = 16


@final
class ProgramTimer:
    """Times some programs, each with nothing else under way.

    Attributes:
        seconds: How long they took, from the dispatch until their results were there.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num_left = _MAX_PROGRAMS
        self._begin: float | None = None  # set while one is under way

    @property
    def is_over(self) -> bool:
        """Whether there were too many: a loop that was left has forgotten its timer."""
        return not self._num_left

    def start(self, before: Any) -> float:
        """Waits for the output of an earlier program; returns for how long."""
        begin = time.perf_counter()
        wait_for_output(before)
        self._begin = now = time.perf_counter()
        return now - begin

    def stop(self, output: Any) -> float:
        """Waits for the output of the program dispatched since `start`; returns for how long."""
        begin = time.perf_counter()
        wait_for_output(output)
        end = time.perf_counter()
        if self._begin is not None:  # it was there when the program was dispatched
            self.seconds += end - self._begin
            self._num_left -= 1
        self._begin = None
        return end - begin


def wait_for_output(output: Any) -> None:
    """Waits for an array, all of a list, or nothing."""
    # Whoever reads the output of a program that has failed gets the error.
    with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError, ValueError):
        for array in output if isinstance(output, list) else [output]:
            if array is not None and not array.is_deleted():
                array.block_until_ready()


@final
class ProfiledSteps:
    """Tells a profile where steps begin.

    Attributes:
        begin_step: Called where one begins, with whether it is the first one of a loop, while a
            profile is wanted; else None.
    """

    __slots__ = ("begin_step",)

    def __init__(self) -> None:
        self.begin_step: Callable[[bool], None] | None = None


profiled_steps = ProfiledSteps()
