"""Checkpoints that servers write and read."""

import threading
from pathlib import Path

import keras
import numpy as np
import pytest

import distributary as dist
from distributary.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
from distributary.errors import CheckpointError, InvalidValueError, PSUnavailableError
from distributary.experimental import local_cluster
from distributary.experimental.partitioners import MinSizePartitioner

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(50, 4)).astype(np.float32)
SECONDS = 60.0  # more than anything takes


def _strategy(ps, max_shards=1, cluster=None):
    return dist.ParameterServerStrategy(
        cluster or local_cluster(workers=2, ps=ps), MinSizePartitioner(100, max_shards=max_shards)
    )


def _variables(strategy, scale=0.0):
    with strategy.scope():
        return {
            "table": dist.Variable(scale * TABLE, name="table"),
            "half": dist.Variable(np.full((3, 5), scale, "bfloat16"), name="half"),
            "flags": dist.Variable(np.array([scale > 0, False])),
            "count": dist.Variable(np.int32(7 * scale)),
            "none": dist.Variable(np.zeros((0, 3), np.float32)),
            "../a b/é%2F.1/": dist.Variable(np.float32(scale)),
            "": dist.Variable(np.float32(scale)),
        }


def _check_equal(variables, scale):
    np.testing.assert_array_equal(variables["table"].numpy(), np.float32(scale) * TABLE)
    np.testing.assert_array_equal(variables["half"].numpy(), np.full((3, 5), scale, "bfloat16"))
    np.testing.assert_array_equal(variables["flags"].numpy(), [scale > 0, False])
    assert variables["count"].numpy() == 7 * scale
    assert variables["../a b/é%2F.1/"].numpy() == variables[""].numpy() == scale


def test_other_numbers_of_servers_and_shards_restore_equal_values(tmp_path):
    path = Checkpoint(v=_variables(_strategy(2, 3), 1.0), epoch=3).save(tmp_path / "a")
    for ps, max_shards in ((3, 2), (1, 7), (2, 1)):
        strategy = _strategy(ps, max_shards)
        checkpoint = Checkpoint(v=_variables(strategy), epoch=0)
        checkpoint.restore(path)
        _check_equal(checkpoint.v, 1.0)
        assert checkpoint.epoch == 3
        path = checkpoint.save(tmp_path / f"of {ps} servers")
        strategy._cluster.close()


def test_other_strategies_restore_it_and_the_other_way_round(tmp_path):
    from_servers = Checkpoint(v=_variables(_strategy(2, 3), 1.0)).save(tmp_path / "servers")
    mirrored = dist.MirroredStrategy(["CPU:0", "CPU:1"])
    checkpoint = Checkpoint(v=_variables(mirrored))

    checkpoint.restore(from_servers)

    _check_equal(checkpoint.v, 1.0)
    checkpoint.v["table"].assign(2 * TABLE)
    checkpoint.v["half"].assign(np.full((3, 5), 2.0))
    for name, value in (("count", 14), ("../a b/é%2F.1/", 2), ("", 2)):
        checkpoint.v[name].assign(value)
    path = checkpoint.save(tmp_path / "mirrored")
    again = Checkpoint(v=_variables(_strategy(2, 3)))
    again.restore(path)
    _check_equal(again.v, 2.0)


def test_servers_restore_what_devices_had_in_parts(tmp_path):
    values = {"columns": RNG.normal(size=(3, 402)), "rows": RNG.normal(size=(402, 3))}

    def checkpoint(strategy, scale):
        with strategy.scope():
            return Checkpoint(
                **{n: dist.Variable(np.float32(scale * v)) for n, v in values.items()}
            )

    devices = [f"CPU:{i}" for i in range(4)]
    parts = dist.MirroredStrategy(devices, experimental_shard_parameters=True)
    path = checkpoint(parts, 1.0).save(tmp_path / "parts")
    on_servers = checkpoint(_strategy(2, 3), 0.0)
    on_servers.restore(path)
    again = checkpoint(parts, 0.0)
    again.restore(on_servers.save(tmp_path / "servers"))

    for name, value in values.items():
        for restored in (on_servers, again):
            np.testing.assert_array_equal(getattr(restored, name).numpy(), np.float32(value))


def test_shards_on_devices_are_saved_as_a_whole(tmp_path):
    table = dist.ShardedVariable([dist.Variable(TABLE[:20]), dist.Variable(TABLE[20:])])
    path = Checkpoint(table=table).save(tmp_path / "shards")
    whole = Checkpoint(table=dist.Variable(0 * TABLE))

    whole.restore(path)

    np.testing.assert_array_equal(whole.table.numpy(), TABLE)
    table.assign(0 * TABLE)
    Checkpoint(table=table).restore(whole.save(tmp_path / "whole"))
    np.testing.assert_array_equal(table.numpy(), TABLE)


def test_values_do_not_travel(tmp_path):
    cluster = local_cluster(workers=1, ps=2)
    checkpoint = Checkpoint(v=_variables(_strategy(2, 3, cluster), 1.0))
    kinds = []

    def spy(source, target, message, deliver):
        reply = deliver(message)
        if any(array.size for array in (*message.arrays, *reply.arrays)):
            kinds.append(message.kind)
        return reply

    cluster.fault = spy
    checkpoint.restore(checkpoint.save(tmp_path / "a"))

    assert kinds == []


class _Training:
    """A Keras model with an embedding, whose steps are the same in every training."""

    def __init__(self, strategy):
        self.strategy = strategy
        keras.utils.set_random_seed(0)
        with strategy.scope():
            self.model = keras.Sequential(
                [
                    keras.Input((2,), dtype="int32"),
                    keras.layers.Embedding(50, 4, name="table"),
                    keras.layers.Flatten(),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dense(1),
                ]
            )
            self.optimizer = keras.optimizers.Adagrad(0.1)
            self.optimizer.build(self.model.trainable_variables)
            self.metric = keras.metrics.Mean()
            self.steps = dist.Variable(0)
        self.coordinator = dist.coordinator.ClusterCoordinator(strategy)
        self.checkpoint = Checkpoint(
            model=self.model, optimizer=self.optimizer, metric=self.metric, steps=self.steps
        )

    def _step(self, ids):
        with dist.GradientTape() as tape:
            loss = (self.model(ids, training=True) ** 2).mean()
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.metric.update_state(loss)
        self.steps.assign_add(1)
        return loss

    def _closure(self, ids):
        return self.strategy.run(self._step, args=(ids,))

    def schedule(self, num_steps, start):
        for i in range(start, start + num_steps):
            ids = np.random.default_rng(i).integers(0, 50, (8, 2))
            self.coordinator.schedule(self._closure, args=(ids.astype(np.int32),))

    def values(self):
        variables = [*self.model.variables, *self.optimizer.variables, *self.metric.variables]
        return [np.array(v) for v in (*variables, self.steps)]


def _check_same(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


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
    _check_same(second.values(), saved, rtol=0)
    second.schedule(5, start=5)
    second.coordinator.join()
    _check_same(second.values(), first.values(), rtol=1e-5, atol=1e-6)
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

    def fails(source, target, message, deliver):
        if (message.kind, target) == ("save", "ps 1"):
            raise OSError("No space left on device")
        return deliver(message)

    cluster.fault = fails
    with pytest.raises(CheckpointError, match=r"ckpt-2 was not written: No space.* is .*ckpt-1"):
        checkpoint.save(tmp_path / "ckpt")
    assert latest_checkpoint(tmp_path) == kept
    assert [p.name for p in tmp_path.glob("[!.]*")] == ["ckpt-1"]

    def elsewhere(source, target, message, deliver):
        if message.kind == "save":
            other = tmp_path / target / "x"
            other.mkdir(parents=True)
            fields = {**message.fields, "path": str(other)}
            message = type(message)("save", fields)
        return deliver(message)

    cluster.fault = elsewhere
    with pytest.raises(CheckpointError, match=r"ps 0 does not see what the coordinator has wri"):
        checkpoint.save(tmp_path / "ckpt")
    assert latest_checkpoint(tmp_path) == kept

    def vanishes(source, target, message, deliver):
        reply = deliver(message)
        if (message.kind, target) == ("save", "ps 1"):
            (Path(message.fields["path"]) / "ps-1.safetensors").unlink()
        return reply

    cluster.fault = vanishes
    with pytest.raises(CheckpointError, match=r"ps 1 has written \d+ bytes to .* sees 0"):
        checkpoint.save(tmp_path / "ckpt")

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
    assert not any(service._current.tenant._copies._copies for service in _servers(cluster))

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
    with pytest.raises(ValueError, match="the file is broken"):
        checkpoint.save(tmp_path / "ckpt")
    assert latest_checkpoint(tmp_path) is None
    checkpoint.save(tmp_path / "ckpt")
    assert latest_checkpoint(tmp_path)
