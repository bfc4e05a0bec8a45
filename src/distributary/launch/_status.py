"""What the launcher reads of its workers. It does not import JAX."""

import json
from collections.abc import Callable
from typing import Final, TypeAlias, final

STATUS_VARIABLE: Final = "DISTRIBUTARY_STATUS_FD"
#: Exit code of a task that cannot be part of its job, `EX_CONFIG` of `<sysexits.h>`, and what it
#: writes to stderr before the reason. The launcher ends the job, and says the reason once.
REFUSED_EXIT_CODE: Final = 78
REFUSED_PREFIX: Final = "distributary refuses the job: "

#: Numbers of a run by name: the same on the page, in files and on the way to a launcher. Names have
#: the form of TensorBoard's tags, `"step/compute_seconds"` for example.
Numbers: TypeAlias = dict[str, float]


@final
class ReportedNumbers:
    """The numbers that one worker has reported.

    Args:
        warn: Called at the first line that `report` would not write.
    """

    def __init__(self, warn: Callable[[], None]) -> None:
        self._warn: Callable[[], None] | None = warn
        self._last: Numbers = {}

    def read(self, line: bytes) -> None:
        """Takes the numbers from a line."""
        try:
            values = {str(name): float(value) for name, value in json.loads(line).items()}
        except (AttributeError, TypeError, ValueError, OverflowError, RecursionError):
            if self._warn is not None:
                self._warn()
            self._warn = None
        else:
            self._last = {**self._last, **values}  # a new dict, because other threads read it

    def numbers(self) -> Numbers:
        """Returns all numbers that the worker has reported, the latest of each. For any thread."""
        numbers = dict(self._last)
        if "step" in numbers:
            numbers.setdefault("num_steps", numbers["step"])
        return numbers

    def __str__(self) -> str:
        """Returns the worker's latest progress, `""` if there is none."""
        parts = []
        if "step" in self._last:
            parts.append(f"step {self._last['step']:.0f}")
        if "examples_per_second" in self._last:
            parts.append(f"{self._last['examples_per_second']:.0f} examples/s")
        return ", ".join(parts)
