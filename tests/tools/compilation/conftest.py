"""Commands of `distributary compile`, where the compilers are installed."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.forks import Fork

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
def run_program(tmp_path: Path) -> Callable[..., str]:
    """A function that runs a program with arguments and stdin, and returns its stdout."""
    if not (_installed("libtpu") and _installed("jax_plugins.xla_cuda13")):
        pytest.skip("needs pip install -e '.[compile]'")

    given, out, err = (tmp_path / name for name in ("stdin", "stdout", "stderr"))

    def run(name: str, *arguments: str, stdin: str = "") -> str:
        given.write_text(stdin)
        with given.open() as stdin_file, out.open("w") as stdout, err.open("w") as stderr:
            files = {"stdin": stdin_file, "stdout": stdout, "stderr": stderr}
            process = Fork([_PROGRAMS / name, *arguments], os.environ, cwd=_PROGRAMS, **files)
            code = process.wait(_SECONDS)
        assert code == 0, err.read_text()
        return out.read_text()

    return run


@pytest.fixture
def compile_all(run_program: Callable[..., str]) -> Callable[[list[list[str]]], list[Outcome]]:
    """A function that runs several command lines in one process."""

    def run(commands: list[list[str]]) -> list[Outcome]:
        lines = "".join(json.dumps(command) + "\n" for command in commands)
        printed = run_program("cases.py", stdin=lines)
        return [Outcome(*json.loads(line)) for line in printed.splitlines()]

    return run
