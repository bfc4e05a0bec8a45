"""Reads the environment variable TF_CONFIG, as TensorFlow does."""

import json
import os
from typing import Any, final

from distributary.cluster_resolver._checks import checked_str, checked_task_id, wrong_type
from distributary.cluster_resolver._cluster_spec import (
    ClusterSpec,
    check_roles,
    check_task,
    checked_jobs,
    checked_task_type,
)
from distributary.cluster_resolver._resolver import ClusterResolver, master_url
from distributary.errors import InvalidValueError

_CLUSTER = 'TF_CONFIG["cluster"]'
_TASK = 'TF_CONFIG["task"]'
_EXAMPLE = (
    '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker",'
    ' "index": 0}}'
)

_Json = dict[str, Any]


@final
class TFConfigClusterResolver(ClusterResolver):
    """The cluster and the task that the environment variable `TF_CONFIG` describes.

    The variable is JSON. Its `"cluster"` is the same in every process, and each process has its own
    `"task"`: `{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker",
    "index": 0}}`. Types are `"chief"`, `"worker"`, `"ps"` and `"evaluator"`; other keys are
    ignored. The variable is read again each time you ask for something. If it is not set, the
    cluster is empty and the task is None.

    All methods and properties that read it raise `InvalidValueError` or `InvalidTypeError` if it is
    wrong; the message names the field. So do `task_type` and `task_id` if the cluster has no such
    task.

    Args:
        task_type: Type of this task; None means that of `TF_CONFIG`.
        task_id: Number of this task; None means that of `TF_CONFIG`.
        rpc_layer: Protocol; None means that of `TF_CONFIG`.
        environment: Name of the environment in which the job runs.

    Source: `tf.distribute.cluster_resolver.TFConfigClusterResolver`.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._environment = environment or ""
        if task_type is not None:
            checked_task_type(task_type, self._field("task_type"))
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the job; empty if `TF_CONFIG` is not set or has no `"cluster"`."""
        return _cluster_spec(_load())

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns `TF_CONFIG["session_master"]` if it is set, or else the address of a task.

        Without `"session_master"`, returns `""` if the cluster has at most one task.

        Raises:
            InvalidValueError: if there is no such task.
        """
        config = _load()
        if "session_master" in config:
            return _string(config, "session_master")
        spec = _cluster_spec(config)
        if sum(spec.num_tasks(job) for job in spec.jobs) <= 1:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise InvalidValueError(
                f"{_TASK} is missing, so master() does not know which task you mean: pass task_type"
                ' and task_id, or add "task" to TF_CONFIG.'
            )
        address = spec.task_address(task_type, task_id)
        return master_url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    def _current_task_type(self) -> str | None:
        return self._task()[0]

    def _current_task_id(self) -> int | None:
        return self._task()[1]

    def _current_rpc_layer(self) -> str | None:
        if self._rpc_layer is not None:
            return self._rpc_layer
        config = _load()
        return _string(config, "rpc_layer") if "rpc_layer" in config else None

    def _task(self) -> tuple[str | None, int | None]:
        """Returns type and number, checked against the cluster as soon as both are known."""
        config = _load()
        task_type, task_id = self._task_type, self._task_id
        type_field, id_field = self._field("task_type"), self._field("task_id")
        task = config.get("task", {})
        if not isinstance(task, dict):
            raise wrong_type(task, _TASK, 'an object such as {"type": "worker", "index": 0}')
        if task and task_type is None:
            type_field = f'{_TASK}["type"]'
            task_type = _entry(task, "type")
        if task and task_id is None:
            id_field = f'{_TASK}["index"]'
            task_id = checked_task_id(_entry(task, "index"), id_field)
        if task_type is not None:
            checked_task_type(task_type, type_field)
        spec = _cluster_spec(config)
        if spec and task_type is not None and task_id is not None:
            check_task(spec, task_type, task_id, _CLUSTER, type_field, id_field)
        return task_type, task_id


def _load() -> _Json:
    text = os.environ.get("TF_CONFIG", "{}")
    try:
        config = json.loads(text, object_pairs_hook=_without_repeated_keys)
    except json.JSONDecodeError as error:
        excerpt = text[max(0, error.pos - 20) : error.pos + 20]
        raise InvalidValueError(
            f"TF_CONFIG is not valid JSON: {error.msg} at line {error.lineno}, column"
            f" {error.colno}, near {excerpt!r}. Expected something like {_EXAMPLE}; json.dumps"
            " writes it. Unset the variable to train with this process alone."
        ) from None
    if not isinstance(config, dict):
        raise wrong_type(config, "TF_CONFIG", f"an object such as {_EXAMPLE}")
    return config


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> _Json:
    result: _Json = {}
    for key, value in pairs:
        if key in result:
            raise InvalidValueError(
                f'TF_CONFIG has the key "{key}" twice in one object, with the values'
                f" {result[key]!r} and {value!r}. Keep one of them."
            )
        result[key] = value
    return result


def _cluster_spec(config: _Json) -> ClusterSpec:
    cluster = config.get("cluster", {})
    checked_jobs(cluster, _CLUSTER)  # first, because its errors name the field
    spec = ClusterSpec(cluster)
    check_roles(spec, _CLUSTER)
    return spec


def _entry(task: _Json, key: str) -> Any:
    if key not in task:
        raise InvalidValueError(
            f'{_TASK} is {task!r} and has no "{key}", expected both keys, as in {{"type": "worker",'
            ' "index": 0}.'
        )
    return task[key]


def _string(config: _Json, key: str) -> str:
    return checked_str(config[key], f'TF_CONFIG["{key}"]')
