"""The abstract interface of cluster resolvers."""

import abc
from typing import Any

from distributary.cluster_resolver._checks import checked_task_id
from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.errors import check_type


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
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
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
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
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
