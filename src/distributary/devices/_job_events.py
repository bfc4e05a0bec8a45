"""The events of a job, which all its processes begin in the same order."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final


@final
class JobEvent:
    """An event of a job: all workers do it together, such as a program, an assignment, a new epoch.

    Args:
        name: Name of the event, for people.
        describe: Returns the parts of the event as texts, which have to be the same on every
            worker. Each comes with the place in the script that it comes from, or "".

    Attributes:
        key: Hash of the name and the texts, the same on every worker.
    """

    def __init__(
        self, name: str, describe: Callable[[], Sequence[tuple[str, str]]] = lambda: ()
    ) -> None:
        self.name = name
        self.describe = describe
        digest = hashlib.blake2b(name.encode(), digest_size=8)
        for text, _ in describe():
            digest.update(b"\n" + text.encode())
        self.key = int.from_bytes(digest.digest(), "little")


@final
@dataclass(eq=False)
class JobPrograms:
    """The events of a job, which all workers begin in the same order.

    Attributes:
        position: Number of events that this process has begun; the same on every worker that has
            come as far.
        num_meetings: Number of events at which this process has waited for the others.
        error: Reason why no further event can begin.
        explain: Turns an error of a program into the one to raise, while a job is watched.
        enter: Makes sure that the other workers do the same, as long as there are any.
        latest: The last event that was begun, with its values.
    """

    position: int = 0
    num_meetings: int = 0
    error: Exception | None = None
    explain: Callable[[Exception], Exception] | None = None
    enter: Callable[[JobEvent, tuple[Any, ...]], bool] | None = None
    latest: tuple[str, tuple[Any, ...]] = "the start", ()
    _is_alone: bool = False

    def explained(self, error: Exception) -> Exception:
        """Returns the error to raise for `error`; if another worker caused it, that reason."""
        return error if self.explain is None else self.explain(error)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lets this process do something that others do not, such as reading a file for all."""
        self._is_alone, before = True, self._is_alone
        try:
            yield
        finally:
            self._is_alone = before

    def begin(self, event: JobEvent, values: tuple[Any, ...] = ()) -> bool:
        """Announces what this process and all others do next; call it before doing it.

        Args:
            event: The event.
            values: Python numbers that belong to it, which may be others next time.

        Returns:
            Whether it waited for the others here; if so, each of them did.

        Raises:
            WorkerMismatchError: if the others do something else.
            Exception: `error`.
        """
        if self.error is not None:
            raise self.error
        if self.enter is not None and not self._is_alone:
            self.latest = event.name, values
            return self.enter(event, values)
        return False


job_programs = JobPrograms()
