"""The command `distributary compile`."""

import argparse
import importlib.util
import json
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from distributary.compilation import (
    Report,
    compile_script,
    known_topologies,
    parse_topology,
    prepare_compilers,
)
from distributary.errors import DistributaryError

__all__ = ["add_compile_command", "add_script_arguments", "check_script"]

_EPILOG = f"""\
The script runs up to the first program under a strategy that updates a trainable variable. That
program is compiled for the topology, even if this machine does not have it, and the script ends.

Known topologies are {known_topologies()}.

examples:
  distributary compile --topology v5e:2x4 train.py
  distributary compile --topology 2xv5e:2x4 --topology h100:8 --json report.json train.py
"""


def add_compile_command(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser(
        "compile",
        help="compile a script's training step for TPUs or GPUs that are not here",
        description="Reports what the TPU or GPU compiler makes of a script's training step: its"
        " collectives, how much device memory it needs, and whether state is updated in place.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--topology",
        action="append",
        required=True,
        metavar="NAME",
        help="devices to compile for, such as v5e:2x4 or h100:8; you can give it several times",
    )
    add(
        "--step",
        metavar="FUNCTION",
        help="name of the step function (default: the first that updates a trainable variable)",
    )
    add("--json", type=Path, metavar="FILE", help="also write the reports to FILE, as JSON")
    add_script_arguments(parser, "Python script whose training step is compiled")
    parser.set_defaults(run=_compile, parser=parser)


def add_script_arguments(
    parser: argparse.ArgumentParser, description: str, *, required: bool = True
) -> None:
    """Adds the script, or module, and its arguments, which must come last."""
    add = parser.add_argument
    add("-m", "--module", action="store_true", help="the script is the name of a module")
    add("script", nargs=None if required else "?", help=description)
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def check_script(namespace: argparse.Namespace) -> None:
    """Ends the command if the script or module does not exist, before anything starts.

    Args:
        namespace: The parsed arguments, with the command's parser as `parser`.
    """
    name = namespace.script
    if namespace.module:
        top = name.partition(".")[0]
        # Unlike this program, `python -m` also looks into the working directory.
        if importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()]):
            return
        namespace.parser.error(
            f"there is no module {top!r} for -m {name}. Run the command where the module is, or"
            " install its package."
        )
    elif not Path(name).exists():
        namespace.parser.error(
            f"there is no file {name!r} in {os.getcwd()}. Give the path of a Python script, or -m"
            " and the name of a module."
        )


def _compile(namespace: argparse.Namespace) -> int:
    check_script(namespace)
    prepare_compilers()
    reports: list[Report] = []
    exit_code = 0
    for name in namespace.topology:
        try:
            report = compile_script(
                namespace.script,
                namespace.arguments,
                parse_topology(name),
                is_module=namespace.module,
                step_name=namespace.step,
            )
        except DistributaryError as error:
            print(f"distributary compile: {error}", file=sys.stderr)
            exit_code = 1
            continue
        reports.append(report)
        print(report.to_text(), flush=True)
    if namespace.json is not None:
        content = [report.to_json() for report in reports]
        namespace.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return exit_code
