"""Lets one of two workers hang in every way of tests/job/activity_cases.py; each must be named.

    python tests/nightly/hangs.py [NAME ...]

Ends with 1 if a hang was not named.
"""

import re
import sys
import time
from pathlib import Path

from _workers import outputs_of_two

_CASES = Path(__file__).parents[1] / "job" / "activity_cases.py"
_SECONDS = 60.0


def _names(output: str, name: str) -> bool:
    said = [line for line in output.splitlines() if "did not get anywhere" in line]
    return len(said) == 1 and name in said[0]


def main() -> int:
    """Tries all of them, or those that are named."""
    names = sys.argv[1:] or re.findall(r"^def (hang_\w+)", _CASES.read_text(), re.MULTILINE)
    missed = []
    for name in names:
        begin = time.monotonic()
        outputs = outputs_of_two("hangs.py", name, seconds=_SECONDS)
        is_named = all(_names(output, name) for output in outputs)
        missed += [] if is_named else [name]
        how = "named" if is_named else "not named"
        print(f"{name}: {how}, job of {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{len(names) - len(missed)} of {len(names)} hangs were named")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
