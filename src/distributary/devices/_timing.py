"""Timing of programs on devices."""

import contextlib
import time
from typing import TypeAlias, final

import jax

_MAX_PROGRAMS = 16

Output: TypeAlias = jax.Array | list[jax.Array] | None
"""An array that a program makes, a list with one per replica, or None."""


@final
class ProgramTimer:
    """A timer for a number of programs, each of which runs with nothing else in flight.

    Attributes:
        seconds: Time of all programs together, each from its dispatch until its results are there.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num_left = _MAX_PROGRAMS
        self._begin: float | None = None  # set while a program is in flight

    @property
    def is_over(self) -> bool:
        """True after too many programs: the loop has ended without taking its timer away."""
        return not self._num_left

    def start(self, before: Output) -> float:
        """Waits for the output of an earlier program; returns the seconds that this took."""
        begin = time.perf_counter()
        wait_for_output(before)
        self._begin = now = time.perf_counter()
        return now - begin

    def stop(self, output: Output) -> float:
        """Waits for the output of the program dispatched since `start`; returns the seconds."""
        begin = time.perf_counter()
        wait_for_output(output)
        end = time.perf_counter()
        if self._begin is not None:  # `start` was called before the program was dispatched
            self.seconds += end - self._begin
            self._num_left -= 1
        self._begin = None
        return end - begin


def wait_for_output(output: Output) -> None:
    """Waits for an array or for all arrays of a list; does nothing for None."""
    # If a program has failed, the error is raised where its output is read.
    with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError, ValueError):
        for array in output if isinstance(output, list) else [output]:
            if array is not None and not array.is_deleted():
                array.block_until_ready()
