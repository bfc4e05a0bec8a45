"""A cluster that you write in your program, and the union of several clusters."""

from collections.abc import Mapping
from typing import final

from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._resolver import ClusterResolver, master_url
from distributary.errors import InvalidTypeError, InvalidValueError

__all__ = ["SimpleClusterResolver", "UnionResolver"]


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
            raise InvalidTypeError(
                f"SimpleClusterResolver: cluster_spec is {cluster_spec!r}"
                f" ({type(cluster_spec).__name__}), expected a ClusterSpec: pass"
                f" ClusterSpec({cluster_spec!r})."
            )
        for field, value in (("master", master), ("environment", environment)):
            if not isinstance(value, str):
                raise InvalidTypeError(
                    f"SimpleClusterResolver: {field} is {value!r} ({type(value).__name__}),"
                    " expected a string."
                )
        self._cluster_spec = cluster_spec
        self._master = master
        self._environment = environment
        self._num_accelerators = _checked_accelerators(num_accelerators)
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster spec that you passed."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of the task that you name, or else the `master` that you passed.

        Raises:
            InvalidValueError: if there is no such task.
        """
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        else:
            address = self._master
        return master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the numbers that you passed, for every task."""
        del task_type, task_id, config_proto
        return dict(self._num_accelerators)

    @property
    def environment(self) -> str:
        """Name of the environment that you passed."""
        return self._environment


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
                raise InvalidTypeError(
                    f"UnionResolver: argument {number} is {resolver!r}"
                    f" ({type(resolver).__name__}), expected a ClusterResolver."
                )
        self._resolvers = resolvers
        self.rpc_layer = rpc_layer
        self.task_type = task_type
        self.task_id = task_id

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
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return master_url(address, rpc_layer or self.rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the numbers of the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str:
        """Environment of the first resolver."""
        return self._resolvers[0].environment

    def _found_task_type(self) -> str | None:
        return self._resolvers[0].task_type

    def _found_task_id(self) -> int | None:
        return self._resolvers[0].task_id

    def _found_rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer


def _checked_accelerators(num_accelerators: Mapping[str, int] | None) -> dict[str, int]:
    if num_accelerators is None:
        return {}
    if not isinstance(num_accelerators, Mapping):
        raise InvalidTypeError(
            f"SimpleClusterResolver: num_accelerators is {num_accelerators!r}"
            f" ({type(num_accelerators).__name__}), expected a dict from kinds of devices to"
            ' numbers of devices, such as {"GPU": 8}.'
        )
    for kind, count in num_accelerators.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise InvalidTypeError(
                f'SimpleClusterResolver: num_accelerators["{kind}"] is {count!r}'
                f" ({type(count).__name__}), expected a number of devices."
            )
        if count < 0:
            raise InvalidValueError(
                f'SimpleClusterResolver: num_accelerators["{kind}"] is {count}, expected a number'
                " of devices >= 0."
            )
    return dict(num_accelerators)


def _merged(parts: list[list[str] | dict[int, str]], job: str) -> list[str] | dict[int, str]:
    if all(isinstance(part, list) for part in parts):
        return [address for part in parts for address in part if isinstance(address, str)]
    merged: dict[int, str] = {}
    for part in parts:
        numbered = part if isinstance(part, dict) else dict(enumerate(part))
        for number, address in numbered.items():
            if merged.setdefault(number, address) != address:
                raise InvalidValueError(
                    f"UnionResolver: {job} {number} is {merged[number]!r} in one resolver and"
                    f" {address!r} in another. Give each task one number: the resolvers list some"
                    f" {job} tasks by number, so they are not renumbered."
                )
    return merged
