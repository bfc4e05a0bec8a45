"""Shows the numbers of a run while it is going on: on a page, and in files."""

import collections
import functools
import importlib.metadata
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final
from urllib.parse import parse_qs, urlsplit

from distributary._threads import start_thread
from distributary.devices import short_name
from distributary.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingPackageError,
    pip_install,
    shown,
)
from distributary.launch import Answer, HttpServer, Numbers, finite, numbers_of, rates

if TYPE_CHECKING:
    from distributary.strategies import Strategy

_SAMPLE_SECONDS = 1.0
_NUM_KEPT: Final = 900
_TASK = "this process"

Tasks: TypeAlias = Mapping[str, Numbers]
Sample: TypeAlias = dict[str, Any]
# Returns what is not in the samples: `title`, a line below it, rows of `tasks`, the `seconds` since
# the beginning, if that is not the page's, and the `messages` of a launcher with their times.
Describe: TypeAlias = Callable[[], dict[str, Any]]

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@final
class Dashboard(AbstractContextManager["Dashboard"]):
    """A page that shows a run while it is going on. A context manager that closes the page.

    Attributes:
        url: Address of the page.
    """

    def __init__(self, url: str, close: Callable[[], None]) -> None:
        self.url = url
        self._close = close

    def __exit__(self, *error: object) -> None:
        self.close()

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
    began = time.monotonic()
    product = _product()
    page = functools.partial(
        _respond, recorder, lambda: {**product, "seconds": time.monotonic() - began, **describe()}
    )
    try:
        server = HttpServer(address, port, page, "distributary-dashboard")
    except OSError as error:
        recorder.close()
        raise OSError(
            error.errno,
            f"The dashboard cannot be served at {address}, port {port}: {error.strerror}. Port 0"
            " takes a free one, and the address must be one of this machine",
        ) from error

    def close() -> None:
        server.close()
        recorder.close()

    host = f"[{address}]" if ":" in address else address
    return Dashboard(f"http://{host}:{server.port}/", close)


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
        sinks: list[JsonLines | TensorBoard] = []
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


def _collect_from(strategy: "Strategy", caller: str) -> Callable[[], Tasks]:
    if not hasattr(strategy, "step_statistics"):
        raise InvalidTypeError(
            f"{caller}: strategy is {shown(strategy)}, expected a distributary strategy, such as"
            " distributary.MirroredStrategy()."
        )
    return lambda: {_TASK: numbers_of(strategy.extended)}


@final
@dataclass(eq=False)
class Recorder:
    """A thread that samples numbers, for the last time when it is closed or the program ends.

    Args:
        collect: Returns the numbers of every task by its name.
        seconds: Seconds between samples.
        sinks: Destinations for the numbers, if there is only one task.
    """

    collect: Callable[[], Tasks]
    seconds: float
    sinks: "Sequence[JsonLines | TensorBoard]" = ()

    def __post_init__(self) -> None:
        self._samples: collections.deque[Sample] = collections.deque(maxlen=_NUM_KEPT)
        self._num_samples = 0
        self._lock = threading.Lock()
        self._before = time.time(), self.collect()
        self._closed = threading.Event()
        self._thread = start_thread(self._run, self._closed.set, "distributary-statistics")

    def samples(self, first: int = 0) -> tuple[list[Sample], int]:
        """Returns the kept samples from number `first` on, and the number of the next sample."""
        with self._lock:
            num_kept = min(len(self._samples), max(0, self._num_samples - first))
            return list(self._samples)[len(self._samples) - num_kept :], self._num_samples

    def close(self) -> None:
        """Takes a last sample and ends the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed.wait(self.seconds):
                self._sample()
            self._sample()
        finally:
            for sink in self.sinks:
                sink.close()

    def _sample(self) -> None:
        now, sums = time.time(), self.collect()
        then, before = self._before
        self._before = now, sums
        tasks = {
            name: numbers | rates(before.get(name, {}), numbers, now - then)
            for name, numbers in sums.items()
        }
        for numbers in tasks.values():
            for sink in self.sinks:
                sink.write(now, numbers)
        with self._lock:
            self._samples.append({"time": now, "tasks": tasks})
            self._num_samples += 1


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
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise MissingPackageError(
                "StatisticsLogger: tensorboard= needs tensorboardX. Install it with"
                f" `{pip_install('tensorboard')}`."
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, when: float, numbers: Numbers) -> None:
        """Adds a scalar for every number of a process at a time, in seconds since 1970."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, int(numbers["num_steps"]), when)

    def close(self) -> None:
        """Writes the rest, and closes the file."""
        self._writer.close()


def _respond(recorder: Recorder, describe: Describe, path: str) -> Answer | None:
    """Returns the page for `/`, and the samples from number 0 on for `/stats.json?first=0`."""
    url = urlsplit(path)
    if url.path == "/":
        return Answer(_page(), "text/html; charset=utf-8", headers=_HEADERS)
    if url.path != "/stats.json":
        return None
    (first,) = parse_qs(url.query).get("first", ["0"])[:1]
    samples, following = recorder.samples(int(first) if first.isdecimal() else 0)
    shown = [
        {**sample, "tasks": {name: finite(numbers) for name, numbers in sample["tasks"].items()}}
        for sample in samples
    ]
    content = {**describe(), "samples": shown, "next": following}
    return Answer(json.dumps(content).encode(), "application/json", headers=_HEADERS)


def _product() -> dict[str, str]:
    """Returns name and version, and the address of the project if the package names one."""
    try:
        metadata = importlib.metadata.metadata("distributary")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return {"product": "distributary"}
    urls = [text.partition(", ")[2] for text in metadata.get_all("Project-URL") or ()]
    product = {"product": f"distributary {metadata['Version']}"}
    return {**product, "link": urls[0]} if urls else product


@functools.cache
def _page() -> bytes:
    return resources.files(__package__).joinpath("page.html").read_bytes()
