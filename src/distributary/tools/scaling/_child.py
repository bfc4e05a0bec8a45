"""Runs a script as the main program and times its training step.

    python -m distributary.tools.scaling._child RESULT_FILE SECONDS SCRIPT

`SCRIPT` is a `Script` in JSON, and the result a `Timing`.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from distributary.devices import watch_programs
from distributary.errors import DistributaryError
from distributary.tools.compilation import Script, run_script
from distributary.tools.scaling._timer import StepTimer


def _main(result: str, seconds: str, content: str) -> int:
    script = Script(**json.loads(content))
    timer = StepTimer(float(seconds), script.step_name)
    watch_programs(timer.wrap)
    try:
        run_script(script.path, script.arguments, is_module=script.is_module)
        timing = timer.timing(script.path)
    except DistributaryError as error:
        print(error, file=sys.stderr)
        return 1
    Path(result).write_text(json.dumps(asdict(timing)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
