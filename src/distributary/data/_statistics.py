"""Statistics on how long the steps of a strategy take, and how long they wait for data."""

import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

from distributary.devices import ProgramTimer, latest_program, progress
from distributary.errors import DistributaryWarning
from distributary.tracing import user_stacklevel

# A warning needs this many steps and seconds, so that a slow start does not cause one.
_MIN_STEPS = 10
_MIN_SECONDS = 0.5
# A timed step waits for its results, and the devices then wait for the host's part of the next one.
# This may take at most 1 % of the time.
_SAMPLE_SHARE = 0.01
_SECONDS_BETWEEN_SAMPLES = (1.0, 30.0)  # at least, at most


@final
@dataclass(frozen=True)
class StepStatistics:
    """Statistics of the steps of a strategy: of `fit`, and of loops over distributed datasets.

    A step lasts from one batch to the next, if a program runs on the devices in between. The first
    step of every loop, which compiles the program, is not counted, and neither is the last one,
    after which no batch comes.

    Args:
        num_steps: Number of steps.
        num_examples: Number of examples that this process was given, including those of first and
            last steps; 0 if unknown.
        seconds: Time that the steps took together.
        host_seconds: Time from when a batch was there until the last program that works on it was
            on its way to the devices: Python and dispatch. Waiting in a dispatch because too many
            programs are on their way is not included. The devices work meanwhile, but a CPU may run
            small programs within this time.
        input_wait_seconds: Part of `seconds` in which the devices were idle because the next batch
            was not there.
        compute_seconds: Part of `seconds` in which the devices worked, collectives included. An
            estimate: at most once a second, a step waits for its results. The steps until the next
            such one count as if they took as long.
        collective_bytes: Size of the arrays that went through collectives of compiled steps so far,
            on each device, after the compiler's optimizations: the inputs of all-reduces, and the
            outputs of all-gathers. Every run of a program counts, including first steps. A `reduce`
            outside of a `dist.function` does not count, nor do copies between memories.
        num_retraces: Number of times a function was traced and compiled again for other arguments.
        num_runs: Number of runs of compiled programs, by `run`, `dist.function` or `fit`. In a loop
            over batches of your own, nothing else is known.
    """

    num_steps: int = 0
    num_examples: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0
    input_wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    collective_bytes: int = 0
    num_retraces: int = 0
    num_runs: int = 0

    @property
    def input_wait_share(self) -> float:
        """Share of the time spent waiting for data, from 0 to 1."""
        return self.input_wait_seconds / self.seconds if self.seconds else 0.0


class Program(Protocol):
    """A compiled program."""

    def collective_bytes(self) -> int:
        """Returns the size of the arrays that one run sends through collectives. For any thread."""


@final
class ProgramRuns:
    """A count of the runs of a program, which does not keep the program alive."""

    __slots__ = ("_num_bytes", "num_runs", "program")

    def __init__(self, program: Program) -> None:
        self.program = weakref.ref(program)
        self.num_runs = 0
        self._num_bytes: int | None = None

    @property
    def collective_bytes(self) -> int:
        """Bytes of all runs together; 0 if the program was gone before anybody asked."""
        if not self.num_runs:
            return 0
        if self._num_bytes is None:
            program = self.program()
            self._num_bytes = 0 if program is None else program.collective_bytes()
        return self.num_runs * self._num_bytes


@final
class StepCounts:
    """The counts of one strategy.

    Attributes:
        num_examples: Number of examples that this process was given so far.
        num_retraces: Number of traces of functions after their first ones.
        sample_at: Time by `time.perf_counter` at which the next sample is due.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._seconds = 0.0
        self._host_seconds = 0.0
        self._wait_seconds = 0.0
        self._compute_seconds = 0.0
        self._warned = False
        self._compute_per_step = 0.0  # in the latest sample
        self.sample_at = 0.0
        self.num_examples = 0
        self.num_retraces = 0
        self._programs: list[ProgramRuns] = []
        self._gone_bytes = self._gone_runs = 0  # of the removed programs

    def snapshot(self) -> StepStatistics:
        """Returns the statistics so far. For any thread."""
        return StepStatistics(
            self._num_steps,
            self.num_examples,
            self._seconds,
            self._host_seconds,
            self._wait_seconds,
            self._compute_seconds,
            self._gone_bytes + sum(runs.collective_bytes for runs in list(self._programs)),
            self.num_retraces,
            self._gone_runs + sum(runs.num_runs for runs in list(self._programs)),
        )

    def runs_of(self, program: Program) -> ProgramRuns:
        """Returns the counter of the runs of a new program."""
        gone = [runs for runs in self._programs if runs.program() is None]
        self._gone_bytes += sum(runs.collective_bytes for runs in gone)
        self._gone_runs += sum(runs.num_runs for runs in gone)
        self._programs = [runs for runs in self._programs if runs not in gone]
        runs = ProgramRuns(program)
        self._programs.append(runs)
        return runs

    def add(self, num_steps: int, seconds: float, host: float, wait: float) -> None:
        """Counts steps, their total time, the host's time, and the time spent waiting for data."""
        self._num_steps += num_steps
        self._seconds += seconds
        self._host_seconds += host
        self._wait_seconds += wait
        compute, at_most = num_steps * self._compute_per_step, seconds - wait
        self._compute_seconds += compute if compute < at_most else at_most

    def add_sample(self, num_steps: int, compute: float, host: float) -> None:
        """Adds a sample: steps that end now, with the seconds that devices and host were busy."""
        self._compute_per_step = compute / num_steps
        at_least, at_most = _SECONDS_BETWEEN_SAMPLES
        self.sample_at = time.perf_counter() + min(max(at_least, host / _SAMPLE_SHARE), at_most)

    def warn_if_starved(self, loop: "Loop") -> None:
        """Warns once if a loop has spent more than half of its time waiting for data."""
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
    """One iteration over data; times the steps between its batches.

    Args:
        counts: The counts of its strategy.
    """

    def __init__(self, counts: StepCounts) -> None:
        self._counts = counts
        self.num_steps = 0
        self.seconds = 0.0
        self.wait_seconds = 0.0
        self._is_first = True
        self._idle = 0.0
        # The step that is under way: when it began; how many batches it has; how many programs and
        # seconds of waiting dispatches came before it; and the timer of its programs.
        self._begin: float | None = None
        self._num_batches = 0
        self._num_programs = 0
        self._blocked = 0.0
        self._timer: ProgramTimer | None = None

    def waiting(self, seconds: float) -> None:
        """Counts time spent waiting for the next batch; called during the wait and at its end.

        The seconds since the last call count if the devices are idle when they end.
        """
        if not latest_program.is_running():
            self._idle += seconds

    def wait_for(self, get: Callable[..., Any], *args: Any) -> Any:
        """Returns `get(*args)`, the next batch, and counts the time as a wait."""
        begin = time.perf_counter()
        batch = get(*args)
        self.waiting(time.perf_counter() - begin)
        return batch

    def batch_is_there(self) -> None:
        """Ends the step under way, because the next batch is handed out."""
        now = time.perf_counter()
        if self._begin is not None and latest_program.count == self._num_programs:
            self._num_batches += 1  # several batches for one program, or no training at all
            return
        if self._begin is not None:
            self._end_step(now, self._begin)
        self._begin, self._num_batches = now, 1
        self._num_programs, self._blocked = latest_program.count, latest_program.blocked_seconds
        if now >= self._counts.sample_at and not self._is_first:
            self._timer = latest_program.timer = ProgramTimer()
        if progress.begin_step is not None:
            progress.begin_step(self._is_first)

    def _end_step(self, now: float, begin: float) -> None:
        num_batches, seconds = self._num_batches, now - begin
        wait, self._idle = min(self._idle, seconds), 0.0
        if self._is_first:
            self._is_first = False
            return
        blocked = latest_program.blocked_seconds - self._blocked
        host = latest_program.dispatched_at - begin - blocked
        timer, self._timer = self._timer, None
        # Otherwise another loop has begun, or there were too many programs.
        if timer is not None and latest_program.timer is timer:
            latest_program.timer = None
            self._counts.add_sample(num_batches, timer.seconds, host)
        self._counts.add(num_batches, seconds, host, wait)
        self.num_steps += num_batches
        self.seconds += seconds
        self.wait_seconds += wait
        if wait:
            self._counts.warn_if_starved(self)
