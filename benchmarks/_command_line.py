"""What the command lines of the benchmarks have in common."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _processes
import _report

__all__ = ["add_replicas", "parse", "parser", "run"]


def parser(description: str | None, rounds_of: str, rounds: int, quick: int) -> Any:
    """A parser with `--rounds`, `--output` and `--quick`.

    Args:
        description: Docstring of the benchmark.
        rounds_of: What there is one of per round.
        rounds: Default of `--rounds`.
        quick: The same with `--quick`.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, help=f"{rounds_of} ({rounds}, quick: {quick})")
    made.add_argument("--output", type=Path, default=_report.RESULTS, metavar="FOLDER")
    made.add_argument("--quick", action="store_true", help="short: shows that it works")
    made.set_defaults(default_rounds=(rounds, quick))
    return made


def add_replicas(made: Any, default: str = "1,2,4") -> None:
    """Adds `--replicas`, and what a benchmark needs that measures in processes of its own."""
    made.add_argument("--replicas", default=default, help="replica counts, comma-separated")
    made.add_argument("--child", help=argparse.SUPPRESS)


def parse(made: Any) -> argparse.Namespace:
    """The arguments, with `rounds` filled in and `replicas` as numbers."""
    arguments: argparse.Namespace = made.parse_args()
    arguments.rounds = arguments.rounds or arguments.default_rounds[arguments.quick]
    if "replicas" in arguments:
        arguments.replicas = [int(count) for count in arguments.replicas.split(",")]
    return arguments


def run(
    arguments: argparse.Namespace,
    main: Callable[[argparse.Namespace], int],
    measure: Callable[[dict[str, Any]], Any],
) -> None:
    """Ends with the status of `main`; in a child process, hands back what `measure` gives."""
    if arguments.child:
        _processes.return_result(measure(json.loads(arguments.child)))
    else:
        sys.exit(main(arguments))
