"""Lets Keras' callback for TensorBoard write without TensorFlow, through tensorboardX."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import keras
import numpy as np

from distributary.errors import MissingPackageError


def write_without_tensorflow(callback: keras.callbacks.TensorBoard) -> None:
    """Gives the callback a place to write to if there is no TensorFlow.

    The graph of the model is left out: TensorBoard shows those of TensorFlow.
    """
    if not _has_tensorflow():
        callback._summary_module = Summaries()
        callback.write_graph = False


def _has_tensorflow() -> bool:
    try:
        return importlib.util.find_spec("tensorflow") is not None
    except ValueError:  # something else has its name
        return False


@final
class Summaries:
    """The part of `tf.summary` that the callback uses.

    Values are written to the writer whose `as_default` was entered last, and without one nowhere.

    Raises:
        MissingPackageError: without tensorboardX.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("tensorboardX") is None:
            raise MissingPackageError(
                "keras.callbacks.TensorBoard needs TensorFlow or tensorboardX. Install the smaller"
                " one with `pip install tensorboardX`."
            )
        self._current: list[tuple[_Writer, Any]] = []
        self._conditions: list[Callable[[], bool]] = []

    def create_file_writer(self, folder: str) -> "_Writer":
        """Returns a writer of an event file in a folder."""
        return _Writer(folder, self._current)

    @contextmanager
    def record_if(self, condition: Callable[[], bool]) -> Iterator[None]:
        """Writes only what the block writes while the condition holds."""
        self._conditions.append(condition)
        try:
            yield
        finally:
            self._conditions.pop()

    def scalar(self, name: str, data: Any, step: Any = None) -> None:
        """Writes a number."""
        self._write("add_scalar", name, lambda: float(np.asarray(data)), step)

    def histogram(self, name: str, data: Any, step: Any = None) -> None:
        """Writes the distribution of an array."""
        self._write("add_histogram", name, lambda: np.asarray(data), step)

    def image(self, name: str, data: Any, step: Any = None) -> None:
        """Writes images `[number, height, width, channels]` with values from 0 to 1."""
        self._write("add_images", name, lambda: np.asarray(data), step, dataformats="NHWC")

    def _write(
        self, method: str, name: str, get: Callable[[], Any], step: Any, **options: Any
    ) -> None:
        if not self._current or not all(condition() for condition in self._conditions):
            return
        writer, default_step = self._current[-1]
        number = int(np.asarray(default_step if step is None else step))
        getattr(writer.events, method)(name, get(), number, **options)


@final
class _Writer:
    def __init__(self, folder: str, current: list[tuple["_Writer", Any]]) -> None:
        from tensorboardX import SummaryWriter

        self.events = SummaryWriter(folder)
        self._current = current

    @contextmanager
    def as_default(self, step: Any = None) -> Iterator[None]:
        self._current.append((self, step))
        try:
            yield
        finally:
            self._current.pop()

    def flush(self) -> None:
        self.events.flush()

    def close(self) -> None:
        self.events.close()
