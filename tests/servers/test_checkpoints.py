"""Checkpoints that servers write and read."""

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
from distributary.errors import CheckpointError, InvalidValueError, PSUnavailableError
from distributary.experimental import local_cluster
from distributary.experimental.partitioners import MinSizePartitioner
from tests.servers.message_faults import spy_on_bytes

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(50, 4)).astype(np.float32)
WIDE = RNG.normal(size=(3, 402)).astype(np.float32)  # large enough to be divided among devices
SECONDS = 60.0  # more than anything takes


def _strategy(ps, max_shards=1, cluster=None):
    return dist.ParameterServerStrategy(
        cluster or local_cluster(workers=2, ps=ps), MinSizePartitioner(100, max_shards=max_shards)
    )


def _variables(strategy, scale=0.0):
    with strategy.scope():
        return {
            "table": dist.Variable(scale * TABLE, name="table"),
            "wide": dist.Variable(scale * WIDE),
            "long": dist.Variable(scale * WIDE.T),
            "half": dist.Variable(np.full((3, 5), scale, "bfloat16"), name="half"),
            "flags": dist.Variable(np.array([scale > 0, False])),
            "count": dist.Variable(np.int32(7 * scale)),
            "none": dist.Variable(np.zeros((0, 3), np.float32)),
            "../a b/é%2F.1/": dist.Variable(np.float32(scale)),
            "": dist.Variable(np.float32(scale)),
        }


def _check_equal(variables, scale):
    np.testing.assert_array_equal(variables["table"].numpy(), np.float32(scale) * TABLE)
    np.testing.assert_array_equal(variables["wide"].numpy(), np.float32(scale) * WIDE)
    np.testing.assert_array_equal(variables["long"].numpy(), np.float32(scale) * WIDE.T)
    np.testing.assert_array_equal(variables["half"].numpy(), np.full((3, 5), scale, "bfloat16"))
    np.testing.assert_array_equal(variables["flags"].numpy(), [scale > 0, False])
    assert variables["count"].numpy() == 7 * scale
    assert variables["../a b/é%2F.1/"].numpy() == variables[""].numpy() == scale


def test_other_servers_and_devices_restore_equal_values_which_do_not_travel(tmp_path):
    cluster = local_cluster(workers=1, ps=2)
    checkpoint = Checkpoint(v=_variables(_strategy(2, 3, cluster), 1.0), epoch=3)
    sizes = spy_on_bytes(cluster)
    path = checkpoint.save(tmp_path / "first")
    checkpoint.restore(path)
    assert not any(sizes)

    devices = [f"CPU:{i}" for i in range(4)]
    for number, strategy in enumerate(
        (
            _strategy(3, 2),
            _strategy(1, 7),
            dist.MirroredStrategy(devices[:2]),
            _strategy(2, 1),
            dist.MirroredStrategy(devices, experimental_shard_parameters=True),
            _strategy(2, 3),
        )
    ):
        checkpoint = Checkpoint(v=_variables(strategy), epoch=0)
        checkpoint.restore(path)
        _check_equal(checkpoint.v, 1.0)
        assert checkpoint.epoch == 3
        path = checkpoint.save(tmp_path / str(number))


def test_shards_on_devices_are_saved_as_a_whole(tmp_path):
    table = dist.ShardedVariable([dist.Variable(TABLE[:20]), dist.Variable(TABLE[20:])])
    path = Checkpoint(table=table).save(tmp_path / "shards")
    whole = Checkpoint(table=dist.Variable(0 * TABLE))

    whole.restore(path)

    np.testing.assert_array_equal(whole.table.numpy(), TABLE)
    table.assign(0 * TABLE)
    Checkpoint(table=table).restore(whole.save(tmp_path / "whole"))
    np.testing.assert_array_equal(table.numpy(), TABLE)


class _Training:
    """A table with a slot, whose steps are the same in every training."""

    def __init__(self, strategy):
        with strategy.scope():
            self.table, self.slot = dist.Variable(TABLE), dist.Variable(np.full_like(TABLE, 0.1))
            self.steps = dist.Variable(0)
        self.coordinator = dist.coordinator.ClusterCoordinator(strategy)
        self.checkpoint = Checkpoint(table=self.table, slot=self.slot, steps=self.steps)

    def _step(self, ids):
        table = self.table.value()
        gradient = jax.grad(lambda table: (table[ids] ** 2).sum())(table)
        total = self.slot.value() + gradient**2
        self.slot.assign(total)
        self.table.assign(table - 0.1 * gradient / jnp.sqrt(total))
        self.steps.assign_add(1)

    def schedule(self, num_steps, start):
        for i in range(start, start + num_steps):
            ids = np.random.default_rng(i).integers(0, 50, 8, np.int32)
            self.coordinator.schedule(self._step, args=(ids,))

    def values(self):
        return np.concatenate([self.table.numpy(), self.slot.numpy()])


def test_a_training_goes_on_and_is_saved_meanwhile(tmp_path):
    cluster = local_cluster(workers=1, ps=2)
    may_write = threading.Event()

    def slow_disk(source, target, message, deliver):
        if message.kind == "save":
            assert may_write.wait(SECONDS)
        return deliver(message)

    cluster.fault = slow_disk
    first = _Training(_strategy(2, 3, cluster))
    manager = CheckpointManager(first.checkpoint, tmp_path, max_to_keep=2)
    assert manager.restore_or_initialize() is None
    first.schedule(5, start=0)
    path = manager.save()  # waits for the steps
    assert first.steps.numpy() == 5
    saved = first.values()
    first.schedule(5, start=5)
    first.coordinator.join()
    assert list(tmp_path.glob("ckpt-?")) == []  # latest_checkpoint() would wait for it
    may_write.set()
    assert latest_checkpoint(tmp_path) == manager.latest_checkpoint == path

    second = _Training(_strategy(3, 2, local_cluster(workers=1, ps=3)))
    again = CheckpointManager(second.checkpoint, tmp_path, max_to_keep=2)
    assert again.restore_or_initialize() == path
    np.testing.assert_array_equal(second.values(), saved)
    second.schedule(5, start=5)
    second.coordinator.join()
    np.testing.assert_allclose(second.values(), first.values(), rtol=1e-5, atol=1e-6)
    for _ in range(2):
        again.save()
    assert [p[-6:] for p in again.checkpoints] == ["ckpt-2", "ckpt-3"]
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"ckpt-2", "ckpt-3"}

    second.checkpoint.restore(again.latest_checkpoint)  # in the same session
    second.schedule(1, start=0)
    second.coordinator.join()
    assert second.steps.numpy() == 11


def test_without_all_servers_the_old_checkpoint_stays(tmp_path):
    cluster = local_cluster(workers=1, ps=2)
    variables = _variables(_strategy(2, 3, cluster), 1.0)
    checkpoint = Checkpoint(v=variables)
    kept = checkpoint.save(tmp_path / "ckpt")

    def fails(target, message, deliver):
        if target == "ps 1":
            raise OSError("No space left on device")
        return deliver(message)

    def goes_elsewhere(target, message, deliver):
        other = tmp_path / target / "x"
        other.mkdir(parents=True)
        return deliver(type(message)("save", {**message.fields, "path": str(other)}))

    def vanishes(target, message, deliver):
        reply = deliver(message)
        if target == "ps 1":
            (Path(message.fields["path"]) / "ps-1.safetensors").unlink()
        return reply

    for fault, text in (
        (fails, r"ckpt-2 was not written: No space.* is .*ckpt-1"),
        (goes_elsewhere, "ps 0 does not see what the coordinator has wri"),
        (vanishes, r"ps 1 has written \d+ bytes to .* sees 0"),
    ):
        cluster.fault = lambda source, target, message, deliver, fault=fault: (
            fault(target, message, deliver) if message.kind == "save" else deliver(message)
        )
        with pytest.raises(CheckpointError, match=text):
            checkpoint.save(tmp_path / "ckpt")
        assert latest_checkpoint(tmp_path) == kept
    assert [p.name for p in tmp_path.glob("ckpt-*")] == ["ckpt-1"]

    lost = []

    def lose_replies(source, target, message, deliver):
        reply = deliver(message)
        if source == "chief" and (target, message.kind) not in lost:
            lost.append((target, message.kind))
            raise ConnectionError
        return reply

    cluster.fault = lose_replies
    checkpoint.restore(checkpoint.save(tmp_path / "ckpt"))
    assert {kind for _, kind in lost} >= {"copy", "save", "load", "adopt", "drop"}
    _check_equal(variables, 1.0)
    assert not any(service._current._copies for service in _servers(cluster))

    cluster.kill("ps 1")
    with pytest.raises(PSUnavailableError, match="ps 1"):
        checkpoint.save(tmp_path / "ckpt")
    assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-5")


def _servers(cluster):
    return [service for name, service in cluster._services.items() if name.startswith("ps")]


def test_what_does_not_fit_changes_nothing(tmp_path):
    path = Checkpoint(v=_variables(_strategy(2, 3), 1.0), x=1).save(tmp_path / "ckpt")
    variables = _variables(_strategy(2, 3), 2.0)
    del variables["half"]
    variables["more"] = dist.Variable(1.0)
    with pytest.raises(InvalidValueError, match=r"Not in.*: v/more.\nOnly in.*: v/half, x."):
        Checkpoint(v=variables).restore(path)
    with _strategy(1).scope():
        wide = dist.Variable(np.zeros((50, 5), np.float32))
        doubled = dist.Variable(np.int64(0))
    with pytest.raises(InvalidValueError, match=r"v/table has shape \(50, 4\), and here \(50, 5\)"):
        Checkpoint(v={"table": wide, "count": doubled}).restore(path, partial=True)

    checkpoint = Checkpoint(v=_variables(_strategy(3, 2), 2.0), x=2)
    row = TABLE[0].tobytes()
    (data,) = (p for p in tmp_path.rglob("ps-*") if row in p.read_bytes())
    data.write_bytes(data.read_bytes().replace(row, bytes(len(row))))
    with pytest.raises(CheckpointError, match=rf"ckpt-1 cannot be read: its file {data.name} is d"):
        checkpoint.restore(path)
    _check_equal(checkpoint.v, 2.0)


def test_the_error_of_a_step_is_not_lost(tmp_path):
    strategy = _strategy(1)
    with strategy.scope():
        count = dist.Variable(0)
    coordinator = dist.coordinator.ClusterCoordinator(strategy)

    def broken():
        yield np.int32(1)
        raise ValueError("the file is broken")

    batches = iter(coordinator.create_per_worker_dataset(broken))

    def step(batches):
        count.assign_add(next(batches))

    for _ in range(4):
        coordinator.schedule(step, args=(batches,))
    checkpoint = Checkpoint(count=count)
    with pytest.raises(ValueError, match="the file is broken") as caught:
        checkpoint.save(tmp_path / "ckpt")
    (note,) = caught.value.__notes__
    assert "Raised at worker " in note
    assert "in broken" in note
    assert latest_checkpoint(tmp_path) is None
    checkpoint.save(tmp_path / "ckpt")
    assert latest_checkpoint(tmp_path)
