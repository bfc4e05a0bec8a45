"""Agreement between the workers of a job, over JAX's coordination service and not their devices."""

import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any, final

import jax

from distributary.errors import CheckpointError
from distributary.topology import coordination_client

_KEY = "distributary/checkpoint"
_POLL_SECONDS = 1.0  # so that Ctrl-C ends a wait
# Every worker counts alike, because all do the same things in the same order.
_numbers = itertools.count(1)
_open: set[int] = set()  # numbers of the rounds of this worker that are not over
_lock = threading.Lock()
_first_kept = 1  # on the chief: what was said in earlier rounds has been deleted


def agree(what: str, timeout_seconds: float, own: Callable[[], Any]) -> list[Any]:
    """What `own` gives on every worker, by their numbers; see `Round`."""
    meeting = Round(what, timeout_seconds)
    try:
        return meeting.meet(own)
    finally:
        meeting.close()


def this_worker() -> tuple[int, int]:
    """Number of this worker, and how many there are."""
    if coordination_client() is None:
        return 0, 1
    return jax.process_index(), jax.process_count()


@final
class Round:
    """One exchange between all workers; created by all of them in the same order, used once.

    What is exchanged is small: nests that JSON can hold. A worker alone talks to itself. Whoever
    creates it closes it.

    Args:
        what: Beginning of errors: what the workers do together.
        timeout_seconds: How long to wait for the others, in each step.
    """

    def __init__(self, what: str, timeout_seconds: float) -> None:
        self._client = coordination_client()
        self._what = what
        self._timeout_seconds = timeout_seconds
        self._number = next(_numbers)
        with _lock:
            _open.add(self._number)
        self.worker, self.num_workers = this_worker()

    @property
    def is_chief(self) -> bool:
        """Whether this process writes."""
        return self.worker == 0

    def meet(self, own: Callable[[], Any]) -> list[Any]:
        """What `own` gives on every worker, by their numbers, on every worker.

        Raises:
            Exception: what `own` raises here.
            CheckpointError: if it raises on another worker, or one does not come in time.
        """
        if self._client is None:
            return [own()]
        try:
            value = own()
        except BaseException as error:
            self.fail(error)
            raise
        with _lock:
            first_open = min(_open)
        self._tell("meet", [value, None, first_open])
        values = []
        for worker in range(self.num_workers):
            value, problem, first_open_there = self._hear("meet", worker)
            if problem is not None:
                raise CheckpointError(f"{self._what} failed on worker {worker}: {problem}")
            values.append(value)
            first_open = min(first_open, first_open_there)
        if self.is_chief:
            self._delete_before(first_open)
        return values

    def fail(self, error: BaseException) -> None:
        """Tells the others, who meet or will do so, that this worker does not."""
        if self._client is not None:
            self._tell("meet", [None, f"{type(error).__name__}: {error}", 0])

    def conclude(self, act: Callable[[], str]) -> str:
        """Lets the chief act, and returns on all workers what it returned.

        Raises:
            Exception: what `act` raises, on the chief.
            CheckpointError: the same on the others, or if the chief does not end in time.
        """
        if not self.is_chief:
            text, problem = self._hear("end", 0)
            if problem is not None:
                raise CheckpointError(problem)
            return str(text)
        try:
            text = act()
        except BaseException as error:
            if self._client is not None:
                self._tell("end", [None, str(error)])
            raise
        if self._client is not None:
            self._tell("end", [text, None])
        return text

    def close(self) -> None:
        """Says that this worker will hear nothing more of this round."""
        with _lock:
            _open.discard(self._number)

    def _tell(self, step: str, message: Any) -> None:
        key = f"{_KEY}/{self._number}/{step}/{self.worker}"
        self._client.key_value_set(key, json.dumps(message))

    def _hear(self, step: str, worker: int) -> Any:
        key = f"{_KEY}/{self._number}/{step}/{worker}"
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            seconds = max(0.001, min(_POLL_SECONDS, deadline - time.monotonic()))
            try:
                return json.loads(self._client.blocking_key_value_get(key, int(seconds * 1000)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" in str(error) and time.monotonic() < deadline:
                    continue
                raise CheckpointError(
                    f"{self._what}: worker {worker} did not take part within"
                    f" {self._timeout_seconds:g} s. All workers must save and restore in the same"
                    f" order; has it ended, or taken another way? ({error})"
                ) from error

    def _delete_before(self, number: int) -> None:
        global _first_kept
        with _lock:
            numbers = range(_first_kept, number)
            _first_kept = max(_first_kept, number)
        for old in numbers:
            self._client.key_value_delete(f"{_KEY}/{old}/")
