"""Profiles of some steps, for Perfetto and TensorBoard."""

import contextlib
import glob
import logging
import os
import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import jax

from distributary.devices import latest_program, progress
from distributary.errors import ContextError, InvalidValueError

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
