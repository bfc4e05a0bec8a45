"""Arguments of the methods of datasets."""

import math
import os
from typing import Any

import numpy as np

from distributary.data._nodes import MAX_SEED
from distributary.data._options import AUTOTUNE
from distributary.errors import InvalidTypeError, InvalidValueError, shown


def drawn_seed() -> int:
    return int(np.random.randint(0, MAX_SEED, dtype=np.int64))


def check_callable(what: str, name: str, value: object) -> None:
    if not callable(value):
        raise InvalidTypeError(f"{what}: {name} is {shown(value)}, expected a function.")


def num_threads(what: str, num_parallel_calls: int | None) -> int | None:
    if num_parallel_calls is None:
        return None
    calls = checked_int(what, "num_parallel_calls", num_parallel_calls, minimum=-1)
    if calls == AUTOTUNE:
        return os.cpu_count() or 1
    if calls == 0:
        raise InvalidValueError(
            f"{what}: num_parallel_calls is 0, expected a number of threads, AUTOTUNE, or None."
        )
    return calls


def checked_int(what: str, name: str, value: Any, minimum: float = -math.inf) -> int:
    is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_number:
        raise InvalidTypeError(f"{what}: {name} is {shown(value)}, expected an int.")
    if value < minimum:
        raise InvalidValueError(f"{what}: {name} is {value}, expected a number >= {minimum}.")
    return int(value)
