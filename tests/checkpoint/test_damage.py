"""Checkpoints whose files are not what was written: never other values, and always a sentence.

DISTRIBUTARY_FUZZ_INPUTS is the number of bits to flip, in both kinds of checkpoints.
"""

import json
import logging
import os
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import distributary as dist
from distributary.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
from distributary.errors import CheckpointError
from distributary.experimental import local_cluster
from distributary.experimental.partitioners import MinSizePartitioner

NUM_FLIPS = int(os.environ.get("DISTRIBUTARY_FUZZ_INPUTS", "60"))
SEED = 7
TABLE = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)


class _Mirrored:
    """Objects of one process, in several dtypes."""

    def __init__(self):
        self._strategy = dist.MirroredStrategy(["CPU:0", "CPU:1"])

    def checkpoint(self, scale):
        with self._strategy.scope():
            table = dist.Variable(scale * TABLE)
            half = dist.Variable(np.full((3, 5), scale, "bfloat16"))
            total = dist.Variable(
                np.float32(scale),
                synchronization=dist.VariableSynchronization.ON_READ,
                aggregation=dist.VariableAggregation.SUM,
            )
        return Checkpoint(
            variables=[table, half, total],
            empty=np.zeros((0, 3)),
            wide=np.full(3, scale, np.complex128),
            other_end=np.full(2, scale, ">f4"),
            key=jax.random.key(scale),
            rng=np.random.Generator(np.random.MT19937(scale)),
            rate=scale / 3,
        )

    def values(self, checkpoint):
        arrays = [v.numpy() for v in checkpoint.variables]
        arrays += [checkpoint.wide, checkpoint.other_end, jax.random.key_data(checkpoint.key)]
        state = json.dumps(checkpoint.rng.bit_generator.state, default=np.ndarray.tolist)
        return [np.asarray(a).tobytes() for a in arrays] + [state, checkpoint.rate]

    def close(self):
        pass


class _OnServers:
    """Variables on two parameter servers."""

    def __init__(self):
        self._cluster = local_cluster(workers=1, ps=2)
        self._strategy = dist.ParameterServerStrategy(
            self._cluster, MinSizePartitioner(100, max_shards=2)
        )

    def checkpoint(self, scale):
        with self._strategy.scope():
            table = dist.Variable(scale * TABLE)
            flag = dist.Variable(np.array([scale > 1, False]))
        return Checkpoint(table=table, flag=flag, step=scale, own=np.full(3, scale))

    def values(self, checkpoint):
        arrays = (checkpoint.table.numpy(), checkpoint.flag.numpy(), checkpoint.own)
        return [a.tobytes() for a in arrays] + [checkpoint.step]

    def close(self):
        self._cluster.close()


@pytest.fixture(params=[_Mirrored, _OnServers])
def objects(request):
    """One kind of objects to save."""
    made = request.param()
    yield made
    made.close()


def _files(path):
    return sorted(file for file in Path(path).rglob("*") if file.is_file())


def test_a_flipped_bit_never_gives_other_values(objects, tmp_path):
    path = objects.checkpoint(3).save(tmp_path / "ckpt")
    saved = objects.checkpoint(3)
    saved.restore(path)
    expected, here = objects.values(saved), objects.checkpoint(1)
    before = objects.values(here)
    choice, files, num_refused = random.Random(SEED), _files(path), 0
    assert len(files) >= 2
    for i in range(NUM_FLIPS):
        file = files[i % len(files)]
        data = bytearray(whole := file.read_bytes())
        bit = choice.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        refusal = ""
        try:
            here.restore(path)
        except CheckpointError as error:
            refusal = str(error)
        if refusal:
            assert file.name in refusal
            assert objects.values(here) == before
            num_refused += 1
        else:
            assert objects.values(here) == expected, f"bit {bit} of {file.name}"
            here = objects.checkpoint(1)
        file.write_bytes(whole)
    here.restore(path)
    assert objects.values(here) == expected
    assert num_refused > 0.9 * NUM_FLIPS


def test_files_that_were_cut_extended_removed_or_swapped_are_named(objects, tmp_path):
    path, other = (
        Path(objects.checkpoint(scale).save(tmp_path / str(scale) / "ckpt")) for scale in (3, 2)
    )
    here = objects.checkpoint(1)
    before = objects.values(here)

    def refused(name):
        with pytest.raises(CheckpointError, match=rf"^.*ckpt-1.* {name}") as caught:
            here.restore(path)
        assert objects.values(here) == before
        assert "\n" not in str(caught.value)

    for file in _files(path):
        whole = file.read_bytes()
        for data in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0", whole + whole):
            file.write_bytes(data)
            refused(file.name)
        file.unlink()
        refused(file.name)
        file.mkdir()
        refused(file.name)
        file.rmdir()
        file.write_bytes(bytes(len(whole)))
        refused(file.name)
        shutil.copy(other / file.name, file)
        if file.name == "checkpoint.json":
            refused(r"(arrays|ps-\d).safetensors")  # its arrays are not these
        else:
            refused(file.name)
        file.write_bytes(whole)
    if isinstance(objects, _OnServers):
        first, second = path / "ps-0.safetensors", path / "ps-1.safetensors"
        first.rename(tmp_path / "x")
        second.rename(first)
        (tmp_path / "x").rename(second)
        refused("ps-0.safetensors")


@pytest.mark.parametrize(
    "text", [None, b"", b"{}", b"null", b"\0" * 500, b"\xff\xfe", "half", "bit"]
)
def test_a_damaged_index_is_left_out_and_does_not_stop_later_saves(text, tmp_path, caplog):
    checkpoint = Checkpoint(a=np.arange(4.0), step=0)
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    for checkpoint.step in (1, 2, 3):
        manager.save()
    manager.wait_until_finished()
    index = tmp_path / "ckpt-3" / "checkpoint.json"
    whole = index.read_bytes()
    if text is None:
        index.unlink()
    else:
        halves = {"half": whole[: len(whole) // 2], "bit": whole.replace(b'"crc32c', b'"crc32d')}
        index.write_bytes(halves.get(text, text))

    again = CheckpointManager(Checkpoint(a=np.zeros(4), step=0), tmp_path, max_to_keep=2)

    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-2")
    assert f"The checkpoint {tmp_path}/ckpt-3 cannot be read: " in caplog.text or (
        f"There is no checkpoint at {tmp_path}/ckpt-3: it has no file" in caplog.text
    )
    with pytest.raises(CheckpointError, match=r"ckpt-3.* checkpoint\.json"):
        again.checkpoint.restore(tmp_path / "ckpt-3")
    assert again.restore_or_initialize() == str(tmp_path / "ckpt-2")
    assert again.checkpoint.step == 2
    again.checkpoint.step = 30
    assert again.save() == str(tmp_path / "ckpt-3")
    again.save()
    assert again.latest_checkpoint == str(tmp_path / "ckpt-4")
    again.checkpoint.restore(tmp_path / "ckpt-3")
    assert again.checkpoint.step == 30


def test_a_checkpoint_with_a_file_that_is_cut_or_missing_is_left_out(tmp_path, caplog):
    manager = CheckpointManager(Checkpoint(a=np.arange(4.0)), tmp_path, max_to_keep=None)
    for _ in range(4):
        manager.save()
    manager.wait_until_finished()
    (tmp_path / "ckpt-3" / "arrays.safetensors").unlink()
    file = tmp_path / "ckpt-4" / "arrays.safetensors"
    file.write_bytes(file.read_bytes()[:-1])

    with caplog.at_level(logging.WARNING):
        found = [latest_checkpoint(tmp_path) for _ in range(3)]

    assert found == [str(tmp_path / "ckpt-2")] * 3
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["Left out"] * 2
    assert f"ckpt-4 cannot be read: its file {file.name} has " in caplog.text
    assert f"ckpt-3 cannot be read: its file {file.name} is missing" in caplog.text


def test_of_two_that_were_being_exchanged_the_whole_one_counts(tmp_path):
    checkpoint = Checkpoint(a=np.arange(4.0), step=1)
    path = Path(checkpoint.save(tmp_path / "ckpt"))
    shutil.copytree(path, tmp_path / "ckpt-1.replaced")
    (path / "checkpoint.json").write_bytes(b"")
    checkpoint.step = 2
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=None)

    manager.save(1)

    assert manager.latest_checkpoint == str(path)
    assert [p.name for p in tmp_path.glob("[!.]*")] == ["ckpt-1"]
    checkpoint.restore(path)
    assert checkpoint.step == 2
