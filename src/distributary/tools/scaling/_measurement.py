"""How training scales: measured with more replicas, predicted for more machines, and drawn.

A script runs once for each number of replicas, with that number of devices. Nothing of a prediction
is measured.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from distributary._threads import num_cores
from distributary.cluster_resolver import visible_gpus
from distributary.errors import LaunchError
from distributary.launch import ALLOCATOR_SETTINGS
from distributary.tools.compilation import Script, call_in_process
from distributary.tools.scaling._timer import Timing, time_script

_NUM_LAST_LINES = 20


def default_replicas() -> tuple[int, ...]:
    """Returns 1, 2, 4, ... up to the number of GPUs, or of cores if there are none."""
    limit = len(visible_gpus()) or num_cores()
    powers = [1 << i for i in range(limit.bit_length())]
    return tuple(powers if powers[-1] == limit else [*powers, limit])


def measure(
    script_of: Mapping[int, Script], seconds: float, environ: Mapping[str, str]
) -> list[Timing]:
    """Measures a script with each number of replicas, one after the other.

    Args:
        script_of: The script for each number of replicas.
        seconds: Seconds for which to measure each.
        environ: The environment.

    Raises:
        LaunchError: if a script fails, or has another number of replicas.
    """
    timings = [_timed(script, n, seconds, environ) for n, script in sorted(script_of.items())]
    rates = [(t.examples_per_step or 0) / t.seconds / t.num_replicas for t in timings]
    is_known = all(timing.examples_per_step for timing in timings)
    return [
        replace(timing, efficiency=rate / rates[0] if is_known else None)
        for timing, rate in zip(timings, rates, strict=True)
    ]


def _timed(script: Script, num_replicas: int, seconds: float, environ: Mapping[str, str]) -> Timing:
    timing, process = call_in_process(
        time_script,
        script,
        seconds,
        environ=_environ(num_replicas, environ),
        stderr=subprocess.STDOUT,
    )
    if not isinstance(timing, Timing):
        lines = process.stdout.splitlines()[-_NUM_LAST_LINES:]
        raise LaunchError(
            f"With --replicas {num_replicas}, {script.path} ended with exit code"
            f" {process.returncode}. Its last lines:\n  " + "\n  ".join(lines)
        )
    if timing.num_replicas != num_replicas:
        raise LaunchError(
            f"{script.path} has {timing.num_replicas} replicas, expected {num_replicas}. Let its"
            " strategy use all devices, as MirroredStrategy() does, and ask for at most as many"
            " replicas as there are GPUs. A TPU can only be measured as a whole."
        )
    return timing


def _environ(num_replicas: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment with this number of CPU devices and GPUs."""
    result = {**ALLOCATOR_SETTINGS, **environ} if sys.platform == "linux" else dict(environ)
    gpus = environ.get("CUDA_VISIBLE_DEVICES")
    names = gpus.split(",") if gpus else [str(i) for i in range(num_replicas)]
    if gpus != "":
        result["CUDA_VISIBLE_DEVICES"] = ",".join(names[:num_replicas])
    result["JAX_NUM_CPU_DEVICES"] = str(num_replicas)
    return result


@final
@dataclass(frozen=True)
class Network:
    """The network between the hosts.

    Args:
        latency_seconds: Latency in one direction.
        bytes_per_second: Bandwidth of a host, in each direction at the same time.
        origin: Where these numbers come from.
    """

    latency_seconds: float
    bytes_per_second: float
    origin: str


@final
@dataclass(frozen=True)
class Prediction:
    """The prediction for a number of hosts.

    Args:
        num_hosts: Number of hosts.
        num_replicas: Number of replicas on all hosts together.
        seconds: Seconds per step.
        examples_per_second: Examples per second of all replicas; None if the batch size is unknown.
        efficiency: Time of a step on one host, divided by `seconds`.
    """

    num_hosts: int
    num_replicas: int
    seconds: float
    examples_per_second: float | None
    efficiency: float


def predict(timing: Timing, network: Network, hosts: Sequence[int]) -> list[Prediction]:
    """Predicts steps on several hosts: the measured step, and then a ring all-reduce.

    The ring between the hosts does not overlap with the step. It takes 2 (N - 1) / N times the
    bytes divided by the bandwidth, and for each all-reduce 2 (N - 1) times the latency. Each host
    keeps its batch, so the global batch grows with the number of hosts.

    Args:
        timing: The measurement of one host. It must have several replicas, because a single one
            reduces nothing.
        network: The network between the hosts.
        hosts: Numbers of hosts.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations" (2009).
    """
    predictions = []
    for num_hosts in hosts:
        turns = 2 * (num_hosts - 1)
        transfer = turns / num_hosts * timing.reduced_bytes / network.bytes_per_second
        latency = turns * network.latency_seconds * timing.num_reductions
        seconds = timing.seconds + transfer + latency
        examples = timing.examples_per_step
        predictions.append(
            Prediction(
                num_hosts,
                num_hosts * timing.num_replicas,
                seconds,
                None if examples is None else num_hosts * examples / seconds,
                timing.seconds / seconds,
            )
        )
    return predictions


_BAR_WIDTH = 60


def draw(timings: Sequence[Timing]) -> str:
    """Returns a bar per number of replicas: the step's time, and in it that of its all-reduces."""
    longest = max(timing.seconds for timing in timings)
    lines = ["time of a step: ▒ what its all-reduces take alone, █ the rest"]
    for timing in timings:
        width = max(1, round(_BAR_WIDTH * timing.seconds / longest))
        reducing = min(width, round(width * timing.communication))
        lines.append(f"{timing.num_replicas:>8}  {'█' * (width - reducing)}{'▒' * reducing}")
    return "\n".join(lines)


def write_png(
    path: Path, title: str, timings: Sequence[Timing], predictions: Sequence[Prediction]
) -> None:
    """Writes a picture of step times and efficiency, with predictions as dashed lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    figure.suptitle(title)
    times, efficiencies = figure.subplots(1, 2)
    replicas = [timing.num_replicas for timing in timings]
    seconds = [timing.seconds for timing in timings]
    reducing = [min(timing.reduction_seconds, timing.seconds) for timing in timings]
    positions = range(len(timings))
    rest = [1e3 * (a - b) for a, b in zip(seconds, reducing, strict=True)]
    times.bar(positions, rest, label="the rest of the step")
    times.bar(positions, [1e3 * x for x in reducing], bottom=rest, label="its all-reduces alone")
    times.set(xlabel="replicas on this machine", ylabel="ms per step", title="measured")
    times.set_xticks(positions, [str(n) for n in replicas])
    times.legend()
    known = [(timing.num_replicas, timing.efficiency) for timing in timings if timing.efficiency]
    if known:
        efficiencies.plot(*zip(*known, strict=True), "o-", label="measured")
        if predictions:
            start = known[-1][1]
            more = [(p.num_replicas, start * p.efficiency) for p in predictions]
            line = zip(known[-1], *more, strict=True)
            efficiencies.plot(*line, "x--", label="predicted for more hosts")
        efficiencies.legend()
    efficiencies.set(xlabel="replicas", ylabel="examples/s per replica, relative")
    efficiencies.set_title("measured, and predicted for more hosts" if predictions else "measured")
    efficiencies.set_xscale("log", base=2)
    efficiencies.xaxis.set_major_formatter("{x:.0f}")
    efficiencies.axhline(1, color="grey", linewidth=0.5)
    efficiencies.set_ylim(bottom=0)
    figure.savefig(path, format="png", dpi=120)
