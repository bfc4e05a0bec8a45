"""Numbers of a run in files, and profiles of its steps."""

import gzip
import json
import math
import re

import numpy as np
import pytest

import distributary as dist
from distributary.devices import progress
from distributary.errors import ContextError, InvalidTypeError, InvalidValueError
from distributary.launch import report


@pytest.fixture(autouse=True)
def _own_values(monkeypatch):
    monkeypatch.setattr(progress, "values", {})


def _step(x):
    return dist.get_replica_context().all_reduce("SUM", x.sum())


def _train(strategy, num_steps):
    dataset = dist.data.Dataset.from_tensor_slices(np.ones((4 * num_steps, 3), np.float32)).batch(4)
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(_step, (batch,))


def test_lines_of_json_have_the_numbers_of_the_run(strategy_of, tmp_path):
    strategy = strategy_of(2)
    file = tmp_path / "folder" / "numbers.jsonl"

    with dist.experimental.StatisticsLogger(strategy, json_lines=file, seconds=60):
        _train(strategy, 12)
        report(loss=np.float32(0.5), accuracy=math.nan)

    (line,) = map(json.loads, file.read_text().splitlines())
    found = strategy.step_statistics
    assert line["num_steps"] == found.num_steps == 10
    assert line["num_examples"] == 48
    assert line["input_wait_seconds"] == found.input_wait_seconds
    assert (line["num_replicas"], line["loss"], line["accuracy"]) == (2, 0.5, None)


def test_an_event_file_has_a_scalar_per_number_over_the_steps(strategy_of, tmp_path, monkeypatch):
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")  # which importing tensorboardX sets
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    from tensorboardX.proto.event_pb2 import Event

    strategy = strategy_of(2)

    with dist.experimental.StatisticsLogger(strategy, tensorboard=tmp_path, seconds=60):
        _train(strategy, 12)
        report(loss=0.5)

    (file,) = tmp_path.iterdir()
    # Our reader checks the checksums, which TensorBoard does, too.
    records = dist.data.TFRecordDataset([str(file)])
    events = [Event.FromString(bytes(record)) for record in records]
    scalars = {v.tag: (e.step, v.simple_value) for e in events for v in e.summary.value}
    assert scalars["loss"] == (10, 0.5)
    assert scalars["num_examples"] == (10, 48)


def test_rates_are_those_between_two_samples(strategy_of, tmp_path):
    strategy = strategy_of(2)
    file = tmp_path / "numbers.jsonl"

    with dist.experimental.StatisticsLogger(strategy, json_lines=file, seconds=0.05):
        while not file.exists() or len(file.read_text().splitlines()) < 3:
            _train(strategy, 20)

    before, after = [json.loads(line) for line in file.read_text().splitlines()][-2:]
    seconds = after["time"] - before["time"]
    num_steps = after["num_steps"] - before["num_steps"]
    assert after["steps_per_second"] == pytest.approx(num_steps / seconds)
    if num_steps:
        taken = after["seconds"] - before["seconds"]
        assert after["step/seconds"] == pytest.approx(taken / num_steps)


def test_a_full_disk_costs_a_training_only_its_numbers(strategy_of, tmp_path, caplog, full_disk):
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    logger = dist.experimental.StatisticsLogger(
        strategy_of(2), json_lines="/dev/full", tensorboard=tmp_path, seconds=60
    )

    with full_disk():
        logger.close()

    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"{tmp_path} is not written any more: File too large.",
        "/dev/full is not written any more: No space left on device.",
    ]


def test_a_full_disk_costs_a_training_only_its_profile(strategy_of, tmp_path, caplog, full_disk):
    file = tmp_path / "profile.json.gz"

    first = dist.experimental.profile(file)
    _train(strategy_of(2), 5)
    with full_disk(1000):
        first.close()

    (record,) = caplog.records
    assert f"The profile {file} is not written: " in record.getMessage()
    with dist.experimental.profile(file):
        _train(strategy_of(2), 5)
    assert file.exists()


def test_a_logger_that_cannot_log_says_so(strategy_of, tmp_path):
    strategy = strategy_of(1)
    logger = dist.experimental.StatisticsLogger

    with pytest.raises(InvalidValueError, match="nowhere to write to"):
        logger(strategy)
    with pytest.raises(InvalidValueError, match="seconds is 0"):
        logger(strategy, json_lines=tmp_path / "x", seconds=0)
    with pytest.raises(InvalidTypeError, match="strategy is 3"):
        logger(3, json_lines=tmp_path / "x")


def test_a_profile_has_the_steps_that_were_asked_for(strategy_of, tmp_path):
    strategy = strategy_of(2)
    file = tmp_path / "profile.json.gz"
    with pytest.raises(InvalidValueError, match="num_steps is 0"):
        dist.experimental.profile(file, num_steps=0)
    with dist.experimental.profile(file):
        pass
    assert not file.exists()

    with dist.experimental.profile(file, num_steps=3):
        with pytest.raises(ContextError, match="another profile"):
            dist.experimental.profile(tmp_path / "other.json.gz")
        _train(strategy, 10)

    trace = json.loads(gzip.decompress(file.read_bytes()))
    steps = [event for event in trace["traceEvents"] if event.get("name") == "step"]
    assert [event["args"]["step_num"] for event in steps] == ["0", "1", "2"]
    sums = [e for e in trace["traceEvents"] if re.fullmatch(r"psum[.\d]*", e.get("name", ""))]
    assert len(sums) == 3 * 2  # of every step, on every device
    assert all(event["ts"] > steps[0]["ts"] for event in sums)
