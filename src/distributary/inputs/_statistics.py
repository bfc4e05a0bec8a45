"""How long steps had to wait for their data."""

import time
import warnings
from dataclasses import dataclass
from typing import final

from distributary.errors import DistributaryWarning
from distributary.topology import latest_program
from distributary.tracing import user_stacklevel

# A warning needs this many steps and seconds, so that a slow start is not held against the data.
_MIN_STEPS = 10
_MIN_SECONDS = 0.5


@final
@dataclass(frozen=True)
class StepStatistics:
    """What the steps of a strategy's loops over distributed datasets took.

    The first step of every loop, in which the program is compiled, is not counted.

    Args:
        num_steps: Number of steps, from one batch to the next with a program run in between.
        seconds: How long they took together.
        input_wait_seconds: For how much of that time the devices had nothing to do because the next
            batch was not there.
    """

    num_steps: int = 0
    seconds: float = 0.0
    input_wait_seconds: float = 0.0

    @property
    def input_wait_share(self) -> float:
        """Share of the time spent waiting for data, 0 to 1."""
        return self.input_wait_seconds / self.seconds if self.seconds else 0.0


@final
class InputStatistics:
    """Counts of one strategy."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._seconds = 0.0
        self._wait_seconds = 0.0
        self._warned = False

    def snapshot(self) -> StepStatistics:
        """What has been counted so far."""
        return StepStatistics(self._num_steps, self._seconds, self._wait_seconds)

    def add(self, seconds: float, wait_seconds: float) -> None:
        """Counts one step."""
        self._num_steps += 1
        self._seconds += seconds
        self._wait_seconds += min(wait_seconds, seconds)

    def warn_if_starved(self, loop: "Loop") -> None:
        """Warns once, when a loop has spent more than half of its time waiting for data."""
        if self._warned or 2 * loop.wait_seconds <= loop.seconds:
            return
        if loop.num_steps < _MIN_STEPS or loop.seconds < _MIN_SECONDS:
            return
        self._warned = True
        warnings.warn(
            f"The devices wait for data {loop.wait_seconds / loop.seconds:.0%} of the time"
            f" ({loop.num_steps} steps, {1000 * loop.seconds / loop.num_steps:.1f} ms each): the"
            " dataset is slower than the training step. Let it do its work for whole batches (map"
            " after batch), in threads (map with num_parallel_calls), once (cache), or not at all"
            " (prepare files). strategy.step_statistics has the numbers.",
            DistributaryWarning,
            stacklevel=user_stacklevel(),
        )


@final
class Loop:
    """One iteration over a distributed dataset: times what lies between its batches.

    Args:
        statistics: What it counts for.
    """

    def __init__(self, statistics: InputStatistics) -> None:
        self._statistics = statistics
        self.num_steps = 0
        self.seconds = 0.0
        self.wait_seconds = 0.0
        self._idle = 0.0
        self._last: float | None = None
        self._num_programs = 0

    def waiting(self, seconds: float) -> None:
        """Called during and after a wait for the next batch, with the seconds since the last call.

        They count if the devices are not at work on the latest step at their end.
        """
        if not latest_program.is_running():
            self._idle += seconds

    def batch_is_there(self) -> None:
        """Called when the next batch is handed out."""
        now = time.perf_counter()
        idle, self._idle = self._idle, 0.0
        last, self._last = self._last, now
        before, self._num_programs = self._num_programs, latest_program.count
        if last is None or before == self._num_programs:
            return  # the first batch, or nobody trains on these batches
        self.num_steps += 1
        if self.num_steps == 1:
            return
        self.seconds += now - last
        self.wait_seconds += min(idle, now - last)
        self._statistics.add(now - last, idle)
        if idle:
            self._statistics.warn_if_starved(self)
