"""Runs a script as the main program and times its training step.

    python -m distributary.tools.scaling._child RESULT_FILE SECONDS PROGRAM

`PROGRAM` is a `Program` in JSON, and the result a `Timing`.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from distributary.devices import watch_programs
from distributary.errors import DistributaryError
from distributary.tools.compilation import run_script
from distributary.tools.scaling._measurement import Program
from distributary.tools.scaling._timer import StepTimer


def _main(result: str, seconds: str, content: str) -> int:
    program = Program(**json.loads(content))
    timer = StepTimer(float(seconds), program.step_name)
    watch_programs(timer.wrap)
    try:
        run_script(program.script, program.arguments, is_module=program.is_module)
        timing = timer.timing(program.script)
    except DistributaryError as error:
        print(error, file=sys.stderr)
        return 1
    Path(result).write_text(json.dumps(asdict(timing)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
