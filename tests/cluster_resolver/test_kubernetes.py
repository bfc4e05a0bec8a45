import sys
from types import SimpleNamespace

import pytest

from distributary.cluster_resolver import KubernetesClusterResolver, KubernetesExecutableLocation
from distributary.errors import ClusterError, InvalidTypeError


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


def _resolver(pods, mapping=None, **settings):
    return KubernetesClusterResolver(mapping, override_client=_Client(pods), **settings)


_WORKERS = {"job-name=tensorflow": [_pod("w-1", "10.0.0.2"), _pod("w-0", "10.0.0.1")]}


def test_pods_are_tasks_in_the_order_of_their_names_as_they_are_now():
    client = _Client(dict(_WORKERS))
    resolver = KubernetesClusterResolver(override_client=client)

    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, "grpc")
    assert resolver.master() == ""
    assert resolver.master("worker", 1) == "grpc://10.0.0.2:8470"

    resolver.task_type, resolver.task_id = "worker", 1

    assert resolver.master() == "grpc://10.0.0.2:8470"
    # The objects that tests written for tf.distribute pass have addresses of nodes only.
    client.pods["job-name=tensorflow"] = [_pod("w-0", None, host_ip="10.1.0.1")]
    assert resolver.cluster_spec() == {"worker": ["10.1.0.1:8470"]}
    assert set(client.asked) == {(None, "job-name=tensorflow")}


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
    def refuse(namespace, label_selector):
        raise PermissionError("403 Forbidden")

    client = SimpleNamespace(list_namespaced_pod=refuse)
    resolver = KubernetesClusterResolver(override_client=client, namespace="team")

    with pytest.raises(ClusterError, match=r"'job-name=.* in namespace 'team' .* 403 Forb.*Role"):
        resolver.cluster_spec()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"job_to_label_mapping": ["a"]}, r"mapping is \['a'\], expected a dict"),
        ({"job_to_label_mapping": {"worker": "a"}}, r"\"worker\"\] is 'a', expected a list"),
        ({"job_to_label_mapping": {"worker": [1]}}, r'"worker"\] is \[1\], expected a list'),
        ({"executable_location": 0}, "executable_location is 0, expected a member of Kubern"),
    ],
)
def test_a_wrong_argument_is_refused(arguments, message):
    with pytest.raises(InvalidTypeError, match=f"^KubernetesClusterResolver: .*{message}"):
        KubernetesClusterResolver(override_client=_Client({}), **arguments)


def test_the_configuration_is_that_of_the_place_and_what_cannot_be_loaded_is_named(monkeypatch):
    def load_kube_config():
        raise FileNotFoundError("Invalid kube-config file")

    loaded = []
    config = SimpleNamespace(
        ConfigException=FileNotFoundError,
        load_incluster_config=lambda: loaded.append("in cluster"),
        load_kube_config=load_kube_config,
    )
    client = SimpleNamespace(CoreV1Api=lambda: _Client(_WORKERS))
    package = SimpleNamespace(config=config, client=client)
    monkeypatch.setitem(sys.modules, "kubernetes", package)

    resolver = KubernetesClusterResolver()

    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert loaded == ["in cluster"]
    with pytest.raises(ClusterError, match=r"OFF_CLUSTER failed .* Invalid kube-config"):
        KubernetesClusterResolver(executable_location=KubernetesExecutableLocation.OFF_CLUSTER)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ImportError, match="pip install kubernetes, or pass override_client"):
        KubernetesClusterResolver()
