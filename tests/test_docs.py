"""The code and commands of the documentation run as they stand, and relative links lead somewhere.

The python blocks of a page are one script, and so are its shell blocks. The output of a block is
compared with the text block that directly follows it, in which `...` stands for anything. A diff
block is the python block that it leads to, and what it leads from must be Python, too. A block
below the comment `<!-- no-run: reason -->` does not run, but commands of distributary in it must
have options that exist. A python block below `<!-- file: train.py -->` is a file for the commands;
scripts that commands name and no block gives are empty.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

from distributary.tools.cli import parser
from tests.forks import Fork

_ROOT = Path(__file__).parents[1]
_PAGES = [
    *sorted(_ROOT.glob("*.md")),
    *sorted((_ROOT / "benchmarks").glob("*.md")),
    *sorted((_ROOT / "examples").rglob("*.md")),
    *sorted((_ROOT / "docs").rglob("*.md")),
]
_PAGES_WITH_CODE = [
    page for page in _PAGES if re.search("```(python|diff)", page.read_text(encoding="utf-8"))
]
_PAGES_WITH_COMMANDS = [page for page in _PAGES if "```shell" in page.read_text(encoding="utf-8")]
_PAGE_SECONDS = 300
_DEVICE_VARIABLE = "JAX_NUM_CPU_DEVICES"  # a page asks for its devices itself

_FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[\w-]*)[^`]*$")
_NO_RUN = re.compile(r" *<!-- *no-run:? *(?P<reason>.*?) *-->")
_FILE = re.compile(r" *<!-- *file: *(?P<name>[\w./]+) *-->")
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ +)*distributary (?P<arguments>.*?)(?: +#.*)?$", re.MULTILINE)
_SCRIPT = re.compile(r"^python (?P<name>\w+/\w+\.py)(?P<arguments>[^#\n]*)", re.MULTILINE)
_EXTRAS = re.compile(r"pip install .*?\.\[(?P<extras>[\w,]+)\]")
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)[^)]*\)|^ *\[[^\]]+\]: +(?P<definition>\S+)")
_END_OF_BLOCK = "\0"


@dataclass
class _Block:
    language: str
    first_line: int  # of the content, counted from 1
    line_above: str
    content: list[str] = field(default_factory=list)
    output: "_Block | None" = None  # the text block that directly follows


def _name(page: Path) -> str:
    return page.relative_to(_ROOT).as_posix()


@pytest.mark.parametrize("page", _PAGES_WITH_CODE, ids=_name)
def test_code_runs_and_prints_what_the_page_says(page, tmp_path):
    blocks = [b for b in _blocks(page, "python") if _is_run(b, page) and not _file_name(b)]
    if not blocks:
        return
    code = _script(blocks, f"print({_END_OF_BLOCK!r}, end='', flush=True)")
    try:
        compile(code, _name(page), "exec", dont_inherit=True)
    except SyntaxError as error:
        _fail(page, error.lineno, str(error))
    script = tmp_path / f"page_{page.stem}.py"  # shadows no package
    script.write_text(code, encoding="utf-8")

    with open(tmp_path / "stdout", "w") as stdout, open(tmp_path / "stderr", "w") as stderr:
        fork = Fork([script], _environ(), stdout=stdout, stderr=stderr, cwd=tmp_path)
        try:
            fork.wait(_PAGE_SECONDS)
        finally:
            fork.kill()
    written = [(tmp_path / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]

    _check_output(page, blocks, fork.returncode, *written, str(script))


@pytest.mark.parametrize("page", _PAGES_WITH_COMMANDS, ids=_name)
def test_commands_run_and_print_what_the_page_says(page, tmp_path):
    blocks = [b for b in _blocks(page, "shell") if _is_run(b, page)]
    if not blocks:
        return
    for name in ("train.py", "my_package/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for block in _blocks(page, "python"):
        if name := _file_name(block):
            (tmp_path / name).write_text("\n".join(block.content), encoding="utf-8")
    script = tmp_path / "commands.sh"
    script.write_text(_script(blocks, r"printf '\0'"), encoding="utf-8")

    process = subprocess.run(
        ["bash", "-euo", "pipefail", script],
        cwd=tmp_path,
        env=_environ(),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=_PAGE_SECONDS,
    )

    _check_output(page, blocks, process.returncode, process.stdout, process.stderr, str(script))


@pytest.mark.parametrize("page", _PAGES_WITH_COMMANDS, ids=_name)
def test_options_and_extras_exist(page):
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for block in _blocks(page, "shell"):
        text = "\n".join(block.content).replace("\\\n", " ")
        for command in _COMMAND.finditer(text):
            try:
                parser().parse_args(shlex.split(command["arguments"]))
            except SystemExit:
                _fail(page, block.first_line, f"not a command: {command[0]}")
        for command in _SCRIPT.finditer(text):
            folder = (_ROOT / command["name"]).parent
            assert (_ROOT / command["name"]).is_file(), command[0]
            code = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
            for option in re.findall(r"--[\w-]+", command["arguments"]):
                assert f'"{option}"' in code, f"{command[0]}: no {option}"
        for command in _EXTRAS.finditer(text):
            unknown = set(command["extras"].split(",")) - set(project["optional-dependencies"])
            if unknown:
                _fail(page, block.first_line, f"no such extras: {unknown}")


@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_relative_links_point_to_files(page):
    _, prose = _split(page.read_text(encoding="utf-8").splitlines())

    dead = []
    for number, line in prose:
        for match in _LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            target = match["target"] or match["definition"]
            is_external = re.match(r"[a-z]+:", target)
            if not is_external and not (page.parent / target.partition("#")[0]).exists():
                dead.append(f"{_name(page)}:{number}: {target}")

    assert not dead, "\n".join(dead)


def test_explained_messages_are_those_of_the_code():
    """The lines "> `message`" of the page, in which `...` stands for anything."""
    page = _ROOT / "docs" / "guide" / "troubleshooting.md"
    messages = re.findall(r"^> `(.+)`$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    code = "\n".join(
        # Strings that stand below each other are one.
        re.sub(r'"\s*\n\s*f?"', "", file.read_text(encoding="utf-8"))
        for file in sorted((_ROOT / "src").rglob("*.py"))
    )

    unknown = [
        message
        for message in messages
        if not re.search(".*".join(map(re.escape, message.split("..."))), code)
    ]

    assert len(messages) > 40
    assert unknown == []


def _blocks(page: Path, language: str) -> list[_Block]:
    blocks, _ = _split(page.read_text(encoding="utf-8").splitlines())
    for block in blocks:
        if block.language == "diff":
            before, after = ([_side(line, s) for line in block.content] for s in "-+")
            compile("\n".join(before), _name(page), "exec", dont_inherit=True)
            block.language, block.content = "python", after
    return [block for block in blocks if block.language == language]


def _side(line: str, sign: str) -> str:
    """The line of a diff without its sign, or nothing if it is not on that side."""
    return line[1:] if line[:1] in ("", " ", sign) else ""


def _file_name(block: _Block) -> str | None:
    comment = _FILE.fullmatch(block.line_above)
    return comment["name"] if comment else None


def _environ() -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if k != _DEVICE_VARIABLE}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the page runs elsewhere
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    return environ


def _check_output(
    page: Path, blocks: list[_Block], status: int | None, stdout: str, stderr: str, script: str
) -> None:
    outputs = stdout.split(_END_OF_BLOCK)
    num_finished = len(outputs) - 1
    if num_finished < len(blocks):
        error = stderr.replace(script, _name(page)) or "The script ended here."
        _fail(page, blocks[num_finished].first_line, error)
    assert status == 0, stderr
    for block, output in zip(blocks, outputs, strict=False):
        if block.output is not None:
            expected, actual = _text("\n".join(block.output.content)), _text(output)
            pattern = re.escape(expected).replace(re.escape("..."), ".*")
            if not re.fullmatch(pattern, actual, flags=re.DOTALL):
                _fail(page, block.output.first_line, f"expected\n{expected}\n\ngot\n{actual}")


def _split(lines: list[str]) -> tuple[list[_Block], list[tuple[int, str]]]:
    """Fenced blocks, and the numbered lines outside of them."""
    blocks: list[_Block] = []
    prose: list[tuple[int, str]] = []
    opening: re.Match[str] | None = None
    follows_block = False
    for number, line in enumerate(lines, start=1):
        if opening is None:
            opening = _FENCE.match(line)
            if opening is None:
                prose.append((number, line))
                follows_block = follows_block and not line.strip()
                continue
            line_above = lines[number - 2] if number > 1 else ""
            block = _Block(opening["language"], number + 1, line_above)
            if follows_block and block.language == "text":
                blocks[-1].output = block
            blocks.append(block)
        elif re.fullmatch(rf" *{opening['fence']}+ *", line):
            opening, follows_block = None, True
        else:
            blocks[-1].content.append(line.removeprefix(opening["indent"]))
    return blocks, prose


def _is_run(block: _Block, page: Path) -> bool:
    comment = _NO_RUN.fullmatch(block.line_above)
    if comment and not comment["reason"]:
        _fail(page, block.first_line - 2, "give a reason: <!-- no-run: reason -->")
    return comment is None


def _script(blocks: list[_Block], end_of_block: str) -> str:
    """A script that has every line of code where the page has it."""
    script: list[str] = []
    for block in blocks:
        script += [""] * (block.first_line - 1 - len(script))
        script += block.content
        script.append(end_of_block)  # instead of the fence
    return "\n".join(script)


def _text(lines: str) -> str:
    return "\n".join(line.rstrip() for line in lines.strip("\n").splitlines())


def _fail(page: Path, line: int | None, message: str) -> NoReturn:
    raise pytest.fail.Exception(f"{_name(page)}:{line}: {message}", pytrace=False) from None
