"""How many steps do two workers and two parameter servers take, next to TensorFlow's?

Five processes a side, over loopback: a chief, two workers, two servers. One thread for the
computation of each process, on both sides, TensorFlow's and XLA's.

    mlp32          784-128-10, batch 32, Adagrad
    embedding256   table 100k x 64 on both servers, 26 ids, 128-1, batch 256, Adagrad
    empty          a function that returns 1: what a closure costs

A block schedules as many steps as take `--block-seconds`, and waits for all of them. CPU time is
that of all five processes.

    python benchmarks/parameter_server.py --tensorflow-python PATH
    python benchmarks/parameter_server.py --quick --only mlp32
"""

import contextlib
import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import _harness
from _clusters import SERVER, Cluster
from _harness import Request, Row, pair
from _peers import Job, Peer, command

NUM_WORKERS, NUM_SERVERS = 2, 2

BARS: Mapping[str, tuple[float, float | None]] = {
    "mlp32": (1 / 1.5, 0.6),
    "embedding256": (1 / 1.2, 0.9),
    "empty": (1 / 10, None),
}
"""Time and CPU time per step over TensorFlow's, at most."""

_ONE_THREAD = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "NPROC": "1",
    "PJRT_NPROC": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class Side:
    """The processes of one implementation.

    Args:
        name: What the report calls it.
        task: Command line of workers and servers.
        chief: Command line of the chief.
        environ: Their environment, without TF_CONFIG.
    """

    def __init__(
        self, name: str, task: Sequence[str], chief: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        environ = {**environ, **_ONE_THREAD}
        self.name = name
        self.cpu_seconds: list[dict[str, float]] = []
        self._tasks = Cluster(task, environ, chief=1, worker=NUM_WORKERS, ps=NUM_SERVERS)
        self._tasks.start("worker", "ps")
        self._chief = Job(name, [chief], [self._tasks.environ("chief", 0)])

    def peer(self, workload: str) -> Peer:
        """Returns a workload that also measures the CPU time of its blocks, of all processes."""
        peer = self._chief.peer(self.name, workload)
        self.cpu_seconds = []

        def time_block(num_steps: int) -> float:
            before = self._cpu_seconds()
            seconds = peer.time_block(num_steps)
            after = self._cpu_seconds()
            spent = {role: (after[role] - before[role]) / num_steps for role in after}
            self.cpu_seconds.append(spent)
            return seconds

        return Peer(self.name, time_block, peer.losses)

    def close(self) -> None:
        """Ends the processes."""
        self._chief.close()
        self._tasks.close()

    def _cpu_seconds(self) -> dict[str, float]:
        pids = {
            "the chief": self._chief.pids,
            "the workers": self._tasks.pids("worker"),
            "the servers": self._tasks.pids("ps"),
        }
        return {role: sum(map(_cpu_seconds, own)) for role, own in pids.items()}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def requests(arguments: Namespace) -> list[Request]:
    """Returns the only request: one cluster takes all workloads."""
    return [{"replicas": f"{NUM_WORKERS} workers, {NUM_SERVERS} servers", "devices": 1}]


def measure(request: Request) -> list[Row]:
    """Measures the workloads, each in turns; a loss that has not fallen is a problem."""
    with contextlib.ExitStack() as stack:
        sides = [Side("distributary", SERVER, command("_ps_tasks"), _harness.environment())]
        stack.callback(sides[0].close)
        if "tensorflow" in request["others"]:
            python = request["tensorflow_python"]
            task = [python, str(_harness.FOLDER / "_ps_tensorflow.py")]
            chief = command("_ps_tensorflow", python)
            sides.append(Side("tensorflow", task, chief, _harness.foreign_environment()))
            stack.callback(sides[1].close)
        return [row for name in request["only"] for row in _measure(name, sides, request)]


def _measure(name: str, sides: Sequence[Side], request: Request) -> Iterator[Row]:
    peers = [side.peer(name) for side in sides]
    first = {peer.name: statistics.mean(peer.losses(20)) for peer in peers}
    num_steps = {
        peer.name: _harness.choose_steps(peer, request["block_seconds"], least=50, most=50_000)
        for peer in peers
    }
    for side in sides:
        side.cpu_seconds.clear()
    seconds = _harness.interleave(peers, request["rounds"], num_steps)
    last = {peer.name: statistics.mean(peer.losses(20)) for peer in peers}
    what = name.replace("empty", "an empty step")
    bar, cpu_bar = BARS[name]
    # The first block does not count.
    spent = {side.name: side.cpu_seconds[1:] for side in sides}
    all_seconds: dict[tuple[str, str, float | None], dict[str, list[float]]] = {
        (f"parameter servers, {what}", "ms/step", bar): seconds,
        (f"parameter servers, {what}", "CPU ms/step", cpu_bar): {
            side: [sum(block.values()) for block in blocks] for side, blocks in spent.items()
        },
        **{
            (f"CPU of {role}, {what}", "ms/step", None): {
                side: [block[role] for block in blocks] for side, blocks in spent.items()
            }
            for role in ("the chief", "the workers", "the servers")
        },
    }
    problems = [
        f"{name}: the loss of {side} has not fallen: {first[side]:.4f}, then {loss:.4f}"
        for side, loss in last.items()
        if name != "empty" and not loss < first[side]
    ]
    for (of, unit, limit), found in all_seconds.items():
        rounds = {side: [1e3 * value for value in values] for side, values in found.items()}
        pairs = [pair("distributary", "tensorflow", limit)] * of.startswith("parameter servers")
        yield _harness.row(of, request["replicas"], unit, rounds, pairs, problems=problems)
        problems = []


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(7, 2),
        block_seconds=(3.0, 1.0),
        options={
            "--only": {"choices": tuple(BARS)},
            "--tensorflow-python": {"default": sys.executable, "metavar": "PATH"},
        },
    )
