"""Scripts that are killed, run out of disk or receive signals."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs a script with arguments in an own process."""

    def run(script: str, *args: object) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "script.py"
        path.write_text(script, encoding="utf-8")
        environ = {k: v for k, v in os.environ.items() if k != "PJRT_NPROC"}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        return subprocess.run(
            [sys.executable, path, *map(str, args)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
