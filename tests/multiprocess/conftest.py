"""Jobs of several worker processes on this machine."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from distributary.launch import free_addresses
from tests.forks import Fork
from tests.interpreters import run_python

_PROGRAMS = Path(__file__).parent / "programs"
_SECONDS = 300.0
# Their workers, if several, have interpreters of their own: sets in orders of their own, and as the
# outermost call that of the program.
_WITH_INTERPRETERS = ("contract", "hangs", "keras_contract")


@dataclass
class Ended:
    """How a worker ended: exit code, the JSON of its last line of output, and all it printed."""

    code: int
    result: Any
    output: str


class Job:
    """Worker processes that run one program, with `TF_CONFIG` each."""

    def __init__(self, num_workers: int) -> None:
        # Not ports of the range from which the connections of other tests get theirs.
        self.addresses = free_addresses("127.0.0.1", num_workers)
        self._processes: dict[Any, tuple[Fork | subprocess.Popen[bytes], IO[str]]] = {}

    def start(
        self,
        program: str,
        worker: int,
        *args: Any,
        devices: int = 1,
        cluster: Any = None,
        key: Any = None,
        **environ: str,
    ) -> None:
        """Starts one worker; `cluster` and `environ` override what it would be told."""
        config = {
            "cluster": cluster or {"worker": self.addresses},
            "task": {"type": "worker", "index": worker},
        }
        env = {k: v for k, v in os.environ.items() if k != "PJRT_NPROC"}
        env |= {
            "TF_CONFIG": json.dumps(config),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **environ,
        }
        command = [str(_PROGRAMS / f"{program}.py"), *map(str, args)]
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `kill`)
        process: Fork | subprocess.Popen[bytes]
        if program in _WITH_INTERPRETERS and len(self.addresses) > 1:
            command.insert(0, sys.executable)
            process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        else:
            process = Fork(command, env, stdout=output)
        self._processes[worker if key is None else key] = process, output

    def start_all(self, program: str, *args: Any, **options: Any) -> "Job":
        """Starts all workers with the same arguments."""
        for worker in range(len(self.addresses)):
            self.start(program, worker, *args, **options)
        return self

    def has_ended(self, key: Any) -> bool:
        """Whether a worker has ended."""
        return self._processes[key][0].poll() is not None

    def wait(self, keys: Iterable[Any] | None = None) -> list[Ended]:
        """Waits for some or all workers, in the order in which they were started."""
        ended = []
        for key in self._processes if keys is None else keys:
            process, file = self._processes[key]
            code = process.wait(_SECONDS)
            file.seek(0)
            output = file.read()
            lines = [line for line in output.splitlines() if line.startswith("{")]
            result = json.loads(lines[-1]) if lines else None
            ended.append(Ended(code, result, output))
        return ended

    def kill(self) -> None:
        """Ends what still runs."""
        for process, file in self._processes.values():
            process.kill()
            process.wait(_SECONDS)
            file.close()


@pytest.fixture
def job() -> Iterator[Callable[[int], Job]]:
    """A function that makes a job for a number of workers."""
    jobs: list[Job] = []

    def make(num_workers: int) -> Job:
        jobs.append(Job(num_workers))
        return jobs[-1]

    yield make
    for one in jobs:
        one.kill()


@pytest.fixture
def launch() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """A function that runs a program with `distributary launch --workers 2`; it must succeed."""

    def launch(options: list[str], program: str, *args: Any) -> "subprocess.CompletedProcess[str]":
        command = ("-m", "distributary", "launch", "--workers", "2", *options)
        environ = {"TF_CONFIG": None, "JAX_NUM_CPU_DEVICES": "1"}
        ended = run_python(*command, _PROGRAMS / f"{program}.py", *args, environ=environ)
        assert ended.returncode == 0, ended.stderr
        return ended

    return launch
