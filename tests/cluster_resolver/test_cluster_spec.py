import re

import pytest

from distributary.cluster_resolver import ClusterSpec
from distributary.errors import InvalidTypeError, InvalidValueError

_CLUSTER = {"worker": ["w0:1", "w1:2"], "ps": {3: "p3:4", 1: "p1:5"}, "chief": ["[::1]:6"]}


@pytest.fixture
def spec():
    return ClusterSpec(_CLUSTER)


def test_tasks_come_out_as_they_went_in(spec):
    assert spec.as_dict() == {
        "worker": ["w0:1", "w1:2"],
        "ps": {1: "p1:5", 3: "p3:4"},
        "chief": ["[::1]:6"],
    }
    assert spec.jobs == ["worker", "ps", "chief"]
    assert spec.num_tasks("ps") == 2
    assert spec.task_indices("ps") == [1, 3]
    assert spec.task_address("ps", 3) == "p3:4"
    assert spec.job_tasks("ps") == [None, "p1:5", None, "p3:4"]
    assert spec.job_tasks("worker") == ["w0:1", "w1:2"]
    # A dict without gaps comes out as a list.
    assert ClusterSpec({"worker": {1: "b:2", "0": "a:1"}}).as_dict() == {"worker": ["a:1", "b:2"]}


def test_a_spec_does_not_change():
    cluster = {"worker": ["a:1"]}
    spec = ClusterSpec(cluster)

    cluster["worker"].append("b:2")
    spec.as_dict()["worker"].append("x:1")
    spec.jobs.append("x")
    spec.task_indices("worker").append(7)

    assert spec == ClusterSpec({"worker": ["a:1"]})


@pytest.mark.parametrize(
    "equal",
    [
        {"worker": ["a:1", "b:2"]},
        {"worker": ("a:1", "b:2")},
        {"worker": {0: "a:1", 1: "b:2"}},
        ClusterSpec({"worker": ["a:1", "b:2"]}),
        ClusterSpec(ClusterSpec({"worker": ["a:1", "b:2"]})),
    ],
)
def test_specs_with_the_same_tasks_are_equal(equal):
    spec = ClusterSpec({"worker": ["a:1", "b:2"]})

    assert spec == equal
    assert equal == spec
    if isinstance(equal, ClusterSpec):
        assert hash(spec) == hash(equal)
    for other in ({"worker": ["a:1"]}, {"worker": ["b:2", "a:1"]}, {"chief": ["a:1", "b:2"]}, 7):
        assert spec != other


def test_only_an_empty_spec_is_false_and_the_text_names_the_jobs_in_alphabetic_order(spec):
    assert spec
    assert not ClusterSpec({})
    with pytest.raises(InvalidValueError, match=r"type 'worker'.*no tasks at all"):
        ClusterSpec({}).num_tasks("worker")
    text = repr(ClusterSpec({"worker": ["a:1"], "chief": ["b:2"]}))
    assert text == "ClusterSpec({'chief': ['b:2'], 'worker': ['a:1']})"


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:65535",
        "train-worker-0.train.ns.svc.cluster.local:2222",
        "my_container_1:2222",
        "[fe80::1%eth0]:2222",
    ],
)
def test_addresses_are_kept_as_written(address):
    assert ClusterSpec({"worker": [address]}).task_address("worker", 0) == address


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("host", "the port is missing"),
        (":2222", "expected a host and one colon"),
        ("host:0", "'0' is not a port from 1 to 65535"),
        ("host:２２", "'２２' is not a port"),
        ("host/x:2222", "'host/x' is neither a host name"),
        ("[::g]:2222", "'::g' is neither a host name nor an IP address"),
        ("::1:2222", "the port is missing"),
        ("[::1:2222", "an IPv6 address must be in brackets"),
        ("grpc://a:1", "expected a host and one colon"),
    ],
)
def test_an_address_that_is_none_is_refused(address, reason):
    message = re.escape(f'cluster["worker"][1] is {address!r}: ') + ".*" + re.escape(reason)

    with pytest.raises(InvalidValueError, match=f"^{message}.*Write host:port.*10.0.0.1:2222"):
        ClusterSpec({"worker": ["good:1", address]})


@pytest.mark.parametrize(
    ("cluster", "error", "message"),
    [
        (None, InvalidTypeError, r"cluster is None, expected a dict"),
        ({1: ["a:1"]}, InvalidTypeError, r"cluster has a key that is 1, expected a task type"),
        ({"worker": "a:1"}, InvalidTypeError, r'cluster\["worker"\] is \'a:1\', expected a list'),
        ({"worker": [7]}, InvalidTypeError, r'cluster\["worker"\]\[0\] is 7, expected the addr'),
        ({"worker": {2: None}}, InvalidTypeError, r'cluster\["worker"\]\[2\] is None'),
        ({"worker": {"x": "a:1"}}, InvalidTypeError, r'cluster\["worker"\] has a key .*\'x\''),
        ({"worker": []}, InvalidValueError, r'cluster\["worker"\] is empty.*Leave the type out'),
        ({"ps": {-1: "a:1"}}, InvalidValueError, r'\["ps"\] has a key that is -1.*count from 0'),
        ({"ps": ["a:1", "b:1", "a:1"]}, InvalidValueError, r"\[0\] .*\[2\] are both \'a:1\'.*own"),
    ],
)
def test_what_is_no_cluster_is_refused(cluster, error, message):
    with pytest.raises(error, match=message):
        ClusterSpec(cluster)


@pytest.mark.parametrize("method", ["num_tasks", "task_indices", "job_tasks"])
def test_asking_for_an_unknown_type_or_task_names_those_there_are(spec, method):
    with pytest.raises(InvalidValueError, match=r"type 'evaluator'.*'worker', 'ps', 'chief'"):
        getattr(spec, method)("evaluator")
    with pytest.raises(InvalidValueError, match=r"no task 2 of type 'ps'.*the numbers are 1, 3"):
        spec.task_address("ps", 2)
