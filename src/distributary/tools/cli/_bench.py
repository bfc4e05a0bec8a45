"""The command `bench`."""

import argparse
import importlib.util
from functools import partial
from pathlib import Path

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
)

_MODELS = ("mlp", "transformer")  # of scaling.MODELS


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_bench(namespace: argparse.Namespace) -> int:
    """Measures how training scales with replicas, and predicts how it scales with hosts.

    Measures the training step of a built-in model or of a script on more and more replicas of this
    machine, and how much of it the all-reduces take. Predicts the time of the step on several hosts
    from latency and bandwidth. A script runs once for each number of replicas, until enough of its
    steps are measured. It must use all devices, as MirroredStrategy() does, and train for at least
    a few seconds.

    Examples:
      distributary bench
      distributary bench --model transformer --replicas 1,2,4 --plot scaling.png
      distributary bench --hosts 2,8,32 --gbit 100 --latency-us 10 train.py --epochs 100
    """
    _check(namespace)
    from distributary.tools.cli._scaling_report import print_report

    print_report(namespace)
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
