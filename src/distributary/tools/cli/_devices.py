"""Prints the devices of this machine, and which of them each strategy would use.

Starts JAX, which takes most of the memory of free GPUs for a moment.
"""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(namespace: argparse.Namespace) -> int:
    """Prints the devices; returns 1 if TF_CONFIG is wrong."""
    from distributary.tools.diagnosis import devices_as_text, find_devices

    facts = find_devices()
    print(json.dumps(facts, indent=2) if namespace.json else devices_as_text(facts))
    return int("error" in facts["strategies"]["MultiWorkerMirroredStrategy"])
