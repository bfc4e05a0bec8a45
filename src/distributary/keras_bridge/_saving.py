"""Saving and loading models of a strategy: one writer, complete files, the same values everywhere.

With several workers all of them call `save`, with one path or a path each. The first one writes its
file; the others wait for it and write only what has another path. Of what is loaded the values of
the first worker count, so the files need not be there on the others.
"""

import errno
import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import jax
import numpy as np
from keras.src.saving import saving_api, saving_lib
from keras.src.utils import file_utils

from distributary.context import default_mode, get_strategy, has_strategy, pop, push
from distributary.errors import ClusterError
from distributary.keras_bridge._data import DatasetAdapter, current_call
from distributary.keras_bridge._models import strategy_of
from distributary.keras_bridge._variables import together
from distributary.topology import coordination_client

_WAIT_SECONDS = 600.0
# What a backup knows about training besides the weights, as an attribute of their file.
_PROGRESS = "distributary_progress"


def save(original: Callable[..., Any]) -> Callable[..., Any]:
    """Files of models of a strategy appear complete, and are written by one worker."""
    signature = inspect.signature(original)

    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(model)
        if strategy is None or not isinstance(filepath, (str, os.PathLike)):
            return original(model, filepath, *args, **kwargs)
        given = signature.bind(model, filepath, *args, **kwargs).arguments
        several_files = not given.get("zipped", True) or given.get("max_shard_size") is not None

        def write() -> None:
            if several_files or file_utils.is_remote_path(filepath):
                original(model, filepath, *args, **kwargs)
                return
            with complete_file(Path(filepath), strategy.extended.worker_number) as temporary:
                original(model, str(temporary), *args, **kwargs)

        with together(model):
            _once(strategy, os.fspath(filepath), write)
        return None

    return save


def load_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Weights are read by the first worker, for all."""

    def load_weights(model: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(model)
        if strategy is None or strategy.extended.num_workers == 1:
            return original(model, *args, **kwargs)
        with together(model):
            if strategy.extended.worker_number == 0:
                original(model, *args, **kwargs)
            take_over(model, strategy)
        return None

    return load_weights


def load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model that is loaded has the first worker's weights on all workers."""

    def load_model(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        if has_strategy() and get_strategy().extended.num_workers > 1:
            with together(model):
                take_over(model, get_strategy())
        return model

    return load_model


def outside_of_strategies(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras makes an optimizer while it saves, which is none of the strategy's."""

    def get_attr_skipset(*args: Any, **kwargs: Any) -> Any:
        mode = default_mode()
        push(mode)
        try:
            return original(*args, **kwargs)
        finally:
            pop(mode)

    return get_attr_skipset


def take_over(model: Any, strategy: Any) -> None:
    """Gives the variables of a model and its optimizer the first worker's values."""
    variables = [*model.variables, *getattr(getattr(model, "optimizer", None), "variables", ())]
    values = strategy.extended.from_chief([np.asarray(v.value) for v in variables])
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _once(strategy: Any, path: str, write: Callable[[], None]) -> None:
    """Calls `write` on the first worker, and on those that have another path."""
    extended = strategy.extended
    if extended.num_workers == 1:
        write()
        return
    number = getattr(strategy, "_num_saved_files", 0)
    strategy._num_saved_files = number + 1
    key = f"distributary/saved/{number}"
    place = path if file_utils.is_remote_path(path) else os.path.abspath(path)
    if extended.worker_number == 0:
        result: dict[str, Any] = {"path": place, "error": None}
        try:
            write()
        except BaseException as error:
            result["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            coordination_client().key_value_set(key, json.dumps(result))
        return
    try:
        told = coordination_client().blocking_key_value_get(key, int(_WAIT_SECONDS * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise ClusterError(
            f"Saving {path!r}: worker 0 has not saved anything within {_WAIT_SECONDS:g} s."
            f" Call save on all workers, or on the first one alone. ({error})"
        ) from error
    result = json.loads(told)
    if result["path"] != place:
        write()
    elif result["error"] is not None:
        raise OSError(f"Worker 0 could not save {path!r}: {result['error']}")


@contextmanager
def complete_file(path: Path, worker: int) -> Iterator[Path]:
    """A path to write to; the file takes its place at the end, or is removed after an error."""
    # The name keeps its end, by which Keras knows the format.
    temporary = path.with_name(f".worker{worker}.{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.add_note(f"Saving {str(path)!r}: the disk is full. What was there is kept.")
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# BackupAndRestore: weights and progress are one file, so that they belong together after a kill.


def backup(original: Callable[..., Any]) -> Callable[..., Any]:
    """A backup is written by the first worker, and also has the state of the random numbers."""

    def _save_model(self: Any) -> None:
        model = self.model
        strategy = strategy_of(model)
        if strategy is None or file_utils.is_remote_path(self.backup_dir):
            original(self)
            return
        with together(model):
            if strategy.extended.worker_number == 0:
                _write_backup(self)

    return _save_model


def _write_backup(callback: Any) -> None:
    model = callback.model
    os.makedirs(callback.backup_dir, exist_ok=True)
    if callback.double_checkpoint and os.path.exists(callback._weights_path):
        file_utils.copy(callback._weights_path, callback._prev_weights_path)
        file_utils.copy(callback._training_metadata_path, callback._prev_training_metadata_path)
    progress = {"epoch": callback._current_epoch, "batch": callback._last_batch_seen}
    with complete_file(Path(callback._weights_path), 0) as path:
        inspect.unwrap(saving_lib.save_weights_only)(model, str(path))
        with h5py.File(path, "r+") as file:
            file.attrs[_PROGRESS] = json.dumps({**progress, **_random_state(model)})
    with complete_file(Path(callback._training_metadata_path), 0) as path:
        path.write_text(json.dumps(progress))  # for Keras without a strategy


def restore(original: Callable[..., Any]) -> Callable[..., Any]:
    """Training goes on where the first worker's backup was made, on all workers."""

    def _load_model(self: Any) -> None:
        model = self.model
        strategy = strategy_of(model)
        if strategy is None:
            original(self)
            return
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        with together(model):
            epoch = -1
            if strategy.extended.worker_number == 0:
                epoch = _read_backup(self)
            (agreed,) = strategy.extended.from_chief([np.array(epoch)])
            epoch = int(agreed)
            if epoch < 0:
                return
            if strategy.extended.num_workers > 1:
                take_over(model, strategy)
        model._initial_epoch = epoch
        call = current_call.get()
        if call is not None and isinstance(call.data, DatasetAdapter):
            call.data.start_at(epoch, self.params.get("steps"))

    return _load_model


def _read_backup(callback: Any) -> int:
    """Loads weights and random state; returns the epoch that comes next, -1 without a backup."""
    path = callback._weights_path
    if not file_utils.exists(path):
        return -1
    inspect.unwrap(saving_api.load_weights)(callback.model, path)
    progress = None
    if not file_utils.is_remote_path(path):
        with h5py.File(path, "r") as file:
            progress = file.attrs.get(_PROGRESS)
    if progress is None:  # Keras made it without a strategy
        if not file_utils.exists(callback._training_metadata_path):
            return 0
        with file_utils.File(callback._training_metadata_path, "r") as file:
            return int(json.loads(file.read())["epoch"])
    progress = json.loads(progress)
    key, *others = progress["numpy"]
    np.random.set_state(("MT19937", np.array(key, np.uint32), *others))
    for generator, state in zip(_seed_states(callback.model), progress["seeds"], strict=True):
        generator.assign(np.array(state, generator.dtype))
    return int(progress["epoch"])


def _random_state(model: Any) -> dict[str, Any]:
    """What decides the order of the examples, and dropout, whose seeds Keras does not save."""
    _, key, *others = np.random.get_state(legacy=True)
    seeds = [np.asarray(state.value).tolist() for state in _seed_states(model)]
    return {"numpy": [np.asarray(key).tolist(), *others], "seeds": seeds}


def _seed_states(model: Any) -> list[Any]:
    return [variable for variable in model.variables if variable.name == "seed_generator_state"]


def training_ended(original: Callable[..., Any]) -> Callable[..., Any]:
    """The backup is removed by the first worker."""

    def on_train_end(self: Any, logs: Any = None) -> None:
        strategy = strategy_of(self.model)
        if strategy is None or strategy.extended.worker_number == 0:
            original(self, logs)

    return on_train_end
