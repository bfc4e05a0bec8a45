"""The command line of `distributary`."""

import argparse
import inspect
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from distributary.errors import DistributaryError
from distributary.job import package_versions
from distributary.launch import LaunchOptions
from distributary.tools.cli import _bench, _compile, _doctor, _launch
from distributary.tools.cli._arguments import Parser, add_topology_arguments, suggestion


class _Command(NamedTuple):
    """A command: adds its arguments to its parser, and runs with them parsed, for the exit code.

    The docstring of `run` is the help, with examples at the end. Nothing that imports JAX is
    imported before it is called, so that help and messages come at once.
    """

    add_arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


_COMMANDS: Final[Mapping[str, _Command]] = {
    "launch": _Command(_launch.add_launch_arguments, _launch.run_launch),
    "devices": _Command(_doctor.add_devices_arguments, _doctor.run_devices),
    "doctor": _Command(_doctor.add_doctor_arguments, _doctor.run_doctor),
    "bench": _Command(_bench.add_bench_arguments, _bench.run_bench),
    "certs": _Command(_launch.add_certs_arguments, _launch.run_certs),
    "compile": _Command(add_topology_arguments, _compile.run_compile),
    "plan": _Command(_compile.add_plan_arguments, _compile.run_plan),
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
