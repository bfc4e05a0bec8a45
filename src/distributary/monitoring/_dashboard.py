"""The dashboard and the statistics logger, which a program starts to show its run."""

import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from distributary.errors import InvalidTypeError, InvalidValueError
from distributary.monitoring._closing import Closing
from distributary.monitoring._numbers import numbers_of
from distributary.monitoring._page import Describe, respond
from distributary.monitoring._recorder import Recorder, Sink, Tasks
from distributary.monitoring._server import HttpServer
from distributary.monitoring._sinks import JsonLines, TensorBoard
from distributary.topology import short_name

if TYPE_CHECKING:
    from distributary.strategies import Strategy

__all__ = ["Dashboard", "StatisticsLogger", "dashboard", "serve"]

_SAMPLE_SECONDS = 1.0
_TASK = "this process"


@final
class Dashboard(Closing):
    """A page that shows a run while it is going on. A context manager that closes the page.

    Attributes:
        url: Address of the page.
    """

    def __init__(self, url: str, close: Callable[[], None]) -> None:
        self.url = url
        self._close = close

    def close(self) -> None:
        """Stops serving the page."""
        self._close()

    def __repr__(self) -> str:
        return f"<dashboard at {self.url}>"


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

    return serve(collect, describe, port, address)


def serve(collect: Callable[[], Tasks], describe: Describe, port: int, address: str) -> Dashboard:
    """Serves the page for the numbers of some tasks.

    Args:
        collect: Returns the numbers of every task by its name.
        describe: Returns title, subtitle and the state of the tasks.
        port: Port to listen on; 0 takes a free one.
        address: Address to listen on.
    """
    if not 0 <= port < 1 << 16:
        raise InvalidValueError(
            f"dashboard: port is {port}, expected 0 to 65535; 0 takes any free port."
        )
    recorder = Recorder(collect, _SAMPLE_SECONDS)
    page = partial(respond, recorder, describe)
    try:
        server = HttpServer(address, port, page, "distributary-dashboard")
    except OSError:
        recorder.close()
        raise

    def close() -> None:
        server.close()
        recorder.close()

    host = f"[{address}]" if ":" in address else address
    return Dashboard(f"http://{host}:{server.port}/", close)


@final
class StatisticsLogger(Closing):
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

    def close(self) -> None:
        """Writes the last numbers and closes the files."""
        self._recorder.close()


def _collect_from(strategy: "Strategy", caller: str) -> Callable[[], Tasks]:
    if not hasattr(strategy, "step_statistics"):
        raise InvalidTypeError(
            f"{caller}: strategy is {strategy!r}, expected a distributary strategy, such as"
            " distributary.MirroredStrategy()."
        )
    return lambda: {_TASK: numbers_of(strategy.extended)}
