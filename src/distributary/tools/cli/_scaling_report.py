"""Measures how training scales, and predicts it for several hosts, for `distributary bench`."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict

from distributary.engine import counted, format_bytes
from distributary.tools import diagnosis, scaling
from distributary.tools.cli._arguments import write_json
from distributary.tools.compilation import Script

_MODULE = "distributary.tools.scaling._training_loop"


def print_report(namespace: argparse.Namespace) -> None:
    """Measures, predicts, and prints both; takes the arguments of the command."""
    replicas = namespace.replicas or scaling.default_replicas()
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


def _network(namespace: argparse.Namespace) -> scaling.Network:
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
    timings: Sequence[scaling.Timing],
    network: scaling.Network,
    predictions: Sequence[scaling.Prediction],
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
    host = f"hosts of {counted(last.num_replicas, 'replica')}"
    rate = f"{network.bytes_per_second * 8e-9:.1f} Gbit/s"
    lines += [
        f"predicted, not measured: {host} in a ring that overlaps with nothing,",
        f"{network.latency_seconds * 1e6:.0f} us one way and {rate} ({network.origin})",
        f"{'hosts':>8} {heads}",
        *(_line(one.num_hosts, one.seconds, "", one) for one in predictions),
    ]
    return "\n".join(lines)


def _verdict(timings: Sequence[scaling.Timing]) -> str:
    """Returns a sentence that says whether more devices pay."""
    rates = [timing.examples_per_second or 0.0 for timing in timings]
    if len(timings) == 1 or not all(rates):
        return "Whether more devices pay needs two numbers of replicas, and known batch sizes."
    best = max(range(len(rates)), key=rates.__getitem__)
    if best == 0:
        return f"More devices do not pay: {timings[0].num_replicas} trains the most examples."
    gain, most = rates[best] / rates[0], timings[best].num_replicas
    return f"More devices pay: {most} train {gain:.2f} times as fast as {timings[0].num_replicas}."


def _measured_line(timing: scaling.Timing) -> str:
    spread = f"({min(timing.block_seconds) * 1e3:.2f}-{max(timing.block_seconds) * 1e3:.2f})"
    reduced = "none"
    if timing.num_reductions:
        reduced = (
            f"{format_bytes(timing.reduced_bytes)} in"
            f" {timing.reduction_seconds * 1e3:.2f} ms, {timing.communication:.0%} of the step"
        )
    return f"{_line(timing.num_replicas, timing.seconds, spread, timing)}  {reduced}"


def _line(
    number: int, seconds: float, spread: str, result: scaling.Timing | scaling.Prediction
) -> str:
    rate, efficiency = result.examples_per_second, result.efficiency
    return (
        f"{number:>8} {seconds * 1e3:>9.2f} {spread:<16}"
        f" {'?' if rate is None else f'{rate:,.0f}':>11}"
        f" {'?' if efficiency is None else f'{efficiency:.0%}':>10}"
    )
