import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

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


class _ApiServer(BaseHTTPRequestHandler):
    """Lists pods as an API server does, to a service account that has a Role in `team` alone."""

    def do_GET(self):
        url = urlsplit(self.path)
        is_allowed = url.path == "/api/v1/namespaces/team/pods"
        names = ["w-10", "w-2"] if "app=train" in parse_qs(url.query)["labelSelector"] else []
        items = [
            {"metadata": {"name": n}, "status": {"phase": "Running", "podIP": f"10.0.0.{n[2:]}"}}
            for n in names
        ]
        refusal = {"kind": "Status", "message": "pods is forbidden", "code": 403}
        answer = {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
        body = json.dumps(answer if is_allowed else refusal).encode()
        self.send_response(200 if is_allowed else 403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def api_server(tmp_path, monkeypatch):
    """An API server, and the file of kubectl that has its address."""
    kubernetes = pytest.importorskip("kubernetes")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _ApiServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = {"cluster": "here", "user": "me"}
    config = {
        "clusters": [
            {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "this", "context": place}],
        "current-context": "this",
    }
    path = tmp_path / "config"
    path.write_text(json.dumps(config))
    # Read from the environment when the package is imported.
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    yield
    server.shutdown()
    server.server_close()


def test_the_package_kubernetes_lists_the_pods_of_an_api_server(api_server):
    place = KubernetesExecutableLocation.OFF_CLUSTER
    workers = {"worker": ["app=train"]}

    resolver = KubernetesClusterResolver(workers, executable_location=place, namespace="team")

    assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470", "10.0.0.10:8470"]}
    with pytest.raises(ClusterError, match=r"no pod in namespace 'team' has the label 'app=a'"):
        KubernetesClusterResolver(
            {"worker": ["app=a"]}, executable_location=place, namespace="team"
        ).cluster_spec()
    with pytest.raises(ClusterError, match=r"in all namespaces.*pods is forbidden.*pass namespace"):
        KubernetesClusterResolver(workers, executable_location=place).cluster_spec()
    with pytest.raises(ClusterError, match=r"WITHIN_CLUSTER failed.*pass executable_location="):
        KubernetesClusterResolver(workers)
