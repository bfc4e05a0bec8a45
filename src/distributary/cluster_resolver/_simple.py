"""A cluster that you write in your program."""

from collections.abc import Mapping
from typing import final

from distributary.cluster_resolver._checks import checked_counts
from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._resolver import ClusterResolver
from distributary.errors import check_type


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
