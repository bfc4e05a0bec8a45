"""The command line of `distributary`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from distributary.cli import _bench, _certs, _compile, _devices, _doctor, _launch
from distributary.errors import DistributaryError
from distributary.launch import LaunchOptions


class _Command(Protocol):
    """The module of a command. Its docstring is the help, with examples at the end."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments of the command to its parser."""

    def run(self, namespace: argparse.Namespace) -> int:
        """Runs the command with the parsed arguments, and returns the exit code."""


_COMMANDS: Final[Mapping[str, _Command]] = {
    "launch": _launch,
    "devices": _devices,
    "doctor": _doctor,
    "bench": _bench,
    "certs": _certs,
    "compile": _compile,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    Args:
        arguments: Arguments after the name of the program; by default those of this process.
    """
    namespace = parser().parse_args(arguments)
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
    return _launch.options_of(parser().parse_args(arguments), environ)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command `distributary`."""
    whole = argparse.ArgumentParser(
        prog="distributary", description="Distributed training with JAX and Keras 3."
    )
    commands = whole.add_subparsers(dest="name", title="commands", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        text = command.__doc__ or ""  # Python -OO leaves it out
        description, heading, examples = text.partition("Examples:\n")
        own = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=description,
            epilog=heading + examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(own)
        own.set_defaults(parser=own)
    return whole
