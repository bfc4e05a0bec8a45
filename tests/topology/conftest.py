"""Programs in processes of their own, for what depends on when JAX starts."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

_TIMEOUT_SECONDS = 90
_CLEARED = ("NPROC", "PJRT_NPROC", "XLA_FLAGS")

# JAX and XLA must find as many cores on every machine.
_PREAMBLE = """
import os

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])

import jax

from distributary import config, topology
"""


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Runs a program on one core in a fresh process and returns what it prints.

    The program finds `os`, `jax`, `config` and `topology` imported and JAX not started. Warnings
    are errors. `environ` adds environment variables.
    """
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("the number of cores cannot be set")

    def run(program: str, environ: dict[str, str] | None = None) -> str:
        return _run(["-W", "error", "-c", _PREAMBLE + program], environ)

    return run


@pytest.fixture
def run_file() -> Callable[..., str]:
    """Runs a Python file with arguments in a fresh process and returns what it prints."""
    return lambda *arguments: _run(["-W", "error", *arguments], None)


def _run(arguments: list[str], environ: dict[str, str] | None) -> str:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _CLEARED and not name.startswith("JAX_")
    }
    try:
        process = subprocess.run(
            [sys.executable, *arguments],
            env=inherited | {"JAX_PLATFORMS": "cpu"} | (environ or {}),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"still running after {_TIMEOUT_SECONDS} s: {error.stdout} {error.stderr}")
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()
