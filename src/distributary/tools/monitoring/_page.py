"""The page that shows the numbers of a run while it is going on.

The launcher imports this module, so it does not import JAX.
"""

import collections
import contextlib
import functools
import importlib.metadata
import json
import logging
import math
import platform
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, final
from urllib.parse import parse_qs, urlsplit

from distributary._threads import start_thread
from distributary.errors import InvalidValueError
from distributary.launch import LaunchOptions, Numbers, Tasks, count_running
from distributary.servers._statistics import Answer, HttpServer

_log = logging.getLogger(__name__)

_SAMPLE_SECONDS = 1.0
_NUM_KEPT: Final = 900

ByTask: TypeAlias = Mapping[str, Numbers]
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
# Reported per step, for the time between two samples.
_PER_STEP = ("seconds", "host_seconds", "input_wait_seconds", "compute_seconds", "collective_bytes")


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


def serve_page(
    collect: Callable[[], ByTask], describe: Describe, port: int, address: str
) -> Dashboard:
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


def serve(
    options: LaunchOptions,
    tasks: Callable[[], Mapping[int, Tasks]],
    messages: Callable[[], Sequence[tuple[float, str]]],
) -> Dashboard:
    """Serves the page for a job, from its launcher; see `launch.run`."""
    program, *arguments = options.command
    command = shlex.join([Path(program).name, *arguments])
    hosts, where = options.hosts, platform.node()
    if hosts is not None and options.is_first_host:
        where = f"{hosts.num_hosts} hosts"
    elif hosts is not None:
        where += f", host {hosts.host_rank} of {hosts.num_hosts}"

    def collect() -> ByTask:
        return {name: of for host in tasks().values() for name, of in host.numbers.items()}

    def describe() -> dict[str, Any]:
        states = [(rank, state) for rank, of in sorted(tasks().items()) for state in of.states]
        return {
            "title": count_running([state for _, state in states]) or "Nothing runs yet",
            "subtitle": f"{command} on {where}",
            "messages": messages(),
            "tasks": [state if hosts is None else {**state, "host": r} for r, state in states],
        }

    assert options.dashboard_port is not None
    return serve_page(collect, describe, options.dashboard_port, options.dashboard_address)


class Sink(Protocol):
    """A destination for samples.

    Attributes:
        path: Its file or folder.
    """

    path: Path

    def write(self, when: float, numbers: Numbers) -> None:
        """Adds the numbers of a process at a time, in seconds since 1970."""

    def close(self) -> None:
        """Writes the rest, and closes the file."""


@final
@dataclass(eq=False)
class Recorder:
    """A thread that samples numbers, for the last time when it is closed or the program ends.

    A sink that cannot be written, because its disk is full for example, is given up with a warning.

    Args:
        collect: Returns the numbers of every task by its name.
        seconds: Seconds between samples.
        sinks: Destinations for the numbers, if there is only one task.
    """

    collect: Callable[[], ByTask]
    seconds: float
    sinks: Sequence[Sink] = ()

    def __post_init__(self) -> None:
        self._samples: collections.deque[Sample] = collections.deque(maxlen=_NUM_KEPT)
        self._num_samples = 0
        self._sinks = list(self.sinks)
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
            for sink in list(self._sinks):
                with self._giving_up(sink):
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
            for sink in list(self._sinks):
                with self._giving_up(sink):
                    sink.write(now, numbers)
        with self._lock:
            self._samples.append({"time": now, "tasks": tasks})
            self._num_samples += 1

    @contextlib.contextmanager
    def _giving_up(self, sink: Sink) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _log.warning("%s is not written any more: %s.", sink.path, error.strerror)
            self._sinks.remove(sink)
            with contextlib.suppress(OSError):  # of what it could not write
                sink.close()


def finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Returns the numbers with None for those that JSON cannot represent."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def rates(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> Numbers:
    """Returns the changes between two samples `seconds` apart, per second and per step."""
    changes = {name: after[name] - before[name] for name in after.keys() & before.keys()}
    if not seconds or any(changes.get(name, 0) < 0 for name in ("num_steps", "num_examples")):
        return {}  # the process has been started again in between
    num_steps = changes.get("num_steps", 0)
    numbers: Numbers = {}
    for name in ("steps", "examples", "runs"):
        if f"num_{name}" in changes and after[f"num_{name}"]:
            numbers[f"{name}_per_second"] = changes[f"num_{name}"] / seconds
    if num_steps and changes.get("seconds"):
        numbers |= {f"step/{name}": changes[name] / num_steps for name in _PER_STEP}
    return numbers


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
