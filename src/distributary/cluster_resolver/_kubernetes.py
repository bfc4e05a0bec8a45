"""Pods that Kubernetes runs, found by their labels."""

import enum
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

from distributary.cluster_resolver._cluster_spec import ClusterSpec, checked_strs, join_address
from distributary.cluster_resolver._resolver import ClusterResolver, ask, imported
from distributary.errors import ClusterError, check_type

_WHO = "KubernetesClusterResolver"

# An object with the methods of kubernetes.client.CoreV1Api.
_Client = Any


class KubernetesExecutableLocation(enum.Enum):
    """The place where the program runs, which decides how it reaches the API server.

    * `WITHIN_CLUSTER`: in a pod, with the pod's service account.
    * `OFF_CLUSTER`: elsewhere, with `~/.kube/config`.

    Source: `tf.distribute.cluster_resolver.KubernetesExecutableLocation`.
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


@final
class KubernetesClusterResolver(ClusterResolver):
    """The running pods that match label selectors, all with the same port.

    Tasks are sorted by the names of their pods, with `worker-2` before `worker-10`. You must set
    which of them this process is: `resolver.task_type = "worker"`, `resolver.task_id = 0`. In an
    indexed Job, take the number from the environment variable `JOB_COMPLETION_INDEX`. The service
    account needs permission to list pods.

    Args:
        job_to_label_mapping: Label selectors by type of task. If a type has several, the pods of
            the first selector come first. None means `{"worker": ["job-name=tensorflow"]}`.
        tf_server_port: Port on which the tasks listen.
        rpc_layer: Protocol to put in front of addresses.
        override_client: An object like `kubernetes.client.CoreV1Api()`, with credentials. None
            makes one, which needs the package kubernetes.
        executable_location: Where this program runs.
        namespace: Namespace of the pods. None searches all namespaces, which needs a cluster role.

    Raises:
        MissingPackageError: if you pass no `override_client` and kubernetes is not installed.
        ClusterError: if the configuration of kubernetes cannot be loaded.
        InvalidTypeError: if an argument has the wrong type.

    Source: `tf.distribute.cluster_resolver.KubernetesClusterResolver`. That one takes the addresses
    of the nodes, at which you reach a pod only if it uses the network of its node.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str = "grpc",
        override_client: _Client | None = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
        *,
        namespace: str | None = None,
    ) -> None:
        expected = "a member of KubernetesExecutableLocation"
        field = f"{_WHO}: executable_location"
        check_type(field, executable_location, KubernetesExecutableLocation, expected)
        mapping = job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        expected = 'a list of label selectors, such as ["app=train"]'
        field = f"{_WHO}: job_to_label_mapping"
        check_type(field, mapping, Mapping, "a dict from task types to lists of label selectors")
        self._selectors_of = {
            job: checked_strs(selectors, f'{field}["{job}"]', expected)
            for job, selectors in mapping.items()
        }
        self._port = tf_server_port
        client = override_client or _make_client(executable_location)
        if namespace is None:
            self._where, self._list = "all namespaces", client.list_pod_for_all_namespaces
        else:
            self._where = f"namespace {namespace!r}"
            self._list = functools.partial(client.list_namespaced_pod, namespace)
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the pods as they are now.

        Raises:
            ClusterError: if the API server does not answer, no pod matches a selector, or a pod is
                not running or has no address yet.
        """
        return ClusterSpec(
            {
                job: [address for selector in selectors for address in self._find(selector, job)]
                for job, selectors in self._selectors_of.items()
            }
        )

    def _find(self, selector: str, job: str) -> list[str]:
        """Returns the addresses of the pods with a label."""
        answer = ask(
            functools.partial(self._list, label_selector=selector),
            f"{_WHO}: listing the pods with the label {selector!r} in {self._where}",
            "The service account of this pod must be allowed to list pods. If it has a Role instead"
            " of a ClusterRole, pass namespace.",
        )
        pods = sorted(answer.items, key=lambda pod: _in_numeric_order(pod.metadata.name))
        if not pods:
            raise ClusterError(
                f"{_WHO}: no pod in {self._where} has the label {selector!r}, which"
                f' job_to_label_mapping gives for "{job}". Compare with kubectl get pods'
                " --show-labels."
            )
        addresses = []
        for pod in pods:
            # Those of a node are in objects that tests written for tf.distribute pass.
            ip = getattr(pod.status, "pod_ip", None) or getattr(pod.status, "host_ip", None)
            if pod.status.phase != "Running" or not ip:
                raise ClusterError(
                    f'{_WHO}: pod "{pod.metadata.name}" ({selector}) is in the phase'
                    f' "{pod.status.phase}" with the address {ip}, expected "Running" and an'
                    " address. Wait until all pods run, and delete those of earlier jobs or choose"
                    " a narrower label."
                )
            addresses.append(join_address(ip, self._port))
        return addresses


def _make_client(location: KubernetesExecutableLocation) -> _Client:
    kubernetes = imported("kubernetes", "kubernetes", f"{_WHO}: override_client")
    is_inside = location is KubernetesExecutableLocation.WITHIN_CLUSTER
    config = kubernetes.config
    ask(
        config.load_incluster_config if is_inside else config.load_kube_config,
        f"{_WHO}: loading the configuration for {location.name}",
        "Outside of a pod, pass executable_location=KubernetesExecutableLocation.OFF_CLUSTER, which"
        " reads ~/.kube/config.",
    )
    return kubernetes.client.CoreV1Api()


def _in_numeric_order(name: str) -> list[tuple[str, int]]:
    """Returns a sort key with which `worker-2` comes before `worker-10`."""
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name)]
