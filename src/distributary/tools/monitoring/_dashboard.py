"""Shows the run of a strategy: on a page, as numbers in files, and as profiles of some steps."""

import contextlib
import glob
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import jax

from distributary._summaries import EventFile
from distributary.devices import latest_program, progress, short_name
from distributary.errors import (
    ContextError,
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
            from tensorboardX.summary import scalar
        except ImportError as error:
            raise MissingPackageError(
                "StatisticsLogger: tensorboard= needs tensorboardX. Install it with"
                f" `{pip_install('tensorboard')}`."
            ) from error
        self._file, self._scalar = EventFile(folder), scalar

    def write(self, when: float, numbers: Numbers) -> None:
        """Adds a scalar for every number of a process at a time, in seconds since 1970."""
        step = int(numbers["num_steps"])
        for name, value in numbers.items():
            self._file.write(wall_time=when, step=step, summary=self._scalar(name, value))
        self._file.flush()

    def close(self) -> None:
        """Writes the rest, and closes the file."""
        self._file.close()


# Profiles of some steps, for Perfetto and TensorBoard.

_log = logging.getLogger(__name__)

_STEP = "step"


def profile(path: str | os.PathLike[str], num_steps: int = 5) -> "Profile":
    """Records what the next steps do, on the host and on the devices.

    A step lasts from one batch to the next, of `fit` or of a loop over a distributed dataset. In
    the profile it is a slice named `step`, on the thread that calls the program. The recording
    starts with the next batch, but never with the first batch of a loop, for which programs are
    compiled. It ends `num_steps` batches later, or when you close the profile.

    Args:
        path: The file to write, `"profile.json.gz"` for example. It has Chrome's trace format,
            compressed; open it with https://ui.perfetto.dev. It is not sent anywhere.
        num_steps: Number of steps.

    Returns:
        The recording. Use it as a context manager, or call its `close()`.

    Raises:
        ContextError: if another profile is being recorded.
        InvalidValueError: if `num_steps` is below 1.
    """
    if num_steps < 1:
        raise InvalidValueError(f"profile: num_steps is {num_steps}, expected 1 or more.")
    if progress.begin_step is not None:
        raise ContextError("profile: another profile is being recorded. Close it first.")
    return Profile(Path(path), num_steps)


@final
class Profile(AbstractContextManager["Profile"]):
    """A recording; made by `profile`.

    Attributes:
        path: Path of the file, which exists once the recording has ended.
    """

    def __init__(self, path: Path, num_steps: int) -> None:
        self.path = path
        self._num_steps = num_steps
        self._num_begun = 0
        self._step: Any = None
        self._folder: str | None = None
        progress.begin_step = self._begin_step

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the recording if it has not ended, and writes the file if there were any steps.

        If it cannot be written, because a disk is full for example, there is a warning.
        """
        if progress.begin_step != self._begin_step:
            return
        progress.begin_step = None
        if self._folder is None:
            return
        latest_program.wait()
        self._step.__exit__(None, None, None)
        try:
            jax.profiler.stop_trace()
            (trace,) = glob.glob(f"{self._folder}/**/*.trace.json.gz", recursive=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(trace, self.path)
        except (OSError, jax.errors.JaxRuntimeError) as error:  # the training goes on
            _log.warning("The profile %s is not written: %s", self.path, error)
            shutil.rmtree(self._folder)
            with contextlib.suppress(RuntimeError):  # JAX goes on with a trace that it cannot write
                jax.profiler.stop_trace()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _begin_step(self, is_first: bool) -> None:
        if is_first and self._folder is None:
            return
        if self._num_begun == self._num_steps:
            self.close()
            return
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="distributary-profile-")
            latest_program.wait()
            jax.profiler.start_trace(self._folder)
        else:
            self._step.__exit__(None, None, None)
        self._step = jax.profiler.StepTraceAnnotation(_STEP, step_num=self._num_begun)
        self._step.__enter__()
        self._num_begun += 1
