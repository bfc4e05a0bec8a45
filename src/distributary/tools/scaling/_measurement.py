"""How training scales: measured with more replicas, predicted for more machines, and drawn.

A script runs once for each number of replicas, with that number of devices. Nothing of a prediction
is measured.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from distributary._threads import num_cores
from distributary.cluster_resolver import visible_gpus
from distributary.devices import REPLICA_AXIS, Nest, ProgramKind, watch_programs
from distributary.engine import counted, format_bytes, placed_struct_of
from distributary.errors import DistributaryError, InvalidValueError, LaunchError
from distributary.launch import ALLOCATOR_SETTINGS
from distributary.tools.compilation import (
    Script,
    ScriptEnded,
    StandIn,
    call_in_process,
    collectives_of_step,
    moved_activations,
    run_script,
)
from distributary.tools.diagnosis import all_reduce_seconds, loopback

# The training step of a script, measured while the script runs.

_NUM_WARM_UP_STEPS = 3  # the first one compiles, and the next ones may allocate memory
_NUM_BLOCKS = 5
_NUM_REDUCTIONS = 20


@final
@dataclass(frozen=True)
class Timing:
    """The time that steps of a script take on some replicas of this machine.

    Args:
        step: Name of the step's function, or of the Keras method.
        platform: `"cpu"`, `"gpu"` or `"tpu"`.
        num_replicas: Number of replicas.
        block_seconds: Seconds per step, input and Python included, of several runs of steps.
        examples_per_step: Size of the global batch; None if unknown.
        num_reductions: Number of all-reduces in a step.
        reduced_bytes: Bytes that they reduce; reduce-scatters and all-gathers count half.
        reduction_seconds: Seconds that all-reduces of these sizes take alone.
        activations: The collectives that move activations, as text for people.
        efficiency: Examples per second and replica, divided by those with the smallest number of
            replicas that was measured; None if the batch size is unknown.
    """

    step: str
    platform: str
    num_replicas: int
    block_seconds: Sequence[float]
    examples_per_step: int | None
    num_reductions: int
    reduced_bytes: int
    reduction_seconds: float
    activations: Sequence[str]
    efficiency: float | None = None

    @property
    def seconds(self) -> float:
        """Median seconds per step."""
        return float(np.median(self.block_seconds))

    @property
    def examples_per_second(self) -> float | None:
        """Examples per second of all replicas together; None if the batch size is unknown."""
        examples = self.examples_per_step
        return None if examples is None else examples / self.seconds

    @property
    def communication(self) -> float:
        """Time of the all-reduces alone, divided by the time of the whole step."""
        return self.reduction_seconds / self.seconds


def time_script(script: Script, seconds: float) -> Timing:
    """Runs a script as the main program, and times its training step.

    Args:
        script: The script.
        seconds: Seconds for which to measure.

    Raises:
        SystemExit: with a text that says why there is no measurement, or by the script.
    """
    timer = StepTimer(seconds, script.step_name)
    watch_programs(timer.wrap)
    try:
        run_script(script)
        return timer.timing(script.path)
    except DistributaryError as error:
        sys.exit(str(error))


@final
class StepTimer:
    """A watcher of programs, see `watch_programs`, that ends the script after enough steps.

    Args:
        seconds: Seconds for which to measure.
        step_name: Name of the function that is the step; None for the first program that updates a
            trainable variable.
    """

    def __init__(self, seconds: float, step_name: str | None) -> None:
        self._block_limit_seconds = seconds / _NUM_BLOCKS
        self._step_name = step_name
        self._call: Any = None  # the step
        self._num_warm = 0
        self._num_steps = 0  # in the current block
        self._start = 0.0
        self._blocks: list[float] = []

    def wrap(
        self, call: Any, mesh: jax.sharding.Mesh | None, kind: ProgramKind
    ) -> Callable[..., Any]:
        """Returns the function to call in place of a program."""
        if not kind.is_step(self._step_name):
            return call
        return StandIn(partial(self._run, call, mesh, kind.name), call.lower)

    def timing(self, script: str) -> Timing:
        """Returns the measurement; measures the all-reduces alone.

        Raises:
            InvalidValueError: if the script has taken too few steps.
        """
        if self._call is None:
            what = "a training step" if self._step_name is None else repr(self._step_name)
            raise InvalidValueError(
                f"{script} ended without running {what} under a strategy. Strategies with parameter"
                " servers or central storage cannot be measured; --step names another function."
            )
        if not self._blocks:
            raise InvalidValueError(
                f"{script} ended after {self._num_warm + self._num_steps} steps. Let it train for"
                " longer, or measure for less time with --seconds."
            )
        mesh = self._mesh
        sizes: list[int] = []
        activations: list[str] = []
        reduction_seconds = 0.0
        if mesh is not None and mesh.size > 1:
            collectives = collectives_of_step(self._call.lower(*self._specs).compile())
            for collective in collectives:
                share = 1.0 if collective.kind == "all-reduce" else 0.5
                sizes += [round(share * collective.num_bytes)] * (collective.num_calls or 1)
            activations = moved_activations(collectives)
            if sizes:
                reduction_seconds = all_reduce_seconds(mesh, sizes, _NUM_REDUCTIONS)
        devices = jax.local_devices() if mesh is None else mesh.devices.flat
        num_replicas = 1 if mesh is None else mesh.shape[REPLICA_AXIS]
        return Timing(
            step=self._name,
            platform=devices[0].platform,
            num_replicas=num_replicas,
            block_seconds=self._blocks,
            examples_per_step=_num_examples(self._specs[-1], num_replicas),
            num_reductions=len(sizes),
            reduced_bytes=sum(sizes),
            reduction_seconds=reduction_seconds,
            activations=activations,
        )

    def _run(self, call: Any, mesh: jax.sharding.Mesh | None, name: str, *args: Nest) -> Nest:
        if self._call is None:
            self._call, self._mesh, self._name = call, mesh, name
            self._specs = jax.tree.map(placed_struct_of, args)  # the call donates the arguments
        result = call(*args)
        if self._call is not call:  # the same function, but for another shape
            return result
        if self._num_warm < _NUM_WARM_UP_STEPS:
            self._num_warm += 1
            self._begin_after(result)
            return result
        self._num_steps += 1
        if time.perf_counter() - self._start >= self._block_limit_seconds:
            num_steps = self._num_steps
            start, end = self._start, self._begin_after(result)
            self._blocks.append((end - start) / num_steps)
            if len(self._blocks) == _NUM_BLOCKS:
                raise ScriptEnded
        return result

    def _begin_after(self, result: Nest) -> float:
        """Starts a block once the devices have finished; returns the time of its start."""
        jax.block_until_ready(result)
        self._num_steps = 0
        self._start = time.perf_counter()
        return self._start


def _num_examples(data: Nest, num_replicas: int) -> int | None:
    """Returns the size of the global batch in the arguments of a step; None if there is none."""
    for leaf in jax.tree.leaves(data):
        shape = np.shape(leaf)
        sharding = getattr(leaf, "sharding", None)
        if sharding is None and shape and num_replicas == 1:  # from Keras, on the host
            return shape[0]
        if sharding is None and shape[:1] == (num_replicas,) and len(shape) > 1:
            return num_replicas * shape[1]
        spec = getattr(sharding, "spec", None)
        if spec == P(REPLICA_AXIS) and len(shape) > 1:
            return num_replicas * shape[1]
    return None


# A script with each number of replicas.

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
    environ = _environ(num_replicas, environ)
    timing, process = call_in_process(
        time_script, script, seconds, environ=environ, stderr=subprocess.STDOUT
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
        num_replicas, examples = num_hosts * timing.num_replicas, timing.examples_per_step
        rate = None if examples is None else num_hosts * examples / seconds
        efficiency = timing.seconds / seconds
        predictions.append(Prediction(num_hosts, num_replicas, seconds, rate, efficiency))
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
    what = "measured, and predicted for more hosts" if predictions else "measured"
    efficiencies.set(xlabel="replicas", ylabel="examples/s per replica, relative", title=what)
    efficiencies.set_xscale("log", base=2)
    efficiencies.xaxis.set_major_formatter("{x:.0f}")
    efficiencies.axhline(1, color="grey", linewidth=0.5)
    efficiencies.set_ylim(bottom=0)
    figure.savefig(path, format="png", dpi=120)


# The report of `distributary bench`.

_MODULE = "distributary.tools.scaling._training_loop"


def report(namespace: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Measures, predicts, and returns both, for JSON and as text; takes the command's arguments."""
    replicas = namespace.replicas or default_replicas()
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    scripts = {number: _script(namespace, number) for number in replicas}
    timings = measure(scripts, namespace.seconds, environ)
    title = _title(namespace)
    last = timings[-1]
    network = _network(namespace)
    # One replica reduces nothing; larger numbers of replicas show what there is to reduce.
    predictions = predict(last, network, namespace.hosts) if last.num_reductions else []
    if namespace.plot is not None:
        on = f"{title} on {last.platform.upper()}"
        write_png(namespace.plot, on, timings, predictions)
    derived = ("seconds", "examples_per_second", "communication")
    content = {
        "program": title,
        "measured": [asdict(t) | {name: getattr(t, name) for name in derived} for t in timings],
        "network": asdict(network),
        "predicted": [asdict(prediction) for prediction in predictions],
    }
    return content, _text(title, timings, network, predictions)


def _script(namespace: argparse.Namespace, num_replicas: int) -> Script:
    if namespace.script is not None:
        arguments = tuple(namespace.arguments)
        return Script(namespace.script, arguments, namespace.module, namespace.step)
    batch = namespace.batch
    if namespace.global_batch is not None:
        batch, rest = divmod(namespace.global_batch, num_replicas)
        if rest or not batch:
            namespace.parser.error(
                f"--global-batch {namespace.global_batch} is not divisible by {num_replicas}"
                " replicas"
            )
    return Script(_MODULE, (namespace.model, str(batch)), is_module=True)


def _title(namespace: argparse.Namespace) -> str:
    if namespace.script is not None:
        return " ".join([namespace.script, *namespace.arguments])
    if namespace.global_batch is not None:
        return f"{namespace.model}, {namespace.global_batch} examples"
    return f"{namespace.model}, {namespace.batch} examples per replica"


def _network(namespace: argparse.Namespace) -> Network:
    """Returns the network of the options; measures the missing values on loopback."""
    latency, rate = namespace.latency_us, namespace.gbit
    options = (latency, "the given latency"), (rate, "the given bandwidth")
    sources = [name for value, name in options if value is not None]
    if len(sources) < 2:
        link = loopback()
        sources.append("this machine's loopback, which is not a network")
        latency = link.round_trip_seconds / 2 * 1e6 if latency is None else latency
        rate = link.bytes_per_second * 8 / 1e9 if rate is None else rate
    return Network(latency / 1e6, rate * 1e9 / 8, " and ".join(sources))


def _text(
    title: str, timings: Sequence[Timing], network: Network, predictions: Sequence[Prediction]
) -> str:
    last = timings[-1]
    heads = f"{'ms/step':>9} {'':>16} {'examples/s':>11} {'efficiency':>10}"
    lines = [
        f"measured: {title}, step {last.step!r}, {last.platform.upper()} devices",
        f"{'replicas':>8} {heads}  all-reduces alone",
        *map(_measured_line, timings),
        "",
        draw(timings),
        "",
        _verdict(timings),
    ]
    if last.platform == "cpu":
        lines.append("CPU devices share the cores: more devices do not add hardware.")
    if last.activations:
        lines += ["", "activations that travel between devices:"]
        lines += [f"  {text}" for text in last.activations]
    lines.append("")
    if not predictions:
        lines.append("No prediction: the largest number of replicas has no all-reduce.")
        return "\n".join(lines)
    host = f"hosts of {counted(last.num_replicas, 'replica')}"
    rate = f"{network.bytes_per_second * 8e-9:.1f} Gbit/s"
    lines += [
        f"predicted, not measured: {host} in a ring that overlaps with nothing,",
        f"{network.latency_seconds * 1e6:.0f} us one way and {rate} ({network.origin})",
        f"{'hosts':>8} {heads}",
        *(_line(one.num_hosts, one.seconds, "", one) for one in predictions),
    ]
    return "\n".join(lines)


def _verdict(timings: Sequence[Timing]) -> str:
    """Returns a sentence that says whether more devices pay."""
    rates = [timing.examples_per_second or 0.0 for timing in timings]
    if len(timings) == 1 or not all(rates):
        return "Whether more devices pay needs two numbers of replicas, and known batch sizes."
    best = max(range(len(rates)), key=rates.__getitem__)
    if best == 0:
        return f"More devices do not pay: {timings[0].num_replicas} trains the most examples."
    gain, most = rates[best] / rates[0], timings[best].num_replicas
    return f"More devices pay: {most} train {gain:.2f} times as fast as {timings[0].num_replicas}."


def _measured_line(timing: Timing) -> str:
    spread = f"({min(timing.block_seconds) * 1e3:.2f}-{max(timing.block_seconds) * 1e3:.2f})"
    reduced = "none"
    if timing.num_reductions:
        reduced = (
            f"{format_bytes(timing.reduced_bytes)} in"
            f" {timing.reduction_seconds * 1e3:.2f} ms, {timing.communication:.0%} of the step"
        )
    return f"{_line(timing.num_replicas, timing.seconds, spread, timing)}  {reduced}"


def _line(number: int, seconds: float, spread: str, result: Timing | Prediction) -> str:
    rate, efficiency = result.examples_per_second, result.efficiency
    return (
        f"{number:>8} {seconds * 1e3:>9.2f} {spread:<16}"
        f" {'?' if rate is None else f'{rate:,.0f}':>11}"
        f" {'?' if efficiency is None else f'{efficiency:.0%}':>10}"
    )
