"""Workers and servers as processes."""

import contextlib
import json
import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from distributary.launch import free_addresses
from tests.forks import Fork

_PROGRAMS = Path(__file__).parent / "programs"
_SECONDS = 60.0  # more than anything takes


class Cluster:
    """Processes of two workers and two servers, with certificates."""

    def __init__(self, stack, certificates):
        self._stack = stack
        self._certificates = str(certificates)
        chief, metrics, *addresses = free_addresses("127.0.0.1", 6)
        self.spec = {"chief": [chief], "worker": addresses[:2], "ps": addresses[2:]}
        self._metrics_port = metrics.rpartition(":")[2]
        self.processes = {}
        for name in ("worker 0", "worker 1", "ps 0", "ps 1"):
            self.start(name)

    def start(self, name):
        """Starts a task, in place of one that has ended."""
        task_type, index = name.split()
        self.processes[name] = self.start_program("task.py", task_type, int(index))

    def start_program(self, program, task_type, index, *args):
        config = {"cluster": self.spec, "task": {"type": task_type, "index": index}}
        environ = {
            **os.environ,
            "DISTRIBUTARY_CERTS": self._certificates,
            "TF_CONFIG": json.dumps(config),
            "DISTRIBUTARY_METRICS_PORT": self._metrics_port,
        }
        stderr = self._stack.enter_context(os.fdopen(os.dup(2), "w"))  # that of the tests
        command = [_PROGRAMS / program, *args]
        process = Fork(command, environ, stdout=subprocess.PIPE, stderr=stderr)
        self._stack.enter_context(process.stdout)
        self._stack.callback(process.wait, _SECONDS)
        self._stack.callback(process.kill)
        return process

    def metrics(self):
        """The lines that all processes tell."""
        lines = []
        first = int(self._metrics_port)
        for port in range(first, first + 10):
            with (
                contextlib.suppress(urllib.error.URLError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=_SECONDS) as reply,
            ):
                lines += reply.read().decode().splitlines()
        return lines

    def kill(self, name):
        self.processes[name].kill()
        self.processes[name].wait(_SECONDS)
