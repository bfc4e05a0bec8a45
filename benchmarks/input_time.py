"""Does the input keep up? Datasets, their way to the devices, overlap with the step, files.

Sections, each in a fresh process, peers in turns:

    memory   batches/s of 60,000 x 784 float32, shuffled, repeated, batches of 128, on the host:
             a NumPy permutation and fancy index, ours, grain one element at a time, tf.data
    devices  the same put on R devices, seconds per batch, against a loop that calls device_put
    overlap  a training step whose batches take 80 % of its time to load, against the step alone
    files    1 GB in four .npy files, against reading the files: pieces that can be used while the
             next one is read ("read"), and all into one small buffer, which stays in the cache

    python benchmarks/input_time.py --tensorflow-python PATH
"""

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _harness
from _harness import Pair, Request, Row, pair
from _peers import Job, Peer, command, timed

ROWS, COLUMNS, BATCH = 60_000, 784, 128
NUMPY_BAR, TF_DATA_BAR, GRAIN_BAR = 1 / 0.9, 1 / 3, 1 / 50
DEVICE_PUT_BAR, READ_BAR = 1.1, 1 / 0.8
SECTIONS = ("memory", "devices", "overlap", "files")


def _rows() -> Any:
    import numpy as np

    return np.random.default_rng(0).random((ROWS, COLUMNS), np.float32)


def _by_hand(rows: Any) -> Iterator[Any]:
    import numpy as np

    while True:
        order = np.random.permutation(len(rows))
        for i in range(0, len(rows), BATCH):
            yield rows[order[i : i + BATCH]]


def _ours(rows: Any) -> Any:
    from distributary.data import Dataset

    return Dataset.from_tensor_slices(rows).shuffle(len(rows), seed=0).repeat().batch(BATCH)


def _grain(rows: Any) -> Iterator[Any]:
    import grain

    dataset = grain.MapDataset.source(rows).shuffle(seed=0).repeat().batch(BATCH)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def requests(arguments: Namespace) -> Iterator[Request]:
    """Yields the sections, two of them with every number of replicas."""
    for section in arguments.sections:
        if section in ("devices", "overlap"):
            for num_replicas in arguments.replicas:
                yield {"section": section, "replicas": num_replicas}
        else:
            yield {"section": section, "replicas": "-", "devices": 1}


def measure(request: Request) -> list[Row]:
    """Measures one section."""
    return {
        "memory": _measure_memory,
        "devices": _measure_devices,
        "overlap": _measure_overlap,
        "files": _measure_files,
    }[request["section"]](request)


def _row(
    request: Request,
    what: str,
    peers: Sequence[Peer],
    pairs: Sequence[Pair],
    num_steps: dict[str, int] | int,
) -> list[Row]:
    seconds = _harness.interleave(peers, request["rounds"], num_steps)
    rounds = {name: [1e3 * value for value in values] for name, values in seconds.items()}
    return [_harness.row(what, request["replicas"], "ms", rounds, pairs)]


def _measure_memory(request: Request) -> list[Row]:
    from _overlap import taking

    rows = _rows()
    peers = [taking("numpy", _by_hand(rows)), taking("ours", iter(_ours(rows)))]
    try:
        peers.append(taking("grain", _grain(rows)))
    except ImportError:
        print("grain is not installed", file=sys.stderr)
    if "tensorflow" in request["others"]:
        python = request["tensorflow_python"]
        served = command("_tf_data", python, shape=[ROWS, COLUMNS], batch=BATCH)
        peers.append(Job("tf.data", [served], [_harness.foreign_environment()]).peer("tf.data"))
    what = "a batch from memory"
    pairs = [
        pair("ours", "numpy", NUMPY_BAR, f"{what}, over NumPy"),
        pair("ours", "grain", GRAIN_BAR, f"{what}, over grain"),
        pair("ours", "tf.data", TF_DATA_BAR, f"{what}, over tf.data"),
    ]
    # Many steps: tf.data reads ahead while others have their turn.
    num_steps = dict.fromkeys((peer.name for peer in peers), 200 if request["quick"] else 1000)
    return _row(request, what, peers, pairs, {**num_steps, "grain": 4})


def _measure_devices(request: Request) -> list[Row]:
    import jax
    from _distributary import mirrored
    from _handwritten import AXIS, LocalReplicas
    from _overlap import taking
    from jax.sharding import PartitionSpec

    num_replicas = request["replicas"]
    rows = _rows()
    ours = iter(mirrored(num_replicas).experimental_distribute_dataset(_ours(rows)))
    replicas = LocalReplicas(num_replicas)

    def by_hand() -> Iterator[jax.Array]:
        return (replicas.place(x, PartitionSpec(AXIS)) for x in _by_hand(rows))

    def same(batch: Any) -> Any:
        return batch

    peers = [
        taking("by hand", by_hand(), same),
        taking("ours", ours, same),
        taking("control", by_hand(), same),
    ]
    pairs = [pair("ours", "by hand", DEVICE_PUT_BAR), pair("control", "by hand")]
    return _row(request, "a batch on the devices, over `device_put`", peers, pairs, 500)


def _measure_overlap(request: Request) -> list[Row]:
    import _distributary
    import _overlap

    num_replicas = request["replicas"]
    size = BATCH * num_replicas, 1024, 4
    return [_overlap.measure(request, _distributary.mirrored(num_replicas), size)]


def _measure_files(request: Request) -> list[Row]:
    import numpy as np

    columns = 1024
    megabytes = 100 if request["quick"] else 1000
    rows_per_file = megabytes * 1_000_000 // 4 // (columns * 4)
    found = []
    with tempfile.TemporaryDirectory(dir=request["folder"]) as folder:
        files = [str(Path(folder) / f"{i}.npy") for i in range(4)]
        rows = np.random.default_rng(0).random((rows_per_file, columns), np.float32)
        for name in files:
            np.save(name, rows)
        for batch in (256, 1024, 4096):
            num_bytes = batch * columns * 4
            peers = [
                timed("read", partial(_read, files, num_bytes)),
                timed("into one buffer", partial(_read_into, files, num_bytes)),
                timed("ours", partial(_read_ours, files, batch)),
            ]
            what = f"{megabytes / 1000:g} GB of files by {num_bytes >> 20} MiB, over `read`"
            pairs = [pair("ours", "read", READ_BAR), pair("ours", "into one buffer")]
            found += _row(request, what, peers, pairs, 1)
    return found


def _read(files: Sequence[str], num_bytes: int, _: int) -> None:
    """Reads files into memory of its own each time, as whoever uses the data has to."""
    for name in files:
        with open(name, "rb", buffering=0) as file:
            # `piece` is there while the next one is read, as a batch in a loop is.
            while piece := file.read(num_bytes):
                assert piece


def _read_into(files: Sequence[str], num_bytes: int, _: int) -> None:
    buffer = bytearray(num_bytes)
    for name in files:
        with open(name, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _read_ours(files: Sequence[str], batch: int, _: int) -> None:
    from distributary.data import Dataset

    assert sum(len(x) for x in Dataset.from_npy(list(files)).batch(batch)) > 0


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(15, 3),
        options={
            "--sections": {"choices": SECTIONS},
            "--replicas": {"choices": (1, 2, 4), "default": (2, 4)},
            "--folder": {"metavar": "FOLDER", "help": "where the 1 GB is written for a while"},
            "--tensorflow-python": {"default": sys.executable, "metavar": "PATH"},
        },
    )
