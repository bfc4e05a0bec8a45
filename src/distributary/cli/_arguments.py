"""The arguments that several commands have."""

import argparse
import importlib.util
import json
import os
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_STDOUT = Path("-")


def add_option(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup",
    flag: str,
    type_: Callable[[str], Any],
    metavar: str,
    text: str,
    default: object = None,
    field: str | None = None,
) -> None:
    """Adds an option that has a value.

    Args:
        parser: The parser, or a group of it.
        flag: Name on the command line.
        type_: Makes the value of a text.
        metavar: Name of the value in the help.
        text: Help; the default follows.
        default: The default, as value or as text.
        field: Name of the value in the namespace; None takes the flag's.
    """
    if default is not None:
        text += " (default: %(default)s)"
    parser.add_argument(flag, type=type_, metavar=metavar, help=text, default=default, dest=field)


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


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--json [FILE]`; see `write_json`."""
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=_STDOUT,
        metavar="FILE",
        help="print JSON instead; with FILE, write it there as well",
    )


def write_json(where: Path | None, content: object) -> bool:
    """Prints or writes JSON if the user wants it; returns whether to print text."""
    if where is None:
        return True
    text = json.dumps(content, indent=1)
    if where == _STDOUT:
        print(text, flush=True)
        return False
    where.write_text(text + "\n", encoding="utf-8")
    return True
