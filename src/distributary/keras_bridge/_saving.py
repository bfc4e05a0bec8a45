"""Saving and loading models of a strategy: one writer, complete files, the same values everywhere.

With several workers all of them call `save`, with one path or a path each. The first one writes its
file; the others wait for it and write only what has another path. Of what is loaded the values of
the first worker count, so the files need not be there on the others.
"""

import errno
import inspect
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import google_crc32c
import h5py  # type: ignore[import-untyped]
import numpy as np
from keras.src.saving import saving_api, saving_lib
from keras.src.utils import file_utils

from distributary.context import default_mode, get_strategy, has_strategy, pop, push
from distributary.errors import CheckpointError, ClusterError, InvalidValueError
from distributary.job import consensus
from distributary.keras_bridge._data import DatasetAdapter, current_call
from distributary.keras_bridge._models import strategy_of
from distributary.keras_bridge._variables import together
from distributary.topology import job_programs
from distributary.variables import hold, release

_WAIT_SECONDS = 600.0
# What a backup knows about training besides the weights, as an attribute of their file.
_PROGRESS = "distributary_progress"
_SEAL = b"\ndistributary crc32c %08x"
_LOCK = "latest"
_PIECE_BYTES = 4 << 20


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
            with complete_file(Path(filepath)) as temporary:
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
                with job_programs.alone():
                    original(model, *args, **kwargs)
            take_over(model, strategy)
        return None

    return load_weights


def load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model that is loaded has the first worker's weights on all workers."""

    def load_model(*args: Any, **kwargs: Any) -> Any:
        if not has_strategy() or get_strategy().extended.num_workers == 1:
            return original(*args, **kwargs)
        with job_programs.alone():
            model = original(*args, **kwargs)
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
    values = strategy.extended.from_chief(
        [np.asarray(v.value) for v in variables], f"the loaded weights of {model.name}"
    )
    with job_programs.alone():  # they are the same
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def _once(strategy: Any, path: str, write: Callable[[], None]) -> None:
    """Calls `write` on the first worker, and on those that have another path."""
    extended = strategy.extended
    if extended.num_workers == 1:
        write()
        return
    job = consensus()
    assert job is not None
    # The first worker may save files that the others do not: these ask for those of this place.
    position = job_programs.position
    topic = f"file {job.count(f'files at {position}')} saved at place {position}"
    place = path if file_utils.is_remote_path(path) else os.path.abspath(path)
    if extended.worker_number == 0:
        result: dict[str, Any] = {"path": place, "error": None}
        try:
            write()
        except BaseException as error:
            result["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            job.tell(topic, result)
        return
    try:
        result = job.hear(topic, _WAIT_SECONDS)
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
    """A path to write to; the file takes its place at the end, or is removed after an error."""
    path = path.resolve()  # what a link leads to is replaced, and not the link
    temporary = _temporary(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        # HDF5 has the file open, and crashes when this process ends if it cannot write the rest.
        with suppress(OSError):
            os.truncate(temporary, 0)
        temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = CheckpointError(
                f"{path} was not saved: the disk is full ({os.strerror(error.errno)}). What was"
                " there before is kept."
            )
            problem.errno = error.errno
            raise problem from None
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary(path: Path) -> Path:
    """A name of this process; files of those that were killed on this host are removed."""
    # It keeps its end, by which Keras knows the format.
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
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


# BackupAndRestore: weights and progress are one file, so that they belong together after a kill. At
# its end is a checksum, which HDF5 ignores.


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
    _take_folder(callback)
    if callback.double_checkpoint and os.path.exists(callback._weights_path):
        file_utils.copy(callback._weights_path, callback._prev_weights_path)
        file_utils.copy(callback._training_metadata_path, callback._prev_training_metadata_path)
    progress = {"epoch": callback._current_epoch, "batch": callback._last_batch_seen}
    with complete_file(Path(callback._weights_path)) as path:
        inspect.unwrap(saving_lib.save_weights_only)(model, str(path))
        with h5py.File(path, "r+") as file:
            file.attrs[_PROGRESS] = json.dumps({**progress, **_random_state(model)})
        seal = _SEAL % _checksum(path)
        with path.open("ab") as file:
            file.write(seal)
    with complete_file(Path(callback._training_metadata_path)) as path:
        path.write_text(json.dumps(progress))  # for Keras without a strategy


def _take_folder(callback: Any) -> None:
    """Makes sure that the folder is this job's, and that nothing else has the names of its files.

    Raises:
        InvalidValueError: if not. Of an OSError Keras thinks that the backup is damaged, and would
            replace it.
    """
    weights, metadata = Path(callback._weights_path), Path(callback._training_metadata_path)
    try:
        hold(Path(callback.backup_dir), _LOCK, is_series=True)
    except CheckpointError as error:
        raise InvalidValueError(f"BackupAndRestore: {error}") from None
    foreign = None
    if _seal_of(weights) is None:  # or it is one by Keras without a strategy
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
    """The last bytes of a backup that was made with a strategy."""
    try:
        with path.open("rb") as file:
            file.seek(-len(_SEAL % 0), os.SEEK_END)
            seal = file.read()
    except OSError:
        return None
    return seal if seal.startswith(_SEAL.partition(b"%")[0]) else None


def _check_seal(path: Path) -> None:
    """Checks that a backup is what was written."""
    seal = _seal_of(path)
    if seal is not None and seal != _SEAL % _checksum(path, len(seal)):
        raise CheckpointError(
            f"BackupAndRestore: {path} is damaged: its checksum is not right. Remove it to begin"
            " anew; double_checkpoint=True keeps the backup before."
        )


def _checksum(path: Path, num_last_bytes: int = 0) -> int:
    """The checksum of a file, but for its last bytes."""
    left, checksum = path.stat().st_size - num_last_bytes, 0
    with path.open("rb") as file:
        while data := file.read(min(left, _PIECE_BYTES)):
            checksum, left = google_crc32c.extend(checksum, data), left - len(data)
    return checksum


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
                with job_programs.alone():
                    epoch = _read_backup(self)
            (agreed,) = strategy.extended.from_chief([np.array(epoch)], "the epoch to go on with")
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
    if not file_utils.is_remote_path(path):
        _take_folder(callback)
    if not file_utils.exists(path):
        return -1
    if not file_utils.is_remote_path(path):
        _check_seal(Path(path))
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
    """The backup is removed by the first worker, and what else is in its folder stays."""

    def on_train_end(self: Any, logs: Any = None) -> None:
        strategy = strategy_of(self.model)
        if strategy is None or file_utils.is_remote_path(self.backup_dir):
            original(self, logs)
        elif strategy.extended.worker_number == 0:
            if self.delete_checkpoint:
                for path in (
                    self._weights_path,
                    self._prev_weights_path,
                    self._training_metadata_path,
                    self._prev_training_metadata_path,
                ):
                    Path(path).unlink(missing_ok=True)
            release(Path(self.backup_dir), _LOCK)
            if self.delete_checkpoint:
                with suppress(OSError):  # something else is in it
                    os.rmdir(self.backup_dir)

    return on_train_end
