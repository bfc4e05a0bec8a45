"""Keras is imported before the first test, because it sets environment variables."""

import os
import subprocess
import sys

import keras  # noqa: F401
import pytest


@pytest.fixture(scope="session")
def run_python():
    """Runs code in a process that has nothing imported yet; returns what it prints."""

    def run(code, *arguments, **environ):
        path = os.pathsep.join(filter(None, sys.path))
        process = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
            env={"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environ},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    return run
