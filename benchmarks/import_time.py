"""How much longer does `import distributary` take than `import jax`?

Times are of whole fresh processes, as a user waits for them. The round that does not count fills
the file cache.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from _peers import Peer, timed

__all__ = ["peers"]

PROGRAMS = {
    "jax": "import jax",
    # Without jax, users would pay for it later, where this benchmark does not look.
    "distributary": "import sys, distributary; assert 'jax' in sys.modules",
}


def peers(names: Sequence[str]) -> list[Peer]:
    """Returns programs."""
    environ = dict(os.environ)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every round would compile what we measure

    def run(program: str, _: int) -> None:
        subprocess.run([sys.executable, "-c", program], env=environ, check=True)

    return [timed(name, partial(run, PROGRAMS[name])) for name in names]
