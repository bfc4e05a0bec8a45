"""The arguments that several commands have, and what is said about wrong ones."""

import argparse
import contextlib
import difflib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NoReturn, TypeVar, final

_T = TypeVar("_T")

_STDOUT = Path("-")
# What `compilation.known_topologies()` returns, which imports JAX.
_TOPOLOGIES = (
    "TPUs v2, v3, v4, v5e, v5p, v6e, tpu7x with the grid of their chips (v5e:2x4, v4:2x2x1, and"
    " 2xv5e:2x4 for two slices), and GPUs h100 with their number, also per host (h100:8, h100:2x8"
    " for two hosts)"
)

# What other launchers call our options.
_OTHER_NAMES = {
    "workers": "nproc-per-node nproc n np num-processes num-workers gpus",
    "master": "master-addr rdzv-endpoint",
}


@final
class Parser(argparse.ArgumentParser):
    """A parser that finds what you may have meant."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and what is wrong, and exits."""
        # Of the two, the arguments of the script may be none.
        super().error(message.replace("required: script, arguments", "required: script"))

    def check_known(self, unknown: Iterable[str]) -> None:
        """Ends the command with a suggestion if there are arguments that it does not know."""
        for text in unknown:
            name = text.partition("=")[0]
            if not name.startswith("-"):
                self.error(f"{text!r} is one argument too many")
            word = name.lstrip("-").replace("_", "-")
            word = next((own for own, of in _OTHER_NAMES.items() if word in of.split()), word)
            flags = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
            hint = suggestion(word, flags, "--")
            if not hint and "SCRIPT" in (self.usage or ""):
                hint = " Options of the script come after the script."
            self.error(f"there is no option {name}.{hint}")


def suggestion(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns `" Did you mean ...?"` with the known words that are most like another; or `""`."""
    words = difflib.get_close_matches(word, known, 2, cutoff=0.65)
    words = words or [name for name in known if name.startswith(word)][:2]
    return f" Did you mean {' or '.join(prefix + name for name in words)}?" if words else ""


def whole(smallest: int, largest: float = math.inf) -> Callable[[str], int]:
    """Returns the type of an option that is a whole number."""
    up_to = "" if largest == math.inf else f" to {largest:.0f}"
    expected = f"a whole number from {smallest}{up_to}"
    return _checked(int, lambda value: smallest <= value <= largest, expected)


def wholes(text: str) -> list[int]:
    """Returns the numbers of `"4,1,2"`, in order."""
    try:
        return sorted({whole(1)(part) for part in text.split(",")})
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers from 1 with commas between them, such as 1,2,4; found {text!r}"
        ) from None


def number(*, above_zero: bool = False) -> Callable[[str], float]:
    """Returns the type of an option that is a finite number, not below zero."""
    expected = f"a number{' above 0' if above_zero else ', 0 or more'}"
    least = math.ulp(0.0) if above_zero else 0.0
    return _checked(float, lambda value: least <= value < math.inf, expected)


def _checked(
    convert: Callable[[str], _T], is_right: Callable[[_T], bool], expected: str
) -> Callable[[str], _T]:
    def parse(text: str) -> _T:
        with contextlib.suppress(ValueError):
            if is_right(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")

    return parse


def one_of(*names: str) -> Callable[[str], str]:
    """Returns the type of an option that is one of some words."""

    def parse(text: str) -> str:
        if text in names:
            return text
        raise argparse.ArgumentTypeError(
            f"there is no {text!r}; known are {', '.join(names)}.{suggestion(text, names)}"
        )

    return parse


def output_file(text: str) -> Path:
    """Returns the path of a file to write, whose folder must exist.

    A Python file is refused: it is the script, in the place of the file that an option asks for.
    """
    path = Path(text)
    if path.suffix == ".py":
        raise argparse.ArgumentTypeError(
            f"{text} is a Python script, which would be overwritten. Give the name of another file"
        )
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent} for {path.name}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, expected the name of a file")
    return path


def add_option(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup",
    flag: str,
    type_: Callable[[str], Any],
    metavar: str,
    text: str,
    default: object = None,
    **more: Any,
) -> None:
    """Adds an option that has a value.

    Args:
        parser: The parser, or a group of it.
        flag: Name on the command line.
        type_: Makes the value of a text.
        metavar: Name of the value in the help.
        text: Help; the default follows.
        default: The default, as value or as text.
        **more: Other arguments of `add_argument`.
    """
    if default is not None:
        text += " (default: %(default)s)"
    parser.add_argument(flag, type=type_, metavar=metavar, help=text, default=default, **more)


def add_script_arguments(
    parser: argparse.ArgumentParser,
    description: str,
    *,
    required: bool = True,
    options: str = "[OPTION ...]",
) -> None:
    """Adds the script, or module, and its arguments, which must come last.

    Args:
        parser: The parser.
        description: Help.
        required: Whether there must be one.
        options: The options as the usage shows them.
    """
    add = parser.add_argument
    add("-m", "--module", action="store_true", help="the script is the name of a module")
    add("script", nargs=None if required else "?", help=description)
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    script = "SCRIPT [ARGUMENT ...]"
    parser.usage = f"%(prog)s {options} {script if required else f'[{script}]'}"


def add_topology_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the devices to compile for, the script, its step, and `--json FILE`."""
    text = f"devices to compile for; you can give it several times. Known are {_TOPOLOGIES}."
    add_option(parser, "--topology", str, "NAME", text, action="append")
    text = "name of the step function (default: the first that updates a trainable variable)"
    add_option(parser, "--step", str, "FUNCTION", text)
    add_option(parser, "--json", output_file, "FILE", "also write the reports to FILE, as JSON")
    description = "Python script whose training step is compiled"
    add_script_arguments(parser, description, options="--topology NAME [OPTION ...]")


def check_topologies(namespace: argparse.Namespace) -> None:
    """Ends the command if there is no script, or no topology.

    Takes the topologies from behind the script if all are there.

    Args:
        namespace: The parsed arguments, with the command's parser as `parser`.
    """
    check_script(namespace)
    if namespace.topology is None:
        behind = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        behind.add_argument("--topology", action="append")
        parsed, namespace.arguments = behind.parse_known_args(namespace.arguments)
        namespace.topology = parsed.topology
    if namespace.topology is None:
        namespace.parser.error(
            f"--topology says which devices to compile for. Known are {_TOPOLOGIES}."
        )


def check_script(namespace: argparse.Namespace) -> None:
    """Ends the command if the script or module does not exist, before anything starts.

    Args:
        namespace: The parsed arguments, with the command's parser as `parser`.
    """
    name, error = namespace.script, namespace.parser.error
    if namespace.module:
        missing = _missing_module(name)
        if missing is not None:
            hint = " Leave out -m for a file." if name.endswith(".py") else ""
            error(
                f"there is no module {missing!r} for -m {name}.{hint} Run the command where the"
                " module is, or install its package."
            )
        return
    path = Path(name)
    if path.suffix == ".ipynb":
        error(
            f"{name!r} is a notebook. Write it as a script first: jupyter nbconvert --to script"
            f" {name}"
        )
    if path.is_dir() and not (path / "__main__.py").exists():
        error(f"{name!r} is a folder without a __main__.py. Give the path of a Python script.")
    if not path.exists():
        folder = path.parent if path.parent.is_dir() else Path()
        hint = suggestion(path.name, [file.name for file in folder.glob("*.py")])
        error(
            f"there is no file {name!r} in {os.getcwd()}.{hint} Give the path of a Python script,"
            " or -m and the name of a module."
        )


def _missing_module(name: str) -> str | None:
    """Returns the part of a module's name that does not exist, without importing anything."""
    top, *others = name.split(".")
    # Unlike this program, `python -m` also looks into the working directory.
    spec = _spec(top, None) or PathFinder.find_spec(top, [os.getcwd()])
    for part in [*others, None]:
        if spec is None:
            return top
        path = spec.submodule_search_locations
        if part is None and path is None:
            return None
        top = f"{top}.{part or '__main__'}"
        spec = _spec(top, path or [])
    return None if spec else top


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    specs = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next(filter(None, specs), None)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--json [FILE]`; see `write_json`."""
    text = "print JSON instead; with FILE, write it there as well"
    add_option(parser, "--json", output_file, "FILE", text, nargs="?", const=_STDOUT)


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
