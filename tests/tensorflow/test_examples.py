"""The programs in examples/tf_distribute learn.

Those that run in the same way share a process, where the second finds everything imported.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.interpreters import run_python

_PROGRAMS = Path(__file__).parents[2] / "examples" / "tf_distribute"

_ONE_AFTER_THE_OTHER = """
import runpy, sys

for program in sys.argv[1:]:
    sys.argv = [program, "--epochs", "1"]
    runpy.run_path(program, run_name="__main__")
"""


def test_programs_of_one_process(tmp_path):
    process = _run([], ["keras_fit", "custom_loop", "distributed_input"], tmp_path)

    assert (process.returncode, process.stderr) == (0, ""), process.stdout
    _, fit, loop = process.stdout.split("Number of devices: 2\n")
    assert fit.endswith("Loaded with the same accuracy.\n")
    assert _accuracy(r"Test loss .*accuracy ([\d.]+)", fit) > 0.4  # by chance 0.1
    assert _accuracy(r"Accuracy of the restored model: ([\d.]+)", loop) > 0.4
    assert "113 batches of 16\nRows of the replicas: [8, 8]\n" in loop
    assert process.stdout.endswith("One after the other: [0.0, 10.0]\n")


def test_programs_of_several_workers(tmp_path):
    names = ["multi_worker_fit", "multi_worker_custom_loop"]
    process = _run(["--workers", "2"], names, tmp_path)

    assert process.returncode == 0, process.stdout + process.stderr
    for worker in (0, 1):
        prefix = rf"\[worker {worker}\]"
        trained = rf"{prefix} Trained 1 epochs; .*accuracy ([\d.]+)"
        assert _accuracy(trained, process.stdout) > 0.4
        assert _accuracy(rf"{prefix} Epoch 1: accuracy ([\d.]+)", process.stdout) > 0.4
    assert (tmp_path / "digits.keras").exists()
    assert list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("name", "num_servers", "at_least"),
    [("parameter_server_fit", 2, 0.75), ("parameter_server_custom_loop", 1, 0.4)],
)
def test_programs_with_parameter_servers(name, num_servers, at_least, tmp_path):
    process = _run(["--workers", "1", "--ps", str(num_servers)], [name], tmp_path)

    assert process.returncode == 0, process.stdout + process.stderr
    assert _accuracy(r"[Tt]est .*accuracy:? ([\d.]+)$", process.stdout) > at_least


def _accuracy(pattern: str, output: str) -> float:
    match = re.search(pattern, output, flags=re.MULTILINE)
    assert match is not None, output
    return float(match[1])


def _run(tasks: list[str], names: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs programs for one epoch each, by the launcher if there are several tasks."""
    launcher = ["-m", "distributary", "launch", *tasks] if tasks else []
    programs = [str(_PROGRAMS / f"{name}.py") for name in names]
    if len(programs) == 1:
        script = [*programs, "--epochs", "1"]
    else:
        runner = directory / "run.py"
        runner.write_text(_ONE_AFTER_THE_OTHER, encoding="utf-8")
        script = [str(runner), *programs]
    environ = dict.fromkeys(("JAX_NUM_CPU_DEVICES", "PJRT_NPROC", "KERAS_BACKEND"))
    return run_python(*launcher, *script, environ=environ, cwd=directory)
