"""The programs in examples/tf_distribute learn, started as a user would start them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAMS = Path(__file__).parents[2] / "examples" / "tf_distribute"
_SECONDS = 300  # about 10 on two idle cores


@pytest.mark.parametrize(
    ("name", "tasks", "expected"),
    [
        ("keras_fit", None, r"devices: 2\n.*accuracy ([\d.]+)\nLoaded with the same accuracy"),
        ("custom_loop", None, r"devices: 2\n.*Accuracy of the restored model: ([\d.]+)"),
        ("multi_worker_fit", ("--workers", "2"), r"Trained 1 epochs; .*accuracy ([\d.]+)"),
        ("multi_worker_custom_loop", ("--workers", "2"), r"Epoch 1: accuracy ([\d.]+), loss"),
        ("parameter_server_fit", ("--workers", "1", "--ps", "2"), r"accuracy ([\d.]+)"),
        ("parameter_server_custom_loop", ("--workers", "2", "--ps", "1"), r"Test \w+ ([\d.]+)"),
    ],
)
def test_programs_learn_in_one_epoch(name, tasks, expected, tmp_path):
    launcher = [] if tasks is None else ["-m", "distributary", "launch", *tasks]

    process = _run([*launcher, str(_PROGRAMS / f"{name}.py"), "--epochs", "1"], tmp_path)

    assert process.returncode == 0, process.stdout + process.stderr
    assert "Warning" not in process.stderr
    accuracy = re.search(expected, process.stdout, flags=re.DOTALL)
    assert accuracy is not None, process.stdout
    by_chance = 0.5 if name == "parameter_server_fit" else 0.1
    assert float(accuracy[1]) > by_chance + 0.25


def test_distributed_input_shows_what_it_says(tmp_path):
    process = _run([str(_PROGRAMS / "distributed_input.py")], tmp_path)

    assert (process.returncode, process.stderr) == (0, ""), process.stdout
    assert "113 batches of 16\nRows of the replicas: [8, 8]\n" in process.stdout
    assert process.stdout.endswith("One after the other: [0.0, 10.0]\n")


def _run(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    device_variables = ("JAX_NUM_CPU_DEVICES", "PJRT_NPROC", "KERAS_BACKEND")
    environ = {name: value for name, value in os.environ.items() if name not in device_variables}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # absolute
    environ["JAX_PLATFORMS"] = "cpu"
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
