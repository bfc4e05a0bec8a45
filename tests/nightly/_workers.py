"""Jobs on this machine, for programs that take too long for CI; some of it is of `benchmarks`."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _processes import FOLDER, Cluster, environment

__all__ = ["FOLDER", "PROGRAMS", "Cluster", "environment", "outputs_of_two"]

PROGRAMS = Path(__file__).parents[1] / "multiprocess" / "programs"


def outputs_of_two(program: str, *arguments: object, seconds: float, devices: int = 1) -> list[str]:
    """Runs a program of tests/multiprocess in two workers, and returns what each has printed.

    A worker that does not end in time is killed, with all that it has started.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    with contextlib.ExitStack() as stack:
        # No pipes: a child that outlives its worker would keep them open.
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        processes = []
        for worker, output in enumerate(outputs):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}}
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(PROGRAMS / program), *map(str, arguments)],
                    env={
                        **os.environ,
                        "TF_CONFIG": json.dumps(task),
                        "JAX_PLATFORMS": "cpu",
                        "JAX_NUM_CPU_DEVICES": str(devices),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        for process in processes:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
            process.wait()
        for output in outputs:
            output.seek(0)
        return [output.read() for output in outputs]
