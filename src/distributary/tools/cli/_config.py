"""Keeps the options of a job in a file, from which `distributary launch` takes them.

The file is distributary.toml, or the table [tool.distributary] of pyproject.toml: next to the
script or, if there is none, in the working directory. The command line of `distributary launch`
overrides it. With options, this command writes them to distributary.toml in the working directory.
Then it shows which options are in force, and where each comes from. Without options and without a
file, it asks on a terminal.

Examples:
  distributary config
  distributary config --workers 4 --max-restarts 3 --dashboard
  distributary config --no-dashboard
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, final

from distributary.tools.cli import _launch
from distributary.tools.cli._arguments import Parser

_FILE = "distributary.toml"
_PROJECT = "pyproject.toml"
_PROG = "distributary launch"
_QUESTIONS = {
    "workers": "How many workers on this host?",
    "devices-per-worker": "How many CPU devices has each worker?",
    "ps": "How many parameter servers? 0 for all-reduce",
    "max-restarts": "How often to restart after a failure?",
    "log-dir": "In which folder to write the log files?",
    "dashboard": "Serve a page that shows the run?",
}
_WORDS = {"yes": True, "y": True, "no": False, "n": False}


@final
@dataclass(frozen=True)
class Settings:
    """The options that a file has.

    Args:
        path: The file.
        place: The file and, if it has other content, too, the table in it; for messages.
        table: The options by name, as the file has them.
    """

    path: Path
    place: str
    table: Mapping[str, Any]

    def arguments(self) -> list[str]:
        """Returns the options as arguments of `distributary launch`.

        Ends the command if one of them does not exist or has an impossible value.
        """
        checker = _checker(self.place)
        arguments = []
        for name, value in self.table.items():
            if f"--{name}" not in checker.flags:
                checker.check_known([f"--{name}"])
            if not isinstance(value, (bool, int, float, str)):
                checker.error(f"{name} is {value!r}, expected a number, a text, true or false")
            if name in _switches(checker) and not isinstance(value, bool):
                checker.error(f"{name} is {value!r}, expected true or false")
            if isinstance(value, bool):
                arguments.append(f"--{name}" if value else f"--no-{name}")
                continue
            if name in _paths(checker):
                value = self.path.parent / str(value)  # as if the command ran in the file's folder
            arguments.append(f"--{name}={value}")
        checker.parse_args(arguments)
        return arguments


def add_arguments(parser: Parser) -> None:
    """Adds the arguments: those of `launch` before the script, without their defaults."""
    _launch.add_options(parser)
    for action in _actions(parser):
        action.help = (action.help or "").replace("%(default)s", str(action.default))
        action.default = argparse.SUPPRESS
    parser.usage = "%(prog)s [OPTION ...]"


def run(namespace: argparse.Namespace) -> int:
    """Writes the options that there are, or asks for them, and shows those in force."""
    given = {
        _name(action): getattr(namespace, action.dest)
        for action in _actions(namespace.parser)
        if action.dest in namespace
    }
    settings = _found([Path()])
    if not given and settings is None and sys.stdin.isatty():
        given = _asked()
    if given:
        if settings is not None and settings.path.name == _PROJECT:
            namespace.parser.error(
                f"the options are in {settings.place}. Change them there, or move them to {_FILE}."
            )
        _write(Path(_FILE), given)
        settings = _found([Path()])
    _show(settings)
    return 0


def completed(namespace: argparse.Namespace, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments of `launch`, with the options of the file that belongs to the script.

    Args:
        namespace: The parsed arguments without the file.
        arguments: The arguments after `launch`.
    """
    own = [] if namespace.module else [Path(namespace.script).parent]
    settings = _found([*own, Path()])
    if settings is None:
        return namespace
    more = settings.arguments()
    result = namespace.parser.parse_args([*more, *arguments])
    result.name = namespace.name
    if more:
        result.from_file = f"options of {settings.place}: {' '.join(more)}"
    return result


def _checker(source: str) -> Parser:
    """Returns a parser of the options, whose messages begin with where they come from."""
    checker = Parser(prog=_PROG, add_help=False, allow_abbrev=False)
    checker.source = source
    _launch.add_options(checker)
    return checker


def _actions(parser: Parser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.dest != "help"]


def _name(action: argparse.Action) -> str:
    return action.option_strings[0].removeprefix("--")


def _paths(parser: Parser) -> list[str]:
    return [_name(action) for action in _actions(parser) if action.type is Path]


def _switches(parser: Parser) -> list[str]:
    return [_name(action) for action in _actions(parser) if action.nargs == 0]


def _found(folders: Sequence[Path]) -> Settings | None:
    """Returns the options of the first folder that has any."""
    for folder in folders:
        own = _read(folder / _FILE)
        project = _read(folder / _PROJECT).get("tool", {}).get("distributary")
        if project is not None and (folder / _FILE).exists():
            _fail(f"both {folder / _FILE} and {folder / _PROJECT} have options. Keep one of them.")
        if project is not None:
            path = folder / _PROJECT
            if not isinstance(project, dict):
                _fail(f"{path}: tool.distributary is {project!r}, expected a table")
            return Settings(path, f"{path}, [tool.distributary]", project)
        if (folder / _FILE).exists():
            return Settings(folder / _FILE, str(folder / _FILE), own)
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        _fail(f"{path} cannot be read: {error}")


def _fail(message: str) -> NoReturn:
    print(f"{_PROG}: {message}", file=sys.stderr)
    sys.exit(2)


def _as_toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)


def _write(path: Path, given: Mapping[str, Any]) -> None:
    """Changes or adds lines of the file, and leaves the others as they are."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    expected = {**_read(path), **given}
    for name, value in given.items():
        line = f"{name} = {_as_toml(value)}"
        pattern = re.compile(rf"\s*[\"']?{re.escape(name)}[\"']?\s*=")
        at = next((i for i, old in enumerate(lines) if pattern.match(old)), None)
        lines[len(lines) if at is None else at : None if at is None else at + 1] = [line]
    text = "\n".join(lines) + "\n"
    try:
        fits = {n: _as_toml(v) for n, v in tomllib.loads(text).items()} == {
            n: _as_toml(v) for n, v in expected.items()
        }
    except tomllib.TOMLDecodeError:
        fits = False
    if not fits:
        _fail(f"{path} is written in a way that cannot be changed here. Edit the file.")
    path.write_text(text, encoding="utf-8")


def _asked() -> dict[str, Any]:
    """Asks for the most important options; returns those that differ from the defaults."""
    checker = _checker("")
    actions = {_name(action): action for action in _actions(checker)}
    answers: dict[str, Any] = {}
    print(f"The options of `{_PROG}` in {Path.cwd()}. Enter keeps what is in brackets.")
    for name, question in _QUESTIONS.items():
        action = actions[name]
        default = "no" if name == "dashboard" else action.default
        while True:
            try:
                text = input(f"{question} [{'none' if default is None else default}] ").strip()
            except (EOFError, KeyboardInterrupt):
                print("\nNothing is written.")
                sys.exit(130)
            if not text:
                break
            try:
                answers[name] = _answer(action, text)
                break
            except argparse.ArgumentTypeError as error:
                print(f"  {error}")
    if not answers:
        print("Nothing differs from the defaults, so nothing is written.")
    return answers


def _answer(action: argparse.Action, text: str) -> Any:
    if callable(action.type):
        return action.type(text)
    if text.lower() not in _WORDS:
        raise argparse.ArgumentTypeError(f"expected yes or no, found {text!r}")
    return _WORDS[text.lower()]


def _show(settings: Settings | None) -> None:
    arguments = [] if settings is None else settings.arguments()
    checker = _checker("")
    values = vars(checker.parse_args(arguments))
    from_file = {} if settings is None else settings.table
    rows = []
    for action in _actions(checker):
        name, value = _name(action), values[action.dest]
        if value is None and isinstance(action, argparse.BooleanOptionalAction):
            value = name == "tuning"
        origin = "default"
        if name in from_file or f"no-{name}" in from_file:
            assert settings is not None
            origin = settings.place
        rows.append((name, "-" if value is None else _as_toml(value), origin))
    width, size = (max(len(row[i]) for row in rows) for i in (0, 1))
    for name, text, origin in rows:
        print(f"{name:<{width}}  {text:<{size}}  {origin}")
    if settings is None:
        print("\nThere is no file with options here. `distributary config --workers 4` makes one.")
