"""A cluster that you write in your program, and the union of several clusters."""

from collections.abc import Mapping
from typing import final

from distributary.cluster_resolver._checks import checked_counts, checked_str, wrong_type
from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._resolver import ClusterResolver
from distributary.errors import InvalidValueError


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
        if not isinstance(cluster_spec, ClusterSpec):
            expected = f"a ClusterSpec: pass ClusterSpec({cluster_spec!r})"
            raise wrong_type(cluster_spec, self._field("cluster_spec"), expected)
        self._cluster_spec = cluster_spec
        self._master = checked_str(master, self._field("master"))
        self._environment = checked_str(environment, self._field("environment"))
        field = self._field("num_accelerators")
        self._num_accelerators = {}
        if num_accelerators:
            example = 'from kinds of devices to numbers of devices, such as {"GPU": 8}'
            self._num_accelerators = checked_counts(num_accelerators, field, example, minimum=0)
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
            if not isinstance(resolver, ClusterResolver):
                raise wrong_type(resolver, self._field(f"argument {number}"), "a ClusterResolver")
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
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
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

    def _current_task_type(self) -> str | None:
        return self._first.task_type if self._task_type is None else self._task_type

    def _current_task_id(self) -> int | None:
        return self._first.task_id if self._task_id is None else self._task_id

    def _current_rpc_layer(self) -> str | None:
        return self._first.rpc_layer if self._rpc_layer is None else self._rpc_layer


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
