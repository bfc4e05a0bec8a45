"""Lets one of two workers hang in every way of tests/job/activity_cases.py; each must be named.

    python tests/nightly/hangs.py [NAME ...]

Ends with 1 if a hang was not named.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_PROGRAM = _TESTS / "multiprocess" / "programs" / "hangs.py"
_SECONDS = 60.0


def _is_named(name: str) -> bool:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    processes = []
    for worker in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}}
        environ = {**os.environ, "TF_CONFIG": json.dumps(task), "JAX_PLATFORMS": "cpu"}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(_PROGRAM), name],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    is_named = True
    for process in processes:
        try:
            output, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            output = ""
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
            process.kill()
        said = [line for line in output.splitlines() if "did not get anywhere" in line]
        is_named &= len(said) == 1 and name in said[0]
    return is_named


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
