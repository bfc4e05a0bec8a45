"""The examples run as the README says, and reach what they promise."""

import re
import subprocess
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.interpreters import run_python

_EXAMPLES = Path(__file__).parents[1] / "examples"
_NEEDED = {"digits_flax.py": ("flax",), "compile_report.py": ("libtpu",)}


@pytest.mark.parametrize("name", ["digits", "digits_custom_loop"])
def test_digits_learns_on_two_cpu_devices_and_draws_its_learning_curves(name, tmp_path):
    process = _run(f"{name}.py", tmp_path)

    output = process.stdout
    assert process.returncode == 0, output + process.stderr
    # On a slow machine, compiling takes long enough to be told.
    told = [line for line in process.stderr.splitlines() if not line.startswith("Compiling a step")]
    assert not told
    assert output.startswith("<MirroredStrategy: 2 replicas on CPU:0, CPU:1; XLA all-reduce"), (
        output
    )
    accuracy = re.search(r"^Test accuracy: ([\d.]+)%", output, flags=re.MULTILINE)
    assert accuracy is not None, output
    assert 97 <= float(accuracy[1]) <= 100
    assert re.search(r"^Time: [\d.]+ s", output, flags=re.MULTILINE), output
    assert len(output.splitlines()) < 60, "two lines per epoch at most"
    pixels = imread(tmp_path / f"{name}_learning_curves.png")
    height, width, _ = pixels.shape
    assert width >= 800
    assert height >= 300
    assert len({row.tobytes() for row in pixels}) > 100, "the picture is almost empty"


def test_digits_fails_when_it_has_not_learned_enough(tmp_path):
    # 1437 images in three batches: one program is compiled.
    options = ["--epochs", "1", "--batch-size", "479"]
    process = _run("digits.py", tmp_path, *options)

    assert process.returncode == 1, process.stdout + process.stderr
    assert "Test accuracy: " in process.stdout


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "central_storage.py --epochs 4 --width 256",
            r"""<CentralStorageStrategy: 2 replicas on CPU:1, CPU:2, variables on CPU:0; .*
Weights: 0\.3 MB, state of Adam: 0\.7 MB
CPU:0 holds 1\.0 MB
CPU:1 holds 0\.0 MB
CPU:2 holds 0\.0 MB
Test accuracy: 9[5-9]\.\d+% \(required: 95%\)""",
        ),
        (
            "sharded_optimizer_state.py --epochs 1",
            r"""<MirroredStrategy: 4 replicas .*
  accuracy .*
  on cpu:0: 614 kB of weights, 1229 kB of other state
<MirroredStrategy: 4 replicas .*; Keras optimizer state sharded>
  accuracy .*
  on cpu:0: 614 kB of weights, 307 kB of other state
Largest difference of a weight: \d\.\de[-+]\d\d""",
        ),
        (
            "recommender.py --epochs 15",
            r"""<ParameterServerStrategy: 2 workers, 2 parameter servers>
\S+\.py: .*
\S+\.py: .*
Held back name among ten: [4-7]\d% \(the most popular ones: [2-4]\d%\)""",
        ),
        (
            "digits_flax.py --epochs 5",
            r"""<MirroredStrategy: 2 replicas .*
Epoch 5/5, loss 0\.\d+
Test accuracy: 9[5-9]\.\d+% \(required: 95%\)""",
        ),
        (
            "compile_report.py v5e:2x4",
            r"""<MirroredStrategy: 8 replicas on TPU:0, .*
devices   replicas  all-reduces  all-reduced     memory     MFLOP  compiled in
v5e:2x4          8            1      68\.9 kB .*""",
        ),
    ],
)
def test_example_prints_what_it_shows(command, expected, tmp_path):
    name, *arguments = command.split()
    for package in _NEEDED.get(name, ()):
        pytest.importorskip(package)

    process = _run(name, tmp_path, *arguments)

    assert process.returncode == 0, process.stdout + process.stderr
    assert re.fullmatch(expected, process.stdout.strip()), process.stdout


def test_a_job_that_loses_a_worker_goes_on_from_its_checkpoint(tmp_path):
    launch = ["-m", "distributary", "launch", "--workers", "2", "--max-restarts", "1"]
    script = [str(_EXAMPLES / "multi_worker_recovery.py"), "--epochs", "6", "--lose-a-worker"]
    process = _run_python(*launch, *script, directory=tmp_path)

    assert process.returncode == 0, process.stdout + process.stderr
    assert "worker 1 was ended by SIGKILL" in process.stderr
    said = re.findall(r"\[worker 0\] (Starts after epoch \d|Test accuracy: \d+)", process.stdout)
    assert said[:2] == ["Starts after epoch 0", "Starts after epoch 3"], process.stdout
    assert said[2:] >= ["Test accuracy: 95"], process.stdout


def test_the_list_of_examples_is_complete():
    page = (_EXAMPLES / "README.md").read_text(encoding="utf-8")

    missing = [path.name for path in _EXAMPLES.glob("*.py") if f"]({path.name})" not in page]

    assert missing == []


def _run(name: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs an example as a user without accelerators would."""
    return _run_python(_EXAMPLES / name, *arguments, directory=directory)


def _run_python(*arguments: object, directory: Path) -> subprocess.CompletedProcess[str]:
    environ = {"JAX_NUM_CPU_DEVICES": None, "PJRT_NPROC": None}
    return run_python(*arguments, environ=environ, cwd=directory)
