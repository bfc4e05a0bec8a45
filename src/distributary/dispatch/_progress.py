"""The progress of this process, for someone who watches it."""

from dataclasses import dataclass, field
from typing import final

import jax
import numpy as np


@final
@dataclass(eq=False)
class Progress:
    """The progress of this process, for someone who watches it.

    Attributes:
        is_watched: Whether someone watches; otherwise nothing is counted.
        num_steps: Number of steps of `fit` and of loops over distributed datasets, and of closures.
        num_examples: Number of examples in them, in this process.
        values: Latest numbers of the program itself, such as its loss, by name.
    """

    is_watched: bool = False
    num_steps: int = 0
    num_examples: int = 0
    values: dict[str, float] = field(default_factory=dict)

    def add(self, num_steps: int, num_examples: int) -> None:
        """Counts steps."""
        self.num_steps += num_steps
        self.num_examples += num_examples

    def note_logs(self, logs: object) -> None:
        """Takes the numbers from the logs of Keras; they are computed already."""
        if isinstance(logs, dict):
            kinds = (jax.Array, np.ndarray, np.generic, float, int)
            numbers = {k: v for k, v in logs.items() if isinstance(v, kinds) and np.ndim(v) == 0}
            self.values = {**self.values, **{k: float(v) for k, v in numbers.items()}}


progress = Progress()
