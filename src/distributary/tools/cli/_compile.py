"""The commands that compile for machines that are not here: `compile` and `plan`."""

import argparse
import sys

from distributary.errors import DistributaryError
from distributary.tools.cli._arguments import (
    add_option,
    add_topology_arguments,
    check_script,
    check_topologies,
    whole,
    write_json,
)


def run_compile(namespace: argparse.Namespace) -> int:
    """Compiles a script's training step for TPUs or GPUs that are not here.

    Reports what the TPU or GPU compiler makes of the step: its collectives, how much device memory
    it needs, and whether state is updated in place. The script runs up to the first program under a
    strategy that updates a trainable variable. That program is compiled for the topology, even if
    this machine does not have it, and the script ends.

    Examples:
      distributary compile --topology v5e:2x4 train.py
      distributary compile --topology 2xv5e:2x4 --topology h100:8 --json report.json train.py
    """
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


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_plan(namespace: argparse.Namespace) -> int:
    """Finds how a script's variables can be divided so that its step fits.

    Compiles the training step of a script with each layout of its variables: mirrored, with sharded
    optimizer state, with sharded parameters, and with layers that are divided over two devices
    each; with and without rematerialization. Prints the memory that it needs on each device, what a
    step moves between devices, and the largest batch that fits with the best layout, or with each
    layout that you name.
    Needs neither the devices nor memory for the variables of Keras, which have no values.

    Examples:
      distributary plan --topology v5e:4x4 --topology h100:8 train.py
    """
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
