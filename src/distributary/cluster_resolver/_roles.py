"""The types of tasks in a training job, and checks that a task belongs to a cluster."""

from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.errors import InvalidTypeError, InvalidValueError

__all__ = [
    "TASK_TYPES",
    "check_roles",
    "check_task",
    "checked_task_id",
    "checked_task_type",
    "numbered_tasks",
]

TASK_TYPES = ("chief", "worker", "ps", "evaluator")

_SINGLE_TYPES = ("chief", "evaluator")
_HINTS = {
    "master": ' TensorFlow 2 and distributary call it "chief".',
    "coordinator": ' The process that dispatches closures is of the type "chief".',
}


def check_roles(cluster_spec: ClusterSpec, field: str) -> None:
    """Checks that a cluster has only known types of tasks, and at most one chief and evaluator.

    Args:
        cluster_spec: The cluster.
        field: Where the user wrote it, for messages: `'TF_CONFIG["cluster"]'`.

    Raises:
        InvalidValueError: if it does not.
    """
    for job in cluster_spec.jobs:
        if job not in TASK_TYPES:
            raise InvalidValueError(
                f'{field} has the key "{job}", which is not a task type.{_hint(job)} The task'
                f" types are {_listing(TASK_TYPES)}."
            )
        num_tasks = cluster_spec.num_tasks(job)
        if job in _SINGLE_TYPES and num_tasks > 1:
            raise InvalidValueError(
                f'{field}["{job}"] has {num_tasks} tasks ({cluster_spec.as_dict()[job]}), expected'
                f" one: a job has at most one {job}. Keep the first, and make the others workers."
            )


def check_task(
    cluster_spec: ClusterSpec,
    task_type: str,
    task_id: int,
    *,
    cluster_field: str,
    type_field: str,
    id_field: str,
) -> None:
    """Checks that a task belongs to a cluster; an evaluator need not be listed there.

    Args:
        cluster_spec: The cluster, which must not be empty.
        task_type: One of `TASK_TYPES`.
        task_id: Number of the task.
        cluster_field: Where the user wrote the cluster, for messages.
        type_field: Where the user wrote the type.
        id_field: Where the user wrote the number.

    Raises:
        InvalidValueError: if it does not belong to the cluster.
    """
    if task_type not in cluster_spec.jobs:
        if task_type == "evaluator":
            if task_id != 0:
                raise InvalidValueError(
                    f"{id_field} is {task_id}, but a job has at most one evaluator. Set it to 0."
                )
            return
        raise InvalidValueError(
            f'{type_field} is "{task_type}", but {cluster_field} has no "{task_type}", only'
            f" {_listing(cluster_spec.jobs)}. Name one of these, or add the addresses of the"
            f' "{task_type}" tasks.'
        )
    if task_id not in cluster_spec.task_indices(task_type):
        raise InvalidValueError(
            f'{id_field} is {task_id}, but {cluster_field}["{task_type}"] has'
            f" {numbered_tasks(cluster_spec, task_type)}. Set it to one of these, or add the"
            f" address of task {task_id}."
        )


def checked_task_type(task_type: object, field: str) -> str:
    """Returns the type of a task, after checking it.

    Raises:
        InvalidTypeError: if it is not a string.
        InvalidValueError: if it is not one of `TASK_TYPES`.
    """
    if not isinstance(task_type, str):
        raise InvalidTypeError(
            f"{field} is {task_type!r} ({type(task_type).__name__}), expected a string: one of"
            f" {_listing(TASK_TYPES)}."
        )
    if task_type not in TASK_TYPES:
        raise InvalidValueError(
            f'{field} is "{task_type}", which is not a task type.{_hint(task_type)} The task types'
            f" are {_listing(TASK_TYPES)}."
        )
    return task_type


def checked_task_id(task_id: object, field: str) -> int:
    """Returns the number of a task from an int, or from a string of digits as in TensorFlow.

    Raises:
        InvalidTypeError: if it is neither.
        InvalidValueError: if it is negative.
    """
    if isinstance(task_id, str) and task_id.isascii() and task_id.isdecimal():
        return int(task_id)
    if isinstance(task_id, bool) or not isinstance(task_id, int):
        raise InvalidTypeError(
            f"{field} is {task_id!r} ({type(task_id).__name__}), expected the number of a task,"
            " such as 0."
        )
    if task_id < 0:
        raise InvalidValueError(
            f"{field} is {task_id}, expected the number of a task; they count from 0."
        )
    return task_id


def numbered_tasks(cluster_spec: ClusterSpec, task_type: str) -> str:
    """Returns text for messages: `"2 tasks, with the numbers 0 and 1"`."""
    numbers = [str(number) for number in cluster_spec.task_indices(task_type)]
    if len(numbers) == 1:
        return f"1 task, with the number {numbers[0]}"
    return f"{len(numbers)} tasks, with the numbers {', '.join(numbers[:-1])} and {numbers[-1]}"


def _hint(name: str) -> str:
    lowered = name.lower()
    if lowered in TASK_TYPES:
        return f' Write it in lower case: "{lowered}".'
    return _HINTS.get(lowered, "")


def _listing(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
