"""The place of one task in a cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from distributary.cluster_resolver._cluster_spec import ClusterSpec, checked_task_id, parse_address
from distributary.cluster_resolver._resolver import ClusterResolver
from distributary.errors import InvalidValueError, check_type

_TASK_TYPES = ("chief", "worker", "ps", "evaluator")


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
    if task_type is None or task_id is None:
        raise InvalidValueError(
            f"{'task_type' if task_type is None else 'task_id'} is None, but the cluster has"
            f" {_summary(spec)}. Say which task this process is: with"
            ' "task": {"type": "worker", "index": 0} in TF_CONFIG, or with task_type and task_id of'
            " the cluster resolver."
        )
    number = checked_task(spec, task_type, task_id)
    for job in {"chief", "worker"}.intersection(spec.jobs):
        if None in spec.job_tasks(job):
            raise InvalidValueError(
                f'cluster_spec["{job}"] has the numbers {spec.task_indices(job)}, but'
                f" {_name(job, spec.job_tasks(job).index(None))} is missing. Workers that compute"
                " together must all be listed, numbered from 0."
            )
    jobs = [job for job in _TASK_TYPES if job in spec.jobs]
    peers = tuple(
        Peer(job, n, spec.task_address(job, n)) for job in jobs for n in spec.task_indices(job)
    )
    workers = tuple(peer for peer in peers if peer.task_type in ("chief", "worker"))
    return MultiWorker(spec, task_type, number, workers, peers)


def place_of(resolver: ClusterResolver) -> MultiWorker | None:
    """Returns the place of this process in the cluster of a resolver; None if that is empty.

    Raises:
        InvalidTypeError, InvalidValueError: see `multi_worker`.
    """
    spec = resolver.cluster_spec()
    return multi_worker(spec, resolver.task_type, resolver.task_id) if spec else None


def check_roles(cluster_spec: ClusterSpec, field: str) -> None:
    """Checks that a cluster has only known types of tasks, and at most one chief and evaluator.

    Args:
        cluster_spec: The cluster.
        field: Where the user wrote it, for messages: `'TF_CONFIG["cluster"]'`.

    Raises:
        InvalidValueError: if it does not.
    """
    for job in cluster_spec.jobs:
        if job not in _TASK_TYPES:
            raise InvalidValueError(
                f'{field} has the key "{job}", which is not a task type. The task types are'
                f" {', '.join(_TASK_TYPES)}."
            )
        num_tasks = cluster_spec.num_tasks(job)
        if job in ("chief", "evaluator") and num_tasks > 1:
            raise InvalidValueError(
                f'{field}["{job}"] has {num_tasks} tasks ({cluster_spec.as_dict()[job]}), expected'
                f" one: a job has at most one {job}. Keep the first, and make the others workers."
            )


def checked_task(
    cluster_spec: ClusterSpec,
    task_type: Any,
    task_id: Any,
    fields: tuple[str, str, str] = ("cluster_spec", "task_type", "task_id"),
) -> int:
    """Returns the number of a task that belongs to a cluster; an evaluator need not be listed.

    Args:
        cluster_spec: The cluster. If it is empty, only the types are checked.
        task_type: Type of the task.
        task_id: Number of the task.
        fields: Where the user wrote these three, for messages.

    Raises:
        InvalidTypeError: if the type or the number of the task has the wrong type.
        InvalidValueError: if the task does not belong to the cluster.
    """
    cluster_field, type_field, id_field = fields
    check_type(type_field, task_type, str, 'a string, such as "worker"')
    number = checked_task_id(task_id, id_field)
    is_known = task_type in cluster_spec.jobs
    numbers = cluster_spec.task_indices(task_type) if is_known else []
    if cluster_spec and number not in numbers and (task_type, number) != ("evaluator", 0):
        asked = f" and {id_field} is {number}" if is_known or task_type == "evaluator" else ""
        raise InvalidValueError(
            f'{type_field} is "{task_type}"{asked}, but {cluster_field} has'
            f" {_summary(cluster_spec)}. Choose one of these tasks, or add the address of yours."
        )
    return number


def _name(task_type: str, task_id: int) -> str:
    # A job has at most one chief and one evaluator.
    return f"{task_type} {task_id}" if task_type in ("worker", "ps") else task_type


def _summary(spec: ClusterSpec) -> str:
    """Returns the numbers of the tasks of each type: `"chief 0; worker 0, 1"`."""
    return "; ".join(f"{job} {', '.join(map(str, spec.task_indices(job)))}" for job in spec.jobs)
