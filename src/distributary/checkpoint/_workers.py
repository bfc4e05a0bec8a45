"""Agreement between the workers of a job, over JAX's coordination service and not their devices."""

import itertools
import json
from collections.abc import Callable
from typing import Any, final

import jax

from distributary.errors import CheckpointError
from distributary.topology import coordination_client

_KEY = "distributary/checkpoint"
# Every worker counts alike, because all do the same things in the same order.
_numbers = itertools.count(1)


@final
class Round:
    """One exchange between all workers; created by all of them in the same order, used once.

    What is exchanged is small: nests that JSON can hold. A worker alone talks to itself.

    Args:
        what: Beginning of errors: what the workers do together.
        timeout_seconds: How long to wait for the others, in each step.
    """

    def __init__(self, what: str, timeout_seconds: float) -> None:
        self._client = coordination_client()
        self._what = what
        self._timeout_seconds = timeout_seconds
        self._number = next(_numbers)
        self.num_workers = 1 if self._client is None else jax.process_count()
        self.worker = 0 if self._client is None else jax.process_index()

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
            text = json.dumps([own(), None])
        except BaseException as error:
            self.fail(error)
            raise
        self._tell("meet", text)
        values = []
        for worker in range(self.num_workers):
            value, problem = json.loads(self._hear("meet", worker))
            if problem is not None:
                raise CheckpointError(f"{self._what} failed on worker {worker}: {problem}")
            values.append(value)
        # Whoever is here has finished all earlier rounds.
        if self.is_chief:
            self._client.key_value_delete(f"{_KEY}/{self._number - 1}/")
        return values

    def fail(self, error: BaseException) -> None:
        """Tells the others, who meet or will do so, that this worker does not."""
        if self._client is not None:
            self._tell("meet", json.dumps([None, f"{type(error).__name__}: {error}"]))

    def conclude(self, act: Callable[[], str]) -> str:
        """Lets the chief act, and returns on all workers what it returned.

        Raises:
            Exception: what `act` raises, on the chief.
            CheckpointError: the same on the others, or if the chief does not end in time.
        """
        if not self.is_chief:
            text, problem = json.loads(self._hear("end", 0))
            if problem is not None:
                raise CheckpointError(problem)
            return str(text)
        try:
            text = act()
        except BaseException as error:
            if self._client is not None:
                self._tell("end", json.dumps([None, str(error)]))
            raise
        if self._client is not None:
            self._tell("end", json.dumps([text, None]))
        return text

    def _tell(self, step: str, text: str) -> None:
        self._client.key_value_set(f"{_KEY}/{self._number}/{step}/{self.worker}", text)

    def _hear(self, step: str, worker: int) -> str:
        milliseconds = int(self._timeout_seconds * 1000)
        key = f"{_KEY}/{self._number}/{step}/{worker}"
        try:
            text: str = self._client.blocking_key_value_get(key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            raise CheckpointError(
                f"{self._what}: worker {worker} did not take part within"
                f" {self._timeout_seconds:g} s. All workers must save and restore in the same"
                f" order; has it ended, or taken another way? ({error})"
            ) from error
        return text
