"""How long does a job take to notice that a worker was killed, and to train again?

One job of `distributary launch` loses a random worker, the chief included, again and again by
SIGKILL at a random moment, and must end on the weights of a job that nobody disturbs, bit for bit.

    python benchmarks/recovery.py --workers 2

Seconds since the kill until

* `named`: the first of the other workers has written which worker was lost,
* `stopped`: the last of the other workers has ended,
* `next step`: all workers are there again and have finished a step.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from pathlib import Path

import _harness
import numpy as np
from _harness import Request, Row, number

BARS = {"named": 2.0, "stopped": 2.0, "next step": 15.0}
PROGRAM = Path(__file__).parents[1] / "tests" / "multiprocess" / "programs" / "training.py"
EPOCHS_PER_KILL = 20
_SECONDS = 120.0
_TAIL_BYTES = 300


class Job:
    """A training job behind the launcher."""

    def __init__(self, folder: Path, num_workers: int, num_epochs: int, max_restarts: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.num_workers = num_workers
        self.names: list[float] = []  # when a worker has named a lost one
        environ = {k: v for k, v in _harness.environment().items() if k != "TF_CONFIG"}
        workers = ["--workers", str(num_workers), "--max-restarts", str(max_restarts)]
        program = [str(PROGRAM), str(folder), str(num_epochs), "[]"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distributary", "launch", *workers, *program],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._output: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def steps(self) -> list[tuple[float, int]]:
        """Time of the last step of every worker that has made one, and its process."""
        last = []
        for worker in range(self.num_workers):
            with contextlib.suppress(OSError, IndexError):
                with (self.folder / f"steps.{worker}").open("rb") as file:
                    file.seek(-min(_TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
                    line = file.read().splitlines()[-1].split()
                last.append((float(line[0]), int(line[1])))
        return last

    def wait_for_other_processes(self, old: set[int]) -> tuple[float, list[int]]:
        """When, and in which processes, all workers have made a step again."""
        end = time.time() + _SECONDS
        while time.time() < end:
            steps = self.steps()
            pids = [pid for _, pid in steps]
            if len(pids) == self.num_workers and not old & set(pids):
                return time.time(), pids
            if self.process.poll() is not None:
                break
            time.sleep(0.005)
        raise RuntimeError("the job does not train:\n" + "".join(self._output[-40:]))

    def end(self) -> dict[str, np.ndarray]:
        """What the job has saved at its end."""
        code = self.process.wait(_SECONDS)
        self._reader.join()
        if code:
            raise RuntimeError(f"the job has failed with {code}:\n" + "".join(self._output[-40:]))
        return dict(np.load(self.folder / "saved.npz"))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "distributary: worker" in line:
                self.names.append(time.time())
            self._output.append(line)


def requests(arguments: Namespace) -> list[Request]:
    """Returns the only request."""
    return [{"replicas": f"{arguments.workers} workers", "devices": 1}]


def measure(request: Request) -> list[Row]:
    """Kills a worker per round; a job that ends on other weights is a problem."""
    num_kills, num_workers = request["rounds"], request["workers"]
    seconds: dict[str, list[float]] = {name: [] for name in BARS}
    chance = random.Random(request["seed"])
    num_epochs = EPOCHS_PER_KILL * (num_kills + 1)
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Job(Path(folder) / "undisturbed", num_workers, num_epochs, 0).end()
        job = Job(Path(folder) / "disturbed", num_workers, num_epochs, num_kills)
        pids: list[int] = []
        for _ in range(num_kills):
            _, pids = job.wait_for_other_processes(set(pids))
            time.sleep(chance.uniform(0.0, 0.3))
            killed = chance.randrange(num_workers)
            num_names = len(job.names)
            at = time.time()
            os.kill(pids[killed], signal.SIGKILL)
            _wait_for_end([pid for pid in pids if pid != pids[killed]])
            seconds["stopped"].append(time.time() - at)
            again_at, _ = job.wait_for_other_processes(set(pids))
            seconds["next step"].append(again_at - at)
            seconds["named"].append(job.names[num_names] - at)
        restarted = job.end()
    is_same = all(np.array_equal(undisturbed[name], restarted[name]) for name in undisturbed)
    numbers = [
        number(f"{name}, longest", max(seconds[name]), "s", bar) for name, bar in BARS.items()
    ]
    problems = [] if is_same else ["the weights are not those of the undisturbed job"]
    what = "a killed worker"
    replicas = request["replicas"]
    return [_harness.row(what, replicas, "s", seconds, numbers=numbers, problems=problems)]


def _wait_for_end(pids: list[int]) -> None:
    end = time.time() + _SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.time() > end:
            raise RuntimeError(f"processes {pids} do not end")
        time.sleep(0.002)


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(20, 3),
        options={"--workers": {"type": int, "default": 2}, "--seed": {"type": int, "default": 0}},
    )
