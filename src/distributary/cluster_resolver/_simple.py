"""Clusters that you write in your program, and several clusters as one."""

from collections.abc import Mapping
from typing import Any, final

from distributary.cluster_resolver._cluster_spec import ClusterSpec, checked_counts
from distributary.cluster_resolver._resolver import ClusterResolver
from distributary.errors import InvalidValueError, check_type


@final
class SimpleClusterResolver(ClusterResolver):
    """A cluster that you describe in your program.

    Args:
        cluster_spec: Tasks of the job.
        master: Value that `master()` returns when you do not name a task.
        task_type: Type of this task.
        task_id: Number of this task.
        environment: Name of the environment in which the job runs.
        num_accelerators: Accelerators per worker, such as `{"GPU": 8}`; None for none.
        rpc_layer: Protocol to put in front of addresses.

    Raises:
        InvalidTypeError: if an argument has the wrong type.
        InvalidValueError: if a number of accelerators is negative.

    Source: `tf.distribute.cluster_resolver.SimpleClusterResolver`.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        expected = f"a ClusterSpec: pass ClusterSpec({cluster_spec!r})"
        check_type(self._field("cluster_spec"), cluster_spec, ClusterSpec, expected)
        check_type(self._field("master"), master, str, "a string")
        check_type(self._field("environment"), environment, str, "a string")
        self._cluster_spec, self._master, self._environment = cluster_spec, master, environment
        self._num_accelerators = checked_counts(
            {} if num_accelerators is None else num_accelerators,
            self._field("num_accelerators"),
            'from kinds of devices to numbers of devices, such as {"GPU": 8}',
        )
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster spec that you passed."""
        return self._cluster_spec

    def _master_address(self, task_type: str | None, task_id: int | None) -> str:
        if task_type is None or task_id is None:
            return self._master
        return self._cluster_spec.task_address(task_type, task_id)

    def _accelerators_of_any_task(self) -> dict[str, int]:
        return dict(self._num_accelerators)


# Several clusters as one.


@final
class UnionResolver(ClusterResolver):
    """Several resolvers as one: the tasks of all of them, and everything else from the first.

    Tasks of one type are numbered resolver by resolver. If a resolver gives the tasks of a type by
    number, with gaps, all tasks of that type keep their numbers. If several resolvers describe a
    type in the same way, its tasks are taken once. So the first resolver can override properties of
    the second.

    Args:
        *resolvers: At least one resolver.
        rpc_layer: Protocol; None means that of the first resolver.
        task_type: Type of this task; None means that of the first resolver.
        task_id: Number of this task; None means that of the first resolver.

    Raises:
        InvalidTypeError: if an argument is not a resolver.
        InvalidValueError: if you pass no resolver.

    Source: `tf.distribute.cluster_resolver.UnionResolver`, which repeats the tasks that several
    resolvers give, and ignores `task_id=0`.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        if not resolvers:
            raise InvalidValueError(
                "UnionResolver: got no arguments, expected one or more resolvers."
            )
        for number, resolver in enumerate(resolvers):
            what = self._field(f"argument {number}")
            check_type(what, resolver, ClusterResolver, "a ClusterResolver")
        self._resolvers = resolvers
        self._first = resolvers[0]
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of all resolvers.

        Raises:
            InvalidValueError: if two resolvers give different tasks the same number, or the same
                address to different tasks.
        """
        specs_by_job: dict[str, list[list[str] | dict[int, str]]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                parts = specs_by_job.setdefault(job, [])
                if tasks not in parts:
                    parts.append(tasks)
        return ClusterSpec({job: _merged(parts, job) for job, parts in specs_by_job.items()})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the task that you name, or else the first resolver's master.

        Raises:
            InvalidValueError: if there is no such task.
        """
        if task_type is None or task_id is None:
            return self._first.master(rpc_layer=rpc_layer or self.rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    @property
    def environment(self) -> str:
        """Environment of the first resolver."""
        return self._first.environment

    def _accelerators_of_any_task(self) -> dict[str, int]:
        return self._first.num_accelerators()

    def _value_of(self, name: str) -> Any:
        return getattr(self._first, name)


def _merged(parts: list[list[str] | dict[int, str]], job: str) -> list[str] | dict[int, str]:
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return [address for part in lists for address in part]
    merged: dict[int, str] = {}
    for part in parts:
        for number, address in part.items() if isinstance(part, dict) else enumerate(part):
            if merged.setdefault(number, address) != address:
                raise InvalidValueError(
                    f"UnionResolver: {job} {number} is {merged[number]!r} in one resolver and"
                    f" {address!r} in another. Give each task one number: the resolvers list some"
                    f" {job} tasks by number, so they are not renumbered."
                )
    return merged
