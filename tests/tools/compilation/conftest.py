"""Commands of `distributary compile`, where the compilers are installed."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_PROGRAMS = Path(__file__).parent / "programs"
_SECONDS = 300


class Outcome(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str
    reports: list[Any]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture
def run_program() -> Callable[..., str]:
    """A function that runs a program with arguments and stdin, and returns its stdout."""
    if not (_installed("libtpu") and _installed("jax_plugins.xla_cuda13")):
        pytest.skip("needs pip install -e '.[compile]'")

    # The programs run in their folder, where relative folders of the path are not.
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(name: str, *arguments: str, stdin: str = "") -> str:
        process = subprocess.run(
            [sys.executable, _PROGRAMS / name, *arguments],
            input=stdin,
            cwd=_PROGRAMS,
            env=environ,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    return run


@pytest.fixture
def compile_all(run_program: Callable[..., str]) -> Callable[[list[list[str]]], list[Outcome]]:
    """A function that runs several command lines in one process."""

    def run(commands: list[list[str]]) -> list[Outcome]:
        lines = "".join(json.dumps(command) + "\n" for command in commands)
        printed = run_program("cases.py", stdin=lines)
        return [Outcome(*json.loads(line)) for line in printed.splitlines()]

    return run
