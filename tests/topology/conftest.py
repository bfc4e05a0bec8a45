"""Programs in processes of their own, for what depends on when JAX starts."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import Fork

_TIMEOUT_SECONDS = 90
_CLEARED = ("NPROC", "PJRT_NPROC", "XLA_FLAGS")

# JAX and XLA must find as many cores on every machine.
_PREAMBLE = """
import os
import warnings

warnings.simplefilter("error")
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])

import jax

from distributary import config, devices
"""


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Runs a program on one core in a process of its own and returns what it prints.

    The program finds `os`, `jax`, `config` and `devices` imported and JAX not started. Warnings
    are errors. `environ` adds environment variables, of which JAX reads some when it is imported.
    """
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("the number of cores cannot be set")

    def run(program: str, environ: dict[str, str] | None = None) -> str:
        if environ:
            return _run(["-W", "error", "-c", _PREAMBLE + program], environ)
        path = tmp_path / "program.py"
        path.write_text(_PREAMBLE + program)
        with (tmp_path / "output").open("w+") as output:
            process = Fork([path], _environ(), stdout=output)
            code = process.wait(_TIMEOUT_SECONDS)
            output.seek(0)
            printed = output.read().strip()
        assert code == 0, printed
        return printed

    return run


@pytest.fixture
def run_file() -> Callable[..., str]:
    """Runs a Python file with arguments in a fresh process and returns what it prints."""
    return lambda *arguments: _run(["-W", "error", *arguments], None)


def _environ() -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _CLEARED and not name.startswith("JAX_")
    }
    return inherited | {"JAX_PLATFORMS": "cpu"}


def _run(arguments: list[str], environ: dict[str, str] | None) -> str:
    try:
        process = subprocess.run(
            [sys.executable, *arguments],
            env=_environ() | (environ or {}),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"still running after {_TIMEOUT_SECONDS} s: {error.stdout} {error.stderr}")
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()
