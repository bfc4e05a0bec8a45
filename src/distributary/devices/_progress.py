"""The progress of this process, for someone who watches it."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import final

import jax
import numpy as np

from distributary._threads import call_after

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
