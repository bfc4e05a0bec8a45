"""Programs in processes of their own, for what depends on when JAX starts."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests import interpreters
from tests.forks import Fork

_TIMEOUT_SECONDS = 90

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
            return _run("-c", _PREAMBLE + program, environ=environ)
        path = tmp_path / "program.py"
        path.write_text(_PREAMBLE + program)
        inherited = {k: v for k, v in os.environ.items() if k not in _cleared()}
        with (tmp_path / "output").open("w+") as output:
            process = Fork([path], {**inherited, "JAX_PLATFORMS": "cpu"}, stdout=output)
            code = process.wait(_TIMEOUT_SECONDS)
            output.seek(0)
            printed = output.read().strip()
        assert code == 0, printed
        return printed

    return run


@pytest.fixture
def run_file() -> Callable[..., str]:
    """Runs a Python file with arguments in a fresh process and returns what it prints."""
    return _run


def _cleared() -> list[str]:
    names = ("NPROC", "PJRT_NPROC", "XLA_FLAGS")
    return [name for name in os.environ if name in names or name.startswith("JAX_")]


def _run(*arguments: str, environ: Mapping[str, str] = {}) -> str:
    variables = {**dict.fromkeys(_cleared()), "JAX_PLATFORMS": "cpu", **environ}
    options = {"environ": variables, "timeout": _TIMEOUT_SECONDS}
    process = interpreters.run_python("-W", "error", *arguments, **options)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()
