"""The interface of cluster resolvers, what several of them share, and clusters that you write."""

import abc
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from distributary.cluster_resolver._cluster_spec import (
    ClusterSpec,
    checked_counts,
    checked_task_id,
    join_address,
    number_in,
)
from distributary.errors import (
    ClusterError,
    InvalidValueError,
    MissingPackageError,
    check_type,
    checked_int,
)


class ClusterResolver(abc.ABC):
    """A description of where a job runs: the addresses of its tasks, and which one this process is.

    In a subclass of your own, define `cluster_spec`, and `master` if it is not a task. Set
    `task_type`, `task_id` and `rpc_layer` where they apply, or override these properties.
    Multi-worker strategies need `task_type` and `task_id`.

    Source: `tf.distribute.cluster_resolver.ClusterResolver`.
    """

    _task_type: str | None = None  # as set
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment = ""

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the job as they are now; empty if it is this process alone."""

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of a task, with the protocol in front; `""` if there is no task.

        Nothing in distributary uses it.

        Args:
            task_type: Type of the task; give it together with `task_id`. None means the type of
                this task, unless the description of the class says otherwise.
            task_id: Number of the task.
            rpc_layer: Protocol; None means the resolver's.

        Raises:
            InvalidValueError: if there is no such task.
        """
        address = self._master_address(task_type, task_id)
        layer = rpc_layer or self.rpc_layer
        return f"{layer}://{address}" if layer and address is not None else address or ""

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Returns the number of GPUs or TPU cores of a worker by kind: `{"GPU": 8}`; empty if none.

        Unless a resolver knows the numbers, they are those of this process. They hold for every
        worker, because all workers must have the same number of devices. The call starts JAX, which
        must not happen before you create a multi-worker strategy.

        Args:
            task_type: Type of the task that you ask about.
            task_id: Number of the task that you ask about.
            config_proto: Ignored; accepted for compatibility.
        """
        del task_type, task_id, config_proto
        return self._accelerators_of_any_task()

    @property
    def environment(self) -> str:
        """Name of the environment in which the job runs; `""` unless you gave one."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """Type of this task, such as `"worker"`; None if unknown. You can set it."""
        return self._value_of("task_type") if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        field, expected = self._field("task_type"), 'a string, such as "worker"'
        check_type(field, task_type, str | None, expected)
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Number of this task among those of its type; None if unknown. You can set it."""
        return self._value_of("task_id") if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        if task_id is not None:
            task_id = checked_task_id(task_id, self._field("task_id"))
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """Protocol in front of addresses, such as `"grpc"`; None for none. You can set it."""
        return self._value_of("rpc_layer") if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        field, expected = self._field("rpc_layer"), 'a string, such as "grpc", or None'
        check_type(field, rpc_layer, str | None, expected)
        self._rpc_layer = rpc_layer

    def _value_of(self, name: str) -> Any:
        """Returns the value of a property that is not set; None if unknown."""
        return None

    def _master_address(self, task_type: str | None, task_id: int | None) -> str | None:
        """Returns the address of the task that `master` was asked for; None if there is none."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return None
        return self.cluster_spec().task_address(task_type, task_id)

    def _accelerators_of_any_task(self) -> dict[str, int]:
        """Returns what `num_accelerators` returns, if it is the same for all tasks."""
        from distributary.devices import local_devices_of  # which imports JAX

        counts = {kind: len(local_devices_of(kind)) for kind in ("GPU", "TPU")}
        return {kind: count for kind, count in counts.items() if count}

    def _field(self, name: str) -> str:
        """Returns the name of an argument or a property, for messages."""
        return f"{type(self).__name__}: {name}"


# Asks APIs through clients of optional packages.


def imported(module: str, package: str, field: str) -> Any:
    """Imports a module of an optional package.

    Args:
        module: Name of the module.
        package: Name with which pip installs it.
        field: The argument with which the user can do without the package: `"Resolver: client"`.

    Raises:
        MissingPackageError: if the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        who, _, argument = field.partition(": ")
        raise MissingPackageError(
            f"{who} needs the package {package}, which cannot be imported ({error}). Run pip"
            f" install {package}, or pass {argument}."
        ) from error


def ask(request: Callable[[], Any], what: str, cure: str) -> Any:
    """Returns the answer to a request.

    Args:
        request: Sends the request.
        what: Description of the request, for messages: `"Resolver: listing the pods"`.
        cure: Advice for messages.

    Raises:
        ClusterError: if the request fails.
    """
    try:
        return request()
    except Exception as error:  # its classes are unknown, because the packages are optional
        said = " ".join(str(error).split()).removesuffix(".")  # those of HTTP have many lines
        raise ClusterError(f"{what} failed with {type(error).__name__}: {said}. {cure}") from error


# Turns the ranks that a launcher gives to processes on hosts into tasks with addresses.


class RankClusterResolver(ClusterResolver):
    """Base class of resolvers for launchers that number the processes of a job.

    Args:
        places: For each rank, the host of the process and its number on that host.
        rank: Rank of this process.
        jobs: Number of tasks of each type, as the user passed it; None for workers only. Types take
            the ranks in alphabetical order.
        port_base: Port of the first process on each host; the others count up from it.
        rpc_layer: Protocol to put in front of addresses.

    Raises:
        InvalidTypeError: if `jobs` is not a dict to ints, or `port_base` is not an int.
        InvalidValueError: if a number in `jobs` is negative, or a port is out of range.
        ClusterError: if the numbers in `jobs` do not add up to the number of processes.
    """

    def __init__(
        self,
        places: Sequence[tuple[str, int]],
        rank: int,
        jobs: Mapping[str, int] | None,
        port_base: int,
        rpc_layer: str,
    ) -> None:
        checked_int(self._field("port_base"), port_base, minimum=1)
        field = self._field("jobs")
        expected = 'from task types to numbers of tasks, such as {"chief": 1, "worker": 3}'
        jobs = checked_counts({"worker": len(places)} if jobs is None else jobs, field, expected)
        tasks = [(job, number) for job in sorted(jobs) for number in range(jobs[job])]
        if len(tasks) != len(places):
            raise ClusterError(
                f"{field} is {jobs!r}, which is {len(tasks)} tasks, but the launcher has started"
                f" {len(places)} processes. Make the numbers add up to {len(places)}, or start as"
                " many processes as there are tasks."
            )
        cluster: dict[str, list[str]] = {}
        for (job, _), (host, local_rank) in zip(tasks, places, strict=True):
            cluster.setdefault(job, []).append(join_address(host, port_base + local_rank))
        self._cluster_spec = ClusterSpec(cluster)
        self.task_type, self.task_id = tasks[rank]
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the processes that the launcher has started."""
        return self._cluster_spec


def variable(name: str, cure: str) -> str:
    """Returns the text of an environment variable.

    Args:
        name: Name of the variable.
        cure: Advice for when it is not set, for messages.

    Raises:
        ClusterError: if the variable is not set.
    """
    text = os.environ.get(name)
    if text is None:
        raise ClusterError(f"The environment variable {name} is not set. {cure}")
    return text


def int_variable(name: str, cure: str, maximum: int | None = None) -> int:
    """Returns the number in an environment variable, from 0 to `maximum`.

    Raises:
        ClusterError: if the variable is not set or has another value.
    """
    text = variable(name, cure)
    number = number_in(text)
    if number is None or (maximum is not None and number > maximum):
        bounds = ">= 0" if maximum is None else f"from 0 to {maximum}"
        raise ClusterError(
            f"The environment variable {name} is {text!r}, expected a number {bounds}. {cure}"
        )
    return number


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
