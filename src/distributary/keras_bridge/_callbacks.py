"""Makes callbacks free in steps that none of them observes; only the first worker reports."""

import functools
from collections.abc import Callable
from typing import Any, final

import jax
import keras
from keras.src.utils import is_default

from distributary.context import get_strategy
from distributary.dispatch import JobEvent, job_programs
from distributary.job import consensus, copies
from distributary.keras_bridge._data import current_call
from distributary.keras_bridge._models import strategy_of

# These write or send data of the whole job, not of a single worker.
_OF_CHIEF = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)

# Hooks of a list of callbacks for every batch, each with other hooks that it runs.
_PER_BATCH = (
    ("on_train_batch_begin", "on_batch_begin"),
    ("on_train_batch_end", "on_batch_end"),
    ("on_test_batch_begin",),
    ("on_test_batch_end",),
    ("on_predict_batch_begin",),
    ("on_predict_batch_end",),
)
_UNKNOWN = (-1, False)


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


def _if_wanted(method: Callable[..., None], names: tuple[str, ...]) -> Callable[..., None]:
    """Limits a method of a callback list to lists that have a callback with one of these hooks."""
    attribute = f"_wants_{names[0]}"

    @functools.wraps(method)
    def limited(self: Any, batch: int, logs: Any = None) -> None:
        callbacks = self.callbacks
        size, is_wanted = getattr(self, attribute, _UNKNOWN)
        if size != len(callbacks):
            hooks = [getattr(callback, name) for callback in callbacks for name in names]
            is_wanted = not all(map(is_default, hooks))
            setattr(self, attribute, (len(callbacks), is_wanted))
        if is_wanted:
            method(self, batch, logs)

    return limited


@final
class LeanCallbackList(keras.callbacks.CallbackList):
    """The callbacks of a model under a strategy, in a call of `fit` or a related method.

    For every batch, Keras starts a task in a thread to convert logs, even if no callback uses them.
    This list calls hooks for every batch only if some callback has them.
    """

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tells the other workers, too."""
        if get_strategy().extended.num_workers > 1:
            job_programs.begin(JobEvent(f"the begin of an epoch of {self._model.name}"))
        super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Lets all workers stop if one does."""
        if copies.is_half_due:
            compare_copies(self._model, f"at the end of epoch {epoch + 1}")
        super().on_epoch_end(epoch, logs)
        # A callback may decide this from something that only its worker knows, such as the time.
        job = consensus()
        if get_strategy().extended.num_workers > 1 and job is not None:
            stops = job.agree("the end of an epoch", lambda: bool(self._model.stop_training))
            self._model.stop_training = any(stops)


for _name, *_others in _PER_BATCH:
    _method = getattr(keras.callbacks.CallbackList, _name)
    setattr(LeanCallbackList, _name, _if_wanted(_method, (_name, *_others)))


def init(original: Callable[..., None]) -> Callable[..., None]:
    """Makes the list of callbacks that Keras creates in a call a `LeanCallbackList`."""

    def __init__(  # noqa: N807
        self: Any,
        callbacks: Any = None,
        add_history: bool = False,
        add_progbar: bool = False,
        model: Any = None,
        **params: Any,
    ) -> None:
        is_of_keras = type(self) is keras.callbacks.CallbackList and current_call.get() is not None
        if is_of_keras and strategy_of(model) is not None:
            self.__class__ = LeanCallbackList
            if get_strategy().extended.worker_number > 0:
                add_progbar = False
                given = keras.tree.flatten(callbacks) if callbacks else []
                callbacks = [c for c in given if not isinstance(c, _OF_CHIEF)]
        original(self, callbacks, add_history, add_progbar, model, **params)

    return __init__
