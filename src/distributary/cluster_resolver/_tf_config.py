"""Reads the environment variable TF_CONFIG, as TensorFlow does."""

import difflib
import json
import os
from typing import Any, final

from distributary.cluster_resolver._cluster_spec import ClusterSpec, checked_jobs
from distributary.cluster_resolver._multi_worker import check_roles, checked_task
from distributary.cluster_resolver._resolver import ClusterResolver
from distributary.errors import InvalidValueError, check_type

_CLUSTER = 'TF_CONFIG["cluster"]'
_TASK = 'TF_CONFIG["task"]'
_FIELDS = (_CLUSTER, f'{_TASK}["type"]', f'{_TASK}["index"]')
_TASK_EXAMPLE = '{"type": "worker", "index": 0}'
_EXAMPLE = f'{{"cluster": {{"worker": ["10.0.0.1:2222"]}}, "task": {_TASK_EXAMPLE}}}'


@final
class TFConfigClusterResolver(ClusterResolver):
    """The cluster and the task that the environment variable `TF_CONFIG` describes.

    The variable is JSON. Its `"cluster"` is the same in every process, and each process has its own
    `"task"`: `{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker",
    "index": 0}}`. Types are `"chief"`, `"worker"`, `"ps"` and `"evaluator"`; other keys are
    ignored. The variable is read again each time you ask for something. If it is not set, the
    cluster is empty and the task is None.

    All methods and properties that read it raise `InvalidValueError` or `InvalidTypeError` if it is
    wrong; the message names the field. So do `task_type` and `task_id` if `TF_CONFIG` names a task
    that is not in its cluster.

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
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the job; empty if `TF_CONFIG` is not set or has no `"cluster"`."""
        return _cluster_spec(_load())

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns `TF_CONFIG["session_master"]` if it is set, or else the address of a task.

        Without `"session_master"`, returns `""` if the cluster has at most one task.

        Raises:
            InvalidValueError: if there is no such task.
        """
        config = _load()
        spec = _cluster_spec(config)
        if "session_master" in config:
            return _string(config, "session_master")
        if sum(map(spec.num_tasks, spec.jobs)) <= 1:
            return ""
        address = super().master(task_type, task_id, rpc_layer)
        if not address:
            raise InvalidValueError(
                f"{_TASK} is missing, so master() does not know which task you mean: pass task_type"
                ' and task_id, or add "task" to TF_CONFIG.'
            )
        return address

    def _value_of(self, name: str) -> Any:
        config = _load()
        spec = _cluster_spec(config)
        if name == "rpc_layer":
            return _string(config, name) if name in config else None
        task = config.get("task", {})
        check_type(_TASK, task, dict, f"an object such as {_TASK_EXAMPLE}")
        if not task:
            return None
        if not task.keys() >= {"type", "index"}:
            raise InvalidValueError(
                f'{_TASK} is {task!r}, expected "type" and "index", as in {_TASK_EXAMPLE}.'
            )
        number = checked_task(spec, task["type"], task["index"], _FIELDS)
        return number if name == "task_id" else task["type"]


def size_of_job() -> tuple[int, int]:
    """Returns the numbers of workers and parameter servers in this process' job, from `TF_CONFIG`.

    All tasks that are neither servers nor evaluators count as workers, whatever their type is. Both
    numbers are 0 for an evaluator, which does not work with the others.

    Raises:
        InvalidTypeError, InvalidValueError: if the cluster is wrong, so that nobody knows, or the
            task is not in it.
    """
    if not os.environ.get("TF_CONFIG", "").strip():
        return 0, 0
    config = _load()
    cluster, task = config.get("cluster") or {}, config.get("task")
    of_task = (task.get("type"), task.get("index")) if isinstance(task, dict) else (None, None)
    if of_task[0] == "evaluator":
        return 0, 0
    if isinstance(cluster, dict):  # some launchers write types of which there are no tasks
        cluster = {job: tasks for job, tasks in cluster.items() if tasks}
    jobs = checked_jobs(cluster, _CLUSTER)
    if None not in of_task:  # a program may know its task itself
        checked_task(ClusterSpec(cluster), *of_task, _FIELDS)
    sizes = {job: len(tasks) for job, tasks in jobs.items()}
    servers, _ = sizes.pop("ps", 0), sizes.pop("evaluator", 0)
    return sum(sizes.values()), servers


def _load() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG", "{}")
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        excerpt = text[max(0, error.pos - 20) : error.pos + 20]
        raise InvalidValueError(
            f"TF_CONFIG is not valid JSON: {error}, near {excerpt!r}. Expected something like"
            f" {_EXAMPLE}; json.dumps writes it. Unset the variable to train with this process"
            " alone."
        ) from None
    check_type("TF_CONFIG", config, dict, f"an object such as {_EXAMPLE}")
    for key in config.keys() - {"cluster", "task"}:  # others have no meaning here
        known = {"cluster", "task"} - config.keys()
        for meant in difflib.get_close_matches(key.lower(), known, 1, 0.75):
            raise InvalidValueError(
                f"TF_CONFIG has the key {key!r}, which has no meaning. Write {meant!r}, as in"
                f" {_EXAMPLE}."
            )
    return config


def _cluster_spec(config: dict[str, Any]) -> ClusterSpec:
    cluster = config.get("cluster", {})
    checked_jobs(cluster, _CLUSTER)  # first, because its errors name the field
    spec = ClusterSpec(cluster)
    check_roles(spec, _CLUSTER)
    return spec


def _string(config: dict[str, Any], key: str) -> str:
    check_type(f'TF_CONFIG["{key}"]', config[key], str, "a string")
    return str(config[key])
