"""`distributary doctor`."""

import json
import os
import sys

import pytest

from distributary.tools.cli import main
from distributary.tools.diagnosis import _machine as machine
from tests.interpreters import run_python


def test_it_examines_this_machine(monkeypatch, capsys):
    monkeypatch.setenv("TF_CONFIG", "{}")

    code = main(["doctor", "--only", "machine", "links", "all-reduce", "--json"])

    report = json.loads(capsys.readouterr().out)
    assert (code, report["problem"], report["links"]) == (0, False, [])
    checks = {check["name"]: check for check in report["checks"]["this process"]}
    assert checks["versions"]["numbers"]["python"] == sys.version.split()[0]
    assert len(checks["devices"]["numbers"]["devices"]) == 8
    reduced = checks["all-reduce"]["numbers"]
    assert [row["bytes"] for row in reduced["sizes"]] == [4, 1 << 16, 1 << 20, 1 << 24]
    assert all(row["seconds"] > 0 for row in reduced["sizes"])
    assert reduced["replicas"] == 8
    assert checks["links"]["status"] == "skipped"
    memory = checks["memory"]["numbers"]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory["available_bytes"] < memory["total_bytes"] <= pages


def test_a_wrong_cluster_is_a_problem_with_a_fix(monkeypatch, capsys):
    monkeypatch.setenv("TF_CONFIG", "{")

    code = main(["doctor"])

    out = capsys.readouterr().out
    assert code == 1
    assert "PROBLEM  cluster        TF_CONFIG" in out
    assert "fix: Correct TF_CONFIG" in out
    assert out.endswith("1 problem, 0 warnings\n")


@pytest.mark.parametrize(
    ("environ", "status", "detail"),
    [
        ({"KERAS_BACKEND": "jax"}, "ok", "'jax', if distributary is imported before keras"),
        ({"KERAS_BACKEND": "torch"}, "warning", "'torch' (KERAS_BACKEND)"),
    ],
)
def test_the_backend_of_keras(environ, status, detail):
    check = machine.keras(environ)

    assert check.status == status
    assert detail in check.detail
    assert (check.fix is None) == (status == "ok")


def test_workers_of_the_launcher_are_examined_together(tmp_path):
    environ = dict.fromkeys(("TF_CONFIG", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES"))
    environ["KERAS_BACKEND"] = "torch"  # something to say about both
    doctor = ["-m", "distributary", "doctor", "--json", "report.json", "--wait-seconds", "60"]

    launch = ("-m", "distributary", "launch", "--workers", "2")
    process = run_python(*launch, *doctor, environ=environ, cwd=tmp_path)

    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tasks"] == list(report["checks"]) == ["worker 0", "worker 1"]
    assert [(link["source"], link["target"]) for link in report["links"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert all(link["error"] is None for link in report["links"])
    for checks in report["checks"].values():
        by_name = {check["name"]: check for check in checks}
        assert by_name["keras"]["status"] == "warning"
        assert by_name["all-reduce"]["numbers"]["replicas"] == 2
        trained = by_name["training"]["numbers"]
        assert trained["last_loss"] < trained["first_loss"] / 2
        assert trained["replicas_agree"]
        assert trained["difference_to_one_device"] < 1e-4
    lines = [line for line in process.stdout.splitlines() if line.startswith("[worker 0]")]
    assert "[worker 0] links, from the row to the column:" in lines
    # Of another worker only what is not as it should be.
    start = lines.index("[worker 0] worker 1:")
    assert "WARNING  keras" in lines[start + 1]
    assert not any("training" in line for line in lines[start:])
