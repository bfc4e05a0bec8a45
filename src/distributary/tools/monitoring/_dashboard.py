"""Shows the numbers of a strategy's run: on a page, and in files."""

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from distributary.devices import short_name
from distributary.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingPackageError,
    pip_install,
    shown,
)
from distributary.launch import Numbers, numbers_of
from distributary.tools.monitoring._page import (
    ByTask,
    Dashboard,
    Recorder,
    Sink,
    finite,
    serve_page,
)

if TYPE_CHECKING:
    from distributary.strategies import Strategy

_TASK = "this process"


def dashboard(strategy: "Strategy", port: int = 0, *, address: str = "127.0.0.1") -> Dashboard:
    """Serves a page that shows the run of a strategy: its speed, its loss, and its waiting times.

    The page shows the numbers of `strategy.step_statistics`, the numbers of a `ClusterCoordinator`,
    the logs of `fit`, and everything that the program passes to `distributary.launch.report`. With
    several workers it shows only this process; `distributary launch --dashboard` shows all of them.

    Args:
        strategy: The strategy.
        port: Port to listen on; 0 takes a free one.
        address: Address to listen on. There is no password: anybody who reaches the address can
            read the page.

    Returns:
        An object with the `url`. Call its `close()`, or use it as a context manager.

    Raises:
        InvalidTypeError: if `strategy` is not a strategy.
        InvalidValueError: for an impossible port.
        OSError: if the port is taken.
    """
    collect = _collect_from(strategy, "dashboard")
    extended = strategy.extended
    devices = [short_name(device) for device in extended.worker_devices]
    num_replicas = extended.num_replicas
    what = f"{type(strategy).__name__}, {num_replicas} replica{'s' if num_replicas > 1 else ''}"

    def describe() -> dict[str, Any]:
        where = f"process {os.getpid()} on {platform.node()}"
        if extended.num_workers > 1:
            where += f", worker {extended.worker_number} of {extended.num_workers}"
        task = {"name": _TASK, "state": "running", "devices": devices}
        return {"title": what, "subtitle": where, "tasks": [task]}

    return serve_page(collect, describe, port, address)


@final
class StatisticsLogger(AbstractContextManager["StatisticsLogger"]):
    """A logger that writes the numbers of a strategy's run to files until you close it.

    The numbers are those of `dashboard`. It is a context manager, and writes the last numbers at
    its end.

    Args:
        strategy: The strategy.
        json_lines: File that gets one line of JSON per sample. Lines that it already has are kept.
        tensorboard: Folder for a TensorBoard event file, which needs tensorboardX.
        seconds: Seconds between samples.

    Raises:
        InvalidTypeError: if `strategy` is not a strategy.
        InvalidValueError: if you give no file, or `seconds` is not positive.
        MissingPackageError: for `tensorboard` without tensorboardX.
    """

    def __init__(
        self,
        strategy: "Strategy",
        *,
        json_lines: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        seconds: float = 1.0,
    ) -> None:
        collect = _collect_from(strategy, "StatisticsLogger")
        if json_lines is None and tensorboard is None:
            raise InvalidValueError(
                "StatisticsLogger: there is nowhere to write to. Give json_lines=, the path of a"
                " file, or tensorboard=, the path of a folder."
            )
        if not seconds > 0:
            raise InvalidValueError(
                f"StatisticsLogger: seconds is {seconds}, expected a positive number of seconds."
            )
        sinks: list[Sink] = []
        if tensorboard is not None:
            sinks.append(TensorBoard(Path(tensorboard)))
        if json_lines is not None:
            sinks.append(JsonLines(Path(json_lines)))
        self._recorder = Recorder(collect, seconds, sinks)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes the last numbers and closes the files."""
        self._recorder.close()


def _collect_from(strategy: "Strategy", caller: str) -> Callable[[], ByTask]:
    if not hasattr(strategy, "step_statistics"):
        raise InvalidTypeError(
            f"{caller}: strategy is {shown(strategy)}, expected a distributary strategy, such as"
            " distributary.MirroredStrategy()."
        )
    return lambda: {_TASK: numbers_of(strategy.extended)}


@final
class JsonLines:
    """A file with one line of JSON per sample: `time`, in seconds since 1970, and the numbers.

    JSON has no infinity and no NaN: such numbers become null.

    Args:
        path: The file, to which lines are added. Its folder is created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, when: float, numbers: Numbers) -> None:
        """Adds a line with the numbers of a process at a time, in seconds since 1970."""
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
        self.path = folder
        try:
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.record_writer import RecordWriter
            from tensorboardX.summary import scalar
        except ImportError as error:
            raise MissingPackageError(
                "StatisticsLogger: tensorboard= needs tensorboardX. Install it with"
                f" `{pip_install('tensorboard')}`."
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        # Not `SummaryWriter`, which waits forever if its thread has ended because a disk is full.
        name = f"events.out.tfevents.{time.time():.0f}.{platform.node()}"
        self._writer = RecordWriter(str(folder / name))
        self._event, self._scalar = Event, scalar
        self._add(wall_time=time.time(), file_version="brain.Event:2")

    def write(self, when: float, numbers: Numbers) -> None:
        """Adds a scalar for every number of a process at a time, in seconds since 1970."""
        step = int(numbers["num_steps"])
        for name, value in numbers.items():
            self._add(wall_time=when, step=step, summary=self._scalar(name, value))
        self._writer.flush()

    def close(self) -> None:
        """Writes the rest, and closes the file."""
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.write(self._event(**fields).SerializeToString())
