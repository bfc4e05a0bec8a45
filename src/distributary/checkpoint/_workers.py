"""Rounds, in which the workers of a job save and restore together."""

from collections.abc import Callable
from typing import Any, NoReturn, final

from distributary.dispatch import JobEvent, job_programs
from distributary.errors import CheckpointError, ClusterError
from distributary.job import consensus

_BEGIN = JobEvent("saving a checkpoint")


def agree(
    what: str, timeout_seconds: float, own: Callable[[], Any], topic: str | None = None
) -> list[Any]:
    """Returns the results of `own` on every worker, in worker order.

    Args:
        what: Beginning of errors, which says what the workers do together.
        timeout_seconds: Seconds to wait for the others.
        own: Function whose result can be written as JSON.
        topic: The conversation, if it is not that of the script.

    Raises:
        Exception: any error that `own` raises on this worker.
        CheckpointError: if `own` raises on another worker, or a worker does not take part in time.
    """
    job = consensus()
    if job is None:
        return [own()]
    failures: list[BaseException] = []

    def say() -> Any:
        try:
            return own()
        except BaseException as error:
            failures.append(error)
            raise

    try:
        if topic is None:
            return job.agree("restoring a checkpoint", say, seconds=timeout_seconds)
        return job.agree(topic, say, topic, timeout_seconds)
    except TimeoutError as error:
        raise _absent(what, timeout_seconds, error) from error
    except ClusterError as error:
        if error in failures:
            raise
        raise CheckpointError(f"{what}: {error}") from error


def this_worker() -> tuple[int, int]:
    """Returns the number of this worker, and the number of workers."""
    job = consensus()
    return (0, 1) if job is None else (job.number, job.num_workers)


@final
class Round:
    """One checkpoint that all workers write together. All of them create it, in the same order.

    Once created, it can be used in another thread.

    Args:
        what: Beginning of errors, which says what the workers do together.
        timeout_seconds: Seconds to wait for the others, in each step.

    Raises:
        WorkerMismatchError: if the other workers do something else.
    """

    def __init__(self, what: str, timeout_seconds: float) -> None:
        self._job = consensus()
        self._what = what
        self._timeout_seconds = timeout_seconds
        self._topic: str | None = None
        if self._job is not None:
            job_programs.begin(_BEGIN)
            self._topic = f"checkpoint {self._job.count('checkpoint')}"

    @property
    def is_chief(self) -> bool:
        """True if this process writes."""
        return self._job is None or self._job.number == 0

    def meet(self, own: Callable[[], Any]) -> list[Any]:
        """Returns the results of `own` on every worker, in worker order; see `agree`."""
        return agree(self._what, self._timeout_seconds, own, self._topic)

    def fail(self, error: BaseException) -> NoReturn:
        """Tells the other workers, which are meeting, that this one has failed; raises `error`."""

        def own() -> NoReturn:
            raise error

        self.meet(own)
        raise AssertionError

    def conclude(self, act: Callable[[], str]) -> str:
        """Runs `act` on the chief, and returns its result on all workers.

        Raises:
            Exception: on the chief, any error that `act` raises.
            CheckpointError: on the other workers, if `act` raises an error or the chief does not
                finish in time.
        """
        job = self._job
        if job is None:
            return act()
        topic = f"the end of {self._topic}"
        if job.number:
            try:
                text, problem = job.receive(topic, self._timeout_seconds)
            except (TimeoutError, ClusterError) as error:
                raise _absent(self._what, self._timeout_seconds, error) from error
            if problem is not None:
                raise CheckpointError(problem)
            return str(text)
        try:
            text = act()
        except BaseException as error:
            job.send_to_all(topic, [None, str(error)])
            raise
        job.send_to_all(topic, [text, None])
        return text


def _absent(what: str, timeout_seconds: float, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{what}: a worker did not take part within {timeout_seconds:g} s. All workers must save"
        f" and restore in the same order. Look at the output of the other workers ({error})."
    )
