"""The programs in `programs` print what they print with TensorFlow; only the import differs.

They have the constructs of the public programs: TensorFlow's guides and tutorials of distributed
training, those of keras.io, and loops from model gardens. `programs/run_tensorflow.py` recorded
what TensorFlow 2.21 prints with one device and with two.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.programs.run_tensorflow import FOLDER, RECORDED, programs

_SECONDS = 600  # for all programs together; about 60 on an idle core
_RUN_ALL = """
import contextlib, io, json, os, runpy, sys, tempfile, traceback

results = {}
for path in sys.argv[1:]:
    out = io.StringIO()
    os.chdir(tempfile.mkdtemp(dir=os.environ["SHARED_FOLDER"]))
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
        results[path] = out.getvalue()
    except BaseException:
        results[path] = out.getvalue() + traceback.format_exc()
json.dump(results, sys.stdout)
"""
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")


@pytest.mark.parametrize("num_devices", [1, 2])
def test_programs_print_what_they_print_with_tensorflow(num_devices, tmp_path):
    # TensorFlow's workers of servers have one replica.
    names = [name for name in programs() if num_devices == 1 or "parameter_servers" not in name]
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))

    printed = _printed(names, num_devices, tmp_path)

    different = {}
    for name in names:
        # TensorFlow fails with one number of CPUs in some; a global batch gives the same numbers.
        expected = recorded[name][str(num_devices)] or recorded[name][str(3 - num_devices)]
        if difference := _difference(printed[name].splitlines(), expected):
            different[name] = f"{difference}\n{printed[name]}"
    assert not different, "\n\n".join(f"{name}: {text}" for name, text in different.items())


def _printed(names: list[str], num_devices: int, folder: Path) -> dict[str, str]:
    """Returns what programs print, which run one after the other in one process."""
    environ = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "PJRT_NPROC")}
    environ |= {
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "SHARED_FOLDER": str(folder),
    }
    paths = [str(FOLDER / f"{name}.py") for name in names]
    process = subprocess.run(
        [sys.executable, "-c", _RUN_ALL, *paths],
        env=environ,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    return {name: found[path] for name, path in zip(names, paths, strict=True)}


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
