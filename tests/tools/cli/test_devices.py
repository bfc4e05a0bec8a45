"""`distributary devices`."""

import json
import re

import pytest

from distributary.tools.cli import main
from tests.interpreters import run_python

_CLUSTER = {
    "chief": ["10.0.0.1:1"],
    "worker": ["10.0.0.2:1", "10.0.0.3:1"],
    "evaluator": ["10.0.0.4:1"],
}


def _config(task_type, index, **others):
    cluster = _CLUSTER | others
    return json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})


def _found(monkeypatch, capsys, tf_config):
    monkeypatch.setenv("TF_CONFIG", tf_config)
    code = main(["devices", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_it_names_the_devices_and_who_uses_them(monkeypatch, capsys):
    code, found = _found(monkeypatch, capsys, "{}")

    assert code == 0
    names = [f"CPU:{i}" for i in range(8)]
    assert found["devices"] == [
        {"name": name, "kind": "cpu", "memory_bytes": None} for name in names
    ]
    assert found["cpu"]["devices"] == 8
    assert found["cpu"]["threads"] >= 16
    assert found["cpu"]["threads_suffice"]
    strategies = found["strategies"]
    assert strategies["MirroredStrategy"]["devices"] == names
    assert strategies["MirroredStrategy"]["replicas"] == 8
    assert "all-reduce over shared memory" in strategies["MirroredStrategy"]["description"]
    assert strategies["OneDeviceStrategy"]["devices"] == ["CPU:0"]
    assert "the same as Mirrored" in strategies["MultiWorkerMirroredStrategy"]["description"]


def test_it_says_which_worker_this_is_and_connects_to_nobody(monkeypatch, capsys):
    code, found = _found(monkeypatch, capsys, _config("worker", 1))

    assert code == 0
    several = found["strategies"]["MultiWorkerMirroredStrategy"]
    assert several["task"] == "worker 1"
    assert list(several["workers"].items()) == [
        ("chief", "10.0.0.1:1"),
        ("worker 0", "10.0.0.2:1"),
        ("worker 1", "10.0.0.3:1"),
    ]
    assert several["replicas"] == 24
    assert several["description"].endswith(
        "24 replicas if every worker has 8 CPU devices; exchanges between pairs, or XLA all-reduce,"
        " over gloo, one vector per dtype"
    )


@pytest.mark.parametrize(
    ("task_type", "others", "task", "description"),
    [
        ("evaluator", {}, "evaluator", "evaluator, which does not train with the workers"),
        ("worker", {"ps": ["10.0.0.5:1"]}, "worker 0", "use ParameterServerStrategy"),
        ("ps", {"ps": ["10.0.0.5:1"]}, "ps 0", "use ParameterServerStrategy"),
    ],
)
def test_a_task_of_another_strategy_is_told_so(
    monkeypatch, capsys, task_type, others, task, description
):
    code, found = _found(monkeypatch, capsys, _config(task_type, 0, **others))

    assert code == 0
    several = found["strategies"]["MultiWorkerMirroredStrategy"]
    assert several["task"] == task
    assert several["description"].endswith(description)


@pytest.mark.parametrize(
    ("tf_config", "message"), [("{", "TF_CONFIG"), (_config("worker", 2), "worker.*2")]
)
def test_a_wrong_cluster_is_an_error(monkeypatch, capsys, tf_config, message):
    monkeypatch.setenv("TF_CONFIG", tf_config)

    code = main(["devices"])

    assert code == 1
    assert re.search(f"MultiWorkerMirroredStrategy\n  .*{message}", capsys.readouterr().out)


def test_the_command_prepares_jax_as_a_strategy_does():
    environ = {"PJRT_NPROC": None, "TF_CONFIG": None, "JAX_NUM_CPU_DEVICES": "3"}

    process = run_python("-m", "distributary", "devices", environ=environ)

    assert (process.returncode, process.stderr) == (0, "")
    assert re.search(r"^CPU:2   cpu$", process.stdout, re.MULTILINE)
    assert re.search(r"has \d+ threads on \d+ cores: enough", process.stdout)
    assert "MirroredStrategy\n  3 replicas on CPU:0, CPU:1, CPU:2; XLA" in process.stdout
