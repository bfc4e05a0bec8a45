"""Summaries for TensorBoard, with the functions of `tf.summary`, written by tensorboardX."""

import importlib.util
import itertools
import os
import platform
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, final

import jax
import numpy as np
from jax.typing import ArrayLike

from distributary.context import get_replica_context
from distributary.errors import InvalidValueError, MissingPackageError


def has_tensorflow() -> bool:
    """Returns whether TensorFlow is installed."""
    try:
        return importlib.util.find_spec("tensorflow") is not None
    except ValueError:  # something else has its name
        return False


_num_files = itertools.count()
_SECONDS_BETWEEN_FLUSHES = 120.0  # as TensorFlow's


@final
class EventFile:
    """An event file of TensorBoard in a folder, which is created.

    It is written where `write` is called. The thread of tensorboardX's `SummaryWriter` ends when a
    disk is full, and those that write wait for it forever.

    Args:
        folder: TensorBoard's `--logdir`, or a folder below it; also `s3://` and `gs://`.
        suffix: End of the file's name.

    Raises:
        ImportError: without tensorboardX.
    """

    def __init__(self, folder: str | os.PathLike[str], suffix: str = "") -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter, directory_check

        folder = os.fspath(folder)
        directory_check(folder)
        # Files of one second need different names.
        place = f"{platform.node()}.{os.getpid()}.{next(_num_files)}"
        name = f"events.out.tfevents.{time.time():.0f}.{place}{suffix}"
        self._writer, self._event = RecordWriter(f"{folder}/{name}"), Event
        self._next_flush = 0.0
        #: Writes the rest and closes the file; at the end of the process, too.
        self.close = weakref.finalize(self, self._writer.close)
        self.write(file_version="brain.Event:2")

    def write(self, **fields: Any) -> None:
        """Writes an event with these fields, and flushes now and then.

        Raises:
            OSError: if the file cannot be written.
        """
        event = self._event(**{"wall_time": time.time(), **fields})
        self._writer.write(event.SerializeToString())
        if time.monotonic() >= self._next_flush:
            self.flush()

    def flush(self) -> None:
        """Writes everything to the file."""
        if self.close.alive:
            self._writer.flush()
        self._next_flush = time.monotonic() + _SECONDS_BETWEEN_FLUSHES


@final
class Summaries:
    """The functions of `tf.summary`.

    Values are written to the writer whose `as_default` was entered last, and without one nowhere.
    In a step, they are written when the step runs; of several replicas, the first one writes.
    """

    def __init__(self) -> None:
        self._current: list[tuple[SummaryWriter, Any]] = []
        self._conditions: list[Callable[[], bool]] = []
        self._step: object = None

    def create_file_writer(
        self,
        logdir: str,
        max_queue: int | None = None,
        flush_millis: int | None = None,
        filename_suffix: str | None = None,
        name: str | None = None,
        experimental_trackable: bool = False,
        experimental_mesh: object = None,
    ) -> "SummaryWriter":
        """Returns a writer of an event file in a folder.

        Raises:
            MissingPackageError: without tensorboardX.
        """
        if importlib.util.find_spec("tensorboardX") is None:
            raise MissingPackageError(
                "Summaries for TensorBoard need TensorFlow or tensorboardX. Install the smaller one"
                " with `pip install tensorboardX`."
            )
        return SummaryWriter(logdir, self._current, filename_suffix or "")

    def create_noop_writer(self) -> "SummaryWriter":
        """Returns a writer that writes nothing."""
        return SummaryWriter(None, self._current, "")

    def audio(
        self,
        name: str,
        data: Any,
        sample_rate: int,
        step: object = None,
        max_outputs: int = 3,
        encoding: str | None = None,
        description: object = None,
    ) -> None:
        """Writes the first clip of `[number, frames, channels]`, with values from -1 to 1."""
        self._write("audio", name, data[0], step, sample_rate=sample_rate)

    def set_step(self, step: object) -> None:
        """Sets the step of what is written without one: a number or a variable."""
        self._step = step

    def get_step(self) -> Any:
        """Returns what `set_step` has set."""
        return self._step

    def should_record_summaries(self) -> bool:
        """Returns whether something would be written now."""
        return bool(self._current) and all(condition() for condition in self._conditions)

    def flush(self, writer: "SummaryWriter | None" = None, name: str | None = None) -> None:
        """Writes everything to the file: of a writer, or of the current one."""
        for one in [writer] if writer is not None else [w for w, _ in self._current[-1:]]:
            one.flush()

    @contextmanager
    def record_if(self, condition: bool | Callable[[], bool]) -> Iterator[None]:
        """Writes only what the block writes while the condition holds."""
        self._conditions.append(condition if callable(condition) else lambda: bool(condition))
        try:
            yield
        finally:
            self._conditions.pop()

    def scalar(
        self, name: str, data: ArrayLike, step: object = None, description: object = None
    ) -> None:
        """Writes a number."""
        self._write("scalar", name, data, step, float)

    def histogram(
        self,
        name: str,
        data: Any,
        step: object = None,
        buckets: int | None = None,
        description: object = None,
    ) -> None:
        """Writes the distribution of the finite numbers of an array, over 30 or more `buckets`."""
        self._write("histogram", name, data, step, _finite, bins=buckets or 30)

    def image(
        self,
        name: str,
        data: Any,
        step: object = None,
        max_outputs: int = 3,
        description: object = None,
    ) -> None:
        """Writes images `[number, height, width, channels]` with values from 0 to 1."""
        self._write("image", name, data[:max_outputs], step, dataformats="NHWC")

    def text(
        self, name: str, data: ArrayLike, step: object = None, description: object = None
    ) -> None:
        """Writes text."""
        self._write("text", name, np.asarray(data), step, lambda text: str(text.item()))

    def _write(
        self,
        kind: str,
        name: str,
        data: ArrayLike,
        step: object,
        convert: Callable[[Any], Any] = np.asarray,
        **options: Any,
    ) -> None:
        if not self.should_record_summaries():
            return
        writer, default_step = self._current[-1]
        chosen = (step, default_step, self._step)
        number = next((_value(one) for one in chosen if one is not None), None)
        if number is None:
            raise InvalidValueError(
                f"Summary {name!r} has no step. Pass step=, or set one with"
                " tf.summary.experimental.set_step."
            )

        def write(number: int, data: np.ndarray, replica: int = 0) -> None:
            values = convert(data)
            if replica == 0 and writer.events is not None and np.size(values):
                from tensorboardX import summary

                made = getattr(summary, kind)(name, values, **options)
                writer.events.write(step=int(number), summary=made)

        values = [number, _value(data)]
        if any(isinstance(value, jax.core.Tracer) for value in values):
            jax.debug.callback(write, *values, _replica())
        elif _replica() == 0:
            write(*values)


def _value(value: object) -> Any:
    """Returns the array of a variable, and anything else unchanged."""
    return value.__jax_array__() if hasattr(value, "__jax_array__") else value


def _finite(values: np.ndarray) -> np.ndarray:
    """Returns the finite numbers of an array, `[n]`."""
    numbers = np.asarray(values, np.float64)
    return numbers[np.isfinite(numbers)]


def _replica() -> Any:
    context = get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


@final
class SummaryWriter:
    """A writer of an event file.

    Source: `tf.summary.SummaryWriter`.
    """

    def __init__(
        self, folder: str | None, current: list[tuple["SummaryWriter", Any]], suffix: str
    ) -> None:
        self.events = None if folder is None else EventFile(folder, suffix)
        self._current = current

    @contextmanager
    def as_default(self, step: object = None) -> Iterator[Self]:
        """Makes this the writer of what the block writes, with a step if you pass one."""
        self.set_as_default(step)
        try:
            yield self
        finally:
            self._current.pop()

    def set_as_default(self, step: object = None) -> None:
        """Makes this the writer from now on, with a step if you pass one."""
        self._current.append((self, step))

    def flush(self) -> None:
        """Writes everything to the file."""
        jax.effects_barrier()  # what steps have still to write
        if self.events is not None:
            self.events.flush()

    def close(self) -> None:
        """Writes everything to the file and closes it."""
        jax.effects_barrier()
        if self.events is not None:
            self.events.close()
