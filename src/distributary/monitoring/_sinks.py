"""Writes the numbers of a run to files."""

import json
from pathlib import Path
from typing import final

from distributary.errors import MissingPackageError
from distributary.monitoring._numbers import Numbers, finite

__all__ = ["JsonLines", "TensorBoard"]


@final
class JsonLines:
    """A file with one line of JSON per sample: `time`, in seconds since 1970, and the numbers.

    JSON has no infinity and no NaN: such numbers become null.

    Args:
        path: The file, to which lines are added. Its folder is created.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, when: float, numbers: Numbers) -> None:
        """Adds a line with the numbers."""
        self._file.write(json.dumps({"time": when, **finite(numbers)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@final
class TensorBoard:
    """A TensorBoard event file with a scalar for every number, over the steps.

    Args:
        folder: TensorBoard's `--logdir`, or a folder below it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise MissingPackageError(
                "StatisticsLogger: tensorboard= needs tensorboardX. Install it with"
                " `pip install 'distributary[tensorboard]'`."
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, when: float, numbers: Numbers) -> None:
        """Adds a scalar for every number."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, int(numbers["num_steps"]), when)

    def close(self) -> None:
        """Writes the rest, and closes the file."""
        self._writer.close()
