"""Makes callbacks free in steps that none of them observes; only the first worker reports."""

from collections.abc import Callable
from typing import Any

import jax
import keras
from keras.src.utils import is_default

from distributary.context import get_strategy, has_strategy
from distributary.dispatch import JobEvent, job_programs
from distributary.job import consensus, copies

# These write or send data of the whole job, not of a single worker.
_OF_CHIEF = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)


def is_silent() -> bool:
    """Returns whether this process leaves printing and writing to the first worker."""
    return has_strategy() and get_strategy().extended.worker_number > 0


def print_msg(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes only the first worker print progress."""

    def print_msg(*args: Any, **kwargs: Any) -> None:
        if not is_silent():
            original(*args, **kwargs)

    return print_msg


def compare_copies(model: Any, what: str) -> None:
    """Compares the workers' copies of a model and its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    held = [
        variable
        for variable in (*model.variables, *getattr(optimizer, "variables", ()))
        if isinstance(variable._value, jax.Array)
        and variable._value.is_fully_replicated
        and not variable._value.is_fully_addressable
    ]
    copies.compare(what, [v.path for v in held], [v._value for v in held])


def make_callback_list(base: type, strategy_of: Callable[[Any], Any]) -> type:
    """Makes a stand-in for Keras' `CallbackList`, which is leaner for models under a strategy."""

    def wanted(callback: Any, *names: str) -> bool:
        return any(not is_default(getattr(callback, name)) for name in names)

    class LeanCallbackList(base):
        """A list of callbacks that calls per-batch hooks only if some callback has them.

        For every batch, Keras starts a task in a thread to convert logs, even if no callback uses
        them.
        """

        def __init__(self, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
            self._answers: dict[Any, bool] = {}
            if is_silent():
                kwargs["add_progbar"] = False
                given = (
                    [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else callbacks
                )
                callbacks = [c for c in given or () if not isinstance(c, _OF_CHIEF)]
            super().__init__(callbacks, *args, **kwargs)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if get_strategy().extended.num_workers > 1:
                job_programs.begin(JobEvent(f"the begin of an epoch of {self._model.name}"))
            super().on_epoch_begin(epoch, logs)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if copies.is_half_due:
                compare_copies(self._model, f"at the end of epoch {epoch + 1}")
            super().on_epoch_end(epoch, logs)
            # A callback may decide this from something that only its worker knows, such as the
            # time.
            job = consensus()
            if get_strategy().extended.num_workers > 1 and job is not None:
                stops = job.agree("the end of an epoch", lambda: bool(self._model.stop_training))
                self._model.stop_training = any(stops)

        def _asks(self, *names: str) -> bool:
            key = (*names, len(self.callbacks))
            answer: bool | None = self._answers.get(key)
            if answer is None:
                answer = any(wanted(callback, *names) for callback in self.callbacks)
                self._answers[key] = answer
            return answer

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self._asks("on_train_batch_begin", "on_batch_begin"):
                super().on_train_batch_begin(batch, logs)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self._asks("on_train_batch_end", "on_batch_end"):
                super().on_train_batch_end(batch, logs)

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self._asks("on_test_batch_begin"):
                super().on_test_batch_begin(batch, logs)

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if self._asks("on_test_batch_end"):
                super().on_test_batch_end(batch, logs)

        def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self._asks("on_predict_batch_begin"):
                super().on_predict_batch_begin(batch, logs)

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            if self._asks("on_predict_batch_end"):
                super().on_predict_batch_end(batch, logs)

    class Choice(type):
        """The type of the stand-in: Keras calls the stand-in and uses it with `isinstance`."""

        def __call__(cls, *args: Any, model: Any = None, **kwargs: Any) -> Any:
            kind = base if strategy_of(model) is None else LeanCallbackList
            return kind(*args, model=model, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, base)

    return Choice("CallbackList", (), {})
