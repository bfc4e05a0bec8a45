import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import pytest

from distributary.cluster_resolver import TPUClusterResolver
from distributary.errors import ClusterError, InvalidTypeError, InvalidValueError, UnsupportedError

_ATTRIBUTES = "/computeMetadata/v1/instance/attributes/"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.flavors.append(self.headers["Metadata-Flavor"])
        answer = self.server.answers.get(self.path.removeprefix(_ATTRIBUTES))
        self.send_response(404 if answer is None else 200)
        self.end_headers()
        self.wfile.write((answer or "").encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def serve_metadata(set_environ):
    """Starts a metadata server with the hosts and the number of a Cloud TPU VM."""
    servers = []

    def serve_metadata(hosts):
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        server.flavors = []
        server.answers = {"worker-network-endpoints": hosts, "agent-worker-number": "1"}
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((server, thread))
        set_environ(GCE_METADATA_IP=f"127.0.0.1:{server.server_address[1]}")
        return server

    yield serve_metadata

    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_on_gke_the_environment_names_the_hosts(set_environ):
    set_environ(TPU_WORKER_HOSTNAMES="t-0.t,t-1.t, t-2.t", TPU_WORKER_ID=2)

    resolver = TPUClusterResolver()

    assert resolver.cluster_spec() == {"worker": ["t-0.t:8482", "t-1.t:8482", "t-2.t:8482"]}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 2, "grpc")
    assert resolver.master() == resolver.get_master() == "grpc://t-0.t:8482"
    assert resolver.master("worker", 1, "http") == "http://t-1.t:8482"
    assert resolver.get_job_name() == "worker"
    assert resolver.environment == ""


def test_a_single_host_needs_no_number(set_environ):
    set_environ(TPU_WORKER_HOSTNAMES="fd00::2", MEGASCALE_NUM_SLICES=1)

    resolver = TPUClusterResolver(job_name="tpu_worker", port=1000)

    assert resolver.cluster_spec() == {"tpu_worker": ["[fd00::2]:1000"]}
    assert (resolver.task_type, resolver.task_id) == ("tpu_worker", 0)


def test_ports_of_libtpu_are_not_those_of_the_program(set_environ):
    set_environ(
        TPU_PROCESS_ADDRESSES="localhost:8476,[fd00::2]:8476", TPU_WORKER_HOSTNAMES="ignored"
    )

    assert TPUClusterResolver().cluster_spec() == {"worker": ["localhost:8482", "[fd00::2]:8482"]}
    assert TPUClusterResolver().task_id is None


@pytest.mark.parametrize(
    "hosts", ["10.0.0.1,10.0.0.2", "unknown:0:10.0.0.1, unknown:1:10.0.0.2\n"], ids=["new", "old"]
)
def test_on_a_tpu_vm_the_metadata_server_names_the_hosts(hosts, serve_metadata, set_environ):
    server = serve_metadata(hosts)
    set_environ(http_proxy="http://127.0.0.1:9", no_proxy=None)  # must not be asked

    resolver = TPUClusterResolver("")
    assert server.flavors == []  # nothing is asked before it is needed

    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8482", "10.0.0.2:8482"]}
    assert resolver.task_id == 1
    assert set(server.flavors) == {"Google"}


def test_a_metadata_server_that_does_not_answer_is_reported(serve_metadata, set_environ):
    serve_metadata(hosts=None)
    with pytest.raises(ClusterError, match=r"endpoints for the TPU .* HTTP Error 404.*=\"local"):
        TPUClusterResolver().cluster_spec()

    set_environ(GCE_METADATA_IP="127.0.0.1:9")
    with pytest.raises(ClusterError, match=r"127.0.0.1:9/.*refused.*TPU_WORKER_HOSTNAMES"):
        TPUClusterResolver().cluster_spec()


def test_local_is_this_host_alone():
    num_cores = sum(device.platform == "tpu" for device in jax.local_devices())

    with TPUClusterResolver("local") as resolver:
        assert not resolver.cluster_spec()
        assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 0, "")
        assert resolver.num_accelerators() == {"TPU": num_cores}


@pytest.mark.parametrize("tpu", ["a:1,b:2", "grpc://a:1, grpc://b:2", ("grpc://a:1", "b:2")])
def test_hosts_can_be_given(tpu, set_environ):
    resolver = TPUClusterResolver(tpu)

    assert resolver.cluster_spec() == {"worker": ["a:1", "b:2"]}
    assert resolver.task_id is None

    set_environ(TPU_WORKER_ID=1)

    assert resolver.task_id == 1

    resolver.task_id = 0

    assert resolver.task_id == 0


def test_a_single_host_that_is_given_is_this_one_and_a_coordinator_a_task_of_its_own():
    resolver = TPUClusterResolver("a:1", coordinator_name="coordinator", coordinator_address="c:1")

    assert resolver.cluster_spec() == {"worker": ["a:1"], "coordinator": ["c:1"]}
    assert resolver.task_id == 0


@pytest.mark.parametrize(
    ("tpu", "environ", "error", "message"),
    [
        (None, {"TPU_WORKER_ID": 2}, ClusterError, "is '2', expected a number from 0 to 1. It"),
        (None, {"MEGASCALE_NUM_SLICES": 2}, UnsupportedError, "NUM_SLICES is 2.*slice by slice"),
        (
            *(None, {"TPU_WORKER_HOSTNAMES": "a,,b"}),
            *(InvalidValueError, r'cluster\["worker"\]\[1\] is \':8482\': expected a host'),
        ),
        ("my-tpu", {}, UnsupportedError, "tpu is 'my-tpu'. Names of TPUs are not"),
        (["a:1", "b"], {}, InvalidValueError, r"\[1\] is 'b': the port is missing"),
        ([7], {}, InvalidTypeError, r"TPUClusterResolver: tpu is \[7\], expected None"),
        (7, {}, InvalidTypeError, r"tpu is 7, expected None, \"local\""),
    ],
)
def test_a_wrong_environment_or_argument_is_refused(set_environ, tpu, environ, error, message):
    set_environ(**{"TPU_WORKER_HOSTNAMES": "a,b", **environ})

    with pytest.raises(error, match=message):
        _ = TPUClusterResolver(tpu).cluster_spec(), TPUClusterResolver(tpu).task_id
