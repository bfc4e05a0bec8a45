"""Does the input keep up? Datasets, their way to the devices, overlap with the step, files.

Sections:

    memory   batches of 60,000 x 784 float32, shuffled, repeated, 128 rows each, on the host:
             a NumPy permutation and fancy index, ours, grain one element at a time, tf.data
    devices  the same put on R devices, against a loop that calls device_put
    overlap  a training step whose batches take 80 % of its time to load, against the step alone
    files    1 GB in a .npy file, mapped, against reading it, in pieces that can be used while
             the next one is read
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from _distributary import mirrored
from _handwritten import AXIS, Replicas
from _peers import Peer, timed
from _workloads import ROW_BATCH, random_rows
from jax.sharding import PartitionSpec

import distributary as dist

__all__ = ["peers"]

Builders: TypeAlias = Mapping[str, Callable[[str], Peer]]

_SHARE_OF_LOADING = 0.8
_COLUMNS = 1024
_FOLDER = tempfile.TemporaryDirectory()  # removed when the process ends


def peers(names: Sequence[str], section: str, **arguments: Any) -> list[Peer]:
    """Returns peers of a section, whose function below tells its other arguments."""
    if section == "overlap":
        found = {peer.name: peer for peer in _overlap(**arguments)}
        return [found[name] for name in names]
    sections: Mapping[str, Callable[..., Builders]] = {
        "memory": _memory,
        "devices": _devices,
        "files": _files,
    }
    builders = sections[section](**arguments)
    return [builders[name](name) for name in names]


def _taking(name: str, batches: Iterator[Any], use: Any = None) -> Peer:
    """Returns a peer that takes batches, and waits for what `use` makes of them."""

    def run(num_steps: int) -> None:
        last = None
        for _ in range(num_steps):
            last = next(batches) if use is None else use(next(batches))
        if use is not None:
            jax.block_until_ready(last)

    return timed(name, run)


def _by_hand(rows: Any) -> Iterator[Any]:
    while True:
        order = np.random.permutation(len(rows))
        for i in range(0, len(rows), ROW_BATCH):
            yield rows[order[i : i + ROW_BATCH]]


def _ours(rows: Any) -> Any:
    dataset = dist.data.Dataset.from_tensor_slices(rows).shuffle(len(rows), seed=0)
    return dataset.repeat().batch(ROW_BATCH)


def _grain(rows: Any) -> Iterator[Any]:
    import grain

    dataset = grain.MapDataset.source(rows).shuffle(seed=0).repeat().batch(ROW_BATCH)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def _memory() -> Builders:
    rows = random_rows()
    return {
        "numpy": lambda name: _taking(name, _by_hand(rows)),
        "ours": lambda name: _taking(name, iter(_ours(rows))),
        "grain": lambda name: _taking(name, _grain(rows)),
    }


def _devices(num_replicas: int) -> Builders:
    rows = random_rows()
    replicas = Replicas.of_this_process(num_replicas)

    def by_hand(name: str) -> Peer:
        placed = (replicas.place(x, PartitionSpec(AXIS)) for x in _by_hand(rows))
        return _taking(name, placed, lambda batch: batch)

    def ours(name: str) -> Peer:
        batches = iter(mirrored(num_replicas).experimental_distribute_dataset(_ours(rows)))
        return _taking(name, batches, lambda batch: batch)

    return {"by hand": by_hand, "ours": ours, "control": by_hand}


def _overlap(num_replicas: int, size: tuple[int, int, int]) -> list[Peer]:
    """Returns steps with batches that are there, are read ahead, and are not.

    Args:
        num_replicas: Devices that are used.
        size: Examples of a batch over all replicas, their columns, and the layers of the step.
    """
    num_examples, width, num_layers = size
    strategy = mirrored(num_replicas)
    with strategy.scope():
        w = dist.Variable(jnp.eye(width), name="w")

    def step(x: jax.Array) -> jax.Array:
        for _ in range(num_layers):
            x = jnp.tanh(x @ w)
        w.assign(w.value() * 0.999)
        return dist.get_replica_context().all_reduce("SUM", jnp.sum(x))

    batch = np.ones((num_examples, width), np.float32)
    (placed,) = strategy.experimental_distribute_dataset([batch])

    def train(x: Any) -> Any:
        loss = strategy.run(step, (x,))
        return jax.block_until_ready(loss)  # as a loop does that prints its loss

    train(placed)
    alone = _taking("alone", itertools.repeat(placed), train)
    load_seconds = _SHARE_OF_LOADING * min(alone.time_block(20) for _ in range(5))

    def load() -> Iterator[Any]:
        while True:
            time.sleep(load_seconds)  # a disk or a network, which leaves the cores alone
            yield batch

    dataset = dist.data.Dataset.from_generator(load)
    without = dist.InputOptions(experimental_per_replica_buffer_size=0)
    ahead = iter(strategy.experimental_distribute_dataset(dataset))
    behind = iter(strategy.experimental_distribute_dataset(dataset, without))
    return [
        alone,
        _taking("with loader", ahead, train),
        _taking("without reading ahead", behind, train),
    ]


def _files(num_bytes: int, batch: int) -> Builders:
    """Returns readers of a file of `num_bytes`, by as many rows as `batch` says."""
    path = Path(_FOLDER.name) / "rows.npy"
    row_bytes = 4 * _COLUMNS
    rows = np.random.default_rng(0).random((num_bytes // 4 // row_bytes, _COLUMNS), np.float32)
    np.save(path, rows)
    piece_bytes = batch * row_bytes

    def read(_: int) -> None:
        """Reads the file into memory of its own each time, as whoever uses the data has to."""
        with open(path, "rb", buffering=0) as file:
            # `piece` is there while the next one is read, as a batch in a loop is.
            while piece := file.read(piece_bytes):
                assert piece

    def ours(_: int) -> None:
        rows = np.load(path, mmap_mode="r")
        batches = dist.data.Dataset.from_tensor_slices(rows).batch(batch)
        assert sum(len(x) for x in batches) > 0

    return {"read": lambda name: timed(name, read), "ours": lambda name: timed(name, ours)}
