"""Kills workers of a job, which must notice, start again, and end as if nothing had happened.

One job of `distributary launch` loses a random worker, the chief included, again and again by
SIGKILL at a random moment, and must end on the weights of a job that nobody disturbs, bit for bit.

    python tests/nightly/recovery.py [--kills 20] [--seed 0]

Prints the seconds since the kill until

* `named`: the first of the other workers has written which worker was lost,
* `stopped`: the last of the other workers has ended,
* `next step`: all workers are there again and have finished a step.

Ends with 1 if the weights differ, or one of these took too long.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from _workers import PROGRAMS, environment

_NUM_WORKERS = 2
_MOST_SECONDS = {"named": 2.0, "stopped": 2.0, "next step": 15.0}
_EPOCHS_PER_KILL = 20
_SECONDS = 120.0
_TAIL_BYTES = 300


class Job:
    """A training job behind the launcher."""

    def __init__(self, folder: Path, num_epochs: int, max_restarts: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.names: list[float] = []  # when a worker has named a lost one
        environ = {k: v for k, v in environment().items() if k != "TF_CONFIG"}
        workers = ["--workers", str(_NUM_WORKERS), "--max-restarts", str(max_restarts)]
        program = [str(PROGRAMS / "training.py"), str(folder), str(num_epochs)]
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
        for worker in range(_NUM_WORKERS):
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
            if len(pids) == _NUM_WORKERS and not old & set(pids):
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


def kill_workers(num_kills: int, seed: int) -> tuple[dict[str, list[float]], bool]:
    """Returns seconds by what was waited for, and whether the weights are those expected."""
    seconds: dict[str, list[float]] = {name: [] for name in _MOST_SECONDS}
    chance = random.Random(seed)
    num_epochs = _EPOCHS_PER_KILL * (num_kills + 1)
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Job(Path(folder) / "undisturbed", num_epochs, 0).end()
        job = Job(Path(folder) / "disturbed", num_epochs, num_kills)
        pids: list[int] = []
        for _ in range(num_kills):
            _, pids = job.wait_for_other_processes(set(pids))
            time.sleep(chance.uniform(0.0, 0.3))
            killed = chance.randrange(_NUM_WORKERS)
            num_names = len(job.names)
            at = time.time()
            os.kill(pids[killed], signal.SIGKILL)
            while any(Path(f"/proc/{pid}").exists() for pid in pids if pid != pids[killed]):
                time.sleep(0.002)
            seconds["stopped"].append(time.time() - at)
            again_at, _ = job.wait_for_other_processes(set(pids))
            seconds["next step"].append(again_at - at)
            seconds["named"].append(job.names[num_names] - at)
        restarted = job.end()
    is_same = all(np.array_equal(undisturbed[name], restarted[name]) for name in undisturbed)
    return seconds, is_same


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seconds, is_same = kill_workers(options.kills, options.seed)
    for name, found in seconds.items():
        print(f"{name}: median {statistics.median(found):.2f} s, longest {max(found):.2f} s")
    print("the weights are", "those" if is_same else "NOT those", "of the undisturbed job")
    is_soon = all(max(found) <= _MOST_SECONDS[name] for name, found in seconds.items())
    return 0 if is_same and is_soon else 1


if __name__ == "__main__":
    sys.exit(main())
