"""Lets one of two workers hang in every way of tests/job/activity_cases.py; each must be named.

    python tests/nightly/hangs.py [NAME ...]

Ends with 1 if a hang was not named.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

_TESTS = Path(__file__).parents[1]
_PROGRAM = _TESTS / "multiprocess" / "programs" / "hangs.py"
_SECONDS = 60.0


def _is_named(name: str) -> bool:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    with contextlib.ExitStack() as stack:
        # No pipes: a child that outlives its worker would keep them open.
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        processes = [_start(addresses, worker, name, outputs[worker]) for worker in range(2)]
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS)
        for process in processes:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
            process.wait()
        return all(_names(output, name) for output in outputs)


def _start(addresses: list[str], worker: int, name: str, output: IO[str]) -> subprocess.Popen[str]:
    task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}}
    return subprocess.Popen(
        [sys.executable, str(_PROGRAM), name],
        env={**os.environ, "TF_CONFIG": json.dumps(task), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _names(output: IO[str], name: str) -> bool:
    output.seek(0)
    said = [line for line in output if "did not get anywhere" in line]
    return len(said) == 1 and name in said[0]


def main() -> int:
    """Tries all of them, or those that are named."""
    cases = (_TESTS / "job" / "activity_cases.py").read_text()
    names = sys.argv[1:] or re.findall(r"^def (hang_\w+)", cases, re.MULTILINE)
    missed = []
    for name in names:
        begin = time.monotonic()
        if not _is_named(name):
            missed.append(name)
        how = "not named" if name in missed else "named"
        print(f"{name}: {how}, job of {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{len(names) - len(missed)} of {len(names)} hangs were named")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
