"""Files with the numbers of a run."""

import json
from pathlib import Path
from typing import final

from distributary.errors import MissingPackageError
from distributary.monitoring._numbers import Numbers, finite

__all__ = ["JsonLines", "TensorBoard"]


@final
class JsonLines:
    """A line of JSON per sample: `time`, in seconds since 1970, and the numbers by name.

    JSON has no infinity: such numbers, and those that are none, are null.

    Args:
        path: The file; lines are added to it. Its folder is made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, when: float, numbers: Numbers) -> None:
        """Adds a line."""
        self._file.write(json.dumps({"time": when, **finite(numbers)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@final
class TensorBoard:
    """An event file with a scalar per number, over the steps.

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
        """Writes what is left."""
        self._writer.close()
