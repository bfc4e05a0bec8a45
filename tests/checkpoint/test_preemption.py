"""PreemptionCheckpointHandler in a process alone; tests/multiprocess has those of several."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

import distributary as dist
from distributary.checkpoint import Checkpoint, CheckpointManager
from distributary.experimental import PreemptionCheckpointHandler, TerminationConfig


@pytest.fixture(autouse=True)
def _sigterm():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def _training(directory, config=None):
    v = dist.Variable(jnp.int32(0))
    handler = PreemptionCheckpointHandler(None, Checkpoint(v=v), directory, config)
    return v, handler


def test_sigterm_saves_and_ends_and_the_next_process_goes_on(tmp_path):
    v, handler = _training(tmp_path)

    def step(signal_at):
        v.assign_add(1)
        if int(v.numpy()) == signal_at:
            signal.raise_signal(signal.SIGTERM)
        return 10 * int(v.numpy())

    assert [handler.run(step, 3), handler.run(step, signal_at=3)] == [10, 20]
    handler.run(step, 3)
    with pytest.raises(SystemExit) as end:
        handler.run(step, 3)

    assert end.value.code == 42
    v, handler = _training(tmp_path)
    assert (int(v.numpy()), handler.total_run_calls) == (3, 3)
    handler.run(step, 0)
    assert (int(v.numpy()), handler.total_run_calls) == (4, 4)


def test_a_watcher_is_asked_and_a_function_saves(tmp_path):
    is_noticed, saved = threading.Event(), []
    config = TerminationConfig(
        termination_watcher_fn=lambda: is_noticed.set() or True,
        save_fn=lambda *args, **kwargs: saved.append((args, kwargs)),
    )
    _, handler = _training(tmp_path, config)
    assert is_noticed.wait(30)

    with pytest.raises(SystemExit):
        while True:
            handler.save_checkpoint_if_preempted(7, check_interval=False)

    assert saved == [((7,), {"check_interval": False})]
    assert list(tmp_path.iterdir()) == []


def test_a_scope_around_steps_saves_when_it_is_left(tmp_path):
    v, handler = _training(tmp_path)

    with pytest.raises(SystemExit), handler.watch_preemption_scope():
        signal.raise_signal(signal.SIGTERM)
        v.assign_add(5)

    assert int(_training(tmp_path)[0].numpy()) == 5


_RESOLVER = dist.cluster_resolver.SimpleClusterResolver(
    dist.cluster_resolver.ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]})
)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "a Checkpoint needs checkpoint_dir", (None, "checkpoint")),
        (ValueError, "has the directory '.*' already", (None, "manager", "elsewhere")),
        (TypeError, "checkpoint_or_checkpoint_manager is 3", (None, 3)),
        (TypeError, "termination_config is 5", (None, "manager", None, 5)),
        (NotImplementedError, "the cluster has parameter servers", (_RESOLVER, "manager")),
    ],
)
def test_wrong_arguments_are_refused(error, message, arguments, tmp_path):
    checkpoint = Checkpoint(a=1)
    known = {"checkpoint": checkpoint, "manager": CheckpointManager(checkpoint, tmp_path, 1)}
    resolver, saved, *others = arguments

    with pytest.raises(error, match=message):
        PreemptionCheckpointHandler(resolver, known.get(saved, saved), *others)
    with pytest.raises(ValueError, match="grace_period is -1"):
        TerminationConfig(grace_period=-1)
    with pytest.raises(TypeError, match="exit_fn is 3, expected a function"):
        TerminationConfig(exit_fn=3)


def test_another_thread_than_the_main_one_is_refused(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        creation = pool.submit(_training, tmp_path)

        with pytest.raises(RuntimeError, match="Create it in the main thread"):
            creation.result()
