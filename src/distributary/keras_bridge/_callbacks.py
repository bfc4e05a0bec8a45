"""Callbacks: free in steps that none of them observes; only the first worker reports and backs up.

`BackupAndRestore` writes one file from which all workers go on in the middle of an epoch. Weights
and progress are in one file, so that they match even after a kill. The file ends with a checksum,
which HDF5 ignores.
"""

import dataclasses
import functools
import inspect
import io
import itertools
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import h5py  # type: ignore[import-untyped]
import keras
import numpy as np

from distributary._summaries import Summaries, has_tensorflow
from distributary.checkpoint import (
    complete_file,
    hold,
    is_damaged,
    is_sealed,
    keep_programs,
    release,
    remove_programs,
    seal,
)
from distributary.context import get_strategy
from distributary.devices import Fit, JobEvent, job_programs, local_copy, progress
from distributary.errors import CheckpointError, InvalidTypeError, InvalidValueError, shown
from distributary.job import consensus, copies
from distributary.keras_bridge._data import Position, current_call
from distributary.keras_bridge._keras_private import file_utils, saving_api, saving_lib
from distributary.keras_bridge._models import strategy_of
from distributary.keras_bridge._saving import by_itself, take_over
from distributary.keras_bridge._variables import take_turn

# Backups


_log = logging.getLogger(__name__)

# Datasets of the weights file: how far training is, and the state of the other callbacks.
_PROGRESS = "distributary_progress"
_CALLBACKS = "distributary_callbacks"
# The attributes with the state of Keras' callbacks, which Keras does not save.
_STATES = (
    (keras.callbacks.EarlyStopping, ("best", "wait", "best_epoch", "best_weights")),
    (keras.callbacks.ReduceLROnPlateau, ("best", "wait", "cooldown_counter")),
    (keras.callbacks.ModelCheckpoint, ("best",)),
    (keras.callbacks.SwapEMAWeights, ("_ema_weights_in_model",)),
)
_LOCK = "latest"


class Backup(keras.callbacks.BackupAndRestore):
    """A user's `BackupAndRestore`, whose attributes it shares, in a call of `fit`."""

    @classmethod
    def of(cls, callback: Any) -> Any:
        """Returns the form of a callback in which Keras' methods are those of this class.

        Keras' own write to a bucket, to which all workers have access.
        """
        kind = type(callback)
        if not is_backup(callback) or file_utils.is_remote_path(callback.backup_dir):
            return callback
        # Methods of a user's own class come first.
        is_own = kind is not keras.callbacks.BackupAndRestore
        backup: Any = object.__new__(type(kind.__name__, (kind, cls), {}) if is_own else cls)
        backup.__dict__ = vars(callback)
        return backup

    def _save_model(self) -> None:
        """Makes the first worker write a backup, which includes the state of the random numbers."""
        model, strategy = self.model, get_strategy()
        call: Any = current_call.get()
        steps = 0
        in_epoch = self._current_epoch == call.epoch
        if in_epoch and call.order_is_known and strategy.extended.remote_steps is None:
            steps = self._last_batch_seen + 1
            if call.is_last_step(steps, self.params.get("steps")):
                call.due.append(self)  # Keras cannot go on with an epoch without a step
                return
        reached = {
            "epoch": self._current_epoch,
            "steps": self.params.get("steps"),
            "batch_size": getattr(call.data, "batch_size", None),
            "position": dataclasses.asdict(call.position(steps)),
            "metrics": [np.asarray(v).tolist() for v in model.metrics_variables if steps],
        }
        take_turn(0, model, strategy, lambda: self._write(reached))

    def _write(self, reached: dict[str, Any]) -> None:
        with by_itself(get_strategy()):
            self._take_folder()
            if self.double_checkpoint and os.path.exists(self._weights_path):
                file_utils.copy(self._weights_path, self._prev_weights_path)
                file_utils.copy(self._training_metadata_path, self._prev_training_metadata_path)
            seeds = [np.asarray(state.value).tolist() for state in _seed_states(self.model)]
            described = json.dumps({**reached, "model_seeds": seeds}).encode()
            with complete_file(Path(self._weights_path)) as path:
                inspect.unwrap(saving_lib.save_weights_only)(self.model, str(path))
                with h5py.File(path, "r+") as file:
                    file[_PROGRESS] = np.frombuffer(described, np.uint8)
                    file[_CALLBACKS] = np.frombuffer(_packed_callbacks(), np.uint8)
                seal(path)
            of_keras = {"epoch": self._current_epoch, "batch": self._last_batch_seen}
            with complete_file(Path(self._training_metadata_path)) as path:
                path.write_text(json.dumps(of_keras))  # for Keras without a strategy

    def _take_folder(self) -> None:
        """Checks that the folder belongs to this job, and that nothing else uses its file names.

        Raises:
            InvalidValueError: if not. Keras would take an OSError for a damaged backup, and replace
                it.
        """
        weights, metadata = Path(self._weights_path), Path(self._training_metadata_path)
        try:
            hold(Path(self.backup_dir), _LOCK, is_series=True)
        except CheckpointError as error:
            raise InvalidValueError(f"BackupAndRestore: {error}") from None
        foreign = None
        if not is_sealed(weights):  # or Keras has made it without a strategy
            try:
                int(json.loads(metadata.read_bytes())["epoch"])
            except FileNotFoundError:
                foreign = weights if weights.exists() else None
            except (OSError, ValueError, KeyError, TypeError):
                foreign = metadata
        if foreign is not None:
            raise InvalidValueError(
                f"BackupAndRestore: {foreign} is there already, and is not from a backup. Move it"
                " away, or choose another backup_dir."
            )

    def on_train_begin(self, logs: object = None) -> None:
        """Makes all workers continue training from the first worker's backup."""
        model, strategy = self.model, get_strategy()
        keep_programs(Path(self.backup_dir).absolute())
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self._found = b""
        # Keras takes the backup before if this one is damaged.
        take_turn(0, model, strategy, super().on_train_begin)
        from_chief = strategy.extended.from_chief
        found, self._found = self._found, b""
        (size,) = from_chief([np.array(len(found))], "the size of the backup")
        if not size:
            return
        take_over(model, strategy)
        own = np.frombuffer(found or bytes(int(size)), np.uint8)
        (of_chief,) = from_chief([own], "the progress of training")
        described, _, packed = of_chief.tobytes().partition(b"\n")
        self._go_on(json.loads(described))
        _unpack_callbacks(packed)

    def _load_model(self) -> None:
        with by_itself(get_strategy()):
            self._found = self._read()

    def _read(self) -> bytes:
        """Loads weights.

        Returns:
            The progress of training, as a line of JSON, then the state of the callbacks. Empty
            without a backup.
        """
        path, metadata = Path(self._weights_path), Path(self._training_metadata_path)
        self._take_folder()
        if not path.exists():
            return b""
        if is_damaged(path):
            raise CheckpointError(
                f"BackupAndRestore: {path} is damaged: its checksum is not right. Remove it to"
                " begin anew; double_checkpoint=True keeps the backup before."
            )
        inspect.unwrap(saving_api.load_weights)(self.model, str(path))
        with h5py.File(path, "r") as file:
            if _PROGRESS in file:
                return b"\n".join(file[name][:].tobytes() for name in (_PROGRESS, _CALLBACKS))
        # Keras made it without a strategy.
        return metadata.read_bytes() if metadata.exists() else b'{"epoch": 0}'

    def _go_on(self, reached: dict[str, Any]) -> None:
        """Lets training go on from there."""
        model = self.model
        call: Any = current_call.get()
        self._current_epoch = model._initial_epoch = epoch = reached["epoch"]
        if "position" not in reached:  # Keras made it without a strategy
            return
        for generator, state in zip(_seed_states(model), reached["model_seeds"], strict=True):
            generator.assign(np.array(state, generator.dtype))
        position = Position(**reached["position"])
        was, steps = reached["steps"], self.params.get("steps")
        size = getattr(call.data, "batch_size", None)
        has_other_size = reached["batch_size"] != size
        if (position.steps and was != steps) or (position.batches and has_other_size):
            _log.warning(
                "BackupAndRestore: the backup was made after %s of %s steps of epoch %s, with"
                " batch_size %s, and an epoch has %s with %s now. So that epoch begins anew, and"
                " uses its first examples again.",
                *(position.steps, was, epoch + 1, reached["batch_size"], steps, size),
            )
            batches = 0 if has_other_size else position.batches - position.steps
            position = dataclasses.replace(position, steps=0, batches=batches)
        elif position.steps:
            call.metrics = reached["metrics"]
            self._last_batch_seen = position.steps - 1
        call.go_to(position)

    def on_train_end(self, logs: object = None) -> None:
        """Makes the first worker remove its backups at the end of training, and no other file."""
        folder = Path(self.backup_dir).absolute()
        if self.delete_checkpoint:
            remove_programs(folder)
        if get_strategy().extended.worker_number > 0:
            return
        if self.delete_checkpoint:
            for name in ("weights", "prev_weights", "training_metadata", "prev_training_metadata"):
                Path(getattr(self, f"_{name}_path")).unlink(missing_ok=True)
        release(folder, _LOCK)
        if self.delete_checkpoint:
            with suppress(OSError):  # the folder has other files
                folder.rmdir()


def _resume_metrics(model: Any, values: list[Any]) -> None:
    """Gives the metrics of an epoch that goes on the values that they had there."""
    variables = model.metrics_variables
    if [np.shape(value) for value in values] != [tuple(v.shape) for v in variables]:
        _log.warning(
            "BackupAndRestore: the backup was made with other metrics. Those of this epoch are the"
            " ones of its remaining steps."
        )
        return
    with job_programs.alone():  # the values are the same on all workers
        for variable, value in zip(variables, values, strict=True):
            variable.assign(np.array(value, variable.dtype))


def _callbacks() -> list[tuple[Any, list[str]]]:
    """Returns the other callbacks of this call with a state, and the attributes that have it."""
    call: Any = current_call.get()
    states = []
    for callback in call.callbacks:
        names = [name for cls, names in _STATES if isinstance(callback, cls) for name in names]
        if names := [name for name in names if hasattr(callback, name)]:
            states.append((callback, names))
    return states


def _packed_callbacks() -> bytes:
    """Returns the state of the other callbacks: a line of JSON, and the bytes of its arrays."""
    data: list[bytes] = []

    def described(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return float(value)
        data.append(value.tobytes())
        return value.dtype.name, value.shape

    states = [[type(c).__name__, {n: getattr(c, n) for n in names}] for c, names in _callbacks()]
    return b"\n".join([json.dumps(states, default=described).encode(), b"".join(data)])


def _unpack_callbacks(packed: bytes) -> None:
    """Gives the other callbacks the state that `_packed_callbacks` has returned."""
    line, _, data = packed.partition(b"\n")
    states, callbacks, left = json.loads(line or b"[]"), _callbacks(), io.BytesIO(data)
    names = [name for name, _ in states]
    callback_names = [type(callback).__name__ for callback, _ in callbacks]
    if names != callback_names:
        _log.warning(
            "BackupAndRestore: the backup was made with %s, and this call has %s. So these"
            " callbacks begin anew, and forget what they have counted and the best they have seen.",
            ", ".join(names) or "no callbacks that have a state",
            ", ".join(callback_names) or "none of them",
        )
        return
    for (callback, _), (_, state) in zip(callbacks, states, strict=True):
        for name, value in state.items():
            if isinstance(value, list):
                value = [np.empty(shape, dtype) for dtype, shape in value]
                for array in value:
                    left.readinto(array.reshape(-1).view(np.uint8))
            setattr(callback, name, value)


def _seed_states(model: Any) -> list[Any]:
    layers = model._flatten_layers()
    return [generator.state for layer in layers for generator in layer._seed_generators]


def is_backup(callback: object) -> bool:
    """Returns whether a callback backs up the progress of training."""
    return isinstance(callback, keras.callbacks.BackupAndRestore)


# The list of callbacks


# These write or send data of the whole job, not of a single worker. So do those of other packages,
# which are not imported here.
_OF_CHIEF = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)
_PACKAGES_OF_CHIEF = {"mlflow", "wandb"}


def compare_copies(model: Any, what: str) -> None:
    """Compares the workers' copies of a model and its optimizer."""
    variables = (*model.variables, *getattr(getattr(model, "optimizer", None), "variables", ()))
    held = [v for v in variables if local_copy(v._value) is not v._value]
    copies.compare(what, [v.path for v in held], [v._value for v in held])


def _has(callback: object, name: str) -> bool:
    """Returns whether a callback has a hook of its own, and not that of all, which does nothing."""
    function = getattr(getattr(callback, name), "__func__", None)
    return function is not getattr(keras.callbacks.Callback, name)


def _if_wanted(method: Callable[..., None], names: tuple[str, ...]) -> Callable[..., None]:
    """Limits a method of a callback list to lists that have a callback with one of these hooks."""

    @functools.wraps(method)
    def limited(self: Any, batch: int, logs: object = None) -> None:
        if any(_has(callback, name) for callback in self.callbacks for name in names):
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
            if isinstance(callback, type) or not hasattr(callback, "set_model"):
                raise InvalidTypeError(
                    f"{call.method}: callbacks has {shown(callback)}, expected an object of a class"
                    " of keras.callbacks. Call a class with its arguments; for a function write"
                    " keras.callbacks.LambdaCallback(on_epoch_end=function)."
                )
        # Last, as it saves what the others decide, and restores them after they have begun.
        callbacks.sort(key=is_backup)
        call.callbacks = [c for c in callbacks if not (is_backup(c) or _is_of_chief(c))]
        if get_strategy().extended.worker_number > 0:
            add_progbar = False
            callbacks = [c for c in callbacks if not _is_of_chief(c)]
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.TensorBoard) and not has_tensorflow():
                callback._summary_module = Summaries()
                callback.write_graph = False  # TensorBoard shows those of TensorFlow
        callbacks = [Backup.of(callback) for callback in callbacks]
        super().__init__(callbacks, add_history, add_progbar, **kw)

    def on_train_begin(self, logs: object = None) -> None:
        """Takes note of it for those who watch."""
        progress.fit = Fit(int(self.params.get("epochs") or 1), self.params.get("steps"))
        self._call.passes = 0  # to build the model may have taken one
        self._model._initial_epoch = None  # Keras keeps that of an earlier call
        super().on_train_begin(logs)

    def on_train_end(self, logs: object = None) -> None:
        """Takes note of it for those who watch."""
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
        if self._call.metrics:
            _resume_metrics(self._model, self._call.metrics)
            self._call.metrics = []
        super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Lets all workers stop if one does."""
        if copies.is_half_due:
            compare_copies(self._model, f"at the end of epoch {epoch + 1}")
        progress.note_logs(logs)
        super().on_epoch_end(epoch, logs)
        while self._call.due:  # backups that have waited for the end of the epoch
            self._call.due.pop()._save_model()
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
