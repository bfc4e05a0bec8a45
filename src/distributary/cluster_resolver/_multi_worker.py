"""The place of a task in a cluster, as strategies for several workers need it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from distributary.cluster_resolver._addresses import parse_address
from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._roles import (
    TASK_TYPES,
    check_roles,
    check_task,
    checked_task_id,
    checked_task_type,
    numbered_tasks,
)
from distributary.errors import InvalidValueError

__all__ = ["TOKEN_VARIABLE", "MultiWorker", "Peer", "multi_worker"]

TOKEN_VARIABLE: Final = "DISTRIBUTARY_TOKEN"  # holds the secret that the tasks of a job share

_HOW_TO_NAME_THE_TASK = (
    'Say which task this process is: with "task": {"type": "worker", "index": 0} in TF_CONFIG, or'
    " with the arguments task_type and task_id of the cluster resolver."
)


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
        for peer in self.peers:
            if (peer.task_type, peer.task_id) == (self.task_type, self.task_id):
                return peer.address
        return None

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
        for number, peer in enumerate(self.workers):
            if (peer.task_type, peer.task_id) == (self.task_type, self.task_id):
                return number
        return None

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
        return tuple(
            peer
            for peer in self.workers
            if (peer.task_type, peer.task_id) != (self.task_type, self.task_id)
        )


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
                f"{field} is None, but the cluster has {_summary(spec)}. {_HOW_TO_NAME_THE_TASK}"
            )
    checked_type = checked_task_type(task_type, "task_type")
    checked_id = checked_task_id(task_id, "task_id")
    check_task(
        spec,
        checked_type,
        checked_id,
        cluster_field="cluster_spec",
        type_field="task_type",
        id_field="task_id",
    )
    workers = _peers(spec, ("chief", "worker"))
    _check_no_worker_is_missing(spec)
    return MultiWorker(
        spec, checked_type, checked_id, workers, workers + _peers(spec, ("ps", "evaluator"))
    )


def _peers(spec: ClusterSpec, task_types: tuple[str, ...]) -> tuple[Peer, ...]:
    return tuple(
        Peer(task_type, number, spec.task_address(task_type, number))
        for task_type in task_types
        if task_type in spec.jobs
        for number in spec.task_indices(task_type)
    )


def _check_no_worker_is_missing(spec: ClusterSpec) -> None:
    for task_type in ("chief", "worker"):
        addresses = spec.job_tasks(task_type) if task_type in spec.jobs else []
        if None in addresses:
            raise InvalidValueError(
                f'cluster_spec["{task_type}"] has {numbered_tasks(spec, task_type)}:'
                f" {_name(task_type, addresses.index(None))} is missing. Workers that compute"
                " together must all be listed, numbered from 0."
            )


def _name(task_type: str, task_id: int) -> str:
    # A job has at most one chief and one evaluator.
    return f"{task_type} {task_id}" if task_type in ("worker", "ps") else task_type


def _summary(spec: ClusterSpec) -> str:
    """Returns the number of tasks of each type: `"1 chief, 2 worker, 1 ps"`."""
    return ", ".join(
        f"{spec.num_tasks(task_type)} {task_type}"
        for task_type in TASK_TYPES
        if task_type in spec.jobs
    )
