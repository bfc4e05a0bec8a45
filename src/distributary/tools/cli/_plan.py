"""Finds how a script's variables can be divided so that its step fits.

Compiles the training step of a script with each layout of its variables: mirrored, with sharded
optimizer state, with sharded parameters, and with layers that are divided over two devices each;
with and without rematerialization. Prints the memory that it needs on each device, what a step
moves between devices, and the largest batch that fits with the best layout, or with each layout
that you name.
Needs neither the devices nor memory for the variables of Keras, which have no values.

Examples:
  distributary plan --topology v5e:4x4 --topology h100:8 train.py
"""

import argparse
import sys

from distributary.tools.cli._arguments import (
    add_option,
    add_script_to_compile,
    add_topology_arguments,
    check_script,
    check_topologies,
    whole,
    write_json,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_topology_arguments(parser)
    add_option(
        parser, "--processes", whole(1), "N", "compilations at the same time, 1 to 5 GB each", 2
    )
    parser.add_argument(
        "--layout",
        action="append",
        metavar="NAME",
        help="layout to compile, as in the table; you can give it several times (default: all)",
    )
    add_script_to_compile(parser)


def run(namespace: argparse.Namespace) -> int:
    """Prints a table for each topology; returns 1 if nothing fits on one of them."""
    check_script(namespace)
    check_topologies(namespace)
    from distributary.tools import compilation

    compilation.prepare_compilers()
    script = compilation.Script(
        namespace.script, namespace.arguments, namespace.module, namespace.step
    )
    plans = compilation.plan_script(
        script,
        namespace.topology,
        namespace.processes,
        namespace.layout,
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    print("\n\n".join(plan.to_text() for plan in plans), flush=True)
    write_json(namespace.json, [plan.to_json() for plan in plans])
    return int(any(plan.best is None for plan in plans))
