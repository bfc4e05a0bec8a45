"""Runs a script as the main program and times its training step."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from distributary.compilation import run_script
from distributary.errors import DistributaryError
from distributary.scaling._timer import StepTimer
from distributary.topology import watch_programs


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--step")
    parser.add_argument("--module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    namespace = parser.parse_args()
    timer = StepTimer(namespace.seconds, namespace.step)
    watch_programs(timer.wrap)
    try:
        run_script(namespace.script, namespace.arguments, is_module=namespace.module)
        timing = timer.timing(namespace.script)
    except DistributaryError as error:
        print(error, file=sys.stderr)
        return 1
    namespace.result.write_text(json.dumps(asdict(timing)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
