"""The progress of this process, for someone who watches it."""

from typing import Any, final

import jax
import numpy as np


@final
class Progress:
    """The progress of this process, for someone who watches it.

    Attributes:
        is_watched: Whether someone watches; otherwise nothing is counted.
        num_steps: Number of steps of `fit` and of loops over distributed datasets, and of closures.
        num_examples: Number of examples in them, in this process.
        values: Latest numbers of the program itself, such as its loss, by name.
    """

    __slots__ = ("is_watched", "num_examples", "num_steps", "values")

    def __init__(self) -> None:
        self.is_watched = False
        self.num_steps = 0
        self.num_examples = 0
        self.values: dict[str, float] = {}

    def add(self, num_steps: int, num_examples: int) -> None:
        """Counts steps."""
        self.num_steps += num_steps
        self.num_examples += num_examples

    def note_logs(self, logs: Any) -> None:
        """Takes the numbers from the logs of Keras; they are computed already."""
        if isinstance(logs, dict):
            kinds = (jax.Array, np.ndarray, np.generic, float, int)
            numbers = {k: v for k, v in logs.items() if isinstance(v, kinds) and np.ndim(v) == 0}
            self.values = {**self.values, **{k: float(v) for k, v in numbers.items()}}


progress = Progress()
