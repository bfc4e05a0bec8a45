"""The manager of a series of checkpoints, which are written while training goes on."""

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from distributary.checkpoint._checkpoint import Checkpoint
from distributary.checkpoint._commit import is_kept, keep, numbered, remove
from distributary.checkpoint._save_locks import agree, wait_for_writers
from distributary.checkpoint._saving import Save
from distributary.devices import progress
from distributary.errors import InvalidValueError, check_type

# Keeps compiled programs beside checkpoints: a training that starts again computes sooner.

_NAME = ".compiled"


def keep_programs(directory: Path) -> None:
    """Lets JAX keep the programs of this process in a folder of a checkpoint directory.

    The directory that comes first counts. A folder that the user has chosen
    (`JAX_COMPILATION_CACHE_DIR`) stays. A directory of another user has none: programs are machine
    code. JAX keeps programs that took a second or more to compile, and finds them by all that they
    depend on, the features of the processor included.
    """
    if _folder() is None and not (directory.exists() and directory.stat().st_uid != os.getuid()):
        jax.config.update("jax_compilation_cache_dir", str(directory / _NAME))


def remove_programs(directory: Path) -> None:
    """Removes the programs that this process keeps in a checkpoint directory, and keeps no more."""
    folder = directory / _NAME
    if _folder() == str(folder):
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()  # JAX reads its configuration only once
        shutil.rmtree(folder, ignore_errors=True)


def _folder() -> str | None:
    folder: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return folder


# The manager

_log = logging.getLogger(__name__)

_NS_PER_HOUR = 3600 * 10**9
_THREAD_NAME = "distributary-checkpoint"


@final
class CheckpointManager:
    """A series of checkpoints: it saves, keeps the newest ones and finds the latest.

    `save` returns as soon as the state has been copied to host memory, and a thread writes it to
    disk. A checkpoint is there as a whole or not at all, no matter when the process is killed. If
    the thread fails, the next call that saves, waits or asks for checkpoints raises the error.

    With several workers, all of them create the manager and call its methods, in the same order.

    JAX keeps compiled programs in the directory, too, in the folder `.compiled`, for the next
    start. `JAX_COMPILATION_CACHE_DIR` names another folder; `JAX_ENABLE_COMPILATION_CACHE=false`
    keeps none.

    Args:
        checkpoint: The checkpoint to save.
        directory: Directory to save in, created if needed. With several workers, all must see it.
        max_to_keep: Number of newest checkpoints to keep; None keeps all.
        keep_checkpoint_every_n_hours: Keeps one of the older checkpoints for good every this many
            hours; None keeps none of them.
        checkpoint_name: Beginning of the names of checkpoints, as in `ckpt-1`.
        step_counter: Integer variable or function that tells the number of steps done; required
            for `checkpoint_interval`.
        checkpoint_interval: `save` does nothing until the counter has risen by this much.
        init_fn: Called by `restore_or_initialize` when there is no checkpoint.
        last_checkpoint_step: Step of the last checkpoint, for `checkpoint_interval`.
        asynchronous: Whether a thread writes. With False, `save` returns once everything is on
            disk.
        timeout_seconds: Seconds that workers wait for each other, and for the chief to write.

    Raises:
        InvalidTypeError: if `checkpoint` is not a `Checkpoint`.
        InvalidValueError: for numbers out of range, a name that cannot be part of a file name, or
            an interval without a counter.

    Source: `tf.train.CheckpointManager`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
        last_checkpoint_step: int | None = None,
        *,
        asynchronous: bool = True,
        timeout_seconds: float = 600.0,
    ) -> None:
        expected = "a distributary.checkpoint.Checkpoint"
        check_type("CheckpointManager: checkpoint", checkpoint, Checkpoint, expected)
        for name, number in (
            ("max_to_keep", max_to_keep),
            ("keep_checkpoint_every_n_hours", keep_checkpoint_every_n_hours),
            ("checkpoint_interval", checkpoint_interval),
            ("timeout_seconds", timeout_seconds),
        ):
            if number is not None and not number > 0:
                raise InvalidValueError(
                    f"CheckpointManager: {name} is {number!r}, expected a number > 0"
                    + (" or None." if name != "timeout_seconds" else ".")
                )
        if checkpoint_interval is not None and step_counter is None:
            raise InvalidValueError(
                f"CheckpointManager: checkpoint_interval is {checkpoint_interval}, but there is no"
                " step_counter that says how far the training is. Pass an integer variable, such"
                " as optimizer.iterations."
            )
        if not re.fullmatch(r"[^/\0]+", checkpoint_name):
            raise InvalidValueError(
                f"CheckpointManager: checkpoint_name is {checkpoint_name!r}, expected the beginning"
                ' of names of files, such as "ckpt".'
            )
        #: The checkpoint that is saved.
        self.checkpoint = checkpoint
        self._directory = Path(directory).absolute()
        keep_programs(self._directory)
        #: Directory of the checkpoints.
        self.directory = str(self._directory)
        self._max_to_keep = max_to_keep
        self._keep_every_n_hours = keep_checkpoint_every_n_hours
        self._name = checkpoint_name
        self._step_counter = step_counter
        #: Number of steps between two checkpoints; None saves at every call.
        self.checkpoint_interval = checkpoint_interval
        self._init_fn = init_fn
        self._asynchronous = asynchronous
        self._timeout_seconds = timeout_seconds
        self._latest_step = last_checkpoint_step
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the newest `max_to_keep` checkpoints, oldest first; waits for the writer."""
        self.wait_until_finished()
        wait_for_writers(self._directory)  # of other managers, such as that of an earlier run
        checkpoints = numbered(self._directory, self._name)
        newest = checkpoints if self._max_to_keep is None else checkpoints[-self._max_to_keep :]
        return [str(path) for path, _ in newest]

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the checkpoint saved last, None if there is none; waits for the writer."""
        paths = self.checkpoints
        return paths[-1] if paths else None

    @progress.doing("saving")
    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        options: object = None,
    ) -> str | None:
        """Saves the current state.

        If the previous checkpoint is still being written, it waits for that first.

        Args:
            checkpoint_number: Number in the name of the checkpoint; by default one more than the
                last. A checkpoint with the same number is replaced.
            check_interval: Whether to do nothing before `checkpoint_interval` is over.
            options: No effect.

        Returns:
            The path of the checkpoint, which is complete once `wait_until_finished` has returned.
            None if the interval is not over.

        Raises:
            CheckpointError: if the previous checkpoint could not be written, something other than a
                checkpoint is in the way, or another job saves there.
            InvalidTypeError: if an object cannot be saved.

        Source: `tf.train.CheckpointManager.save`.
        """
        if checkpoint_number is not None and int(checkpoint_number) < 0:
            raise InvalidValueError(
                f"CheckpointManager.save: checkpoint_number is {checkpoint_number}, expected a"
                " number >= 0."
            )
        step = self._step()
        if self.checkpoint_interval is not None and step is not None:
            last = self._latest_step
            if check_interval and last is not None and step - last < self.checkpoint_interval:
                return None
        self.wait_until_finished()
        counters = self.checkpoint._counters
        counters["save_counter"] += 1
        number = counters["save_counter"] if checkpoint_number is None else int(checkpoint_number)
        path = self._directory / f"{self._name}-{number}"
        save = Save(self.checkpoint._objects, counters, path, True, self._timeout_seconds)
        self._latest_step = step
        if not self._asynchronous:
            return save.write(self._remove_old)
        self._writer = threading.Thread(
            target=self._write_in_background, args=(save,), name=_THREAD_NAME
        )
        try:
            self._writer.start()
        except BaseException:
            save.drop()
            raise
        return str(path)

    def wait_until_finished(self) -> None:
        """Waits until the last checkpoint is on disk, on all workers.

        Raises:
            CheckpointError: if the checkpoint could not be written.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def sync(self) -> None:
        """Waits until the last checkpoint is on disk; the same as `wait_until_finished`."""
        self.wait_until_finished()

    def restore_or_initialize(self) -> str | None:
        """Restores the latest checkpoint, or calls `init_fn` if there is none.

        Returns:
            The path of the checkpoint, or None.

        Raises:
            InvalidValueError: if the checkpoint does not fit; see `Checkpoint.restore`.
            CheckpointError: if it cannot be read.

        Source: `tf.train.CheckpointManager.restore_or_initialize`.
        """
        path = self.latest_checkpoint
        # The workers agree on a path, as they may see a new folder at different times.
        what = f"Restoring from {self._directory}"
        path = agree(what, self._timeout_seconds, lambda: path)[0]
        if path is not None:
            self.checkpoint.restore(path)
            self._latest_step = self._step()
        elif self._init_fn is not None:
            self._init_fn()
        return path

    def _step(self) -> int | None:
        counter = self._step_counter
        if counter is None:
            return None
        is_function = callable(counter) and not hasattr(counter, "dtype")
        return int(counter() if is_function else np.asarray(counter))

    def _write_in_background(self, save: Save) -> None:
        try:
            save.write(self._remove_old)
        except BaseException as error:
            _log.error("%s", error)
            self._error = error

    def _remove_old(self) -> None:
        if self._max_to_keep is None:
            return
        kept_at: int | None = None
        hours = self._keep_every_n_hours
        for path, saved in numbered(self._directory, self._name)[: -self._max_to_keep]:
            is_due = hours is not None and (
                kept_at is None or saved.saved_at - kept_at >= hours * _NS_PER_HOUR
            )
            try:
                if is_kept(path):
                    kept_at = saved.saved_at
                elif is_due:
                    kept_at = saved.saved_at
                    keep(path)
                else:
                    remove(path)
            except OSError as error:  # not raised: the new checkpoint is there all the same
                _log.warning("The old checkpoint is not removed: %s", error)


def _wait_for_all() -> None:
    for thread in threading.enumerate():
        if thread.name == _THREAD_NAME:
            thread.join()


# A script may end right after `save`. Files are written by threads of concurrent.futures, which
# accept no more work once the interpreter shuts down. Functions registered here run before that, in
# reverse order of registration. There is no public way to do this (checked with Python 3.11):
# https://github.com/python/cpython/issues/86128.
threading._register_atexit(_wait_for_all)  # type: ignore[attr-defined]
