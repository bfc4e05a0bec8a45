"""The command `distributary bench`."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distributary.cli._compile import add_script_arguments, check_script
from distributary.cli._doctor import add_json_argument, write_json
from distributary.diagnosis import format_bytes, loopback
from distributary.errors import DistributaryError
from distributary.scaling import (
    MODELS,
    Network,
    Prediction,
    Program,
    Row,
    default_replicas,
    draw,
    measure,
    predict,
    write_png,
)

__all__ = ["add_bench_command"]

_EPILOG = """\
A script runs once for each number of replicas, until enough of its steps are measured. It must use
all devices, as MirroredStrategy() does, and train for at least a few seconds.

examples:
  distributary bench
  distributary bench --model transformer --replicas 1,2,4 --plot scaling.png
  distributary bench --hosts 2,8,32 --gbit 100 --latency-us 10 train.py --epochs 100
"""
_MODULE = "distributary.scaling._training_loop"


def add_bench_command(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser(
        "bench",
        help="measure how training scales with replicas, and predict how it scales with hosts",
        description="Measures the training step of a built-in model or of a script on more and"
        " more replicas of this machine, and how much of it the all-reduces take. Predicts the time"
        " of the step on several hosts from latency and bandwidth.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model",
        choices=MODELS,
        default="mlp",
        help="model to measure if you do not give a script (default: mlp)",
    )
    add(
        "--replicas",
        type=_numbers,
        metavar="N,N",
        help="numbers of replicas (default: 1, 2, 4, ... up to the number of GPUs, or of cores)",
    )
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--batch",
        type=int,
        default=64,
        metavar="B",
        help="examples per replica, with --model (default: 64)",
    )
    batch.add_argument(
        "--global-batch",
        type=int,
        metavar="B",
        help="examples that all replicas share, with --model",
    )
    add("--step", metavar="FUNCTION", help="name of the script's step function")
    add(
        "--seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds to measure for each number of replicas (default: 5)",
    )
    add(
        "--hosts",
        type=_numbers,
        default=[2, 4, 8, 16],
        metavar="N,N",
        help="numbers of hosts to predict (default: 2,4,8,16)",
    )
    add("--gbit", type=float, metavar="G", help="bandwidth between hosts, Gbit/s")
    add("--latency-us", type=float, metavar="U", help="latency between hosts, one way, us")
    add("--plot", type=Path, metavar="FILE", help="write a picture (PNG)")
    add_json_argument(parser)
    add_script_arguments(parser, "Python script to measure instead of a model", required=False)
    parser.set_defaults(run=_run, parser=parser)


def _numbers(text: str) -> list[int]:
    numbers = sorted({int(part) for part in text.split(",")})
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a number below 1")
    return numbers


def _run(namespace: argparse.Namespace) -> int:
    if namespace.script is not None:
        check_script(namespace)
    replicas = namespace.replicas or default_replicas(os.environ)
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    programs = {number: _program(namespace, number) for number in replicas}
    try:
        rows = measure(programs, namespace.seconds, environ)
        network = _network(namespace)
        # One replica reduces nothing; larger numbers of replicas show what there is to reduce.
        predictions = (
            predict(rows[-1], network, namespace.hosts) if rows[-1].timing.num_reductions else []
        )
        if namespace.plot is not None:
            title = f"{_title(namespace)} on {rows[-1].timing.platform.upper()}"
            write_png(namespace.plot, title, rows, predictions)
    except DistributaryError as error:
        print(f"distributary bench: {error}", file=sys.stderr)
        return 1
    content = {
        "program": _title(namespace),
        "measured": [
            {
                **asdict(row.timing),
                "seconds": row.timing.seconds,
                "examples_per_second": row.examples_per_second,
                "efficiency": row.efficiency,
                "communication": row.communication,
            }
            for row in rows
        ],
        "network": asdict(network),
        "predicted": [asdict(prediction) for prediction in predictions],
    }
    if write_json(namespace.json, content):
        print(_text(_title(namespace), rows, network, predictions))
    return 0


def _program(namespace: argparse.Namespace, num_replicas: int) -> Program:
    if namespace.script is not None:
        arguments = tuple(namespace.arguments)
        return Program(namespace.script, arguments, namespace.module, namespace.step)
    batch = namespace.batch
    if namespace.global_batch is not None:
        batch, rest = divmod(namespace.global_batch, num_replicas)
        if rest or not batch:
            namespace.parser.error(
                f"--global-batch {namespace.global_batch} is not divisible by {num_replicas}"
                " replicas"
            )
    return Program(_MODULE, (namespace.model, str(batch)), is_module=True)


def _title(namespace: argparse.Namespace) -> str:
    if namespace.script is not None:
        return " ".join([namespace.script, *namespace.arguments])
    if namespace.global_batch is not None:
        return f"{namespace.model}, {namespace.global_batch} examples"
    return f"{namespace.model}, {namespace.batch} examples per replica"


def _network(namespace: argparse.Namespace) -> Network:
    """Returns the network of the options; measures the missing values on loopback."""
    given = []
    latency, rate = namespace.latency_us, namespace.gbit
    if latency is not None:
        given.append("the given latency")
    if rate is not None:
        given.append("the given bandwidth")
    if len(given) < 2:
        link = loopback()
        given.append("this machine's loopback, which is not a network")
        latency = link.round_trip_seconds / 2 * 1e6 if latency is None else latency
        rate = link.bytes_per_second * 8 / 1e9 if rate is None else rate
    return Network(latency / 1e6, rate * 1e9 / 8, " and ".join(given))


def _text(
    title: str, rows: Sequence[Row], network: Network, predictions: Sequence[Prediction]
) -> str:
    timing = rows[-1].timing
    heads = f"{'ms/step':>9} {'':>16} {'examples/s':>11} {'efficiency':>10}"
    lines = [
        f"measured: {title}, step {timing.step!r}, {timing.platform.upper()} devices",
        f"{'replicas':>8} {heads}  all-reduces alone",
        *map(_measured_line, rows),
        "",
        draw(rows),
    ]
    if timing.platform == "cpu":
        lines += ["", "CPU devices share the cores: more devices do not add hardware."]
    lines.append("")
    if not predictions:
        lines.append("No prediction: the largest number of replicas has no all-reduce.")
        return "\n".join(lines)
    host = f"hosts of {timing.num_replicas} replicas"
    rate = f"{network.bytes_per_second * 8e-9:.1f} Gbit/s"
    lines += [
        f"predicted, not measured: {host} in a ring that overlaps with nothing,",
        f"{network.latency_seconds * 1e6:.0f} us one way and {rate} ({network.origin})",
        f"{'hosts':>8} {heads}",
        *map(_predicted_line, predictions),
    ]
    return "\n".join(lines)


def _measured_line(row: Row) -> str:
    timing = row.timing
    spread = f"({min(timing.block_seconds) * 1e3:.2f}-{max(timing.block_seconds) * 1e3:.2f})"
    reduced = "none"
    if timing.num_reductions:
        reduced = (
            f"{format_bytes(timing.reduced_bytes)} in {timing.reduction_seconds * 1e3:.2f} ms,"
            f" {row.communication:.0%} of the step"
        )
    return (
        f"{timing.num_replicas:>8} {timing.seconds * 1e3:>9.2f} {spread:<16}"
        f" {_number(row.examples_per_second):>11} {_percent(row.efficiency):>10}  {reduced}"
    )


def _predicted_line(prediction: Prediction) -> str:
    return (
        f"{prediction.num_hosts:>8} {prediction.seconds * 1e3:>9.2f} {'':<16}"
        f" {_number(prediction.examples_per_second):>11} {_percent(prediction.efficiency):>10}"
    )


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"
