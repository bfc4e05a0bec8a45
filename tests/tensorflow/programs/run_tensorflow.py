"""Runs the programs of this folder with TensorFlow, and writes what they print.

    python tests/tensorflow/programs/run_tensorflow.py

needs the extra `bench`. `tests/tensorflow/test_tensorflow_programs.py` compares the output with
that of distributary. The import is the only difference.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "tensorflow-2.21.json"

# TensorFlow's MirroredStrategy takes one CPU unless it is told which.
_PRELUDE = """
import runpy, sys, functools
import tensorflow as tf
count, path = int(sys.argv[1]), sys.argv[2]
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * count
)
Mirrored = tf.distribute.MirroredStrategy
tf.distribute.MirroredStrategy = lambda: Mirrored([f"CPU:{i}" for i in range(count)])
runpy.run_path(path, run_name="__main__")
"""


def programs() -> list[str]:
    """Returns the names of the programs."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "run_tensorflow")


def _output(name: str, num_devices: int) -> list[str] | None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    text = text.replace("import distributary.compat.tensorflow as tf", "import tensorflow as tf")
    text = re.sub(r"\bdistributary\.compat\.tensorflow\b", "tensorflow", text)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, f"{name}.py")
        program.write_text(text, encoding="utf-8")
        environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        process = subprocess.run(
            [sys.executable, "-c", _PRELUDE, str(num_devices), str(program)],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=600,
        )
    if process.returncode:
        print(f"{name} with {num_devices} devices:\n{process.stderr[-2000:]}")
        return None
    return process.stdout.splitlines()


def main() -> None:
    """Records the programs that are named, or all."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    for name in sys.argv[1:] or programs():
        recorded.setdefault(name, {}).update({str(n): _output(name, n) for n in (1, 2)})
        print(name, flush=True)
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
