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

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import _command_line
import _processes
import _report
import _served
import _tensorflow
import _timing

Json: TypeAlias = Any

NAMES = ("mlp32", "embedding256", "empty")
NUM_WORKERS, NUM_SERVERS = 2, 2

BARS: Mapping[str, tuple[float, float | None]] = {
    "mlp32": (1.5, 0.6),
    "embedding256": (1.2, 0.9),
    "empty": (10.0, None),
}
"""Steps per second over TensorFlow's, at least; CPU time per step over TensorFlow's, at most."""

_FOLDER = Path(__file__).resolve().parent
_ANSWER_SECONDS = 300.0
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
        command: What all its processes run.
        environ: Their environment, without TF_CONFIG.
    """

    def __init__(self, name: str, command: list[str], environ: Mapping[str, str]) -> None:
        from distributary.launch._environment import free_addresses

        self.name = name
        addresses = free_addresses("127.0.0.1", 1 + NUM_WORKERS + NUM_SERVERS)
        cluster = {
            "chief": addresses[:1],
            "worker": addresses[1 : 1 + NUM_WORKERS],
            "ps": addresses[1 + NUM_WORKERS :],
        }

        def environ_of(role: str, index: int) -> dict[str, str]:
            task = {"type": role, "index": index}
            config = json.dumps({"cluster": cluster, "task": task})
            return {**environ, **_ONE_THREAD, "TF_CONFIG": config}

        self._tasks = [
            subprocess.Popen(
                command,
                env=environ_of(role, index),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for role in ("worker", "ps")
            for index in range(len(cluster[role]))
        ]
        self._chief = _served.ServedJob(name, [command], [environ_of("chief", 0)], _ANSWER_SECONDS)
        self.pids = {
            "worker": [task.pid for task in self._tasks[:NUM_WORKERS]],
            "server": [task.pid for task in self._tasks[NUM_WORKERS:]],
            "chief": self._chief.pids,
        }

    def peer(self, name: str) -> "Metered":
        """A workload, by its name."""
        return Metered(_served.ServedPeer(name, self._chief), self)

    def close(self) -> None:
        """Ends the processes."""
        self._chief.close()
        for task in self._tasks:
            task.kill()
            task.wait()


class Metered:
    """A peer that also knows the CPU time of its blocks, of all processes.

    Args:
        peer: The workload.
        side: Whose processes run it.
    """

    def __init__(self, peer: _served.ServedPeer, side: Side) -> None:
        self.name = side.name
        self.cpu_seconds: list[dict[str, float]] = []
        self.losses = peer.losses
        self._peer = peer
        self._side = side

    def time_block(self, num_steps: int) -> float:
        """Takes `num_steps` steps and returns the seconds per step."""
        before = _cpu_seconds(self._side.pids)
        seconds = self._peer.time_block(num_steps)
        after = _cpu_seconds(self._side.pids)
        self.cpu_seconds.append({role: (after[role] - before[role]) / num_steps for role in after})
        return seconds

    def close(self) -> None:
        """Nothing to do: others share the processes."""


def _cpu_seconds(pids: Mapping[str, list[int]]) -> dict[str, float]:
    def seconds(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    return {role: sum(map(seconds, own)) for role, own in pids.items()}


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if a loss has not fallen, else 0."""
    load_before = _report.load_average()
    version = _tensorflow.find_tensorflow(arguments.tensorflow_python)
    if version is None:
        print("tensorflow: not installed (see --tensorflow-python)", file=sys.stderr)
    rows: list[dict[str, Json]] = []
    problems: list[str] = []
    with contextlib.ExitStack() as stack:
        commands = {
            "distributary": ([sys.executable, "_ps_tasks.py"], _processes.environment(1)),
            "tensorflow": (
                [arguments.tensorflow_python, "_ps_tensorflow.py"],
                _tensorflow.environment(),
            ),
        }
        sides = []
        for name, ([python, script], environ) in commands.items():
            if name == "distributary" or version is not None:
                sides.append(Side(name, [python, str(_FOLDER / script)], environ))
                stack.callback(sides[-1].close)
        for name in NAMES if arguments.only is None else arguments.only.split(","):
            print(f"{name} ...", file=sys.stderr, flush=True)
            row = _measure(name, sides, arguments)
            rows.append(row)
            if name != "empty":
                problems += [
                    f"{name}: the loss of {side} has not fallen: {losses}"
                    for side, losses in row["losses"].items()
                    if not losses[-1] < losses[0]
                ]
    _print(rows)
    _print_chief(rows)
    _report.write(
        "parameter_server",
        rows=rows,
        settings={
            "rounds": arguments.rounds,
            "block_seconds": arguments.block_seconds,
            "workers": NUM_WORKERS,
            "servers": NUM_SERVERS,
            "threads": _ONE_THREAD,
        },
        load_before=load_before,
        more_versions={"tensorflow": version or "not measured"},
        folder=arguments.output,
    )
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _measure(name: str, sides: list[Side], arguments: argparse.Namespace) -> dict[str, Json]:
    peers = [side.peer(name) for side in sides]
    first = {peer.name: peer.losses(20) for peer in peers}
    num_steps = {}
    for peer in peers:
        peer.time_block(50)
        seconds = peer.time_block(50)
        num_steps[peer.name] = max(50, min(50_000, round(arguments.block_seconds / seconds)))
    for peer in peers:
        peer.cpu_seconds.clear()
    seconds_of = _timing.interleave(peers, arguments.rounds, num_steps)
    last = {peer.name: peer.losses(20) for peer in peers}
    return {
        "workload": name,
        "num_steps": num_steps,
        "seconds": seconds_of,
        "cpu_seconds": {
            peer.name: [sum(spent.values()) for spent in peer.cpu_seconds[1:]] for peer in peers
        },
        **{
            f"{role}_cpu_seconds": {
                peer.name: [spent[role] for spent in peer.cpu_seconds[1:]] for peer in peers
            }
            for role in ("chief", "worker", "server")
        },
        "losses": {
            side: [statistics.mean(first[side]), statistics.mean(last[side])] for side in first
        },
    }


def _print(rows: list[dict[str, Json]]) -> None:
    table = []
    for row in rows:
        ours = row["seconds"]["distributary"]
        cpu = row["cpu_seconds"]["distributary"]
        cells: list[object] = [
            row["workload"],
            1 / statistics.median(ours),
            1e3 * statistics.median(cpu),
        ]
        if "tensorflow" in row["seconds"]:
            faster = _timing.summarize_ratio(row["seconds"]["tensorflow"], ours)
            cheaper = _timing.summarize_ratio(cpu, row["cpu_seconds"]["tensorflow"])
            row["ratio"], row["cpu_ratio"] = faster, cheaper
            at_least, at_most = BARS[row["workload"]]
            cells += [
                1 / statistics.median(row["seconds"]["tensorflow"]),
                1e3 * statistics.median(row["cpu_seconds"]["tensorflow"]),
                "{median:.2f} ({lower_quartile:.2f} to {upper_quartile:.2f})".format(**faster),
                at_least,
                "ok" if faster["median"] >= at_least else "MISSED",
                cheaper["median"],
                at_most,
                "-" if at_most is None else "ok" if cheaper["median"] <= at_most else "MISSED",
            ]
        table.append([*cells, *["-"] * (11 - len(cells))])
    _report.print_table(
        [
            *("work", "steps/s", "CPU ms", "TF steps/s", "TF CPU ms"),
            *("times as many", "bar", "", "CPU / TF's", "bar", ""),
        ],
        table,
    )


def _print_chief(rows: list[dict[str, Json]]) -> None:
    """What a closure costs the chief, which limits the number of workers."""
    print()
    table = []
    for row in rows:
        spent = statistics.median(row["chief_cpu_seconds"]["distributary"])
        table.append([row["workload"], 1e6 * spent, round(1 / spent) if spent else None])
    _report.print_table(
        ["work", "chief CPU us per step", "steps/s of a chief with one core"], table
    )


def _arguments() -> argparse.Namespace:
    made = _command_line.parser(__doc__, "blocks of each side", 7, 2)
    made.add_argument("--tensorflow-python", default=sys.executable, metavar="PATH")
    made.add_argument("--only", help=f"of {', '.join(NAMES)}, comma-separated")
    made.add_argument("--block-seconds", type=float, default=3.0)
    return _command_line.parse(made)


if __name__ == "__main__":
    sys.path.insert(0, str(_FOLDER.parent / "src"))
    sys.exit(main(_arguments()))
