"""Tries random pairs of scripts that differ in one place; every worker must hear of each.

    python tests/nightly/differing_programs.py [--pairs 300] [--seed 0]

Ends with 1 if a difference was silent on a worker.
"""

import argparse
import json
import sys

from _workers import outputs_of_two

_SECONDS = 600.0
_PAIRS_PER_JOB = 100


def _run(seed: int, first: int, last: int) -> list[dict[int, str]]:
    """Returns what each worker has heard of the pairs, until one of them ended the job."""
    found = []
    for output in outputs_of_two("random_pairs.py", seed, first, last, seconds=_SECONDS):
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"pair"')]
        heard = {line["pair"]: line["heard"] for line in lines if "heard" in line}
        started = max((line["pair"] for line in lines), default=first)
        if started not in heard:  # the job ended in it
            said = [line for line in output.splitlines() if line.startswith("distributary: ")]
            heard[started] = said[0] if said else None
            if not said:
                print(output[-3000:])
        found.append(heard)
    return found


def main() -> int:
    """Runs the pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    first, silent, num_jobs = 0, [], 0
    while first < options.pairs:
        found = _run(options.seed, first, min(first + _PAIRS_PER_JOB, options.pairs))
        num_jobs += 1
        reached = max(max(heard, default=first) for heard in found)
        for pair in range(first, reached + 1):
            if any(not heard.get(pair) for heard in found):
                silent.append(pair)
                print(f"pair {pair}: {[heard.get(pair) for heard in found]}", flush=True)
        print(f"{reached + 1} pairs in {num_jobs} jobs, {len(silent)} silent", flush=True)
        first = reached + 1
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
