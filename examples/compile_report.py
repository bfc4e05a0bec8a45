"""Compiles the training step of digits_custom_loop.py for TPUs and GPUs that are not here.

Needs the compilers, `pip install '.[examples,compile]'`, and no such hardware. Prints what one
device does in a step: how many bytes travel, how much memory and arithmetic it takes. Ends with
status 1 if some gradients are not combined in one all-reduce, or if a step copies its state.
"""

import argparse
import sys
from pathlib import Path

from distributary.tools.compilation import compile_script, parse_topology, prepare_compilers

SCRIPT = Path(__file__).with_name("digits_custom_loop.py")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ["v5e:2x2", "v5e:2x4", "h100:8"]
    parser.add_argument("topologies", nargs="*", default=default, help="default %(default)s")
    parser.add_argument("--global-batch-size", type=int, default=64, help="default %(default)s")
    options = parser.parse_args()

    prepare_compilers()  # first of all, before anything starts JAX
    arguments = ["--global-batch-size", str(options.global_batch_size)]
    reports = [
        compile_script(str(SCRIPT), arguments, parse_topology(name)) for name in options.topologies
    ]

    print("devices   replicas  all-reduces  all-reduced     memory     MFLOP  compiled in")
    for report in reports:
        print(
            f"{report.topology:9} {report.num_replicas:8} {len(report.collectives):12}"
            f" {report.all_reduced_bytes / 1e3:9.1f} kB {report.memory.total / 1e6:7.2f} MB"
            f" {(report.flops or 0) / 1e6:9.1f} {report.compile_seconds:10.1f} s"
        )
    is_good = all(
        len(report.collectives) == 1 and report.num_donated_arrays == report.num_state_arrays
        for report in reports
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
