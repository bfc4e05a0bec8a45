"""Checkpoints that are saved when a machine is about to be taken away."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from jax.experimental import multihost_utils

from distributary.checkpoint._checkpoint import Checkpoint
from distributary.checkpoint._manager import CheckpointManager
from distributary.checkpoint._save_locks import agree
from distributary.devices import coordination_client
from distributary.errors import (
    ContextError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    check_type,
)

if TYPE_CHECKING:
    from distributary.cluster_resolver import ClusterResolver

_log = logging.getLogger(__name__)

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
