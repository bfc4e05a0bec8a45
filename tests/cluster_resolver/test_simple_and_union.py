from collections import Counter

import jax
import pytest

from distributary.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    UnionResolver,
)
from distributary.errors import InvalidTypeError, InvalidValueError

_SPEC = ClusterSpec({"worker": ["w0:1", "w1:1"], "ps": ["p:1"]})


class _Own(ClusterResolver):
    def cluster_spec(self):
        return _SPEC

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return "m"


def _simple(cluster, **settings):
    return SimpleClusterResolver(ClusterSpec(cluster), **settings)


def test_a_resolver_of_your_own_needs_two_methods():
    resolver = _Own()

    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert resolver.environment == ""
    kinds = [d.platform.upper() for d in jax.local_devices() if d.platform != "cpu"]
    assert resolver.num_accelerators("worker", 0, config_proto=None) == Counter(kinds)

    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "grpc"

    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")


def test_a_simple_resolver_returns_its_arguments():
    resolver = SimpleClusterResolver(_SPEC, "m:1", "worker", 1, "here", {"GPU": 8}, "grpc")

    assert resolver.cluster_spec() is _SPEC
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.environment == "here"
    assert resolver.num_accelerators("ps", 0) == {"GPU": 8}
    assert resolver.master() == "grpc://m:1"
    assert resolver.master(rpc_layer="http") == "http://m:1"
    assert resolver.master("ps", 0) == "grpc://p:1"
    with pytest.raises(InvalidValueError, match="no task 5 of type 'worker'"):
        resolver.master("worker", 5)

    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 0, None

    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 0, None)
    resolver = SimpleClusterResolver(_SPEC)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert (resolver.environment, resolver.master(), resolver.num_accelerators()) == ("", "", {})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"master": 1}, InvalidTypeError, r"SimpleClusterResolver: master is 1"),
        ({"task_id": -1}, InvalidValueError, r"SimpleClusterResolver: task_id is -1"),
        ({"rpc_layer": 1}, InvalidTypeError, r"SimpleClusterResolver: rpc_layer is 1"),
        ({"num_accelerators": 8}, InvalidTypeError, r"_accelerators is 8.*\{\"GPU\": 8\}"),
        ({"num_accelerators": {"GPU": -1}}, InvalidValueError, r'"GPU"\] is -1, expected .* >= 0'),
        ({"cluster_spec": {"worker": ["a:1"]}}, InvalidTypeError, r"pass ClusterSpec\(\{'worker'"),
    ],
)
def test_a_wrong_argument_is_refused(settings, error, message):
    with pytest.raises(error, match=message):
        SimpleClusterResolver(**{"cluster_spec": _SPEC} | settings)


def test_a_union_has_the_tasks_of_all_and_the_rest_of_the_first_unless_overridden():
    union = UnionResolver(
        _simple(
            {"worker": ["w0:1"]},
            master="m:1",
            task_type="worker",
            task_id=0,
            environment="first",
            num_accelerators={"GPU": 1},
            rpc_layer="grpc",
        ),
        _simple({"worker": ["w1:1"], "ps": ["p:1"]}, task_type="ps", task_id=0, environment="2nd"),
    )

    assert union.cluster_spec() == {"worker": ["w0:1", "w1:1"], "ps": ["p:1"]}
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, "grpc")
    assert union.environment == "first"
    assert union.num_accelerators() == {"GPU": 1}
    assert union.master() == "grpc://m:1"
    assert union.master("worker", 1) == "grpc://w1:1"

    other = UnionResolver(union, task_type="chief", task_id=0, rpc_layer="http")

    assert (other.task_type, other.task_id, other.rpc_layer) == ("chief", 0, "http")
    assert other.master("worker", 1) == "http://w1:1"

    other.task_type, other.task_id, other.rpc_layer = "ps", 3, "tcp"

    assert (other.task_type, other.task_id, other.rpc_layer) == ("ps", 3, "tcp")
    assert union.task_id == 0


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"worker": ["a:1"]}, {"worker": {1: "b:1"}}, {"worker": ["a:1", "b:1"]}),
        ({"worker": {2: "a:1"}}, {"worker": ["b:1"]}, {"worker": {0: "b:1", 2: "a:1"}}),
        ({"worker": ["a:1"]}, {"worker": ["a:1"]}, {"worker": ["a:1"]}),
        ({}, {"worker": ["a:1"]}, {"worker": ["a:1"]}),
    ],
)
def test_numbered_tasks_keep_their_numbers_and_equal_jobs_are_taken_once(first, second, expected):
    assert UnionResolver(_simple(first), _simple(second)).cluster_spec() == ClusterSpec(expected)


@pytest.mark.parametrize(
    ("resolvers", "error", "message"),
    [
        ([], InvalidValueError, "UnionResolver: got no arguments"),
        ([_Own(), 7], InvalidTypeError, r"argument 1 is 7, expected a ClusterResolver"),
        (
            [_simple({"worker": {1: "a:1"}}), _simple({"worker": ["b:1", "c:1"]})],
            InvalidValueError,
            r"worker 1 is 'a:1' in one .* 'c:1' in another",
        ),
    ],
)
def test_a_union_that_is_none_is_refused(resolvers, error, message):
    with pytest.raises(error, match=message):
        UnionResolver(*resolvers).cluster_spec()
