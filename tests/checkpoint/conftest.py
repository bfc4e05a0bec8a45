"""Scripts that are killed, run out of disk or receive signals."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import Fork


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """A function that runs a script in an own process; returns its exit code and output."""

    def run(script: str, *args: object) -> tuple[int, str]:
        path, output = tmp_path / "script.py", tmp_path / "output"
        path.write_text(script, encoding="utf-8")
        with output.open("w") as file:
            code = Fork([path, *args], os.environ, stdout=file).wait(120)
        return code, output.read_text()

    return run
