"""Saving and loading models of a strategy: one writer, complete files, the same values everywhere.

With several workers, all of them call `save`, with the same path or with a path each. The first
worker writes its file. The others wait for it, and write only if their path is another one. When a
model is loaded, all workers get the values of the first one, so the others do not need the files.
"""

import errno
import functools
import inspect
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import google_crc32c
import h5py  # type: ignore[import-untyped]
import keras
import numpy as np

from distributary.checkpoint import hold, keep_programs, not_of_keras, release, remove_programs
from distributary.context import default_mode, entered, get_strategy, has_strategy
from distributary.devices import job_programs, progress
from distributary.errors import CheckpointError, ClusterError, InvalidValueError
from distributary.job import consensus
from distributary.keras_bridge._data import DatasetAdapter, current_call, epoch_of
from distributary.keras_bridge._keras_private import (
    file_utils,
    find,
    saving_api,
    saving_lib,
    sync_state,
)
from distributary.keras_bridge._models import refuse_in_step, strategy_of
from distributary.keras_bridge._turns import (
    in_turn,
    is_in_parts_of_workers,
    loading_together,
    saved_variables,
)
from distributary.keras_bridge._variables import keeps_on_servers

_log = logging.getLogger(__name__)

_WAIT_SECONDS = 600.0
# Attribute of the weights file, in which a backup keeps the progress of training.
_PROGRESS = "distributary_progress"
_CALLBACKS = "distributary_callbacks"  # dataset with the state of the other callbacks
# The attributes with the state of Keras' callbacks, which Keras does not save.
_STATES = (
    (keras.callbacks.EarlyStopping, ("best", "wait", "best_epoch", "best_weights")),
    (keras.callbacks.ReduceLROnPlateau, ("best", "wait", "cooldown_counter")),
    (keras.callbacks.ModelCheckpoint, ("best",)),
    (keras.callbacks.SwapEMAWeights, ("_ema_weights_in_model",)),
)
_SEAL = b"\ndistributary crc32c %08x"
_LOCK = "latest"
_PIECE_BYTES = 4 << 20


def save(
    original: Callable[..., Any], model: Any, filepath: object, *args: Any, **kwargs: Any
) -> Any:
    """Makes saved files of a strategy's models appear complete, written by one worker."""
    strategy = strategy_of(model)
    refuse_in_step(model, "save")
    if strategy is None or not isinstance(filepath, (str, os.PathLike)):
        with _by_itself(strategy):
            return original(model, filepath, *args, **kwargs)
    options = inspect.signature(original).bind(model, filepath, *args, **kwargs).arguments
    several_files = not options.get("zipped", True) or options.get("max_shard_size") is not None

    def write() -> None:
        if several_files or file_utils.is_remote_path(filepath):
            original(model, filepath, *args, **kwargs)
            return
        with complete_file(Path(filepath)) as temporary:
            original(model, str(temporary), *args, **kwargs)

    with progress.doing("saving"), _by_itself(strategy):
        sync_state(model)
        _once(model, strategy, os.fspath(filepath), write)
    return None


def load_weights(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes the first worker read weights for all workers."""
    strategy = strategy_of(model)
    if strategy is None:
        with _by_itself(None):
            return original(model, *args, **kwargs)

    def load() -> None:
        with _by_itself(strategy):
            original(model, *args, **kwargs)

    path = os.fspath(args[0] if args else kwargs.get("filepath", ""))
    refuse_in_step(model, "load_weights")
    other = not_of_keras(Path(path)) if path else None
    if other is not None:
        raise CheckpointError(f"{model.name}.load_weights cannot read {path}: {other}")
    sync_state(model)
    try:
        in_turn(0, model, strategy, load)
    finally:  # before an error, the first worker may have assigned some
        take_over(model, strategy)
    return None


def load_state(original: Callable[..., Any], saveable: object, *args: Any, **kwargs: Any) -> Any:
    """Gives a model that is loaded in a scope the first worker's weights on all workers."""
    if not has_strategy():  # also for the parts of the model
        return original(saveable, *args, **kwargs)
    strategy = get_strategy()
    sync_state(saveable)
    with _by_itself(strategy), loading_together(strategy):
        result = original(saveable, *args, **kwargs)
    take_over(saveable, strategy)
    return result


def load_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Does the same as `load_state` for files in the old format."""
    if not has_strategy() or get_strategy().extended.num_workers == 1:
        return original(*args, **kwargs)
    with loading_together(get_strategy()):
        model = original(*args, **kwargs)
    take_over(model, get_strategy())
    return model


@contextmanager
def _by_itself(strategy: Any) -> Iterator[None]:
    """Runs the block as the work of this worker alone, outside of the strategy.

    While Keras saves and loads, it makes metrics and optimizers, to learn the names of their
    attributes. In the scope, their variables would come from the chief. With servers, only one
    process saves and loads, and variables are assigned in the scope.

    Args:
        strategy: The strategy of the model; None for a model of Keras alone.
    """
    is_inside = strategy is not None and keeps_on_servers(strategy)
    with nullcontext() if is_inside else entered(default_mode()), job_programs.alone():
        yield


def take_over(model: Any, strategy: Any) -> None:
    """Gives the variables that all workers have the first worker's values."""
    if strategy.extended.num_workers == 1:
        return
    variables = [v for v in saved_variables(model) if not is_in_parts_of_workers(v)]
    values = strategy.extended.from_chief(
        [np.asarray(v.value) for v in variables], f"the loaded weights of {model.name}"
    )
    with job_programs.alone():  # the values are the same on all workers
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def _once(model: Any, strategy: Any, path: str, write: Callable[[], None]) -> None:
    """Calls `write` on the first worker, and on those that have another path."""
    extended = strategy.extended
    if extended.num_workers == 1:
        write()
        return
    job = consensus()
    assert job is not None
    place = path if file_utils.is_remote_path(path) else os.path.abspath(path)
    if any(map(is_in_parts_of_workers, saved_variables(model))):
        paths = job.agree(f"saving {model.name}", lambda: place)
        for worker, worker_path in enumerate(paths):
            if worker == 0 or worker_path != paths[0]:
                in_turn(worker, model, strategy, write)
        return
    # The first worker may save files that the others do not. So they ask for files of this
    # position.
    position = job_programs.position
    topic = f"file {job.count(f'files at {position}')} saved at place {position}"
    if extended.worker_number == 0:
        result: dict[str, Any] = {"path": place, "error": None}
        try:
            write()
        except BaseException as error:
            result["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            job.send_to_all(topic, result)
        return
    try:
        result = job.receive(topic, _WAIT_SECONDS)
    except TimeoutError as error:
        raise ClusterError(
            f"Saving {path!r}: worker 0 has not saved anything within {_WAIT_SECONDS:g} s."
            " Call save on all workers, or on the first one alone."
        ) from error
    if result["path"] != place:
        write()
    elif result["error"] is not None:
        raise OSError(f"Worker 0 could not save {path!r}: {result['error']}")


@contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to; at the end, it replaces the file, or is removed after an error."""
    path = path.resolve()  # of a link, so that its target is replaced and not the link
    temporary = _temporary(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        # HDF5 has the file open. If it cannot write the rest, it crashes when this process ends.
        with suppress(OSError):
            os.truncate(temporary, 0)
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = CheckpointError(
                f"{path} was not saved: the disk is full ({os.strerror(error.errno)}). What was"
                " there before is kept."
            )
            problem.errno = error.errno
            raise problem from None
        raise


def _temporary(path: Path) -> Path:
    """Returns a name for this process; removes files of processes of this host that were killed."""
    # The name keeps its ending, from which Keras knows the format.
    stem, dot, end = path.name.partition(".")
    start, end = f".{stem}.distributary-{socket.gethostname()}-", f"{dot}{end}"
    pattern = re.compile(rf"{re.escape(start)}(\d+){re.escape(end)}")
    for name in os.listdir(path.parent):
        match = pattern.fullmatch(name)
        if match and not _is_running(int(match[1])):
            path.with_name(name).unlink(missing_ok=True)
    return path.with_name(f"{start}{os.getpid()}{end}")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:  # also if the process belongs to another user
        return not isinstance(error, ProcessLookupError)
    return True


# BackupAndRestore: weights and progress are in one file, so that they match even after a kill. The
# file ends with a checksum, which HDF5 ignores.


def distribute(callback: keras.callbacks.BackupAndRestore) -> None:
    """Makes the first worker write backups, and all workers continue from them."""
    for name, function in (("_save_model", _backup), ("_load_model", _restore)):
        original = vars(find("keras.callbacks.BackupAndRestore", name))[name]
        setattr(callback, name, functools.partial(function, callback, original))
    if not file_utils.is_remote_path(callback.backup_dir):
        keep_programs(Path(callback.backup_dir).absolute())


def _backup(callback: Any, original: Callable[[Any], None]) -> None:
    """Makes the first worker write a backup, which includes the state of the random numbers."""
    model = callback.model
    strategy = strategy_of(model)
    if strategy is None or file_utils.is_remote_path(callback.backup_dir):
        original(callback)
        return

    def write() -> None:
        with _by_itself(strategy):
            _write_backup(callback)

    sync_state(model)
    in_turn(0, model, strategy, write)


def _write_backup(callback: Any) -> None:
    model = callback.model
    _take_folder(callback)
    if callback.double_checkpoint and os.path.exists(callback._weights_path):
        file_utils.copy(callback._weights_path, callback._prev_weights_path)
        file_utils.copy(callback._training_metadata_path, callback._prev_training_metadata_path)
    progress = {"epoch": callback._current_epoch, "batch": callback._last_batch_seen}
    with complete_file(Path(callback._weights_path)) as path:
        inspect.unwrap(saving_lib.save_weights_only)(model, str(path))
        with h5py.File(path, "r+") as file:
            file.attrs[_PROGRESS] = json.dumps({**progress, **_random_state(model)})
            file[_CALLBACKS] = np.frombuffer(_packed_callbacks(), np.uint8)
        seal = _SEAL % _checksum(path)
        with path.open("ab") as file:
            file.write(seal)
    with complete_file(Path(callback._training_metadata_path)) as path:
        path.write_text(json.dumps(progress))  # for Keras without a strategy


def _take_folder(callback: Any) -> None:
    """Checks that the folder belongs to this job, and that nothing else uses its file names.

    Raises:
        InvalidValueError: if not. Keras would take an OSError for a damaged backup, and replace it.
    """
    weights, metadata = Path(callback._weights_path), Path(callback._training_metadata_path)
    try:
        hold(Path(callback.backup_dir), _LOCK, is_series=True)
    except CheckpointError as error:
        raise InvalidValueError(f"BackupAndRestore: {error}") from None
    foreign = None
    if _seal_of(weights) is None:  # or Keras has made it without a strategy
        if metadata.exists():
            try:
                int(json.loads(metadata.read_bytes())["epoch"])
            except (OSError, ValueError, KeyError, TypeError):
                foreign = metadata
        elif weights.exists():
            foreign = weights
    if foreign is not None:
        raise InvalidValueError(
            f"BackupAndRestore: {foreign} is there already, and is not from a backup. Move it"
            " away, or choose another backup_dir."
        )


def _seal_of(path: Path) -> bytes | None:
    """Returns the last bytes of a backup that was made with a strategy."""
    try:
        with path.open("rb") as file:
            file.seek(-len(_SEAL % 0), os.SEEK_END)
            seal = file.read()
    except OSError:
        return None
    return seal if seal.startswith(_SEAL.partition(b"%")[0]) else None


def _check_seal(path: Path) -> None:
    """Checks that a backup is complete and unchanged."""
    seal = _seal_of(path)
    if seal is not None and seal != _SEAL % _checksum(path, len(seal)):
        raise CheckpointError(
            f"BackupAndRestore: {path} is damaged: its checksum is not right. Remove it to begin"
            " anew; double_checkpoint=True keeps the backup before."
        )


def _checksum(path: Path, num_last_bytes: int = 0) -> int:
    """Returns the checksum of a file, except for its last bytes."""
    left, checksum = path.stat().st_size - num_last_bytes, 0
    with path.open("rb") as file:
        while data := file.read(min(left, _PIECE_BYTES)):
            checksum, left = google_crc32c.extend(checksum, data), left - len(data)
    return checksum


def _restore(callback: Any, original: Callable[[Any], None]) -> None:
    """Makes all workers continue training from the first worker's backup."""
    model = callback.model
    strategy = strategy_of(model)
    if strategy is None:
        original(callback)
        return
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    epoch, packed = -1, b""

    def read() -> None:
        nonlocal epoch, packed
        with _by_itself(strategy):
            try:
                epoch, packed = _read_backup(callback)
            except OSError:  # as Keras does, which would do it on every worker
                if not _take_previous(callback):
                    raise
                epoch, packed = _read_backup(callback)

    sync_state(model)
    try:
        in_turn(0, model, strategy, read)
    except OSError as error:
        if strategy.extended.num_workers == 1:
            raise
        raise InvalidValueError(f"BackupAndRestore: {error}") from error
    (agreed,) = strategy.extended.from_chief(
        [np.array([epoch, len(packed)])], "the epoch to go on with"
    )
    epoch, size = map(int, agreed)
    if epoch < 0:
        return
    take_over(model, strategy)
    (bytes_of_callbacks,) = strategy.extended.from_chief(
        [np.frombuffer(packed or bytes(size), np.uint8)], "the state of the callbacks"
    )
    _unpack_callbacks(bytes_of_callbacks.tobytes())
    model._initial_epoch = epoch
    call = current_call.get()
    if call is not None and isinstance(call.data, DatasetAdapter):
        call.data.start_at(epoch, callback.params.get("steps"))
    elif call is not None and epoch_of(call.data) is not None:
        call.data._epoch += epoch


def _take_previous(callback: Any) -> bool:
    """Replaces a backup by the one before it; returns False if there is none."""
    if not file_utils.exists(callback._prev_weights_path):
        return False
    file_utils.copy(callback._prev_weights_path, callback._weights_path)
    if file_utils.exists(callback._prev_training_metadata_path):
        file_utils.copy(callback._prev_training_metadata_path, callback._training_metadata_path)
    elif file_utils.exists(callback._training_metadata_path):
        file_utils.remove(callback._training_metadata_path)
    return True


def _read_backup(callback: Any) -> tuple[int, bytes]:
    """Loads weights and random state.

    Returns:
        The next epoch, or -1 without a backup; and the state of the callbacks.
    """
    path = callback._weights_path
    is_local = not file_utils.is_remote_path(path)
    if is_local:
        _take_folder(callback)
    if not file_utils.exists(path):
        return -1, b""
    if is_local:
        _check_seal(Path(path))
    inspect.unwrap(saving_api.load_weights)(callback.model, path)
    progress, packed = None, b""
    if is_local:
        with h5py.File(path, "r") as file:
            progress = file.attrs.get(_PROGRESS)
            packed = file[_CALLBACKS][:].tobytes() if _CALLBACKS in file else packed
    if progress is None:  # Keras made it without a strategy
        if not file_utils.exists(callback._training_metadata_path):
            return 0, packed
        with file_utils.File(callback._training_metadata_path, "r") as file:
            return int(json.loads(file.read())["epoch"]), packed
    progress = json.loads(progress)
    key, *others = progress["numpy"]
    np.random.set_state(("MT19937", np.array(key, np.uint32), *others))
    for generator, state in zip(_seed_states(callback.model), progress["seeds"], strict=True):
        generator.assign(np.array(state, generator.dtype))
    return int(progress["epoch"]), packed


def _callbacks() -> list[tuple[Any, list[str]]]:
    """Returns the other callbacks of this call with a state, and the attributes that have it."""
    call = current_call.get()
    states = []
    for callback in call.callbacks if call else ():
        names = [name for cls, names in _STATES if isinstance(callback, cls) for name in names]
        states.append((callback, [name for name in names if hasattr(callback, name)]))
    return [(callback, names) for callback, names in states if names]


def _packed_callbacks() -> bytes:
    """Returns the state of the other callbacks: a line of JSON, and the bytes of its arrays."""
    states, data = [], []
    for callback, names in _callbacks():
        state: dict[str, Any] = {}
        for name in names:
            value = state[name] = getattr(callback, name)
            if isinstance(value, list):
                arrays = [np.asarray(one) for one in value]
                state[name] = [[array.dtype.name, array.shape] for array in arrays]
                data += [array.tobytes() for array in arrays]
        states.append([type(callback).__name__, state])
    return b"".join([json.dumps(states, default=float).encode(), b"\n", *data])


def _unpack_callbacks(packed: bytes) -> None:
    """Gives the other callbacks the state that `_packed_callbacks` has returned."""
    line, _, data = packed.partition(b"\n")
    states, callbacks, start = json.loads(line or b"[]"), _callbacks(), 0
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
                arrays = []
                for dtype, shape in value:
                    arrays.append(np.ndarray(shape, dtype, data, start).copy())
                    start += arrays[-1].nbytes
                value = arrays
            setattr(callback, name, value)


def _random_state(model: Any) -> dict[str, Any]:
    """Returns the random state of shuffling and of dropout, whose seeds Keras does not save."""
    _, key, *others = np.random.get_state(legacy=True)
    seeds = [np.asarray(state.value).tolist() for state in _seed_states(model)]
    return {"numpy": [np.asarray(key).tolist(), *others], "seeds": seeds}


def _seed_states(model: Any) -> list[Any]:
    layers = model._flatten_layers()
    return [generator.state for layer in layers for generator in layer._seed_generators]


@contextmanager
def ending(callbacks: Sequence[Any]) -> Iterator[None]:
    """Runs the end of training; then the first worker removes its backups, and no other file."""
    backups = [
        (callback, callback.delete_checkpoint)
        for callback in callbacks
        if is_backup(callback) and not file_utils.is_remote_path(callback.backup_dir)
    ]
    for callback, _ in backups:
        callback.delete_checkpoint = False  # Keras would remove the whole folder
    try:
        yield
    finally:
        for callback, deletes in backups:
            callback.delete_checkpoint = deletes
    for callback, deletes in backups:
        if deletes:
            remove_programs(Path(callback.backup_dir).absolute())
        if get_strategy().extended.worker_number == 0:
            _end_backup(callback, deletes)


def is_backup(callback: object) -> bool:
    """Returns whether a callback backs up the progress of training."""
    return isinstance(callback, keras.callbacks.BackupAndRestore)


def _end_backup(callback: Any, deletes: bool) -> None:
    for path in (
        callback._weights_path,
        callback._prev_weights_path,
        callback._training_metadata_path,
        callback._prev_training_metadata_path,
    ):
        if deletes:
            Path(path).unlink(missing_ok=True)
    release(Path(callback.backup_dir), _LOCK)
    if deletes:
        with suppress(OSError):  # the folder has other files
            os.rmdir(callback.backup_dir)
