"""The tasks of a job, their addresses, and the place of one task among them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from distributary.cluster_resolver._addresses import parse_address
from distributary.cluster_resolver._checks import (
    checked_name,
    checked_str,
    checked_task_id,
    wrong_type,
)
from distributary.errors import InvalidTypeError, InvalidValueError

TOKEN_VARIABLE: Final = "DISTRIBUTARY_TOKEN"  # holds the secret that the tasks of a job share
_TASK_TYPES = ("chief", "worker", "ps", "evaluator")
_HINTS = {
    "master": ' TensorFlow 2 and distributary call it "chief".',
    "coordinator": ' The process that dispatches closures is of the type "chief".',
}


@final
class ClusterSpec:
    """The tasks of a job by type and number, with the address of each. Immutable.

    Args:
        cluster: A dict from the type of a task, such as `"worker"`, to the addresses `"host:port"`
            of its tasks. Give them as a list, or as a dict from their numbers if you do not know
            all of them. An empty dict stands for a job of this process alone. You can also pass
            another `ClusterSpec`.

    Raises:
        InvalidTypeError: if `cluster`, the tasks of a type, a number or an address has the wrong
            type.
        InvalidValueError: if an address is malformed, two tasks share one, a number is negative or
            comes twice, or a type has no tasks.

    Source: `tf.train.ClusterSpec`. TensorFlow does not check the addresses, and two of its specs
    are never equal.
    """

    def __init__(
        self, cluster: "Mapping[str, Sequence[str] | Mapping[int, str]] | ClusterSpec"
    ) -> None:
        self._jobs: dict[str, dict[int, str]] = (
            cluster._jobs if isinstance(cluster, ClusterSpec) else checked_jobs(cluster, "cluster")
        )

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns the addresses by type of task: a list, or a dict if some number is missing."""
        return {
            job: list(tasks.values()) if max(tasks) + 1 == len(tasks) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    @property
    def jobs(self) -> list[str]:
        """The types of tasks, in the order in which you gave them."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks of a type.

        Raises:
            InvalidValueError: if there is no such type.
        """
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the numbers of the tasks of a type, in ascending order.

        Raises:
            InvalidValueError: if there is no such type.
        """
        return list(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of one task.

        Raises:
            InvalidValueError: if there is no such type or no such task.
        """
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            raise InvalidValueError(
                f"There is no task {task_index!r} of type {job_name!r} in the cluster; the numbers"
                f" are {_listing(tasks)}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a type in the order of their numbers, None for missing numbers.

        Raises:
            InvalidValueError: if there is no such type.
        """
        tasks = self._tasks(job_name)
        return [tasks.get(number) for number in range(max(tasks) + 1)]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Mapping):
            try:
                other = ClusterSpec(other)
            except (InvalidTypeError, InvalidValueError):
                return False
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, tuple(tasks.items())) for job, tasks in self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))})"

    def _tasks(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise InvalidValueError(
                f"There are no tasks of type {job_name!r} in the cluster, which has"
                f" {', '.join(map(repr, self._jobs)) or 'no tasks at all'}."
            )
        return self._jobs[job_name]


def checked_jobs(cluster: object, field: str) -> dict[str, dict[int, str]]:
    """Returns the addresses of a cluster by type and number, with numbers in ascending order.

    Args:
        cluster: Like the argument of `ClusterSpec`, but not a `ClusterSpec`.
        field: Where the user wrote it, for messages.

    Raises:
        InvalidTypeError, InvalidValueError: see `ClusterSpec`.
    """
    if not isinstance(cluster, Mapping):
        raise wrong_type(
            cluster,
            field,
            "a dict from task types to the addresses of the tasks, such as"
            ' {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}',
        )
    jobs: dict[str, dict[int, str]] = {}
    field_of: dict[tuple[str, int], str] = {}
    for job, tasks in cluster.items():
        checked_name(job, f"{field} has a key that", 'a task type, such as "worker"')
        addresses: dict[int, str] = {}
        for key, address in _items(tasks, f'{field}["{job}"]'):
            number = checked_task_id(key, f'{field}["{job}"] has a key that')
            task_field = f'{field}["{job}"][{json.dumps(key)}]'
            host, port = parse_address(address, task_field)
            earlier = field_of.setdefault((host.lower(), port), task_field)
            if earlier != task_field:
                raise InvalidValueError(
                    f"{earlier} and {task_field} are both {address!r}: two tasks cannot listen at"
                    " the same address. Give each task its own host or port."
                )
            if number in addresses:
                raise InvalidValueError(f"{task_field} appears twice: as a number and as a string.")
            addresses[number] = str(address)
        jobs[job] = dict(sorted(addresses.items()))
    return jobs


def _items(tasks: object, field: str) -> list[tuple[object, object]]:
    """Returns the number, as the user wrote it, and the address of each task of one type."""
    if isinstance(tasks, Mapping):
        items = list(tasks.items())
    elif isinstance(tasks, (list, tuple)):
        items = list(enumerate(tasks))
    else:
        expected = 'a list of addresses, such as ["10.0.0.1:2222"], or a dict from task numbers'
        raise wrong_type(tasks, field, f"{expected} to addresses")
    if not items:
        raise InvalidValueError(
            f"{field} is empty, expected the address of at least one task. Leave the type out if"
            " the job has no such tasks."
        )
    return items


@final
@dataclass(frozen=True)
class Peer:
    """One task of a cluster.

    Args:
        task_type: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.
        task_id: Number of the task among those of its type.
        address: `"host:port"`, as in the cluster spec.
    """

    task_type: str
    task_id: int
    address: str

    @property
    def name(self) -> str:
        """Name for messages: `"chief"`, `"worker 1"`."""
        return _name(self.task_type, self.task_id)

    @property
    def host(self) -> str:
        """Host of `address`. An IPv6 address has no brackets, as sockets expect it."""
        return parse_address(self.address, self.name).host

    @property
    def port(self) -> int:
        """Port of `address`."""
        return parse_address(self.address, self.name).port

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"


@final
@dataclass(frozen=True)
class MultiWorker:
    """The place of one task in a cluster; made by `multi_worker`.

    Args:
        cluster_spec: The cluster.
        task_type: The type of this task.
        task_id: Number of this task.
        workers: The collective group, that is, the tasks that compute together: the chief, if the
            cluster has one, then the workers by number. The position of a task is its process
            index.
        peers: All tasks of the cluster: `workers`, then parameter servers, then the evaluator.
    """

    cluster_spec: ClusterSpec
    task_type: str
    task_id: int
    workers: tuple[Peer, ...]
    peers: tuple[Peer, ...]

    @property
    def name(self) -> str:
        """Name of this task for messages: `"chief"`, `"worker 1"`."""
        return _name(self.task_type, self.task_id)

    @property
    def address(self) -> str | None:
        """Address of this task; None for an evaluator that the cluster does not list."""
        return next((peer.address for peer in self.peers if peer.name == self.name), None)

    @property
    def num_workers(self) -> int:
        """Number of tasks that compute together: the chief and the workers."""
        return len(self.workers)

    @property
    def in_collective_group(self) -> bool:
        """True if this task is one of `workers`; False for parameter servers and the evaluator."""
        return self.worker_number is not None

    @property
    def worker_number(self) -> int | None:
        """Position of this task in `workers`; None if it is not one of them."""
        names = [peer.name for peer in self.workers]
        return names.index(self.name) if self.name in names else None

    @property
    def is_chief(self) -> bool:
        """True for the task that does what is done once: the chief, or worker 0 if there is none.

        Also True for the evaluator, which is the chief of a job of its own, as in tf.distribute.
        """
        return self.worker_number == 0 or self.task_type == "evaluator"

    @property
    def coordinator(self) -> Peer | None:
        """The first of `workers`, to which the others connect; None if there are no workers."""
        return self.workers[0] if self.workers else None

    @property
    def other_workers(self) -> tuple[Peer, ...]:
        """All of `workers` except this task."""
        return tuple(peer for peer in self.workers if peer.name != self.name)


def multi_worker(
    cluster_spec: ClusterSpec | Mapping[str, Sequence[str] | Mapping[int, str]],
    task_type: str | None,
    task_id: int | None,
) -> MultiWorker:
    """Returns the place of a task in a cluster, after checking both.

    Args:
        cluster_spec: The cluster, which must not be empty; `resolver.cluster_spec()`.
        task_type: Type of the task; `resolver.task_type`.
        task_id: Number of the task; `resolver.task_id`.

    Raises:
        InvalidTypeError: if an argument has the wrong type.
        InvalidValueError: if the cluster is empty, has an unknown type of task, or has two chiefs
            or two evaluators; if the number of a chief or worker is missing; if the task is not
            given, or is not in the cluster.

    Source: `tensorflow/python/distribute/multi_worker_util.py`.
    """
    spec = ClusterSpec(cluster_spec)
    if not spec:
        raise InvalidValueError(
            "The cluster is empty, expected the addresses of its tasks, such as"
            ' {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}. A single process needs no cluster:'
            " use MirroredStrategy, or leave TF_CONFIG unset."
        )
    check_roles(spec, "cluster_spec")
    for field, value in (("task_type", task_type), ("task_id", task_id)):
        if value is None:
            raise InvalidValueError(
                f"{field} is None, but the cluster has {_summary(spec)}. Say which task this"
                ' process is: with "task": {"type": "worker", "index": 0} in TF_CONFIG, or with the'
                " arguments task_type and task_id of the cluster resolver."
            )
    checked_type = checked_task_type(task_type, "task_type")
    checked_id = checked_task_id(task_id, "task_id")
    check_task(spec, checked_type, checked_id)
    for job in {"chief", "worker"}.intersection(spec.jobs):
        if None in spec.job_tasks(job):
            raise InvalidValueError(
                f'cluster_spec["{job}"] has the numbers {_listing(spec.task_indices(job))}, but'
                f" {_name(job, spec.job_tasks(job).index(None))} is missing. Workers that compute"
                " together must all be listed, numbered from 0."
            )
    peers = tuple(
        Peer(job, number, spec.task_address(job, number))
        for job in _TASK_TYPES
        if job in spec.jobs
        for number in spec.task_indices(job)
    )
    workers = tuple(peer for peer in peers if peer.task_type in ("chief", "worker"))
    return MultiWorker(spec, checked_type, checked_id, workers, peers)


def check_roles(cluster_spec: ClusterSpec, field: str) -> None:
    """Checks that a cluster has only known types of tasks, and at most one chief and evaluator.

    Args:
        cluster_spec: The cluster.
        field: Where the user wrote it, for messages: `'TF_CONFIG["cluster"]'`.

    Raises:
        InvalidValueError: if it does not.
    """
    for job in cluster_spec.jobs:
        _check_type_exists(job, f'{field} has the key "{job}"')
        num_tasks = cluster_spec.num_tasks(job)
        if job in ("chief", "evaluator") and num_tasks > 1:
            raise InvalidValueError(
                f'{field}["{job}"] has {num_tasks} tasks ({cluster_spec.as_dict()[job]}), expected'
                f" one: a job has at most one {job}. Keep the first, and make the others workers."
            )


def check_task(
    cluster_spec: ClusterSpec,
    task_type: str,
    task_id: int,
    cluster_field: str = "cluster_spec",
    type_field: str = "task_type",
    id_field: str = "task_id",
) -> None:
    """Checks that a task belongs to a cluster; an evaluator need not be listed there.

    Args:
        cluster_spec: The cluster, which must not be empty.
        task_type: A type of tasks that exists.
        task_id: Number of the task.
        cluster_field: Where the user wrote the cluster, for messages.
        type_field: Where the user wrote the type.
        id_field: Where the user wrote the number.

    Raises:
        InvalidValueError: if it does not belong to the cluster.
    """
    if task_type == "evaluator" and "evaluator" not in cluster_spec.jobs:
        if task_id != 0:
            raise InvalidValueError(
                f"{id_field} is {task_id}, but a job has at most one evaluator. Set it to 0."
            )
    elif task_type not in cluster_spec.jobs:
        raise InvalidValueError(
            f'{type_field} is "{task_type}", but {cluster_field} has no "{task_type}", only'
            f" {_listing(cluster_spec.jobs)}. Name one of these, or add the addresses of the"
            f' "{task_type}" tasks.'
        )
    elif task_id not in cluster_spec.task_indices(task_type):
        raise InvalidValueError(
            f'{id_field} is {task_id}, but {cluster_field}["{task_type}"] has the numbers'
            f" {_listing(cluster_spec.task_indices(task_type))}. Set it to one of these, or add the"
            f" address of task {task_id}."
        )


def checked_task_type(task_type: object, field: str) -> str:
    """Returns the type of a task, after checking it.

    Raises:
        InvalidTypeError: if it is not a string.
        InvalidValueError: if there is no such type.
    """
    task_type = checked_str(task_type, field, f"a string: one of {_listing(_TASK_TYPES)}")
    _check_type_exists(task_type, f'{field} is "{task_type}"')
    return task_type


def _check_type_exists(task_type: str, subject: str) -> None:
    if task_type in _TASK_TYPES:
        return
    lowered = task_type.lower()
    hint = _HINTS.get(lowered, "")
    if lowered in _TASK_TYPES:
        hint = f' Write it in lower case: "{lowered}".'
    raise InvalidValueError(
        f"{subject}, which is not a task type.{hint} The task types are {_listing(_TASK_TYPES)}."
    )


def _name(task_type: str, task_id: int) -> str:
    # A job has at most one chief and one evaluator.
    return f"{task_type} {task_id}" if task_type in ("worker", "ps") else task_type


def _summary(spec: ClusterSpec) -> str:
    """Returns the number of tasks of each type: `"1 chief, 2 worker, 1 ps"`."""
    return ", ".join(f"{spec.num_tasks(job)} {job}" for job in _TASK_TYPES if job in spec.jobs)


def _listing(names: Iterable[str | int]) -> str:
    return ", ".join(map(json.dumps, names))
