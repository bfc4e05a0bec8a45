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

import pytest

from tests.compat.programs.run_tensorflow import FOLDER, RECORDED, programs

_SECONDS = 600  # for all programs together; about 60 on two idle cores
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


def _cases() -> list[tuple[int, str]]:
    """Numbers of devices, and programs; TensorFlow's workers of servers have one replica."""
    cases = [(count, name) for count in (1, 2) for name in programs()]
    return [case for case in cases if case[0] == 1 or "parameter_servers" not in case[1]]


@pytest.fixture(scope="module")
def printed(request, tmp_path_factory) -> dict[str, str]:
    """What the programs print with a number of devices, one after the other in one process."""
    folder = tmp_path_factory.mktemp("programs")
    environ = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "PJRT_NPROC")}
    environ |= {
        "JAX_NUM_CPU_DEVICES": str(request.param),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "SHARED_FOLDER": str(folder),
    }
    names = [name for count, name in _cases() if count == request.param]
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


@pytest.mark.parametrize(
    ("printed", "num_devices", "name"),
    [(count, count, name) for count, name in _cases()],
    indirect=["printed"],
    ids=[f"{name}-{count}" for count, name in _cases()],
)
def test_a_program_prints_what_it_prints_with_tensorflow(printed, num_devices, name):
    outputs = printed
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    # TensorFlow itself fails with two CPUs in some programs: a global batch gives the same numbers.
    expected = recorded[str(num_devices)] or recorded["1"]
    lines = [line for line in outputs[name].splitlines() if "Number of devices" not in line]

    assert len(lines) == len(expected) - ("Number of devices" in str(expected)), outputs[name]
    wanted = [line for line in expected if "Number of devices" not in line]
    for line, other in zip(lines, wanted, strict=True):
        assert _NUMBER.sub("#", line) == _NUMBER.sub("#", other), outputs[name]
        numbers = [float(number) for number in _NUMBER.findall(line)]
        others = [float(number) for number in _NUMBER.findall(other)]
        assert numbers == pytest.approx(others, rel=1e-3, abs=1e-4), (line, other)
