"""Saving when a machine is about to be taken away."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from jax.experimental import multihost_utils

from distributary.checkpoint._checkpoint import Checkpoint
from distributary.checkpoint._manager import CheckpointManager
from distributary.checkpoint._workers import agree
from distributary.errors import ContextError, InvalidTypeError, InvalidValueError, UnsupportedError
from distributary.topology import coordination_client

_log = logging.getLogger(__name__)

_EXIT_CODE = 42
_CALLS = "checkpointed_runs"
_POLL_SECONDS = 1.0
_AGREE_SECONDS = 600.0
# Of the grace period, this many steps are left for saving, as in tf.distribute.
_STEPS_LEFT_FOR_SAVING = 6


@final
@dataclass(frozen=True)
class TerminationConfig:
    """How a `PreemptionCheckpointHandler` notices the end, and what it does then.

    Args:
        termination_watcher_fn: Returns whether this machine is about to be taken away; asked once a
            second by a thread. SIGTERM counts in any case.
        exit_fn: Ends the process after saving; default `sys.exit(42)`.
        grace_period: Seconds between the notice and the end. With a positive number training goes
            on after a first save, and a second one is made before the time is over.
        save_fn: Saves in the place of the checkpoint manager; gets the arguments of
            `save_checkpoint_if_preempted`.

    Raises:
        InvalidTypeError: for functions that are none.
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
            if value is not None and not callable(value):
                raise InvalidTypeError(f"TerminationConfig: {name} is {value!r}, not a function.")
        if self.grace_period is not None and not self.grace_period >= 0:
            raise InvalidValueError(
                f"TerminationConfig: grace_period is {self.grace_period!r}, expected a number of"
                " seconds >= 0."
            )


@final
class PreemptionCheckpointHandler:
    """Saves on all workers at the same step when one of them receives SIGTERM, and ends them.

    The constructor restores the latest checkpoint. `run` is called for every step or group of
    steps. After a notice the next call saves, with several workers the one on which all of them
    agree; then `exit_fn` ends the process with exit code 42, which makes `distributary launch
    --max-restarts` start the job again.

    A process alone needs the handler to be created in the main thread, and its SIGTERM belongs to
    it from then on. With several workers JAX receives the signal and tells all of them; a handler
    that the program installs itself after the strategy was created takes that away.

    Args:
        cluster_resolver: The cluster resolver of the strategy, or None.
        checkpoint_or_checkpoint_manager: What is saved and restored.
        checkpoint_dir: Where, for a `Checkpoint`; of it one checkpoint is kept.
        termination_config: A `TerminationConfig`.

    Raises:
        InvalidTypeError: for arguments of another type.
        InvalidValueError: for a `Checkpoint` without, or a manager with, a directory.
        UnsupportedError: for clusters with parameter servers.
        ContextError: if it is created in another thread of a process alone.

    Source: `tf.distribute.experimental.PreemptionCheckpointHandler`.
    """

    def __init__(
        self,
        cluster_resolver: Any,
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
        if not isinstance(config, TerminationConfig):
            raise InvalidTypeError(
                f"PreemptionCheckpointHandler: termination_config is {config!r}, expected a"
                " TerminationConfig."
            )
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
        """Number of calls of `run`, those before the restart included."""
        return self._counters[_CALLS]

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Saves and exits if it is time; otherwise calls the function and returns its result.

        Args:
            distributed_train_function: One or more steps; the same on all workers.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Source: `tf.distribute.experimental.PreemptionCheckpointHandler.run`.
        """
        self._save_if_preempted()
        result = distributed_train_function(*args, **kwargs)
        self._counters[_CALLS] += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """For loops that do not use `run`: to be called after every step, on all workers.

        Args:
            *args: For `CheckpointManager.save`, or `save_fn`.
            **kwargs: Likewise.

        Source: the method of `tf.distribute.experimental.PreemptionCheckpointHandler`.
        """
        self._counters[_CALLS] += 1
        self._save_if_preempted(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Around one or more steps: on leaving it without an error, saves and exits if it is time.

        Source: `tf.distribute.experimental.PreemptionCheckpointHandler.watch_preemption_scope`.
        """
        yield
        self.save_checkpoint_if_preempted()

    def _save_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        if self._called_at is not None:
            self._seconds_per_call = now - self._called_at
        self._called_at = now
        if self._is_in_grace_period:
            if not self._is_time_over():
                return
            self._save(*args, **kwargs)
        else:
            if not self._is_notice_for_all():
                return
            self._notice()
            self._save(*args, **kwargs)
            if self._config.grace_period:
                self._is_in_grace_period = True
                return
        # Should `exit_fn` return, training goes on until the next notice.
        self._is_in_grace_period, self._noticed_at = False, None
        if self._config.exit_fn is not None:
            self._config.exit_fn()
        else:
            sys.exit(_EXIT_CODE)

    def _is_notice_for_all(self) -> bool:
        """Whether this is the call at which all workers save."""
        if self._is_alone:
            return self._noticed_at is not None
        return bool(multihost_utils.reached_preemption_sync_point(self.total_run_calls))

    def _is_time_over(self) -> bool:
        assert self._noticed_at is not None
        grace = self._config.grace_period or 0.0
        left = self._noticed_at + grace - time.monotonic()
        is_over = left <= _STEPS_LEFT_FOR_SAVING * self._seconds_per_call
        # Clocks and steps differ: the first whose time is over ends all.
        return any(agree("The end of the grace period", _AGREE_SECONDS, lambda: is_over))

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        else:
            self._manager.save(*args, **{"check_interval": False, **kwargs})
        self._manager.wait_until_finished()
        self._called_at = None  # the time of a call is that of its steps
        _log.warning("Saved before the end of this process, after %d calls", self.total_run_calls)

    def _receive_signals(self) -> None:
        if not self._is_alone:
            # SIGTERM is JAX's from `jax.distributed.initialize` on: a handler would replace it.
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
            os.kill(os.getpid(), signal.SIGTERM)  # JAX tells the others


def _manager_of(given: Any, directory: str | os.PathLike[str] | None) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        if directory is not None:
            raise InvalidValueError(
                f"PreemptionCheckpointHandler: checkpoint_dir is {directory!r}, but the checkpoint"
                f" manager has the directory {given.directory!r} already. Leave it out."
            )
        return given
    if not isinstance(given, Checkpoint):
        raise InvalidTypeError(
            f"PreemptionCheckpointHandler: checkpoint_or_checkpoint_manager is {given!r}, expected"
            " a distributary.checkpoint.Checkpoint or CheckpointManager."
        )
    if directory is None:
        raise InvalidValueError(
            "PreemptionCheckpointHandler: a Checkpoint needs checkpoint_dir, where it is saved."
        )
    return CheckpointManager(given, directory, max_to_keep=1)
