"""Compiles a script's training step for TPUs or GPUs that are not here.

Reports what the TPU or GPU compiler makes of the step: its collectives, how much device memory it
needs, and whether state is updated in place. The script runs up to the first program under a
strategy that updates a trainable variable. That program is compiled for the topology, even if this
machine does not have it, and the script ends.

Examples:
  distributary compile --topology v5e:2x4 train.py
  distributary compile --topology 2xv5e:2x4 --topology h100:8 --json report.json train.py
"""

import argparse
import sys

from distributary.errors import DistributaryError
from distributary.tools.cli._arguments import (
    add_script_to_compile,
    add_topology_arguments,
    check_script,
    check_topologies,
    write_json,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_topology_arguments(parser)
    add_script_to_compile(parser)


def run(namespace: argparse.Namespace) -> int:
    """Prints a report for each topology; returns 1 if one of them cannot be compiled for."""
    check_script(namespace)
    check_topologies(namespace)
    from distributary.tools import compilation

    compilation.prepare_compilers()
    reports: list[compilation.Report] = []
    exit_code = 0
    for name in namespace.topology:
        try:
            report = compilation.compile_script(
                namespace.script,
                namespace.arguments,
                compilation.parse_topology(name),
                is_module=namespace.module,
                step_name=namespace.step,
            )
        except DistributaryError as error:
            print(f"distributary compile: {error}", file=sys.stderr)
            exit_code = 1
            continue
        reports.append(report)
        print(report.to_text(), flush=True)
    write_json(namespace.json, [report.to_json() for report in reports])
    return exit_code
