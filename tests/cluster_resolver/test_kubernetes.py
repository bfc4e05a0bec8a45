import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from distributary.cluster_resolver import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from distributary.errors import (
    ClusterError,
    InvalidTypeError,
    InvalidValueError,
    MissingPackageError,
)

_HAS_KUBERNETES = importlib.util.find_spec("kubernetes") is not None
_PACKAGE = '''
"""Stands for the package kubernetes: says which configuration was loaded."""
from types import SimpleNamespace

loaded = []

class config:
    class ConfigException(Exception):
        pass

    @staticmethod
    def load_incluster_config():
        loaded.append("in cluster")

    @staticmethod
    def load_kube_config():
        raise config.ConfigException("Invalid kube-config file")

class client:
    class CoreV1Api:
        def list_pod_for_all_namespaces(self, label_selector):
            pod = SimpleNamespace(
                metadata=SimpleNamespace(name="p"),
                status=SimpleNamespace(phase="Running", pod_ip="10.0.0.9"),
            )
            return SimpleNamespace(items=[pod])
'''


def _pod(name, ip, phase="Running", host_ip=None):
    status = SimpleNamespace(phase=phase, pod_ip=ip, host_ip=host_ip)
    return SimpleNamespace(metadata=SimpleNamespace(name=name), status=status)


class _Client:
    """What the resolver uses of `kubernetes.client.CoreV1Api`."""

    def __init__(self, pods):
        self.pods = pods
        self.asked = []

    def list_pod_for_all_namespaces(self, label_selector):
        self.asked.append((None, label_selector))
        return SimpleNamespace(items=self.pods.get(label_selector, []))

    def list_namespaced_pod(self, namespace, label_selector):
        self.asked.append((namespace, label_selector))
        return SimpleNamespace(items=self.pods.get(label_selector, []))


def _resolver(pods, mapping=None, **settings):
    return KubernetesClusterResolver(mapping, override_client=_Client(pods), **settings)


_WORKERS = {"job-name=tensorflow": [_pod("w-1", "10.0.0.2"), _pod("w-0", "10.0.0.1")]}


def test_pods_are_tasks_in_the_order_of_their_names():
    resolver = _resolver(_WORKERS)

    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, "grpc")
    assert resolver.master() == ""
    assert resolver.master("worker", 1) == "grpc://10.0.0.2:8470"

    resolver.task_type, resolver.task_id = "worker", 1

    assert resolver.master() == "grpc://10.0.0.2:8470"


def test_numbers_in_names_count_as_numbers():
    """The pods of an indexed Job are named job-<index>-<random letters>."""
    names = [f"job-{index}-{suffix}" for index, suffix in enumerate("zyxwvutsrqpo")]
    pods = [_pod(name, f"10.0.0.{index}") for index, name in enumerate(names)]

    spec = _resolver({"job-name=tensorflow": sorted(pods, key=lambda p: p.metadata.name)})

    assert spec.cluster_spec() == {"worker": [f"10.0.0.{index}:8470" for index in range(12)]}


def test_each_type_has_its_selectors_in_order():
    pods = {"a": [_pod("x", "1.0.0.1")], "b": [_pod("a", "1.0.0.2")], "c": [_pod("c", "fd00::3")]}

    resolver = _resolver(pods, {"worker": ["a", "b"], "chief": ("c",)}, tf_server_port=99)

    assert resolver.cluster_spec() == {
        "worker": ["1.0.0.1:99", "1.0.0.2:99"],
        "chief": ["[fd00::3]:99"],
    }


def test_the_api_server_is_asked_each_time():
    client = _Client(dict(_WORKERS))
    resolver = KubernetesClusterResolver(override_client=client)
    resolver.cluster_spec()

    client.pods["job-name=tensorflow"] = [_pod("w-0", "10.0.0.7")]

    assert resolver.cluster_spec() == {"worker": ["10.0.0.7:8470"]}
    assert client.asked == [(None, "job-name=tensorflow")] * 2


def test_a_pod_without_an_address_of_its_own_has_that_of_its_node():
    """Such as the objects that tests written for tf.distribute pass."""
    pod = _pod("w", None, host_ip="10.1.0.1")

    assert _resolver({"job-name=tensorflow": [pod]}).cluster_spec() == {"worker": ["10.1.0.1:8470"]}


@pytest.mark.parametrize(
    ("pods", "message"),
    [
        ([], r"no pod in all namespaces has the label 'job-name=tensorflow'.*for \"worker\""),
        (
            [_pod("w-0", "1.0.0.1"), _pod("w-1", None, "Pending")],
            r'pod "w-1" \(job-name=tensorflow\) is in the phase "Pending" .* expected "Running"',
        ),
        ([_pod("w-0", None)], r'pod "w-0" .* with the address None, expected .* an address'),
    ],
)
def test_pods_that_cannot_be_used_are_reported(pods, message):
    with pytest.raises(ClusterError, match=f"^KubernetesClusterResolver: {message}"):
        _resolver({"job-name=tensorflow": pods}).cluster_spec()


def test_an_api_server_that_refuses_is_reported():
    class Refusing:
        def list_namespaced_pod(self, namespace, label_selector):
            raise PermissionError("403 Forbidden")

    resolver = KubernetesClusterResolver(override_client=Refusing(), namespace="team")

    with pytest.raises(
        ClusterError,
        match=r"'job-name=tensorflow' in namespace 'team' failed .* 403 Forbidden.*Role",
    ) as info:
        resolver.cluster_spec()
    assert isinstance(info.value.__cause__, PermissionError)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"job_to_label_mapping": {}}, InvalidTypeError, r"job_to_label_mapping is \{\}"),
        ({"job_to_label_mapping": ["a"]}, InvalidTypeError, r"job_to_label_mapping is \['a'\]"),
        ({"job_to_label_mapping": {"worker": "a"}}, InvalidTypeError, r"\{'worker': 'a'\}"),
        ({"job_to_label_mapping": {"worker": []}}, InvalidTypeError, r"\{'worker': \[\]\}"),
        ({"job_to_label_mapping": {"worker": [1]}}, InvalidTypeError, r"lists of label selectors"),
        ({"tf_server_port": 0}, InvalidValueError, "tf_server_port is 0, expected a port"),
        ({"executable_location": 0}, InvalidValueError, "executable_location is 0, .*OFF_CLUSTER"),
    ],
)
def test_a_wrong_argument_is_refused(arguments, error, message):
    with pytest.raises(error, match=f"^KubernetesClusterResolver: .*{message}"):
        KubernetesClusterResolver(override_client=_Client({}), **arguments)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)

    with pytest.raises(
        MissingPackageError, match="pip install kubernetes, or pass override_client"
    ):
        KubernetesClusterResolver()
    with pytest.raises(ImportError):  # as in TensorFlow
        KubernetesClusterResolver()


def test_in_a_pod_its_service_account_is_used(install):
    package = install("kubernetes", _PACKAGE)

    resolver = KubernetesClusterResolver()

    assert resolver.cluster_spec() == {"worker": ["10.0.0.9:8470"]}
    assert package.loaded == ["in cluster"]


def test_a_configuration_that_cannot_be_loaded_is_reported(install):
    package = install("kubernetes", _PACKAGE)

    with pytest.raises(ClusterError, match=r"OFF_CLUSTER cannot be loaded: Invalid kube-config"):
        KubernetesClusterResolver(executable_location=KubernetesExecutableLocation.OFF_CLUSTER)
    assert package.loaded == []


@pytest.mark.skipif(not _HAS_KUBERNETES, reason="the package kubernetes is not installed")
def test_the_real_client_asks_a_real_server(serve):
    from kubernetes import client

    pods = [
        {
            "metadata": {"name": name},
            "status": {"phase": "Running", "podIP": ip, "hostIP": "9.9.9.9"},
        }
        for name, ip in (("w-10", "10.0.0.3"), ("w-2", "10.0.0.2"))
    ]
    body = json.dumps({"kind": "PodList", "apiVersion": "v1", "items": pods})
    server = serve({"/api/v1/namespaces/team/pods?labelSelector=app%3Dx": body})
    configuration = client.Configuration(host=f"http://{server.address}")
    api = client.CoreV1Api(client.ApiClient(configuration))

    resolver = KubernetesClusterResolver(
        {"worker": ["app=x"]}, override_client=api, namespace="team"
    )

    assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470", "10.0.0.3:8470"]}
    with pytest.raises(ClusterError, match=r"all namespaces failed with .*404"):
        KubernetesClusterResolver({"worker": ["app=x"]}, override_client=api).cluster_spec()
