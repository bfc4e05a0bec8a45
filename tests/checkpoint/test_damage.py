"""Checkpoints whose files are not what was written: never other values, and always a sentence.

DISTRIBUTARY_FUZZ_INPUTS is the number of bits to flip.
"""

import json
import logging
import os
import random
import re
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

NUM_FLIPS = int(os.environ.get("DISTRIBUTARY_FUZZ_INPUTS", "80"))
SEED = 7
TABLE = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)


@pytest.fixture
def new_checkpoint():
    """A function that makes a checkpoint of objects of this process and of two servers."""
    with local_cluster(workers=1, ps=2) as cluster:
        strategy = dist.ParameterServerStrategy(cluster, MinSizePartitioner(100, max_shards=2))

        def new(scale):
            with strategy.scope():
                table = dist.Variable(scale * TABLE)
                half = dist.Variable(np.full((3, 5), scale, "bfloat16"))
                flag = dist.Variable(np.array([scale > 1, False]))
            return Checkpoint(
                variables=[table, half, flag],
                empty=np.zeros((0, 3)),
                wide=np.full(3, scale, np.complex128),
                other_end=np.full(2, scale, ">f4"),
                key=jax.random.key(scale),
                rng=np.random.Generator(np.random.MT19937(scale)),
                rate=scale / 3,
            )

        yield new


def _values(checkpoint):
    arrays = [v.numpy() for v in checkpoint.variables]
    arrays += [checkpoint.wide, checkpoint.other_end, jax.random.key_data(checkpoint.key)]
    state = json.dumps(checkpoint.rng.bit_generator.state, default=np.ndarray.tolist)
    return [np.asarray(a).tobytes() for a in arrays] + [state, checkpoint.rate]


def _files(path):
    return sorted(file for file in Path(path).rglob("*") if file.is_file())


def test_a_flipped_bit_never_gives_other_values(new_checkpoint, tmp_path):
    path = new_checkpoint(3).save(tmp_path / "ckpt")
    saved = new_checkpoint(3)
    saved.restore(path)
    expected, here = _values(saved), new_checkpoint(1)
    before = _values(here)
    choice, files, num_refused = random.Random(SEED), _files(path), 0
    assert len(files) == 4
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
            assert _values(here) == before
            num_refused += 1
        else:
            assert _values(here) == expected, f"bit {bit} of {file.name}"
            here = new_checkpoint(1)
        file.write_bytes(whole)
    here.restore(path)
    assert _values(here) == expected
    assert num_refused > 0.9 * NUM_FLIPS


def test_files_that_were_cut_extended_removed_or_swapped_are_named(new_checkpoint, tmp_path):
    path, other = (
        Path(new_checkpoint(scale).save(tmp_path / str(scale) / "ckpt")) for scale in (3, 2)
    )
    here = new_checkpoint(1)
    before = _values(here)

    def refused(name):
        with pytest.raises(CheckpointError, match=rf"^.*ckpt-1.* {name}") as caught:
            here.restore(path)
        assert _values(here) == before
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
    first, second = path / "ps-0.safetensors", path / "ps-1.safetensors"
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    refused("ps-0.safetensors")


_INDEX, _ARRAYS = "checkpoint.json", "arrays.safetensors"
_DAMAGE = {
    "null": (_INDEX, lambda whole: b"null"),
    "zeros": (_INDEX, lambda whole: b"\0" * 500),
    "no text": (_INDEX, lambda whole: b"\xff\xfe"),
    "half": (_INDEX, lambda whole: whole[: len(whole) // 2]),
    "bit": (_INDEX, lambda whole: whole.replace(b'"crc32c', b'"crc32d')),
    "no index": (_INDEX, None),
    "cut": (_ARRAYS, lambda whole: whole[:-1]),
    "no arrays": (_ARRAYS, None),
}


@pytest.mark.parametrize(("name", "change"), _DAMAGE.values(), ids=_DAMAGE)
def test_a_damaged_checkpoint_is_left_out_and_does_not_stop_later_saves(
    name, change, tmp_path, caplog
):
    checkpoint = Checkpoint(a=np.arange(4.0), step=0)
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    for checkpoint.step in (1, 2, 3):
        manager.save()
    manager.wait_until_finished()
    file = tmp_path / "ckpt-3" / name
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))

    again = CheckpointManager(Checkpoint(a=np.zeros(4), step=0), tmp_path, max_to_keep=2)

    with caplog.at_level(logging.WARNING):
        found = [latest_checkpoint(tmp_path) for _ in range(3)]
    assert found == [str(tmp_path / "ckpt-2")] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    text = (
        r"There is no checkpoint at \S+/ckpt-3: it has no file|The checkpoint \S+/ckpt-3 cannot be"
    )
    assert re.match(f"Left out: ({text})", line)
    with pytest.raises(CheckpointError, match=rf"ckpt-3.* {name.partition('.')[0]}\."):
        again.checkpoint.restore(tmp_path / "ckpt-3")
    assert again.restore_or_initialize() == str(tmp_path / "ckpt-2")
    assert again.checkpoint.step == 2
    again.checkpoint.step = 30
    assert again.save() == str(tmp_path / "ckpt-3")
    again.save()
    assert again.latest_checkpoint == str(tmp_path / "ckpt-4")
    again.checkpoint.restore(tmp_path / "ckpt-3")
    assert again.checkpoint.step == 30


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
