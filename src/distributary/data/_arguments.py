"""Arguments of the methods of datasets."""

import os

import numpy as np

from distributary.data._nodes import MAX_SEED
from distributary.data._options import AUTOTUNE
from distributary.errors import InvalidValueError, checked_int


def drawn_seed() -> int:
    return int(np.random.randint(0, MAX_SEED, dtype=np.int64))


def num_threads(what: str, num_parallel_calls: int | None) -> int | None:
    if num_parallel_calls is None:
        return None
    calls = checked_int(f"{what}: num_parallel_calls", num_parallel_calls, minimum=-1)
    if calls == AUTOTUNE:
        return os.cpu_count() or 1
    if calls == 0:
        raise InvalidValueError(
            f"{what}: num_parallel_calls is 0, expected a number of threads, AUTOTUNE, or None."
        )
    return calls
