import jax
import pytest

from distributary.cluster_resolver import TPUClusterResolver, multi_worker
from distributary.errors import (
    ClusterError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
)

_ATTRIBUTES = "/computeMetadata/v1/instance/attributes/"


@pytest.fixture
def serve_metadata(serve):
    """Starts a metadata server with the hosts and the number of a Cloud TPU VM."""

    def serve_metadata(hosts="10.0.0.1,10.0.0.2", number="1"):
        answers = {"worker-network-endpoints": hosts, "agent-worker-number": number}
        return serve(
            {
                _ATTRIBUTES + key: (200, answer) if isinstance(answer, str) else answer
                for key, answer in answers.items()
            }
        )

    return serve_metadata


def test_on_gke_the_environment_names_the_hosts(set_environ):
    set_environ(TPU_WORKER_HOSTNAMES="t-0.t,t-1.t, t-2.t", TPU_WORKER_ID=2)

    resolver = TPUClusterResolver()

    assert resolver.cluster_spec() == {"worker": ["t-0.t:8482", "t-1.t:8482", "t-2.t:8482"]}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 2, "grpc")
    assert resolver.master() == resolver.get_master() == "grpc://t-0.t:8482"
    assert resolver.master("worker", 1, "http") == "http://t-1.t:8482"
    assert resolver.get_job_name() == "worker"
    assert resolver.environment == ""


def test_port_and_type_can_be_chosen(set_environ):
    set_environ(TPU_WORKER_HOSTNAMES="a,fd00::2", TPU_WORKER_ID=0)

    resolver = TPUClusterResolver(job_name="tpu_worker", port=1000)

    assert resolver.cluster_spec() == {"tpu_worker": ["a:1000", "[fd00::2]:1000"]}
    assert resolver.task_type == "tpu_worker"


def test_a_single_host_needs_no_number(set_environ):
    set_environ(TPU_WORKER_HOSTNAMES="localhost")

    resolver = TPUClusterResolver()

    assert resolver.cluster_spec() == {"worker": ["localhost:8482"]}
    assert resolver.task_id == 0


def test_processes_that_share_a_host_have_their_own_ports(set_environ):
    set_environ(
        TPU_PROCESS_ADDRESSES="localhost:8476,localhost:8477,[fd00::2]:8476",
        TPU_WORKER_HOSTNAMES="ignored",
        CLOUD_TPU_TASK_ID=1,
    )

    resolver = TPUClusterResolver()

    assert resolver.cluster_spec() == {
        "worker": ["localhost:8482", "localhost:8483", "[fd00::2]:8482"]
    }
    assert resolver.task_id == 1


def test_on_a_tpu_vm_the_metadata_server_names_the_hosts(serve_metadata):
    server = serve_metadata()

    resolver = TPUClusterResolver(metadata_server=server.address)
    assert server.requests == []  # nothing is asked before it is needed

    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8482", "10.0.0.2:8482"]}
    assert resolver.task_id == 1
    assert {headers["Metadata-Flavor"] for _, headers in server.requests} == {"Google"}


@pytest.mark.parametrize("variable", ["GCE_METADATA_HOST", "GCE_METADATA_IP"])
def test_the_metadata_server_can_come_from_the_environment(serve_metadata, set_environ, variable):
    # A proxy must not be asked.
    set_environ(
        **{variable: serve_metadata().address}, http_proxy="http://127.0.0.1:9", no_proxy=None
    )

    assert TPUClusterResolver("").task_id == 1


def test_the_metadata_server_can_be_a_url(serve_metadata):
    server = serve_metadata()

    assert TPUClusterResolver(metadata_server=f"http://{server.address}/").task_id == 1


def test_older_machines_list_names_and_numbers_too(serve_metadata):
    server = serve_metadata(hosts="unknown:0:10.0.0.1,unknown:1:10.0.0.2")

    spec = TPUClusterResolver(metadata_server=server.address).cluster_spec()

    assert spec.task_address("worker", 1) == "10.0.0.2:8482"


def test_a_busy_metadata_server_is_asked_again(serve_metadata):
    server = serve_metadata(number=[(503, "busy"), (200, "1\n")])

    assert TPUClusterResolver(metadata_server=server.address).task_id == 1
    assert len(server.requests) == 2


def test_a_metadata_server_without_a_tpu_is_reported(serve):
    server = serve({})

    with pytest.raises(
        ClusterError,
        match=rf"{server.address}/.*endpoints for the TPU .* it answered 404.*=\"local",
    ):
        TPUClusterResolver(metadata_server=server.address).cluster_spec()
    assert len(server.requests) == 1


def test_a_metadata_server_that_is_not_there_is_reported():
    with pytest.raises(ClusterError, match=r"127.0.0.1:9/.*refused.*TPU_WORKER_HOSTNAMES"):
        _ = TPUClusterResolver(metadata_server="127.0.0.1:9").task_id


def test_a_metadata_server_that_keeps_failing_is_given_up(serve, monkeypatch):
    from distributary.cluster_resolver import _tpu

    monkeypatch.setattr(_tpu, "_RETRY_SECONDS", (0.0, 0.0))
    server = serve({_ATTRIBUTES + "agent-worker-number": (503, "busy")})

    with pytest.raises(ClusterError, match="it answered 503"):
        _ = TPUClusterResolver(metadata_server=server.address).task_id
    assert len(server.requests) == 3


@pytest.mark.parametrize("hosts", ["", "a,", "a:1,b:1"])
def test_hosts_that_cannot_be_read_are_refused(serve_metadata, hosts):
    server = serve_metadata(hosts=hosts)

    with pytest.raises(
        ClusterError, match=r"^The attribute worker-network-endpoints .*is not a host"
    ):
        TPUClusterResolver(metadata_server=server.address).cluster_spec()


def test_a_number_that_cannot_be_read_is_refused(serve_metadata):
    server = serve_metadata(number="first")

    with pytest.raises(ClusterError, match=r"^The attribute agent-worker-number .* is 'first'"):
        _ = TPUClusterResolver(metadata_server=server.address).task_id


def test_local_is_this_host_alone():
    resolver = TPUClusterResolver("local")

    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 0, "")


@pytest.mark.parametrize(
    "tpu", ["a:1,b:2", "grpc://a:1, grpc://b:2", ["a:1", "b:2"], ("grpc://a:1", "b:2")]
)
def test_hosts_can_be_given(tpu, set_environ):
    resolver = TPUClusterResolver(tpu)

    assert resolver.cluster_spec() == {"worker": ["a:1", "b:2"]}
    assert resolver.task_id is None

    set_environ(TPU_WORKER_ID=1)

    assert resolver.task_id == 1

    resolver.task_id = 0

    assert resolver.task_id == 0


def test_a_single_host_that_is_given_is_this_one():
    assert TPUClusterResolver("grpc://10.0.0.1:8470").task_id == 0


def test_a_coordinator_is_a_task_of_its_own():
    resolver = TPUClusterResolver("a:1", coordinator_name="coordinator", coordinator_address="c:1")

    assert resolver.cluster_spec() == {"worker": ["a:1"], "coordinator": ["c:1"]}


def test_it_can_stand_in_a_with_statement():
    with TPUClusterResolver("local") as resolver:
        assert resolver.task_id == 0


def test_the_answers_fit_a_multi_worker_strategy(set_environ):
    set_environ(TPU_WORKER_HOSTNAMES="a,b", TPU_WORKER_ID=1)
    resolver = TPUClusterResolver()

    place = multi_worker(resolver.cluster_spec(), resolver.task_type, resolver.task_id)

    assert (place.worker_number, place.coordinator.address) == (1, "a:8482")


def test_tpu_cores_are_those_of_this_host():
    num_cores = sum(device.platform == "tpu" for device in jax.local_devices())

    assert TPUClusterResolver("local").num_accelerators() == {"TPU": num_cores}


@pytest.mark.parametrize(
    ("variables", "error", "message"),
    [
        (
            {"TPU_WORKER_HOSTNAMES": "a,b"},
            ClusterError,
            r"lists 2 TPU hosts \(a, b\), but TPU_WORKER_ID and CLOUD_TPU_TASK_ID are not set",
        ),
        (
            {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": 2},
            ClusterError,
            "TPU_WORKER_ID is '2', expected a number from 0 to 1. It numbers the 2 hosts",
        ),
        (
            {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "x"},
            ClusterError,
            "TPU_WORKER_ID is 'x'",
        ),
        (
            {"TPU_WORKER_HOSTNAMES": "a,,b", "TPU_WORKER_ID": 0},
            ClusterError,
            "TPU_WORKER_HOSTNAMES is 'a,,b', expected names of hosts",
        ),
        (
            {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": 0, "MEGASCALE_NUM_SLICES": 2},
            UnsupportedError,
            "MEGASCALE_NUM_SLICES is 2.*slice by slice",
        ),
    ],
)
def test_a_wrong_environment_is_refused(set_environ, variables, error, message):
    set_environ(**variables)

    with pytest.raises(error, match=message):
        _ = TPUClusterResolver().task_id


def test_one_slice_is_no_obstacle(set_environ):
    set_environ(TPU_WORKER_HOSTNAMES="a", MEGASCALE_NUM_SLICES=1)

    assert TPUClusterResolver().cluster_spec() == {"worker": ["a:8482"]}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"tpu": "my-tpu", "zone": "z"},
            UnsupportedError,
            "tpu is 'my-tpu'. Names of TPUs are not",
        ),
        ({"tpu": ["a:1", "b"]}, InvalidValueError, r"tpu\[1\] is 'b': the port is missing"),
        ({"tpu": "a:1,"}, InvalidValueError, r"tpu\[1\] is '': the host is missing"),
        ({"tpu": [7]}, InvalidTypeError, r"tpu\[0\] is 7 \(int\)"),
        ({"tpu": 7}, InvalidTypeError, r"tpu is 7 \(int\), expected None, \"local\""),
        ({"port": 0}, InvalidValueError, "port is 0, expected a port from 1 to 65535"),
        ({"job_name": ""}, InvalidTypeError, r"job_name is '' \(str\), expected a task type"),
        ({"coordinator_name": "c"}, InvalidValueError, "'c' and coordinator_address is None"),
        (
            {"coordinator_name": "c", "coordinator_address": "c"},
            InvalidValueError,
            "coordinator_address is 'c': the port is missing",
        ),
    ],
)
def test_a_wrong_argument_is_refused(arguments, error, message):
    with pytest.raises(error, match=f"^TPUClusterResolver: .*{message}"):
        TPUClusterResolver(**arguments)
