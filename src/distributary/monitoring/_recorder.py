"""A thread that samples the numbers of a run."""

import collections
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, final

from distributary.dispatch import start_thread
from distributary.monitoring._numbers import Numbers, rates

__all__ = ["Recorder", "Sample", "Sink", "Tasks"]

Tasks: TypeAlias = Mapping[str, Numbers]
Sample: TypeAlias = dict[str, Any]

_NUM_KEPT: Final = 900


class Sink(Protocol):
    """A destination of samples."""

    def write(self, when: float, numbers: Numbers) -> None:
        """Writes the numbers of a process at a time, given in seconds since 1970."""
        ...

    def close(self) -> None:
        """Writes the rest, and closes."""
        ...


@final
class Recorder:
    """A thread that samples numbers, for the last time when it is closed or the program ends.

    Args:
        collect: Returns the numbers of every task by its name.
        seconds: Seconds between samples.
        sinks: Destinations for the numbers, if there is only one task.
    """

    def __init__(
        self, collect: Callable[[], Tasks], seconds: float, sinks: Sequence[Sink] = ()
    ) -> None:
        self._collect = collect
        self._seconds = seconds
        self._sinks = sinks
        self._samples: collections.deque[Sample] = collections.deque(maxlen=_NUM_KEPT)
        self._num_samples = 0
        self._lock = threading.Lock()
        self._before = time.time(), collect()
        self._closed = threading.Event()
        self._thread = start_thread(self._run, self._closed.set, "distributary-statistics")

    def samples(self, first: int = 0) -> tuple[list[Sample], int]:
        """Returns the kept samples from number `first` on, and the number of the next sample."""
        with self._lock:
            num_kept = min(len(self._samples), max(0, self._num_samples - first))
            return list(self._samples)[len(self._samples) - num_kept :], self._num_samples

    def close(self) -> None:
        """Takes a last sample and ends the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed.wait(self._seconds):
                self._sample()
            self._sample()
        finally:
            for sink in self._sinks:
                sink.close()

    def _sample(self) -> None:
        now, sums = time.time(), self._collect()
        then, before = self._before
        self._before = now, sums
        tasks = {
            name: numbers | rates(before.get(name, {}), numbers, now - then)
            for name, numbers in sums.items()
        }
        for numbers in tasks.values():
            for sink in self._sinks:
                sink.write(now, numbers)
        with self._lock:
            self._samples.append({"time": now, "tasks": tasks})
            self._num_samples += 1
