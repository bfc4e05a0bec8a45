"""The programs in `programs` print what they print with TensorFlow; only the import differs.

They have the constructs of the public programs: TensorFlow's guides and tutorials of distributed
training, those of keras.io, and loops from model gardens. `programs/run_tensorflow.py` recorded
what TensorFlow 2.21 prints.
"""

import json
import re

import pytest

from tests.interpreters import run_python
from tests.tensorflow.programs.run_tensorflow import FOLDER, RECORDED, programs

_RUN_ALL = """
import contextlib, io, json, runpy, sys, traceback

results = {}
for path in sys.argv[1:]:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
        results[path] = out.getvalue()
    except BaseException:
        results[path] = out.getvalue() + traceback.format_exc()
with open("printed.json", "w") as file:  # libraries write to stdout, too
    json.dump(results, file)
"""
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")


def test_programs_on_two_devices_print_what_they_print_with_tensorflow(tmp_path):
    paths = {name: str(FOLDER / f"{name}.py") for name in programs()}
    environ = {"JAX_NUM_CPU_DEVICES": "2", "KERAS_BACKEND": None, "PJRT_NPROC": None}

    process = run_python("-c", _RUN_ALL, *paths.values(), environ=environ, cwd=tmp_path)

    assert process.returncode == 0, process.stdout + process.stderr
    printed = json.loads((tmp_path / "printed.json").read_text(encoding="utf-8"))
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    different = {}
    for name, path in paths.items():
        # The numbers are those of one device, where TensorFlow does not fail with one CPU.
        expected = recorded[name]["1"] or recorded[name]["2"]
        if difference := _difference(printed[path].splitlines(), expected):
            different[name] = f"{difference}\n{printed[path]}"
    assert not different, "\n\n".join(f"{name}: {text}" for name, text in different.items())


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
