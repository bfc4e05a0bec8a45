"""Interpreters of their own, for what depends on that; tests/forks.py has a quicker way."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def run_python(
    *arguments: object, environ: Mapping[str, str | None] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a Python that finds what this one does; returns how it ended and what it printed.

    `environ` sets variables, and takes those away that are None. Further options are those of
    `subprocess.run`.
    """
    path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    variables = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **(environ or {})}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={name: str(value) for name, value in variables.items() if value is not None},
        **{"capture_output": True, "text": True, "timeout": 300, **options},
    )
