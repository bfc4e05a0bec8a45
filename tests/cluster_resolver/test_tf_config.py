import json

import pytest

from distributary.cluster_resolver import (
    ClusterSpec,
    TFConfigClusterResolver,
    multi_worker,
    size_of_job,
)
from distributary.errors import InvalidTypeError, InvalidValueError

_WORKERS = {"worker": ["w0:1", "w1:2"]}


@pytest.fixture
def set_config(monkeypatch):
    def set_config(config):
        text = config if isinstance(config, str) else json.dumps(config)
        monkeypatch.setenv("TF_CONFIG", text)

    return set_config


def _config(cluster=_WORKERS, task_type="worker", index=0, **more):
    return {"cluster": cluster, "task": {"type": task_type, "index": index}, **more}


def test_cluster_and_task_are_read(set_config):
    set_config(_config({"chief": ["c:1"], "worker": ["w0:1", "[::1]:2"]}, index=1, rpc_layer="tcp"))

    resolver = TFConfigClusterResolver()

    assert resolver.cluster_spec() == {"chief": ["c:1"], "worker": ["w0:1", "[::1]:2"]}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "tcp")
    assert resolver.environment == ""
    assert resolver.master() == "tcp://[::1]:2"
    assert resolver.master("chief", 0, "http") == "http://c:1"

    set_config(_config({"worker": ["x:1", "y:2"]}, index=0))  # read anew each time

    assert resolver.task_id == 0
    assert resolver.cluster_spec().task_address("worker", 0) == "x:1"


@pytest.mark.parametrize("config", [None, "{}", '{"cluster": {}}', '{"environment": "cloud"}'])
def test_without_a_cluster_the_spec_is_empty(set_config, config):
    if config is not None:
        set_config(config)
    resolver = TFConfigClusterResolver()

    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert resolver.master() == ""


def test_arguments_win_over_the_variable(set_config):
    set_config(_config(index=9, rpc_layer="tcp"))  # there is no worker 9

    resolver = TFConfigClusterResolver("worker", 1, "http", "here")

    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "http")
    assert resolver.environment == "here"
    assert resolver.master() == "http://w1:2"
    with pytest.raises(InvalidValueError, match="no task 7 of type 'worker'"):
        resolver.master("worker", 7)

    resolver.task_id = 0

    assert resolver.master() == "http://w0:1"


def test_numbers_may_be_strings(set_config):
    set_config(_config({"worker": {"0": "a:1", "2": "c:1"}}, index="2"))
    resolver = TFConfigClusterResolver()

    assert resolver.task_id == 2
    assert resolver.cluster_spec().as_dict() == {"worker": {0: "a:1", 2: "c:1"}}
    assert TFConfigClusterResolver(task_id="0").task_id == 0
    with pytest.raises(InvalidTypeError, match=r"^TFConfigClusterResolver: task_id is 'a'"):
        TFConfigClusterResolver(task_id="a")


@pytest.mark.parametrize(
    ("config", "task", "master"),
    [
        ({"task": {"type": "worker", "index": 3}}, ("worker", 3), ""),  # without a cluster
        (_config({"worker": ["w:1"]}), ("worker", 0), ""),  # a single task
        (_config(session_master="grpc://s:1"), ("worker", 0), "grpc://s:1"),
        (_config(environment="cloud", job={"scale": "x"}, model_dir="/m"), ("worker", 0), "w0:1"),
        (_config({"worker": ["w:1"]}, "evaluator"), ("evaluator", 0), ""),  # need not be listed
    ],
)
def test_task_and_master_are_read_and_other_keys_ignored(set_config, config, task, master):
    set_config(config)
    resolver = TFConfigClusterResolver()

    assert (resolver.task_type, resolver.task_id) == task
    assert resolver.master() == master
    assert resolver.cluster_spec() == config.get("cluster", {})


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("", InvalidValueError, r"^TF_CONFIG is not valid JSON: .*Unset the variable"),
        ('{"cluster": {"worker": ["a:1"]', InvalidValueError, r"column 31 .*, near '.*json\."),
        (
            {"cluster": {"worker": {"0": "a:1", "1": "b:x"}}},
            InvalidValueError,
            r'^TF_CONFIG\["cluster"\]\["worker"\]\["1"\] is \'b:x\': \'x\' is not a port',
        ),
        ({"cluster": {"Worker": ["a:1"]}}, InvalidValueError, r'the key "Worker".*types are chief'),
        ({"clster": {"worker": ["a:1"]}}, InvalidValueError, r"the key 'clster'.*'cluster'"),
        ({"CLUSTER": {"worker": ["a:1"]}}, InvalidValueError, r"the key 'CLUSTER'.*'cluster'"),
        ("[1]", InvalidTypeError, r"^TF_CONFIG is \[1\], expected an object"),
        ({"cluster": ["a:1"]}, InvalidTypeError, r'^TF_CONFIG\["cluster"\] is \[\'a:1\'\]'),
    ],
)
def test_a_wrong_cluster_is_refused_whatever_is_asked(set_config, config, error, message):
    set_config(config)
    resolver = TFConfigClusterResolver()  # creating it reads nothing

    for ask in (
        resolver.cluster_spec,
        resolver.master,
        lambda: resolver.task_type,
        lambda: resolver.task_id,
    ):
        with pytest.raises(error, match=message):
            ask()


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        ({"type": "worker"}, InvalidValueError, r' is .*, expected "type" and "index", as'),
        ({"type": "wrk", "index": 0}, InvalidValueError, r'\["type"\] is "wrk".*has worker 0, 1'),
        ({"type": "worker", "index": 2}, InvalidValueError, r'.*\["index"\] is 2, but .* 0, 1'),
        (["worker", 0], InvalidTypeError, r" is \['worker', 0\], expected an object"),
        ({"type": "worker", "index": "one"}, InvalidTypeError, r"\[\"index\"\] is 'one'"),
    ],
)
def test_a_wrong_task_is_refused(set_config, task, error, message):
    set_config({"cluster": _WORKERS, "task": task})

    for name in ("task_type", "task_id"):
        with pytest.raises(error, match=rf'^TF_CONFIG\["task"\]{message}'):
            getattr(TFConfigClusterResolver(), name)


def test_a_cluster_without_a_task_has_no_task(set_config):
    set_config({"cluster": _WORKERS})
    resolver = TFConfigClusterResolver()

    assert (resolver.task_type, resolver.task_id) == (None, None)
    with pytest.raises(InvalidValueError, match=r'^TF_CONFIG\["task"\] is missing.*pass task_type'):
        resolver.master()
    with pytest.raises(InvalidValueError, match=r"task_type is None.*worker 0, 1.*TF_CONFIG"):
        multi_worker(resolver.cluster_spec(), resolver.task_type, resolver.task_id)


@pytest.mark.parametrize("key", ["rpc_layer", "session_master"])
def test_a_setting_of_a_wrong_type_is_refused(set_config, key):
    set_config(_config(**{key: 7}))
    resolver = TFConfigClusterResolver()

    with pytest.raises(InvalidTypeError, match=rf'^TF_CONFIG\["{key}"\] is 7'):
        _ = resolver.rpc_layer if key == "rpc_layer" else resolver.master()


_WITH_SERVERS = {"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1", "p:2"]}


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (_config(_WITH_SERVERS), (2, 2)),
        (_config(_WITH_SERVERS, "evaluator"), (0, 0)),
        (_config(_WITH_SERVERS | {"evaluator": ["e:1"]}, "evaluator"), (0, 0)),
        (_config({"worker": ["w:1"]}), (1, 0)),
        ({"cluster": _WITH_SERVERS}, (2, 2)),  # the program may know the task
        ({"cluster": {"worker": ["w:1"], "ps": []}, "cluster_id": "a"}, (1, 0)),
        ({"cluster": {"master": ["m:1"], "worker": ["w:1"]}}, (2, 0)),  # as of older launchers
        ({"cluster": None}, (0, 0)),
        ("{}", (0, 0)),
        ("", (0, 0)),
        (" \n", (0, 0)),
    ],
)
def test_the_size_of_a_job_is_that_of_the_tasks_that_work_together(set_config, config, sizes):
    set_config(config)

    assert size_of_job() == sizes


@pytest.mark.parametrize(
    "config", ["{", "[]", _config({"worker": ["w0", "w1:1"]}), _config(index=2)]
)
def test_a_job_of_unknown_size_is_refused(set_config, config):
    set_config(config)

    with pytest.raises((InvalidTypeError, InvalidValueError), match="TF_CONFIG"):
        size_of_job()


def test_a_task_of_a_type_that_the_cluster_lacks_is_refused(set_config):
    set_config(_config(task_type="chief"))
    is_missing = (
        r'^TF_CONFIG\["task"\]\["type"\] is "chief", but TF_CONFIG\["cluster"\] has worker 0, 1\.'
    )

    with pytest.raises(InvalidValueError, match=is_missing):
        size_of_job()
    with pytest.raises(InvalidValueError, match=is_missing):
        _ = TFConfigClusterResolver().task_type
