"""The abstract interface of cluster resolvers."""

import abc

from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._roles import checked_task_id
from distributary.errors import InvalidTypeError
from distributary.topology import local_devices_of

__all__ = ["ClusterResolver", "TaskClusterResolver", "master_url"]


class ClusterResolver(abc.ABC):
    """Says where a job runs: the addresses of its tasks, and which of them this process is.

    A class of your own defines `cluster_spec` and `master`. It sets `task_type`, `task_id` and
    `rpc_layer` where they apply, or overrides these properties. Multi-worker strategies need
    `task_type` and `task_id`.

    Source: `tf.distribute.cluster_resolver.ClusterResolver`.
    """

    _task_type: str | None = None  # set by the user: wins over what is found
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the job as they are now; empty if the job is this process alone."""

    @abc.abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task with the protocol in front; nothing in distributary uses it.

        Args:
            task_type: Type of the task, with `task_id`; None for the resolver's own.
            task_id: Number of the task.
            rpc_layer: Protocol; None for that of the resolver.
        """

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """How many GPUs or TPU cores a worker has, by kind: `{"GPU": 8}`; empty if none.

        Unless a resolver knows the numbers, they are those of this process, which holds for every
        worker, as all must have the same number of devices. Finding out starts JAX, which must not
        happen before a multi-worker strategy is created.

        Args:
            task_type: Type of the task that is asked about.
            task_id: Its number.
            config_proto: Has no meaning here; accepted for compatibility.
        """
        del task_type, task_id, config_proto
        counts = {kind: len(local_devices_of(kind)) for kind in ("GPU", "TPU")}
        return {kind: count for kind, count in counts.items() if count}

    @property
    def environment(self) -> str:
        """A name for the surroundings of the job; `""` unless one was given."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The type of this task, such as `"worker"`; None if not known. Can be set."""
        return self._found_task_type() if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        if task_type is not None and not isinstance(task_type, str):
            raise InvalidTypeError(
                f"{type(self).__name__}: task_type is {task_type!r} ({type(task_type).__name__}),"
                ' expected a string, such as "worker".'
            )
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The number of this task among those of its type; None if not known. Can be set."""
        return self._found_task_id() if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        if task_id is not None:
            task_id = checked_task_id(task_id, f"{type(self).__name__}: task_id")
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol in front of addresses, such as `"grpc"`; None for none. Can be set."""
        return self._found_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        if rpc_layer is not None and not isinstance(rpc_layer, str):
            raise InvalidTypeError(
                f"{type(self).__name__}: rpc_layer is {rpc_layer!r} ({type(rpc_layer).__name__}),"
                ' expected a string, such as "grpc", or None.'
            )
        self._rpc_layer = rpc_layer

    # What a property is while nobody has set it.

    def _found_task_type(self) -> str | None:
        return None

    def _found_task_id(self) -> int | None:
        return None

    def _found_rpc_layer(self) -> str | None:
        return None


def master_url(address: str, rpc_layer: str | None) -> str:
    """`"grpc://host:port"`; without a protocol the address as it is."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


class TaskClusterResolver(ClusterResolver):
    """Base of resolvers whose `master` is a task, this one unless another is meant."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task, by default of this one, with the protocol in front.

        Without a task it is `""`.

        Raises:
            InvalidValueError: if there is no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return master_url(address, rpc_layer or self.rpc_layer)
