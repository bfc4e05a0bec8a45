"""The programs in `programs` print what they print with TensorFlow; only the import differs.

They have the constructs of the public programs: TensorFlow's guides and tutorials of distributed
training, those of keras.io, and loops from model gardens. `programs/run_tensorflow.py` recorded
what TensorFlow 2.21 prints with one device and with two.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distributary.launch import free_addresses
from tests.forks import Fork
from tests.tensorflow.programs.run_tensorflow import FOLDER, RECORDED, programs

# `fit` and a loop: they run on workers, with MultiWorkerMirroredStrategy.
ON_WORKERS = ("keras_fit", "multi_worker_loop")
# TensorFlow's workers of servers have one replica. All others run with two.
ON_ONE_DEVICE = ("parameter_servers",)
_SECONDS = 600  # for all programs together; about 60 on an idle core
_RUN_ALL = """
import contextlib, io, json, os, runpy, sys, traceback

results = {}
for path in sys.argv[1:]:
    out = io.StringIO()
    folder = os.path.join(os.environ["PROGRAMS"], os.path.basename(path).removesuffix(".py"))
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    os.environ["SHARED_FOLDER"] = folder
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
        results[path] = out.getvalue()
    except BaseException:
        results[path] = out.getvalue() + traceback.format_exc()
with open(os.environ["RESULTS"], "w") as file:  # libraries write to stdout, too
    json.dump(results, file)
"""
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")


@pytest.mark.parametrize("num_devices", [1, 2])
def test_programs_print_what_they_print_with_tensorflow(num_devices, tmp_path):
    names = list(ON_ONE_DEVICE)
    if num_devices == 2:
        names = [name for name in programs() if name not in ON_ONE_DEVICE + ON_WORKERS]
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))

    started = _Started(names, num_devices, tmp_path)
    started.wait()
    assert not started.error, started.error
    printed = started.printed()

    different = {}
    for name in names:
        # The numbers are those of one device, where TensorFlow does not fail with one CPU.
        expected = recorded[name]["1"] or recorded[name]["2"]
        if difference := _difference(printed[name].splitlines(), expected):
            different[name] = f"{difference}\n{printed[name]}"
    assert not different, "\n\n".join(f"{name}: {text}" for name, text in different.items())


def test_programs_on_two_workers_print_what_they_print_with_tensorflow(tmp_path):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ON_WORKERS:
        text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        text = text.replace("distribute.MirroredStrategy", "distribute.MultiWorkerMirroredStrategy")
        (sources / f"{name}.py").write_text(text, encoding="utf-8")
    addresses = free_addresses("127.0.0.1", 2)
    configs = [
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        for index in range(2)
    ]

    workers = [_Started(ON_WORKERS, 1, tmp_path, sources, config) for config in configs]
    different = {}
    for worker in workers:
        worker.wait()
    errors = "\n".join(worker.error for worker in workers if worker.error)
    assert not errors, errors
    for index, printed in enumerate([worker.printed() for worker in workers]):
        for name in ON_WORKERS:
            # TensorFlow's own workers run one of them; the others have the numbers of one device.
            by_devices = recorded[name]
            expected = by_devices.get("workers") or by_devices["1"] or by_devices["2"]
            if difference := _difference(printed[name].splitlines(), expected):
                different[f"{name} on worker {index}"] = f"{difference}\n{printed[name]}"
    assert not different, "\n\n".join(f"{name}: {text}" for name, text in different.items())


class _Started:
    """A process that runs programs one after the other."""

    def __init__(
        self,
        names: Sequence[str],
        num_devices: int,
        folder: Path,
        sources: Path = FOLDER,
        tf_config: dict[str, Any] | None = None,
    ) -> None:
        task = tf_config["task"]["index"] if tf_config else 0
        self._results = folder / f"printed-{task}.json"
        environ = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "PJRT_NPROC")}
        environ |= {
            "JAX_NUM_CPU_DEVICES": str(num_devices),
            "JAX_PLATFORMS": "cpu",
            "PROGRAMS": str(folder),
            "PYTHONFAULTHANDLER": "1",
            "RESULTS": str(self._results),
        }
        if tf_config:
            environ["TF_CONFIG"] = json.dumps(tf_config)
        self._paths = {name: str(sources / f"{name}.py") for name in names}
        runner = folder / f"run-{task}.py"
        runner.write_text(_RUN_ALL, encoding="utf-8")
        self._output = folder / f"output-{task}"
        with self._output.open("w") as output:
            self._process = Fork([runner, *self._paths.values()], environ, stdout=output)

    def wait(self) -> None:
        """Waits for the end of the process."""
        try:
            status = self._process.wait(_SECONDS)
        finally:
            self._process.kill()
        self.error = f"exit status {status}: {self._output.read_text()}" if status else ""

    def printed(self) -> dict[str, str]:
        """Returns what each program printed."""
        found = json.loads(self._results.read_text(encoding="utf-8"))
        return {name: found[path] for name, path in self._paths.items()}


def _difference(printed: list[str], recorded: list[str]) -> str | None:
    """Returns how output differs from what TensorFlow printed, within rounding; None if not."""
    lines, wanted = (
        [line for line in output if "Number of devices" not in line]
        for output in (printed, recorded)
    )
    if len(lines) != len(wanted):
        return f"{len(lines)} lines, but TensorFlow prints {len(wanted)}"
    for line, other in zip(lines, wanted, strict=True):
        numbers, others = (list(map(float, _NUMBER.findall(text))) for text in (line, other))
        if _NUMBER.sub("#", line) != _NUMBER.sub("#", other) or numbers != pytest.approx(
            others, rel=1e-3, abs=1e-4
        ):
            return f"{line!r}, but TensorFlow prints {other!r}"
    return None
