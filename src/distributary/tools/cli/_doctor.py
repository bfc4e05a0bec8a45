"""The commands that look at a machine: `doctor` and `devices`."""

import argparse
import json
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distributary.tools.cli._arguments import (
    add_json_argument,
    add_option,
    number,
    one_of,
    write_json,
)

if TYPE_CHECKING:
    from distributary.tools.diagnosis import Check, Link, Report

_PARTS = ("machine", "links", "all-reduce", "training")
_WIDTH = 100
_MARKS = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM", "skipped": "skipped"}


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "--only",
        nargs="+",
        type=one_of(*_PARTS),
        default=_PARTS,
        metavar="PART",
        help=f"what to check: {', '.join(_PARTS)} (default: all of them)",
    )
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

    report = examine(namespace.only, namespace.wait_seconds, use)
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
