"""Measures how training scales with replicas, and predicts how it scales with hosts.

Measures the training step of a built-in model or of a script on more and more replicas of this
machine, and how much of it the all-reduces take. Predicts the time of the step on several hosts
from latency and bandwidth. A script runs once for each number of replicas, until enough of its
steps are measured. It must use all devices, as MirroredStrategy() does, and train for at least a
few seconds.

Examples:
  distributary bench
  distributary bench --model transformer --replicas 1,2,4 --plot scaling.png
  distributary bench --hosts 2,8,32 --gbit 100 --latency-us 10 train.py --epochs 100
"""

import argparse
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from distributary.tools import compilation, diagnosis, scaling
from distributary.tools.cli._arguments import (
    add_json_argument,
    add_option,
    add_script_arguments,
    check_script,
    number,
    one_of,
    output_file,
    whole,
    wholes,
    write_json,
)

_MODULE = "distributary.tools.scaling._training_loop"
_MODELS = ("mlp", "transformer")  # of scaling.MODELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add = partial(add_option, parser)
    text = f"model to measure if you do not give a script: {' or '.join(_MODELS)} (default: mlp)"
    add("--model", one_of(*_MODELS), "NAME", text)
    text = "numbers of replicas (default: 1, 2, 4, ... up to the number of GPUs, or of cores)"
    add("--replicas", wholes, "N,N", text)
    batch = parser.add_mutually_exclusive_group()
    add_option(batch, "--batch", whole(1), "B", "examples per replica, with --model (default: 64)")
    text = "examples that all replicas share, with --model"
    add_option(batch, "--global-batch", whole(1), "B", text)
    add("--step", str, "FUNCTION", "name of the script's step function")
    text = "seconds to measure for each number of replicas"
    add("--seconds", number(above_zero=True), "S", text, 5.0)
    add("--hosts", wholes, "N,N", "numbers of hosts to predict", "2,4,8,16")
    add("--gbit", number(above_zero=True), "G", "bandwidth between hosts, Gbit/s")
    add("--latency-us", number(), "U", "latency between hosts, one way, us")
    add("--plot", _picture, "FILE", "write a picture (PNG)")
    add_json_argument(parser)
    add_script_arguments(parser, "Python script to measure instead of a model", required=False)


def _picture(text: str) -> Path:
    path = output_file(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"the picture is a PNG: expected NAME.png, found {text!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "a picture needs matplotlib. Install it: pip install matplotlib"
        )
    return path


def run(namespace: argparse.Namespace) -> int:
    """Measures, predicts, and prints both."""
    _check(namespace)
    replicas = namespace.replicas or scaling.default_replicas(os.environ)
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    scripts = {number: _script(namespace, number) for number in replicas}
    timings = scaling.measure(scripts, namespace.seconds, environ)
    last = timings[-1]
    network = _network(namespace)
    # One replica reduces nothing; larger numbers of replicas show what there is to reduce.
    predictions = scaling.predict(last, network, namespace.hosts) if last.num_reductions else []
    if namespace.plot is not None:
        title = f"{_title(namespace)} on {last.platform.upper()}"
        scaling.write_png(namespace.plot, title, timings, predictions)
    content = {
        "program": _title(namespace),
        "measured": [
            {
                **asdict(timing),
                "seconds": timing.seconds,
                "examples_per_second": timing.examples_per_second,
                "communication": timing.communication,
            }
            for timing in timings
        ],
        "network": asdict(network),
        "predicted": [asdict(prediction) for prediction in predictions],
    }
    if write_json(namespace.json, content):
        print(_text(_title(namespace), timings, network, predictions))
    return 0


def _check(namespace: argparse.Namespace) -> None:
    """Ends the command if options contradict each other, or the script does not exist."""
    if namespace.script is None:
        for flag, value in (("--step", namespace.step), ("--module", namespace.module)):
            if value:
                namespace.parser.error(f"{flag} is for a script. Give its path, or leave it out.")
        namespace.model = namespace.model or _MODELS[0]
        namespace.batch = namespace.batch or 64
        return
    for name in ("model", "batch", "global_batch"):
        if getattr(namespace, name) is not None:
            namespace.parser.error(
                f"--{name.replace('_', '-')} is for a built-in model, but there is the script"
                f" {namespace.script!r}. Leave one of the two out."
            )
    check_script(namespace)


def _script(namespace: argparse.Namespace, num_replicas: int) -> "compilation.Script":
    if namespace.script is not None:
        arguments = tuple(namespace.arguments)
        return compilation.Script(namespace.script, arguments, namespace.module, namespace.step)
    batch = namespace.batch
    if namespace.global_batch is not None:
        batch, rest = divmod(namespace.global_batch, num_replicas)
        if rest or not batch:
            namespace.parser.error(
                f"--global-batch {namespace.global_batch} is not divisible by {num_replicas}"
                " replicas"
            )
    return compilation.Script(_MODULE, (namespace.model, str(batch)), is_module=True)


def _title(namespace: argparse.Namespace) -> str:
    if namespace.script is not None:
        return " ".join([namespace.script, *namespace.arguments])
    if namespace.global_batch is not None:
        return f"{namespace.model}, {namespace.global_batch} examples"
    return f"{namespace.model}, {namespace.batch} examples per replica"


def _network(namespace: argparse.Namespace) -> "scaling.Network":
    """Returns the network of the options; measures the missing values on loopback."""
    latency, rate = namespace.latency_us, namespace.gbit
    options = (latency, "the given latency"), (rate, "the given bandwidth")
    sources = [name for value, name in options if value is not None]
    if len(sources) < 2:
        link = diagnosis.loopback()
        sources.append("this machine's loopback, which is not a network")
        latency = link.round_trip_seconds / 2 * 1e6 if latency is None else latency
        rate = link.bytes_per_second * 8 / 1e9 if rate is None else rate
    return scaling.Network(latency / 1e6, rate * 1e9 / 8, " and ".join(sources))


def _text(
    title: str,
    timings: "Sequence[scaling.Timing]",
    network: "scaling.Network",
    predictions: "Sequence[scaling.Prediction]",
) -> str:
    last = timings[-1]
    heads = f"{'ms/step':>9} {'':>16} {'examples/s':>11} {'efficiency':>10}"
    lines = [
        f"measured: {title}, step {last.step!r}, {last.platform.upper()} devices",
        f"{'replicas':>8} {heads}  all-reduces alone",
        *map(_measured_line, timings),
        "",
        scaling.draw(timings),
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
    host = f"hosts of {last.num_replicas} replica{'' if last.num_replicas == 1 else 's'}"
    rate = f"{network.bytes_per_second * 8e-9:.1f} Gbit/s"
    lines += [
        f"predicted, not measured: {host} in a ring that overlaps with nothing,",
        f"{network.latency_seconds * 1e6:.0f} us one way and {rate} ({network.origin})",
        f"{'hosts':>8} {heads}",
        *map(_predicted_line, predictions),
    ]
    return "\n".join(lines)


def _verdict(timings: "Sequence[scaling.Timing]") -> str:
    """Returns a sentence that says whether more devices pay."""
    rates = [timing.examples_per_second or 0.0 for timing in timings]
    if len(timings) == 1 or not all(rates):
        return "Whether more devices pay needs two numbers of replicas, and known batch sizes."
    best = max(range(len(rates)), key=rates.__getitem__)
    if best == 0:
        return f"More devices do not pay: {timings[0].num_replicas} trains the most examples."
    gain, most = rates[best] / rates[0], timings[best].num_replicas
    return f"More devices pay: {most} train {gain:.2f} times as fast as {timings[0].num_replicas}."


def _measured_line(timing: "scaling.Timing") -> str:
    spread = f"({min(timing.block_seconds) * 1e3:.2f}-{max(timing.block_seconds) * 1e3:.2f})"
    reduced = "none"
    if timing.num_reductions:
        reduced = (
            f"{compilation.format_bytes(timing.reduced_bytes)} in"
            f" {timing.reduction_seconds * 1e3:.2f} ms, {timing.communication:.0%} of the step"
        )
    return f"{_line(timing.num_replicas, timing.seconds, spread, timing)}  {reduced}"


def _predicted_line(prediction: "scaling.Prediction") -> str:
    return _line(prediction.num_hosts, prediction.seconds, "", prediction)


def _line(
    number: int, seconds: float, spread: str, result: "scaling.Timing | scaling.Prediction"
) -> str:
    rate, efficiency = result.examples_per_second, result.efficiency
    return (
        f"{number:>8} {seconds * 1e3:>9.2f} {spread:<16}"
        f" {'?' if rate is None else f'{rate:,.0f}':>11}"
        f" {'?' if efficiency is None else f'{efficiency:.0%}':>10}"
    )
