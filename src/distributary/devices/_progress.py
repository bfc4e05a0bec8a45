"""The progress of this process, for someone who watches it, and the times of its steps."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import jax
import numpy as np

from distributary._threads import call_after
from distributary.devices._dispatcher import ProgramTimer, latest_program
from distributary.errors import warn

_log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 5.0  # before it says that a step is being compiled


@final
@dataclass
class Fit:
    """A call of `fit` that is going on, or the last one.

    Args:
        num_epochs: Number of the last epoch, from 1.
        num_steps: Steps of an epoch; None if that is not known yet.
    """

    num_epochs: int
    num_steps: int | None

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self._first = self._epoch = 0
        self._has_begun = False
        self._steps_before: float | None = None
        self._seconds: float | None = None  # at its end

    def begin_epoch(self, epoch: int) -> None:
        """Takes note of an epoch, with a number from 0."""
        if not self._has_begun:
            self._first, self._has_begun = epoch, True
        self._epoch = epoch
        self._steps_before = None

    def end(self) -> None:
        """Takes note of the end."""
        self._seconds = time.monotonic() - self.began

    def numbers(self, num_steps: float) -> dict[str, float]:
        """Returns the epoch, and the share of the work that is done.

        Args:
            num_steps: Steps that the process has done so far.
        """
        if not self._has_begun:
            return {}
        if self._steps_before is None:
            self._steps_before = num_steps
        part = (num_steps - self._steps_before) / self.num_steps if self.num_steps else 0.0
        done = self._epoch - self._first + min(1.0, part)
        is_over = self._seconds is not None
        seconds = time.monotonic() - self.began if self._seconds is None else self._seconds
        return {
            "fit/epoch": self._epoch + 1,
            "fit/num_epochs": self.num_epochs,
            "fit/share": 1.0 if is_over else done / max(1, self.num_epochs - self._first),
            "fit/seconds": seconds,
        }


@final
@dataclass(eq=False)
class Progress:
    """The progress of this process, for someone who watches it.

    Attributes:
        is_watched: Whether someone watches; otherwise nothing is counted.
        num_steps: Number of steps of `fit` and of loops over distributed datasets, and of closures.
        num_examples: Number of examples in them, in this process.
        values: Latest numbers of the program itself, such as its loss, by name.
        fit: The latest call of `fit`.
        begin_step: Called at the beginning of a step while a profile is wanted, with True for the
            first step of a loop. None otherwise.
    """

    is_watched: bool = False
    num_steps: int = 0
    num_examples: int = 0
    values: dict[str, float] = field(default_factory=dict)
    fit: Fit | None = None
    begin_step: Callable[[bool], None] | None = None
    _seconds: dict[str, float] = field(default_factory=dict)  # of what is over, by name
    _open: tuple[tuple[str, float], ...] = ()  # what is going on, and since when

    def begin(self, name: str) -> None:
        """Begins something else than steps, `"validation"` for example; what was going on waits.

        Counts only what the main thread does, because other threads do not delay the steps.
        """
        if threading.current_thread() is threading.main_thread():
            self._charge()
            self._open = (*self._open, (name, time.monotonic()))

    def end(self, name: str) -> None:
        """Ends what `begin` has begun, and all that has begun in it."""
        names = [label for label, _ in self._open]
        if threading.current_thread() is threading.main_thread() and name in names:
            self._charge()
            left = self._open[: len(names) - 1 - names[::-1].index(name)]
            self._open = tuple((label, time.monotonic()) for label, _ in left)

    @contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """Begins something else than steps, and ends it with the block."""
        is_first = name == "compilation" and name not in [label for label, _ in self._open]
        self.begin(name)
        try:
            with call_after(_PATIENCE_SECONDS, _say_slow) if is_first else nullcontext():
                yield
        finally:
            self.end(name)

    def numbers(self, num_steps: float) -> dict[str, float]:
        """Returns the values, the state of `fit`, and the seconds of all that is not steps.

        Args:
            num_steps: Steps that the process has done so far.
        """
        seconds, going_on = dict(self._seconds), self._open
        if going_on:
            name, since = going_on[-1]
            seconds[name] = seconds.get(name, 0.0) + time.monotonic() - since
        doing = {f"doing/{name}_seconds": value for name, value in seconds.items()}
        return {**self.values, **doing, **(self.fit.numbers(num_steps) if self.fit else {})}

    def _charge(self) -> None:
        """Adds the time of what is going on, up to now."""
        if self._open:
            name, since = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - since

    def add(self, num_steps: int, num_examples: int) -> None:
        """Counts steps."""
        self.num_steps += num_steps
        self.num_examples += num_examples

    def note_logs(self, logs: object) -> None:
        """Takes the numbers from the logs of Keras; they are computed already."""
        if isinstance(logs, dict):
            kinds = (jax.Array, np.ndarray, np.generic, float, int)
            numbers = {k: v for k, v in logs.items() if isinstance(v, kinds) and np.ndim(v) == 0}
            self.values = {**self.values, **{k: float(v) for k, v in numbers.items()}}


def _say_slow() -> None:
    _log.warning(
        "Compiling a step for more than %g s. This comes once for each shape of a batch, and takes"
        " longer for larger models.%s",
        _PATIENCE_SECONDS,
        ""
        if jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        else " A CheckpointManager, BackupAndRestore, or JAX_COMPILATION_CACHE_DIR keeps what is"
        " compiled for the next start.",
    )


progress = Progress()


# How long steps take, and how long they wait for data.

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
        warn(
            f"The devices wait for data {loop.wait_seconds / loop.seconds:.0%} of the time"
            f" ({loop.num_steps} steps, {1000 * loop.seconds / loop.num_steps:.1f} ms each): the"
            " dataset is slower than the training step. Let it do its work for whole batches (map"
            " after batch), in threads (map with num_parallel_calls), once (cache), or not at all"
            " (prepare files). strategy.step_statistics has the numbers."
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
