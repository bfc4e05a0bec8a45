"""The manager of a series of checkpoints, and the handler that saves before a machine goes away."""

import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache

from distributary.checkpoint._checkpoint import Checkpoint
from distributary.checkpoint._commit import is_kept, keep, numbered, remove
from distributary.checkpoint._save_locks import agree, wait_for_writers
from distributary.checkpoint._saving import Save
from distributary.devices import coordination_client, progress
from distributary.errors import (
    ContextError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    check_type,
)

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


# Checkpoints that are saved when a machine is about to be taken away.

if TYPE_CHECKING:
    from distributary.cluster_resolver import ClusterResolver


_EXIT_CODE = 42
_CALLS = "checkpointed_runs"
_POLL_SECONDS = 1.0
_AGREE_SECONDS = 600.0
# The last steps of the grace period, in number of steps, are reserved for saving, as in
# tf.distribute.
_STEPS_LEFT_FOR_SAVING = 6


@final
@dataclass(frozen=True)
class TerminationConfig:
    """Options of a `PreemptionCheckpointHandler`: how to notice the end, and what to do then.

    Args:
        termination_watcher_fn: Function that returns whether this machine is about to be taken
            away. A thread calls it once a second. SIGTERM always counts as a notice, too.
        exit_fn: Function that ends the process after saving; `sys.exit(42)` by default.
        grace_period: Seconds between the notice and the end. If positive, training goes on after a
            first save, and the handler saves again before the time is over.
        save_fn: Function that saves instead of the checkpoint manager. It gets the arguments of
            `save_checkpoint_if_preempted`.

    Raises:
        InvalidTypeError: if one of the functions is not callable.
        InvalidValueError: for a negative grace period.

    Source: `tf.distribute.experimental.TerminationConfig`.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            value = getattr(self, name)
            check_type(f"TerminationConfig: {name}", value, Callable | None, "a function")
        if self.grace_period is not None and not self.grace_period >= 0:
            raise InvalidValueError(
                f"TerminationConfig: grace_period is {self.grace_period!r}, expected a number of"
                " seconds >= 0."
            )


@final
class PreemptionCheckpointHandler:
    """A handler that saves on all workers at the same step when one receives SIGTERM.

    After saving, it ends the processes. The constructor restores the latest checkpoint. Call `run`
    for every step or group of steps. After a notice, the next call saves; with several workers, it
    is the call on which all of them agree. Then `exit_fn` ends the process, by default with exit
    code 42, which makes `distributary launch --max-restarts` start the job again.

    In a job with one process, create the handler in the main thread; it handles SIGTERM from then
    on. With several workers, JAX receives the signal and tells all of them. If your program
    installs its own handler after it has created the strategy, JAX no longer gets the signal.

    Args:
        cluster_resolver: The cluster resolver of the strategy, or None.
        checkpoint_or_checkpoint_manager: The `Checkpoint` or `CheckpointManager` that saves and
            restores.
        checkpoint_dir: Directory to save in, if you pass a `Checkpoint`. One checkpoint is kept.
        termination_config: A `TerminationConfig`.

    Raises:
        InvalidTypeError: for arguments of another type.
        InvalidValueError: for a `Checkpoint` without a directory, or a manager with one.
        UnsupportedError: for clusters with parameter servers.
        ContextError: if a job with one process creates it in a thread other than the main thread.

    Source: `tf.distribute.experimental.PreemptionCheckpointHandler`.
    """

    def __init__(
        self,
        cluster_resolver: "ClusterResolver | None",
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        if cluster_resolver is not None and "ps" in cluster_resolver.cluster_spec().jobs:
            raise UnsupportedError(
                "PreemptionCheckpointHandler: the cluster has parameter servers, which do not"
                " train in step with the workers. Use a CheckpointManager in the coordinator."
            )
        config = termination_config if termination_config is not None else TerminationConfig()
        what = "PreemptionCheckpointHandler: termination_config"
        check_type(what, config, TerminationConfig, "a TerminationConfig")
        self._config = config
        self._manager = _manager_of(checkpoint_or_checkpoint_manager, checkpoint_dir)
        counters = self._manager.checkpoint._counters
        counters.setdefault(_CALLS, 0)
        self._counters = counters
        self._noticed_at: float | None = None  # on this worker
        self._is_in_grace_period = False
        self._called_at: float | None = None
        self._seconds_per_call = 0.0
        self._is_alone = coordination_client() is None
        self._receive_signals()
        self._manager.restore_or_initialize()
        if config.termination_watcher_fn is not None:
            threading.Thread(
                target=self._watch, name="distributary-termination", daemon=True
            ).start()

    @property
    def total_run_calls(self) -> int:
        """Number of calls of `run`, including those before a restart."""
        return self._counters[_CALLS]

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Saves and exits if it is time; otherwise calls the function and returns its result.

        Args:
            distributed_train_function: Function that runs one or more steps, the same on all
                workers.
            *args: Arguments of the function.
            **kwargs: Keyword arguments of the function.

        Source: `tf.distribute.experimental.PreemptionCheckpointHandler.run`.
        """
        self._save_if_preempted()
        result = distributed_train_function(*args, **kwargs)
        self._counters[_CALLS] += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Saves and exits if it is time. Call it after every step, on all workers, without `run`.

        Args:
            *args: Arguments of `CheckpointManager.save`, or of `save_fn`.
            **kwargs: Keyword arguments of the same function.

        Source: the method of `tf.distribute.experimental.PreemptionCheckpointHandler`.
        """
        self._counters[_CALLS] += 1
        self._save_if_preempted(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Runs the block, one or more steps; then saves and exits if it is time.

        If the block raises an error, nothing is saved.

        Source: `tf.distribute.experimental.PreemptionCheckpointHandler.watch_preemption_scope`.
        """
        yield
        self.save_checkpoint_if_preempted()

    def _save_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        if self._called_at is not None:
            self._seconds_per_call = now - self._called_at
        self._called_at = now
        was_in_grace_period = self._is_in_grace_period
        if not (self._is_time_over() if was_in_grace_period else self._is_notice_for_all()):
            return
        self._notice()
        self._save(*args, **kwargs)
        if self._config.grace_period and not was_in_grace_period:
            self._is_in_grace_period = True
            return
        # If `exit_fn` returns, training goes on until the next notice.
        self._is_in_grace_period, self._noticed_at = False, None
        if self._config.exit_fn is not None:
            self._config.exit_fn()
        else:
            sys.exit(_EXIT_CODE)

    def _is_notice_for_all(self) -> bool:
        """Returns whether this is the call at which all workers save."""
        if self._is_alone:
            return self._noticed_at is not None
        return bool(multihost_utils.reached_preemption_sync_point(self.total_run_calls))

    def _is_time_over(self) -> bool:
        assert self._noticed_at is not None
        grace = self._config.grace_period or 0.0
        left = self._noticed_at + grace - time.monotonic()
        is_over = left <= _STEPS_LEFT_FOR_SAVING * self._seconds_per_call
        # Clocks and steps differ, so the first worker whose time is over ends all of them.
        return any(agree("The end of the grace period", _AGREE_SECONDS, lambda: is_over))

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        else:
            self._manager.save(*args, **{"check_interval": False, **kwargs})
        self._manager.wait_until_finished()
        self._called_at = None  # so that the time of a call does not include saving
        _log.warning("Saved before the end of this process, after %d calls", self.total_run_calls)

    def _receive_signals(self) -> None:
        if not self._is_alone:
            # `jax.distributed.initialize` has set a handler of SIGTERM, which ours would replace.
            return
        if threading.current_thread() is not threading.main_thread():
            raise ContextError(
                "PreemptionCheckpointHandler was created in another thread than the main one,"
                " where Python cannot receive SIGTERM. Create it in the main thread."
            )
        signal.signal(signal.SIGTERM, lambda number, frame: self._notice())

    def _notice(self) -> None:
        if self._noticed_at is None:
            self._noticed_at = time.monotonic()

    def _watch(self) -> None:
        watcher = self._config.termination_watcher_fn
        assert watcher is not None
        while not watcher():
            time.sleep(_POLL_SECONDS)
        self._notice()
        if not self._is_alone:
            os.kill(os.getpid(), signal.SIGTERM)  # so that JAX tells the other workers


def _manager_of(saver: object, directory: str | os.PathLike[str] | None) -> CheckpointManager:
    if isinstance(saver, CheckpointManager):
        if directory is not None:
            raise InvalidValueError(
                f"PreemptionCheckpointHandler: checkpoint_dir is {directory!r}, but the checkpoint"
                f" manager has the directory {saver.directory!r} already. Leave it out."
            )
        return saver
    if not isinstance(saver, Checkpoint):
        raise InvalidTypeError(
            f"PreemptionCheckpointHandler: checkpoint_or_checkpoint_manager is {saver!r}, expected"
            " a distributary.checkpoint.Checkpoint or CheckpointManager."
        )
    if directory is None:
        raise InvalidValueError(
            "PreemptionCheckpointHandler: a Checkpoint needs checkpoint_dir, where it is saved."
        )
    return CheckpointManager(saver, directory, max_to_keep=1)
