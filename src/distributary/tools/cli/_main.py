"""The command line of `distributary`, and its commands except those that make jobs."""

import argparse
import importlib.util
import inspect
import json
import platform
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from distributary.errors import DistributaryError
from distributary.job import package_versions
from distributary.launch import LaunchOptions
from distributary.tools.cli import _launch
from distributary.tools.cli._arguments import (
    Parser,
    add_json_argument,
    add_option,
    add_script_arguments,
    add_topology_arguments,
    check_script,
    check_topologies,
    number,
    one_of,
    output_file,
    suggestion,
    whole,
    wholes,
    write_json,
)

if TYPE_CHECKING:
    from distributary.tools.diagnosis import Check, Link, Report

# The commands that look at a machine: `doctor` and `devices`.

_PARTS = ("machine", "links", "all-reduce", "training")
_WIDTH = 100
_MARKS = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM", "skipped": "skipped"}


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    text = f"what to check: {', '.join(_PARTS)} (default: all of them)"
    add_option(parser, "--only", one_of(*_PARTS), "PART", text, nargs="+")
    text = "how long the tasks of a cluster wait for each other"
    add_option(parser, "--wait-seconds", number(), "S", text, 30.0)
    add_json_argument(parser)


def run_doctor(namespace: argparse.Namespace) -> int:
    """Finds out what is wrong or slow here, and how to fix it.

    Checks versions, devices, ports, threads and memory, times all-reduces against what the hardware
    should give, and trains a small network. If all tasks of a cluster run it at the same time, for
    example through the launcher, it also measures the links between them and names slow or missing
    ones. The exit code is 1 if there is a problem that would make training fail.

    Examples:
      distributary doctor
      distributary doctor --only links --json
      distributary launch --workers 3 -m distributary doctor
    """
    from distributary.tools.diagnosis import examine

    def use(report: "Report") -> None:
        if write_json(namespace.json, report.to_json()):
            print(_text(report), flush=True)

    report = examine(namespace.only or _PARTS, namespace.wait_seconds, use)
    return int(report.has_problem)


def _text(report: "Report") -> str:
    lines: list[str] = []
    for place, (task, checks) in enumerate(report.checks.items()):
        # The first task shows everything, the others only warnings and problems.
        shown = [c for c in checks if place == 0 or c.status in ("warning", "problem")]
        if shown and len(report.tasks) > 1:
            lines += [f"{task}:"]
        lines += [line for check in shown for line in _lines(check)]
    if report.links:
        lines += ["", *_matrix(report.links, report.tasks)]
    statuses = [c.status for checks in report.checks.values() for c in checks]
    counts = [(statuses.count("problem"), "problem"), (statuses.count("warning"), "warning")]
    lines += ["", ", ".join(f"{n} {what}{'' if n == 1 else 's'}" for n, what in counts)]
    return "\n".join(lines)


def _lines(check: "Check") -> list[str]:
    text = textwrap.wrap(check.detail, _WIDTH - 24) or [""]
    lines = [f"{_MARKS[check.status]:<8} {check.name:<13}  {text[0]}"]
    lines += [f"{'':<24}{line}" for line in text[1:]]
    if check.fix is not None:  # on one line, so that it can be copied
        lines.append(f"{'':<24}fix: {check.fix}")
    return lines


def _matrix(links: "Sequence[Link]", tasks: Sequence[str]) -> list[str]:
    """Returns a table of round trips and rates, from the task of the row to that of the column."""
    cells = {(link.source, link.target): _cell(link) for link in links}
    width = max(map(len, [*cells.values(), *tasks]))
    stem = max(map(len, tasks))
    rows = [" ".join([f"{'':<{stem}}", *(f"{task:>{width}}" for task in tasks)])]
    for source, task in enumerate(tasks):
        row = [cells.get((source, target), "?") for target in range(len(tasks))]
        rows.append(" ".join([f"{task:<{stem}}", *(f"{cell:>{width}}" for cell in row)]))
    return ["links, from the row to the column:", *rows]


def _cell(link: "Link") -> str:
    if link.error is not None:
        return "none"
    return f"{link.round_trip_seconds * 1e6:.0f} us {link.bytes_per_second / 1e6:.0f} MB/s"


def add_devices_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_devices(namespace: argparse.Namespace) -> int:
    """Prints the devices of this machine, and which of them each strategy would use.

    Starts JAX, which takes most of the memory of free GPUs for a moment.
    """
    from distributary.tools.diagnosis import devices_as_text, find_devices

    facts = find_devices()
    print(json.dumps(facts, indent=2) if namespace.json else devices_as_text(facts))
    return int("error" in facts["strategies"]["MultiWorkerMirroredStrategy"])


# The command `bench`.

_MODELS = ("mlp", "transformer")  # of `scaling/_training_loop.py`


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
    from distributary.tools.scaling import report

    content, text = report(namespace)
    if write_json(namespace.json, content):
        print(text)
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


# The commands that compile for machines that are not here: `compile` and `plan`.


def run_compile(namespace: argparse.Namespace) -> int:
    """Compiles a script's training step for TPUs or GPUs that are not here.

    Reports what the TPU or GPU compiler makes of the step: its collectives, how much device memory
    it needs, and whether state is updated in place. The script runs up to the first program under a
    strategy that updates a trainable variable. That program is compiled for the topology, even if
    this machine does not have it, and the script ends.

    Examples:
      distributary compile --topology v5e:2x4 train.py
      distributary compile --topology 2xv5e:2x4 --topology h100:8 --json report.json train.py
    """
    check_topologies(namespace)
    from distributary.tools import compilation

    compilation.prepare_compilers()
    reports: list[compilation.Report] = []
    exit_code = 0
    for name in namespace.topology:
        try:
            report = compilation.compile_script(
                namespace.script,
                namespace.arguments,
                compilation.parse_topology(name),
                is_module=namespace.module,
                step_name=namespace.step,
            )
        except DistributaryError as error:
            print(f"distributary compile: {error}", file=sys.stderr)
            exit_code = 1
            continue
        reports.append(report)
        print(report.to_text(), flush=True)
    write_json(namespace.json, [report.to_json() for report in reports])
    return exit_code


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_topology_arguments(parser)
    text = "compilations at the same time, 1 to 5 GB each"
    add_option(parser, "--processes", whole(1), "N", text, 2)
    text = "layout to compile, as in the table; you can give it several times (default: all)"
    add_option(parser, "--layout", str, "NAME", text, action="append")


def run_plan(namespace: argparse.Namespace) -> int:
    """Finds how a script's variables can be divided so that its step fits.

    Compiles the training step of a script with each layout of its variables: mirrored, with sharded
    optimizer state, with sharded parameters, and with layers that are divided over two devices
    each; with and without rematerialization. Prints the memory that it needs on each device, what a
    step moves between devices, and the largest batch that fits with the best layout, or with each
    layout that you name.
    Needs neither the devices nor memory for the variables of Keras, which have no values.

    Examples:
      distributary plan --topology v5e:4x4 --topology h100:8 train.py
    """
    check_topologies(namespace)
    from distributary.tools import compilation

    compilation.prepare_compilers()
    plans = compilation.plan_script(
        compilation.Script(namespace.script, namespace.arguments, namespace.module, namespace.step),
        namespace.topology,
        namespace.processes,
        namespace.layout,
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    print("\n\n".join(plan.to_text() for plan in plans), flush=True)
    write_json(namespace.json, [plan.to_json() for plan in plans])
    return int(any(plan.best is None for plan in plans))


# The command line.


class _Command(NamedTuple):
    """A command: adds its arguments to its parser, and runs with them parsed, for the exit code.

    The docstring of `run` is the help, with examples at the end. Nothing that imports JAX is
    imported before it is called, so that help and messages come at once.
    """

    add_arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


_COMMANDS: Final[Mapping[str, _Command]] = {
    "launch": _Command(_launch.add_launch_arguments, _launch.run_launch),
    "devices": _Command(add_devices_arguments, run_devices),
    "doctor": _Command(add_doctor_arguments, run_doctor),
    "bench": _Command(add_bench_arguments, run_bench),
    "certs": _Command(_launch.add_certs_arguments, _launch.run_certs),
    "compile": _Command(add_topology_arguments, run_compile),
    "plan": _Command(add_plan_arguments, run_plan),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    Args:
        arguments: Arguments after the name of the program; by default those of this process.
    """
    namespace = _parsed(sys.argv[1:] if arguments is None else arguments)
    name: str = namespace.name
    try:
        return _COMMANDS[name].run(namespace)
    except DistributaryError as error:
        print(f"distributary {name}: {str(error).removeprefix(f'{name}: ')}", file=sys.stderr)
        return 1


def launch_options(arguments: Sequence[str], environ: Mapping[str, str]) -> LaunchOptions:
    """Returns the job that a command line describes, `["launch", "train.py"]` for example.

    Raises:
        DistributaryError: for impossible values.
        SystemExit: for arguments that do not exist.
    """
    return _launch.options_of(_parsed(arguments), environ)


def parser() -> Parser:
    """Returns the parser of the command `distributary`."""
    whole = Parser(
        prog="distributary",
        description="Distributed training with JAX and Keras 3.",
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="store_true", help="print the versions, and exit")
    commands = whole.add_subparsers(
        dest="name", title="commands", metavar="COMMAND", parser_class=Parser
    )
    for name, command in _COMMANDS.items():
        text = inspect.getdoc(command.run) or ""  # Python -OO leaves it out
        description, heading, examples = text.partition("Examples:\n")
        subparser = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=description,
            epilog=heading + examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(parser=subparser)
    return whole


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    whole = parser()
    first = next((text for text in arguments if not text.startswith("-")), None)
    if first is not None and first not in _COMMANDS:
        hint = suggestion("launch" if first in ("run", "start") else first, _COMMANDS)
        if first.endswith(".py"):
            hint = f" To run a script: distributary launch {first}."
        whole.error(
            f"there is no command {first!r}.{hint} The commands are {', '.join(_COMMANDS)}."
        )
    namespace, unknown = whole.parse_known_args(arguments)
    if namespace.version:
        versions = {**package_versions(), "Python": platform.python_version()}
        print(", ".join(f"{name} {version}" for name, version in versions.items()))
        sys.exit(0)
    if namespace.name is None:
        whole.check_known(unknown)
        whole.print_help(sys.stderr)
        sys.exit(2)
    namespace.parser.check_known(unknown)
    return namespace
