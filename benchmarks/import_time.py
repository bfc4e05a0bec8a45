"""How much longer does `import distributary` take than `import jax`?

Fresh processes in turns: an empty program, `import jax`, `import distributary`. Times are of the
whole process, as a user waits for it. One round before the first fills the file cache.

    python benchmarks/import_time.py
"""

import subprocess
import sys
from argparse import Namespace
from functools import partial

import _harness
from _harness import Request, Row, pair
from _peers import timed

BAR = 1.1
PROGRAMS = {
    "empty": "pass",
    "jax": "import jax",
    # Without jax, users would pay for it later, where this benchmark does not look.
    "distributary": "import sys, distributary; assert 'jax' in sys.modules",
}


def requests(arguments: Namespace) -> list[Request]:
    """Returns the only request."""
    return [{"replicas": "-", "devices": 1}]


def measure(request: Request) -> list[Row]:
    """Measures the programs in turns."""
    environ = _harness.environment()
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every round would compile what we measure

    def run(program: str, _: int) -> None:
        command = [sys.executable, "-c", program]
        subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)

    peers = [timed(name, partial(run, program)) for name, program in PROGRAMS.items()]
    seconds = _harness.interleave(peers, request["rounds"])
    what = "`import distributary`, over `import jax`"
    return [_harness.row(what, "-", "s", seconds, [pair("distributary", "jax", BAR)])]


if __name__ == "__main__":
    _harness.run(requests, measure, rounds=(15, 3))
