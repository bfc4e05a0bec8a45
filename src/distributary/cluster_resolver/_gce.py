"""The machines of an instance group of Google Compute Engine."""

from typing import Any, final

from distributary.cluster_resolver._cluster_spec import ClusterSpec, join_address
from distributary.cluster_resolver._resolver import ClusterResolver, ask, imported
from distributary.errors import ClusterError

_WHO = "GCEClusterResolver"

# An object with the methods of googleapiclient.discovery.build("compute", "v1").
_Service = Any


@final
class GCEClusterResolver(ClusterResolver):
    """The machines of an instance group as tasks of one type, all with the same port.

    Tasks are sorted by the internal address of their machine, compared as text. Set `task_id` to
    say which of them this process is. The service account of the machines needs permission to list
    instance groups and to read instances.

    Args:
        project: Name of the project.
        zone: Zone of the instance group.
        instance_group: Name of the instance group.
        port: Port on which the tasks listen.
        task_type: Type of all tasks.
        task_id: Number of this task.
        rpc_layer: Protocol to put in front of addresses.
        credentials: Credentials of google-auth; `"default"` takes those of the environment.
        service: An object like `googleapiclient.discovery.build("compute", "v1")`. None makes one,
            which needs the package google-api-python-client.

    Raises:
        MissingPackageError: if you pass no `service` and google-api-python-client is not installed.
        InvalidTypeError, InvalidValueError: if the task has the wrong type or number.

    Source: `tf.distribute.cluster_resolver.GCEClusterResolver`.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str = "grpc",
        credentials: object = "default",
        service: _Service | None = None,
    ) -> None:
        self._place = {"zone": zone, "project": project}
        self._group, self._port = instance_group, port
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer
        self._service = service or _make_service(credentials)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the machines as they are now.

        Raises:
            ClusterError: if the API does not answer, the group is empty, or one of its machines is
                not running.
        """
        addresses = [join_address(self._address(name), self._port) for name in self._instances()]
        return ClusterSpec({self.task_type or "worker": sorted(addresses)})

    def _instances(self) -> list[str]:
        """Returns the names of the machines in the group."""
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            **self._place, instanceGroup=self._group, body={"instanceState": "ALL"}, orderBy="name"
        )
        items: list[dict[str, Any]] = []
        while request is not None:
            answer = self._answer(request, "listing the instances")
            items += answer.get("items", ())
            request = groups.listInstances_next(previous_request=request, previous_response=answer)
        if not items:
            raise ClusterError(
                f"{_WHO}: {self._where()} has no instances. Compare with gcloud compute"
                " instance-groups list-instances."
            )
        for item in items:
            if item.get("status", "RUNNING") != "RUNNING":
                raise ClusterError(
                    f'{_WHO}: {item["instance"]} is in the state "{item["status"]}", expected'
                    ' "RUNNING". Wait until all machines run, or remove it from the group.'
                )
        return [item["instance"].rpartition("/")[2] for item in items]

    def _address(self, name: str) -> str:
        request = self._service.instances().get(**self._place, instance=name)
        for interface in self._answer(request, f'reading "{name}"').get("networkInterfaces", ()):
            if "networkIP" in interface:
                return str(interface["networkIP"])
        raise ClusterError(f'{_WHO}: "{name}" of {self._where()} has no internal address.')

    def _answer(self, request: Any, what: str) -> dict[str, Any]:
        cure = "The service account must have the role roles/compute.viewer."
        answer: dict[str, Any] = ask(request.execute, f"{_WHO}: {what} of {self._where()}", cure)
        return answer

    def _where(self) -> str:
        return f"instance group {self._group!r} in {' of project '.join(self._place.values())}"


def _make_service(credentials: object) -> _Service:
    discovery = imported(
        "googleapiclient.discovery", "google-api-python-client", f"{_WHO}: service"
    )
    if credentials == "default":
        credentials = None  # those of the environment
    return discovery.build("compute", "v1", credentials=credentials)
