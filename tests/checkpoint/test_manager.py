"""CheckpointManager: which checkpoints there are, whatever happens while one is written."""

import errno
import os
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint, list_variables
from distributary.errors import CheckpointError
from tests.forks import Fork


def _names(manager):
    return [os.path.basename(path) for path in manager.checkpoints]


def _listed(directory):
    """What is in a directory, without locks."""
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def test_the_newest_are_kept_and_the_latest_is_found(tmp_path):
    checkpoint = Checkpoint(step=0)
    manager = CheckpointManager(checkpoint, tmp_path / "dir", max_to_keep=2)
    assert manager.latest_checkpoint is None

    for checkpoint.step in (10, 20, 30):
        path = manager.save()

    assert path == manager.latest_checkpoint == f"{manager.directory}/ckpt-3"
    assert _names(manager) == _listed(manager.directory) == ["ckpt-2", "ckpt-3"]
    # Another process goes on counting.
    other = CheckpointManager(Checkpoint(step=0), tmp_path / "dir", max_to_keep=None)
    assert other.restore_or_initialize() == path
    assert other.checkpoint.step == 30
    other.save()
    assert _names(other) == ["ckpt-2", "ckpt-3", "ckpt-4"]


def test_who_reads_waits_for_what_another_manager_writes(tmp_path, monkeypatch):
    def sync_slowly(descriptor):
        time.sleep(0.1)
        sync(descriptor)

    def save(number):
        checkpoint.step = number
        return manager.save()

    sync = os.fsync
    monkeypatch.setattr(os, "fsync", sync_slowly)
    checkpoint, other = Checkpoint(step=0), Checkpoint(step=0)
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=None)

    assert save(1) == latest_checkpoint(tmp_path)
    path = save(2)
    assert CheckpointManager(other, tmp_path, max_to_keep=None).latest_checkpoint == path
    other.restore(save(3))
    assert other.step == 3
    assert list_variables(save(4)) == []


def test_the_latest_is_the_one_saved_last(tmp_path):
    checkpoint = Checkpoint(step=0)
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=2, checkpoint_name="c")
    for number in (7, 8, 9):
        checkpoint.step = number
        manager.save(checkpoint_number=number)

    checkpoint.restore(f"{tmp_path}/c-8")
    checkpoint.step = 80
    manager.save(checkpoint_number=8)

    assert _names(manager) == ["c-9", "c-8"]
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/c-8"
    assert latest_checkpoint(tmp_path / "c-8") is None
    checkpoint.step = 0
    manager.restore_or_initialize()
    assert checkpoint.step == 80


def test_one_is_kept_every_n_hours(tmp_path, monkeypatch):
    manager = CheckpointManager(
        Checkpoint(a=1), tmp_path, 1, keep_checkpoint_every_n_hours=2, asynchronous=False
    )

    for hour in range(6):
        monkeypatch.setattr(time, "time_ns", lambda hour=hour: (100 + hour) * 3600 * 10**9)
        manager.save()

    assert _listed(tmp_path) == ["ckpt-1", "ckpt-3", "ckpt-5", "ckpt-6"]
    assert _names(manager) == ["ckpt-6"]

    later = CheckpointManager(Checkpoint(a=1), tmp_path, 1, asynchronous=False)
    later.restore_or_initialize()
    later.save()

    assert _listed(tmp_path) == ["ckpt-1", "ckpt-3", "ckpt-5", "ckpt-7"]  # for good


def test_saving_waits_for_the_interval(tmp_path):
    step = dist.Variable(jnp.int32(3))
    manager = CheckpointManager(
        Checkpoint(step=step), tmp_path, 5, step_counter=step, checkpoint_interval=4
    )
    initialized = []
    manager_of_new = CheckpointManager(
        Checkpoint(step=step), tmp_path / "new", 5, init_fn=lambda: initialized.append(1)
    )

    assert manager.checkpoint_interval == 4
    assert manager.save() is not None  # the first always
    step.assign(6)
    assert manager.save() is None
    assert manager.save(check_interval=False) is not None
    step.assign(9)
    assert manager.save() is None
    step.assign(10)
    assert manager.save() is not None
    step.assign(2)
    manager.restore_or_initialize()
    assert int(step.numpy()) == 10
    assert manager.save() is None  # counted from the restored step
    assert manager_of_new.restore_or_initialize() is None
    assert initialized == [1]


def test_what_is_saved_is_the_state_at_the_time_of_saving(strategy_of, tmp_path):
    strategy = strategy_of(2)
    with strategy.scope():
        ws = [dist.Variable(jnp.zeros((512, 512))) for _ in range(8)]
    checkpoint = Checkpoint(ws=ws, step=0, batches=[np.zeros(100)])
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=None)

    def add():  # donates the buffers of the step before
        for w in ws:
            w.assign_add(jnp.ones_like(w.value()))

    for step in range(1, 13):
        strategy.run(add)
        checkpoint.step = step
        checkpoint.batches[0][:] = step
        if step % 4 == 0:
            manager.save(step)

    for path, step in zip(manager.checkpoints, (4, 8, 12), strict=True):
        checkpoint.restore(path)
        assert checkpoint.step == step
        for array in (*ws, checkpoint.batches[0]):
            np.testing.assert_array_equal(np.asarray(array), step)


def test_a_negative_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint_number is -3, expected a number >= 0\."):
        CheckpointManager(Checkpoint(a=1), tmp_path, 1).save(-3)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (dict(max_to_keep=0), ValueError, "max_to_keep is 0, expected a number > 0 or None"),
        (dict(keep_checkpoint_every_n_hours=-1), ValueError, "every_n_hours is -1"),
        (dict(timeout_seconds=0), ValueError, "timeout_seconds is 0, expected a number > 0."),
        (dict(checkpoint_interval=5), ValueError, "checkpoint_interval is 5, but there is no step"),
        (dict(checkpoint_name="a/b"), ValueError, "checkpoint_name is 'a/b', expected the begin"),
        (dict(checkpoint=3), TypeError, "checkpoint is 3, expected a distributary.checkpoint"),
    ],
)
def test_wrong_arguments_are_refused(kwargs, error, message, tmp_path):
    with pytest.raises(error, match=message):
        CheckpointManager(
            **dict(checkpoint=Checkpoint(a=1), directory=tmp_path, max_to_keep=1) | kwargs
        )


_KILLED = """
import os, signal, sys
import numpy as np
from distributary.checkpoint import Checkpoint, CheckpointManager

directory, replaces, event, part = sys.argv[1:]
checkpoint = Checkpoint(a=np.arange(1000.0), step=1)
manager = CheckpointManager(checkpoint, directory, max_to_keep=1)
manager.save()
manager.wait_until_finished()
# Ends the process right before the operating system would be asked to do this.
def kill(name, args):
    if name == event and part in f"{args[0]} to {args[1]}":
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.step = 2
sys.addaudithook(kill)
manager.save(1 if replaces == "True" else None)  # and the script ends
"""


@pytest.mark.parametrize(
    ("replaces", "event", "part", "expected"),
    [
        (False, "open", "checkpoint.json to w", 1),
        (False, "os.rename", "/ckpt-2", 1),
        (True, "os.rename", ".tmp-", 1),  # the old one has been renamed
        (False, "os.rename", "/ckpt-1 to", 2),  # the old one was to be removed
        (False, "never", "", 2),  # although nobody has waited for the last one
    ],
)
def test_a_kill_at_any_time_leaves_a_complete_checkpoint(replaces, event, part, expected, tmp_path):
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(_KILLED)
    with output.open("w") as file:
        command = [script, tmp_path / "dir", replaces, event, part]
        code = Fork(command, os.environ, stdout=file).wait(120)
    assert code == (0 if event == "never" else -signal.SIGKILL), output.read_text()
    checkpoint = Checkpoint(a=np.zeros(1000), step=0)
    manager = CheckpointManager(checkpoint, tmp_path / "dir", max_to_keep=1)

    manager.restore_or_initialize()

    assert checkpoint.step == expected
    np.testing.assert_array_equal(checkpoint.a, np.arange(1000.0))
    name = os.path.basename(manager.save())
    manager.wait_until_finished()
    assert _listed(tmp_path / "dir") == [name]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_on_a_full_disk_saving_ends_with_a_sentence_until_there_is_room(asynchronous, small_disk):
    checkpoint = Checkpoint(a=np.arange(40_000.0), step=0)
    manager = CheckpointManager(checkpoint, small_disk / "dir", 1, asynchronous=asynchronous)
    checkpoint.step = 1
    path = manager.save()
    manager.wait_until_finished()
    (small_disk / "others").write_bytes(bytes(100_000))

    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            manager.save()
            manager.wait_until_finished()
        assert str(caught.value) == (
            f"The checkpoint {small_disk}/dir/ckpt-2 was not written: the disk of"
            f" {small_disk}/dir is full (No space left on device). The latest complete one is"
            f" {path}."
        )
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
        assert _listed(small_disk / "dir") == ["ckpt-1"]
        checkpoint.restore(path)
        assert checkpoint.step == 1

    (small_disk / "others").unlink()
    checkpoint.step = 3
    checkpoint.a = np.arange(20_000.0)  # two must fit for a moment
    manager.save()
    assert manager.latest_checkpoint == f"{small_disk}/dir/ckpt-2"
    assert _listed(small_disk / "dir") == ["ckpt-2"]
