"""Agreements of the workers of a job that save and restore together."""

from collections.abc import Callable
from typing import Any

from distributary.errors import CheckpointError, ClusterError
from distributary.job import consensus


def agree(
    what: str, timeout_seconds: float, compute: Callable[[], Any], topic: str | None = None
) -> list[Any]:
    """Returns the results of `compute` on every worker, in worker order.

    Args:
        what: Beginning of errors, which says what the workers do together.
        timeout_seconds: Seconds to wait for the others.
        compute: Function whose result can be written as JSON.
        topic: The conversation, if it is not that of the script.

    Raises:
        Exception: any error that `compute` raises on this worker.
        CheckpointError: if `compute` raises on another worker, or one does not take part in time.
    """
    job = consensus()
    if job is None:
        return [compute()]
    failures: list[BaseException] = []

    def say() -> Any:
        try:
            return compute()
        except BaseException as error:
            failures.append(error)
            raise

    try:
        if topic is None:
            return job.agree("restoring a checkpoint", say, seconds=timeout_seconds)
        return job.agree(topic, say, topic, timeout_seconds)
    except TimeoutError as error:
        raise absent(what, timeout_seconds, error) from error
    except ClusterError as error:
        if error in failures:
            raise
        raise CheckpointError(f"{what}: {error}") from error


def this_worker() -> tuple[int, int]:
    """Returns the number of this worker, and the number of workers."""
    job = consensus()
    return (0, 1) if job is None else (job.number, job.num_workers)


def absent(what: str, timeout_seconds: float, error: Exception) -> CheckpointError:
    """Returns the error about a worker that does not take part."""
    return CheckpointError(
        f"{what}: a worker did not take part within {timeout_seconds:g} s. All workers must save"
        f" and restore in the same order. Look at the output of the other workers ({error})."
    )
