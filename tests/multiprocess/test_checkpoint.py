"""Checkpoints of several workers, on another number of workers, and when a worker is killed."""

import json
import os
import re
import signal

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.checkpoint import Checkpoint, latest_checkpoint


@pytest.fixture(scope="module")
def saving(tmp_path_factory):
    """What two workers print that save in a folder, with which the chief's last save ends."""
    directory = tmp_path_factory.mktemp("saved")
    cache = []

    def result(make_job):
        if not cache:
            cache.append(_run(make_job, "save", directory))
            assert all(one.result for one in cache[0]), "\n\n".join(o.output for o in cache[0])
        return directory, cache[0]

    return result


def _run(make_job, what, directory, devices=1):
    return make_job(2).start_all("checkpoint", what, directory, devices=devices).wait()


def test_two_workers_save_together(job, saving):
    directory, ended = saving(job)

    chief, other = (one.result for one in ended)
    assert chief["saved"] == other["saved"] == chief["restored"] == other["restored"]
    assert chief["saved"][3:] == [7, 3]
    assert chief["own"] != other["own"]
    for one in (chief, other):
        before, after, (rows, rows_after) = one["own"]
        assert before == after
        assert rows == rows_after
        assert "worker 1 saves other names" in one["different"]
        assert "does not fit; nothing was restored" in one["unfit"]
    # Then the chief was killed while it wrote the next one.
    assert ended[0].code == -signal.SIGKILL
    assert ended[1].code != 0
    assert any(name.startswith("ckpt-2.tmp-") for name in os.listdir(directory))
    assert latest_checkpoint(directory) == str(directory / "ckpt-1")


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_one_process_restores_it(num_replicas, job, saving, strategy_of):
    directory, (chief, _) = saving(job)
    with strategy_of(num_replicas).scope():
        w = dist.Variable(jnp.zeros(3))
        seen, mean = (
            dist.Variable(
                0.0,
                synchronization=dist.VariableSynchronization.ON_READ,
                aggregation=dist.VariableAggregation[name],
            )
            for name in ("SUM", "MEAN")
        )
    checkpoint = Checkpoint(w=w, seen=seen, mean=mean, epoch=0)

    checkpoint.restore(directory / "ckpt-1", partial=True)

    expected = chief.result["saved"]
    np.testing.assert_array_equal(w.numpy(), np.float32(expected[0]))
    assert float(seen.numpy()) == expected[1]
    assert float(mean.numpy()) == pytest.approx(expected[2], rel=1e-6)
    assert checkpoint.epoch == 7
    with pytest.raises(ValueError, match="rng was saved by 2 workers, each at its own position"):
        Checkpoint(rng=np.random.default_rng(0)).restore(directory / "ckpt-1", partial=True)


def test_workers_with_more_devices_restore_it_and_a_killed_worker_leaves_it_as_it_was(job, saving):
    directory, (saver, _) = saving(job)

    chief, other = _run(job, "restore", directory, devices=2)

    assert all(one.result for one in (chief, other)), chief.output + other.output
    expected, got = saver.result["saved"], chief.result["restored"]
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_allclose(got[1:], expected[1:], rtol=1e-6)
    assert got == other.result["restored"]
    assert sorted(chief.result["own"][0]) == ["arrays.safetensors", "checkpoint.json"]
    assert other.result["own"] is False
    for one in (chief, other):
        assert f"{directory}/results is a folder of something else" in one.result["in the way"]
    assert os.listdir(directory / "results") == ["notes"]
    # Then the second worker was killed while they saved.
    assert other.code == -signal.SIGKILL
    assert chief.code != 0
    assert latest_checkpoint(directory) == str(directory / "ckpt-1")


@pytest.mark.parametrize("divided", ["parts", "parts inside of hosts"])
def test_each_worker_writes_its_parts_and_any_layout_restores_them(divided, job, tmp_path):
    chief, other = _run(job, divided, tmp_path, devices=2)

    assert chief.result, chief.output
    assert other.result, other.output
    assert chief.result["same"] is other.result["same"] is True
    assert chief.result["saved"] == other.result["saved"]
    assert chief.result["iterations"] == other.result["iterations"] == 5
    assert chief.result["own"] == other.result["own"] == list(range(1200))
    assert "none.weights.h5" in chief.result["not loaded"]
    assert "Worker 0 could not save or load" in other.result["not loaded"]
    assert "the disk of" in chief.result["failed"]
    assert "No space left on device" in other.result["failed"]
    assert sorted(os.listdir(tmp_path)) == ["ckpt-1", "own.weights.h5", "workertemp"]
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "ckpt-1").iterdir()}
    large = 4 * (33 * 21 + 3 * 40 * 30)  # bytes of w, the kernel and its two slots of Adam
    if divided == "parts":
        assert sizes["worker-0.safetensors"] == pytest.approx(large / 2, rel=0.25)
        assert sizes["worker-1.safetensors"] == pytest.approx(large / 2, rel=0.25)
    else:
        assert sizes["worker-0.safetensors"] == pytest.approx(large, rel=0.25)
        assert "worker-1.safetensors" not in sizes
    devices = [f"CPU:{i}" for i in range(4)]
    for strategy in (
        dist.MirroredStrategy(devices[:3], experimental_shard_parameters=True),
        dist.MirroredStrategy(devices, experimental_model_parallel=2),
        dist.MirroredStrategy(
            devices, experimental_model_parallel=2, experimental_shard_parameters=True
        ),
        dist.MirroredStrategy(devices[:2]),
        dist.OneDeviceStrategy("CPU:0"),
    ):
        with strategy.scope():
            w = dist.Variable(jnp.zeros((33, 21)))
            model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(30)])
            model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        Checkpoint(w=w, model=model, step=0).restore(tmp_path / "ckpt-1")
        restored = [w.numpy(), *model.get_weights()]
        for value, expected in zip(restored, chief.result["saved"], strict=True):
            np.testing.assert_array_equal(value, np.float32(expected))


def test_a_signal_to_one_worker_saves_on_all_and_the_restarted_job_ends_on_the_same_weights(
    launch, tmp_path
):
    ended = launch(["--max-restarts", "1", "--no-tuning"], "checkpoint", "0.3", tmp_path)

    assert "ended with exit code 42" in ended.stderr, ended.stderr
    lines = re.findall(r"^\[worker \d\] (\{.*\})$", ended.stdout, flags=re.MULTILINE)
    results = [json.loads(line) for line in lines]
    assert len(results) == 2
    for result in results:
        assert result["start"] == results[0]["start"] >= 3
        assert result["num_saved"] == 2  # at the signal and at the end of the grace period
        restarted, undisturbed = result["values"]
        assert restarted == undisturbed
        assert restarted[-1] == result["start"] + 5
