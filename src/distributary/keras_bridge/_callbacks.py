"""Makes callbacks free in steps that none of them observes; only the first worker reports."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, final

import jax
import keras

from distributary.context import get_strategy
from distributary.devices import Fit, JobEvent, job_programs, progress
from distributary.errors import InvalidTypeError, shown
from distributary.job import consensus, copies
from distributary.keras_bridge._backup import (
    back_up_due,
    distribute,
    ending,
    is_backup,
    resume_metrics,
)
from distributary.keras_bridge._data import current_call
from distributary.keras_bridge._models import strategy_of
from distributary.keras_bridge._summaries import Summaries, has_tensorflow

# These write or send data of the whole job, not of a single worker. So do those of other packages,
# which are not imported here.
_OF_CHIEF = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)
_PACKAGES_OF_CHIEF = {"mlflow", "wandb"}

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


def _has(callback: object, name: str) -> bool:
    """Returns whether a callback has a hook of its own, and not that of all, which does nothing."""
    function = getattr(getattr(callback, name), "__func__", None)
    return function is not getattr(keras.callbacks.Callback, name)


def _if_wanted(method: Callable[..., None], names: tuple[str, ...]) -> Callable[..., None]:
    """Limits a method of a callback list to lists that have a callback with one of these hooks."""
    attribute = f"_wants_{names[0]}"

    @functools.wraps(method)
    def limited(self: Any, batch: int, logs: object = None) -> None:
        callbacks = self.callbacks
        size, is_wanted = getattr(self, attribute, _UNKNOWN)
        if size != len(callbacks):
            is_wanted = any(_has(callback, name) for callback in callbacks for name in names)
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

    def __init__(
        self, callbacks: Any = None, add_history: bool = False, add_progbar: bool = False, **kw: Any
    ) -> None:
        call = current_call.get()
        assert call is not None
        self._call = call
        callbacks = keras.tree.flatten(callbacks) if callbacks else []
        for callback in callbacks:
            if isinstance(callback, type):
                name = callback.__name__
                raise InvalidTypeError(
                    f"{call.method}: callbacks has the class {name}. Write {name}() with its"
                    " arguments, an object of the class."
                )
            if not hasattr(callback, "set_model"):
                raise InvalidTypeError(
                    f"{call.method}: callbacks has {shown(callback)}, expected a"
                    " keras.callbacks.Callback. For a function write"
                    " keras.callbacks.LambdaCallback(on_epoch_end=function)."
                )
        # Last, as it saves what the others decide, and restores them after they have begun.
        callbacks.sort(key=is_backup)
        call.callbacks = [c for c in callbacks if not (is_backup(c) or _is_of_chief(c))]
        if get_strategy().extended.worker_number > 0:
            add_progbar = False
            callbacks = [c for c in callbacks if not _is_of_chief(c)]
        for callback in callbacks:
            if is_backup(callback):
                distribute(callback)
            if isinstance(callback, keras.callbacks.TensorBoard) and not has_tensorflow():
                callback._summary_module = Summaries()
                callback.write_graph = False  # TensorBoard shows those of TensorFlow
        super().__init__(callbacks, add_history, add_progbar, **kw)

    def on_train_begin(self, logs: object = None) -> None:
        """Takes note of it for those who watch."""
        progress.fit = Fit(int(self.params.get("epochs") or 1), self.params.get("steps"))
        self._call.passes = 0  # to build the model may have taken one
        self._model._initial_epoch = None  # Keras keeps that of an earlier call
        super().on_train_begin(logs)

    def on_train_end(self, logs: object = None) -> None:
        """Takes note of it for those who watch."""
        with ending(self.callbacks):
            super().on_train_end(logs)
        if progress.fit is not None:
            progress.fit.end()

    def on_test_begin(self, logs: object = None) -> None:
        """Takes note of it for those who watch."""
        progress.end("validation")  # of one that an error has ended
        progress.begin("validation")
        super().on_test_begin(logs)

    def on_test_end(self, logs: object = None) -> None:
        """Takes note of it for those who watch."""
        super().on_test_end(logs)
        progress.end("validation")

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Tells the other workers, too."""
        if progress.fit is not None:
            progress.fit.begin_epoch(epoch)
        if get_strategy().extended.num_workers > 1:
            job_programs.begin(JobEvent(f"the begin of an epoch of {self._model.name}"))
        self._call.epoch = epoch
        for callback in filter(is_backup, self.callbacks):
            callback._current_epoch = epoch  # Keras knows it only after the first one
        resume_metrics(self._model)
        super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Lets all workers stop if one does."""
        if copies.is_half_due:
            compare_copies(self._model, f"at the end of epoch {epoch + 1}")
        progress.note_logs(logs)
        super().on_epoch_end(epoch, logs)
        back_up_due()
        # A callback may decide this from something that only its worker knows, such as the time.
        job = consensus()
        if get_strategy().extended.num_workers > 1 and job is not None:
            stops = job.agree("the end of an epoch", lambda: bool(self._model.stop_training))
            self._model.stop_training = any(stops)


for _kind, _edge in itertools.product(("train", "test", "predict"), ("begin", "end")):
    _name = f"on_{_kind}_batch_{_edge}"
    # Hooks of training run those with an older name, too.
    _names = (_name, f"on_batch_{_edge}") if _kind == "train" else (_name,)
    _method = getattr(keras.callbacks.CallbackList, _name)
    setattr(LeanCallbackList, _name, _if_wanted(_method, _names))


def _is_of_chief(callback: object) -> bool:
    packages = {cls.__module__.partition(".")[0] for cls in type(callback).__mro__}
    return isinstance(callback, _OF_CHIEF) or not _PACKAGES_OF_CHIEF.isdisjoint(packages)


def new(cls: Any, *args: Any, model: Any = None, **kwargs: Any) -> Any:
    """Makes the list of callbacks that Keras creates in a call a `LeanCallbackList`."""
    is_of_keras = cls is keras.callbacks.CallbackList
    if is_of_keras and current_call.get() is not None and strategy_of(model) is not None:
        cls = LeanCallbackList
    return object.__new__(cls)
