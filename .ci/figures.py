"""Prints the size and shape of the source, and holds every room to its budget.

    python .ci/figures.py           tables of size and shape
    python .ci/figures.py --check   ends with 1 if a room is larger than .ci/budgets.toml allows

SLOC are lines with code: no blank lines, comments or docstrings. A room is a package or a module of
`src/distributary`.
"""

import ast
import collections
import io
import sys
import tokenize
import tomllib
from pathlib import Path

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.comprehension,
    ast.Assert,
)


def _sloc_and_comments(text: str, tree: ast.Module) -> tuple[int, int]:
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node) is not None:
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings), len(comments)


def _complexity(function: ast.AST) -> int:
    """Returns McCabe's number: one more than the branches, inner functions included."""
    count = 1
    for node in ast.walk(function):
        if isinstance(node, _BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.match_case):
            count += 1
    return count


_ROOT = Path(__file__).parents[1] / "src" / "distributary"


def check() -> int:
    """Prints the rooms beside their budgets; returns 1 if one is too large or has none."""
    budgets = tomllib.loads(Path(__file__).with_name("budgets.toml").read_text())
    sizes: collections.Counter[str] = collections.Counter()
    for path in _ROOT.rglob("*.py"):
        text = path.read_text()
        room = path.relative_to(_ROOT).parts[0].removesuffix(".py")
        sizes[room] += _sloc_and_comments(text, ast.parse(text))[0]
    lines = []
    for part, rooms in budgets["rooms"].items():
        total = sum(sizes[room] for room in rooms)
        lines.append((part, total, budgets["parts"][part]))
        lines += [(f"  {room}", sizes[room], budget) for room, budget in rooms.items()]
    lines.append(("all", sum(sizes.values()), budgets["all"]))
    known = {room for rooms in budgets["rooms"].values() for room in rooms}
    lines += [(room, size, 0) for room, size in sizes.items() if room not in known]
    for name, size, budget in lines:
        print(f"{name:20} {size:7,} {budget:7,}{'  TOO LARGE' * (size > budget)}")
    return int(any(size > budget for _, size, budget in lines))


def main() -> None:
    """Prints the table."""
    root = _ROOT
    by_package: collections.Counter[str] = collections.Counter()
    num_files = num_comments = num_parameters = num_any = 0
    lengths: list[int] = []
    complex_functions: list[tuple[int, str]] = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        sloc, comments = _sloc_and_comments(text, tree)
        num_files += 1
        num_comments += comments
        parts = path.relative_to(root).parts
        by_package[parts[0] if len(parts) > 1 else "(top)"] += sloc
        for node in ast.walk(tree):
            if not isinstance(node, _FUNCTIONS):
                continue
            lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
            complex_functions.append((_complexity(node), f"{path.relative_to(root)}:{node.name}"))
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if argument.annotation is not None:
                    num_parameters += 1
                    num_any += getattr(argument.annotation, "id", None) == "Any"
    total = sum(by_package.values())
    lengths.sort()
    complex_functions.sort(reverse=True)
    above = [item for item in complex_functions if item[0] > 25]
    rows = [
        ("source files", num_files),
        ("SLOC", f"{total:,}"),
        ("comment lines per 100 SLOC", f"{100 * num_comments / total:.1f}"),
        (
            "lines of a function, median / p90 / longest",
            f"{lengths[len(lengths) // 2]} / {lengths[9 * len(lengths) // 10]} / {lengths[-1]}",
        ),
        ("parameters annotated with bare `Any`", f"{100 * num_any / num_parameters:.0f} %"),
        ("functions above complexity 25", len(above)),
    ]
    print("| Figure | Value |\n| --- | --: |")
    for name, value in rows:
        print(f"| {name} | {value} |")
    print("\n| Package | SLOC |\n| --- | --: |")
    for name, sloc in by_package.most_common():
        print(f"| {name} | {sloc:,} |")
    print("\n" + "\n".join(f"{number} {name}" for number, name in complex_functions[:12]))


if __name__ == "__main__":
    sys.exit(check() if sys.argv[1:] == ["--check"] else main())
