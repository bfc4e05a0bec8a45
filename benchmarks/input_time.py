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

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _command_line
import _processes
import _report
import _served
import _timing
from _timing import Batches

ROWS, COLUMNS, BATCH = 60_000, 784, 128
BARS = {
    "ours / numpy": ("at least", 0.9),
    "ours / tf.data": ("at least", 3.0),
    "ours / grain": ("at least", 50.0),
    "ours / device_put loop": ("at most", 1.1),
    "with loader / alone": ("at most", 1.1),
    "ours / read": ("at least", 0.8),
}
SECTIONS = ("memory", "devices", "overlap", "files")
_CHILD_TIMEOUT_SECONDS = 900.0


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


def _tf_data() -> Batches:
    import tensorflow as tf

    rows = _rows()
    dataset = tf.data.Dataset.from_tensor_slices(rows).shuffle(ROWS).repeat().batch(BATCH)
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    return Batches("tf.data", dataset.as_numpy_iterator())


def _measure_memory(request: dict[str, Any]) -> dict[str, Any]:
    rows = _rows()
    peers: list[Any] = [
        Batches("numpy", _by_hand(rows)),
        Batches("ours", iter(_ours(rows))),
    ]
    steps = {"numpy": request["steps"], "ours": request["steps"]}
    try:
        peers.append(Batches("grain", _grain(rows)))
        steps["grain"] = 4
    except ImportError:
        print("grain is not installed", file=sys.stderr)
    if request["tensorflow"]:
        command = [request["tensorflow"], __file__, "--serve-tf-data"]
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
        environ.pop("PYTHONPATH", None)
        peers.append(_served.start_peer("tf.data", command, environ))
        steps["tf.data"] = request["steps"]  # many: it reads ahead while others have their turn
    seconds = _timing.interleave(peers, request["rounds"], steps)
    for peer in peers:
        peer.close()
    ratios = {
        f"ours / {name}": _timing.summarize_ratio(seconds[name], seconds["ours"])
        for name in seconds
        if name != "ours"
    }
    return {"section": "memory", "seconds": seconds, "ratios": ratios}


def _measure_devices(request: dict[str, Any]) -> dict[str, Any]:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import distributary as dist

    num_replicas = request["replicas"]
    rows = _rows()
    devices = [f"CPU:{i}" for i in range(num_replicas)]
    strategy = dist.MirroredStrategy(devices)
    ours = iter(strategy.experimental_distribute_dataset(_ours(rows)))
    mesh = Mesh(jax.devices()[:num_replicas], "replica")
    sharding = NamedSharding(mesh, PartitionSpec("replica"))
    peers = [
        Batches("by hand", (jax.device_put(x, sharding) for x in _by_hand(rows)), _same),
        Batches("ours", ours, _same),
        Batches("control", (jax.device_put(x, sharding) for x in _by_hand(rows)), _same),
    ]
    seconds = _timing.interleave(peers, request["rounds"], dict.fromkeys(_names(peers), 500))
    return {
        "section": "devices",
        "replicas": num_replicas,
        "seconds": seconds,
        "ratios": {
            "ours / device_put loop": _timing.summarize_ratio(seconds["ours"], seconds["by hand"]),
            "control": _timing.summarize_ratio(seconds["control"], seconds["by hand"]),
        },
    }


def _names(peers: list[Any]) -> list[str]:
    return [peer.name for peer in peers]


def _same(batch: Any) -> Any:
    return batch


def _measure_overlap(request: dict[str, Any]) -> dict[str, Any]:
    import _distributary
    import _overlap

    num_replicas = request["replicas"]
    strategy = _distributary.mirrored(num_replicas)
    size = _overlap.Size(batch=BATCH * num_replicas, width=1024, layers=4)
    found = _overlap.measure(strategy, size, request["rounds"])
    seconds = found["seconds"]
    return {
        "section": "overlap",
        "replicas": num_replicas,
        **found,
        "ratios": {
            f"{name} / alone": _timing.summarize_ratio(seconds[name], seconds["alone"])
            for name in ("with loader", "without reading ahead")
        },
    }


def _measure_files(request: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    columns = 1024
    rows_per_file = request["megabytes"] * 1_000_000 // 4 // (columns * 4)
    with tempfile.TemporaryDirectory(dir=request["folder"]) as folder:
        files = [str(Path(folder) / f"{i}.npy") for i in range(4)]
        rows = np.random.default_rng(0).random((rows_per_file, columns), np.float32)
        for name in files:
            np.save(name, rows)
        sizes = {f"{batch * columns * 4 >> 20} MiB": batch for batch in (256, 1024, 4096)}
        peers = []
        for name, batch in sizes.items():
            num_bytes = batch * columns * 4
            peers.append(_Timed(f"read {name}", _reader(files, num_bytes, keep=True)))
            peers.append(_Timed(f"into one buffer {name}", _reader(files, num_bytes, keep=False)))
            peers.append(_Timed(f"ours {name}", _our_reader(files, batch)))
        seconds = _timing.interleave(peers, request["rounds"], dict.fromkeys(_names(peers), 1))
    return {
        "section": "files",
        "gigabytes": 16 * rows_per_file * columns / 1e9,
        "seconds": seconds,
        "ratios": {
            f"ours / {peer}, {name} at a time": _timing.summarize_ratio(
                seconds[f"{peer} {name}"], seconds[f"ours {name}"]
            )
            for name in sizes
            for peer in ("read", "into one buffer")
        },
    }


def _reader(files: list[str], num_bytes: int, keep: bool) -> Callable[[int], float]:
    """Reads files; `keep` into memory of its own each time, as whoever uses the data has to."""
    buffer = bytearray(num_bytes)

    def read(_: int) -> float:
        start = time.perf_counter()
        for name in files:
            with open(name, "rb", buffering=0) as file:
                if keep:
                    # `piece` is there while the next one is read, as a batch in a loop is.
                    while piece := file.read(num_bytes):
                        assert piece
                else:
                    while file.readinto(buffer):
                        pass
        return time.perf_counter() - start

    return read


def _our_reader(files: list[str], batch: int) -> Callable[[int], float]:
    from distributary.data import Dataset

    def ours(_: int) -> float:
        start = time.perf_counter()
        num_rows = sum(len(x) for x in Dataset.from_npy(files).batch(batch))
        assert num_rows > 0
        return time.perf_counter() - start

    return ours


class _Timed:
    def __init__(self, name: str, time_block: Callable[[int], float]) -> None:
        self.name = name
        self._time_block = time_block

    def time_block(self, num_steps: int) -> float:
        """Takes the steps and returns the seconds per step."""
        return self._time_block(num_steps)


_MEASURES = {
    "memory": _measure_memory,
    "devices": _measure_devices,
    "overlap": _measure_overlap,
    "files": _measure_files,
}


def _measure(request: dict[str, Any]) -> dict[str, Any]:
    return _MEASURES[request["section"]](request)


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if a section failed, else 0."""
    load_before = _report.load_average()
    requests = [
        (
            {
                "section": section,
                "replicas": num_replicas,
                "rounds": arguments.rounds,
                "steps": 200 if arguments.quick else 1000,
                "megabytes": 100 if arguments.quick else 1000,
                "folder": str(arguments.folder) if arguments.folder else None,
                "tensorflow": arguments.tensorflow_python,
            },
            num_replicas,
        )
        for section in arguments.sections
        for num_replicas in (arguments.replicas if section in ("devices", "overlap") else [1])
    ]
    rows, failed = _processes.run_children(__file__, requests, _CHILD_TIMEOUT_SECONDS)
    print("Ratios of speeds (at least) or of times (at most); median over rounds.\n")
    _report.print_table(
        ["section", "R", "ratio", "median", "quartiles", "bar", ""],
        [_row(row, name, ratio) for row in rows for name, ratio in row["ratios"].items()],
    )
    _report.write(
        "input_time",
        rows=rows,
        settings={"rounds": arguments.rounds, "bars": BARS, "quick": arguments.quick},
        load_before=load_before,
        folder=arguments.output,
    )
    return int(failed)


def _row(row: dict[str, Any], name: str, ratio: dict[str, float]) -> list[object]:
    kind, bar = BARS.get(name.partition(",")[0], ("", None))
    median = ratio["median"]
    verdict = ""
    if bar is not None:
        verdict = "ok" if (median >= bar if kind == "at least" else median <= bar) else "MISSED"
    quartiles = f"{ratio['lower_quartile']:.3g} to {ratio['upper_quartile']:.3g}"
    shown = f"{kind} {bar}" if bar is not None else ""
    return [row["section"], row.get("replicas", ""), name, median, quartiles, shown, verdict]


def _parse() -> argparse.Namespace:
    parser = _command_line.parser(__doc__, "rounds per section", 15, 3)
    _command_line.add_replicas(parser, "2,4")
    parser.add_argument(
        "--sections", type=lambda text: text.split(","), default=list(SECTIONS), metavar="A,B"
    )
    parser.add_argument("--tensorflow-python", help="a Python that can import tensorflow")
    parser.add_argument("--folder", type=Path, help="where the 1 GB is written for a while")
    parser.add_argument("--serve-tf-data", action="store_true", help=argparse.SUPPRESS)
    return _command_line.parse(parser)


if __name__ == "__main__":
    given = _parse()
    if given.serve_tf_data:
        _served.serve(_tf_data)
    else:
        _command_line.run(given, main, _measure)
