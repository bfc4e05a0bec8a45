"""Summaries for TensorBoard, with the functions of `tf.summary`, written by tensorboardX."""

import importlib.util
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
        self._write("add_audio", name, data[0], step, sample_rate=sample_rate)

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
        self._write("add_scalar", name, data, step, float)

    def histogram(
        self,
        name: str,
        data: Any,
        step: object = None,
        buckets: object = None,
        description: object = None,
    ) -> None:
        """Writes the distribution of an array."""
        self._write("add_histogram", name, data, step)

    def image(
        self,
        name: str,
        data: Any,
        step: object = None,
        max_outputs: int = 3,
        description: object = None,
    ) -> None:
        """Writes images `[number, height, width, channels]` with values from 0 to 1."""
        self._write("add_images", name, data[:max_outputs], step, dataformats="NHWC")

    def text(
        self, name: str, data: ArrayLike, step: object = None, description: object = None
    ) -> None:
        """Writes text."""
        self._write("add_text", name, np.asarray(data), step, lambda text: str(text.item()))

    def _write(
        self,
        method: str,
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
            if replica == 0:
                getattr(writer.events, method)(name, convert(data), int(number), **options)

        values = [number, _value(data)]
        if any(isinstance(value, jax.core.Tracer) for value in values):
            jax.debug.callback(write, *values, _replica())
        elif _replica() == 0:
            write(*values)


def _value(value: object) -> Any:
    """Returns the array of a variable, and anything else unchanged."""
    return value.__jax_array__() if hasattr(value, "__jax_array__") else value


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
        from tensorboardX import SummaryWriter as Events

        self.events = Events(folder, filename_suffix=suffix, write_to_disk=folder is not None)
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
        self.events.flush()

    def close(self) -> None:
        """Writes everything to the file and closes it."""
        jax.effects_barrier()
        self.events.close()
