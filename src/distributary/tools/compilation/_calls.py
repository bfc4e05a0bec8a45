"""Calls functions in processes of their own, whose memory and devices end with them."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PROGRAM = "from distributary.tools.compilation import answer_call; answer_call()"


def call_in_process(
    function: Callable[..., Any], *args: object, environ: Mapping[str, str], stderr: int
) -> tuple[Any, subprocess.CompletedProcess[str]]:
    """Calls a function in another process.

    Args:
        function: A function of a module.
        *args: Its arguments.
        environ: Environment of the process.
        stderr: Where the process writes errors, as in `subprocess.run`.

    Returns:
        The result, None if the process has failed; and the process with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        call, answer = Path(folder) / "call", Path(folder) / "answer"
        call.write_bytes(pickle.dumps((function, args)))
        process = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(call), str(answer)],
            env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
        )
        has_ended_well = process.returncode == 0 and answer.exists()
        return pickle.loads(answer.read_bytes()) if has_ended_well else None, process


def answer_call() -> None:
    """Makes the call in one file, and writes the result to another; both are arguments."""
    call, answer = map(Path, sys.argv[1:])
    function, args = pickle.loads(call.read_bytes())
    answer.write_bytes(pickle.dumps(function(*args)))
