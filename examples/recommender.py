"""Recommends names to import to the files of JAX, with ParameterServerStrategy.

The data are JAX's own files and the names that each imports. Of every file one name is
held back; the model learns vectors of files and names from the others. It is asked for ten more
names per file, and ends with status 1 if the one that was held back is not among them more often
than among the ten most popular names.

Alone it runs workers and servers in this process. Several processes are
`distributary launch --workers 2 --ps 2 recommender.py`, several machines have TF_CONFIG.
"""

import argparse
import os
import re
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # before keras is imported

import jax
import keras
import numpy as np

import distributary as dist

IMPORT = re.compile(r"^\s*from (\w[\w.]+) import (\([^)]*\)|.+)", flags=re.MULTILINE)
NEGATIVES = 4  # names that a file does not import, for each that it does
BATCH_SIZE = 256


def imported_names(file):
    """`{"numpy.linalg.norm", ...}`"""
    for module, names in IMPORT.findall(file.read_text(encoding="utf-8")):
        for name in re.findall(r"(\w+)(?: as \w+)?", re.sub("#.*", "", names)):
            yield f"{module}.{name}"


def read_files():
    """Files, names, and the numbers of names for each file."""
    root = Path(jax.__file__).parent
    names_of = {file: set(imported_names(file)) for file in sorted(root.rglob("*.py"))}
    counts = Counter(name for names in names_of.values() for name in names)
    names = sorted(name for name, count in counts.items() if count >= 3)
    numbers = {name: number for number, name in enumerate(names)}
    rows = {
        str(file.relative_to(root)): sorted(numbers[name] for name in found if name in numbers)
        for file, found in names_of.items()
    }
    rows = {file: row for file, row in rows.items() if len(row) >= 4}
    return list(rows), names, list(rows.values())


FILES, NAMES, ROWS = read_files()  # every process reads them itself
HELD_BACK = np.array([np.random.default_rng(i).choice(row) for i, row in enumerate(ROWS)])
PAIRS = np.array(
    [(file, name) for file, row in enumerate(ROWS) for name in row if name != HELD_BACK[file]]
)


def with_negatives(pairs):
    """Files `[n]`, one true and some random names for each `[n, 1 + NEGATIVES]`, and labels."""
    files, names = pairs.T
    others = np.random.default_rng().integers(0, len(NAMES), (len(files), NEGATIVES))
    candidates = np.concatenate([names[:, None], others], axis=1).astype(np.int32)
    labels = np.zeros(candidates.shape, np.float32)
    labels[:, 0] = 1
    return (files.astype(np.int32), candidates), labels


def batches():
    """What every worker makes for itself."""
    pairs = dist.data.Dataset.from_tensor_slices(PAIRS).shuffle(len(PAIRS)).repeat()
    return pairs.batch(BATCH_SIZE, drop_remainder=True).map(with_negatives)


def build_model(size):
    files = keras.Input((), dtype="int32")
    names = keras.Input((1 + NEGATIVES,), dtype="int32")
    normal = keras.initializers.RandomNormal(stddev=0.1)
    file_vectors = keras.layers.Embedding(len(FILES), size, normal, name="files")(files)
    name_vectors = keras.layers.Embedding(len(NAMES), size, normal, name="names")(names)
    popularity = keras.layers.Embedding(len(NAMES), 1, "zeros", name="popularity")(names)
    products = keras.layers.Dot(axes=(2, 1))([name_vectors, file_vectors])
    model = keras.Model([files, names], products + popularity[..., 0])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def ten_best(scores):
    """Numbers of names `[file, 10]`, best first, without those that the files are known to use."""
    scores = np.array(scores)
    scores[tuple(PAIRS.T)] = -np.inf
    return np.argsort(-scores, axis=1)[:, :10]


def hits(recommended):
    return (recommended == HELD_BACK[:, None]).any(axis=1).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="default %(default)s")
    parser.add_argument("--size", type=int, default=16, help="of vectors, default %(default)s")
    options = parser.parse_args()

    resolver = dist.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        dist.Server(resolver).join()  # until the job ends
        return 0
    in_one_process = dist.experimental.local_cluster(workers=2, ps=2)
    strategy = dist.ParameterServerStrategy(
        resolver if resolver.cluster_spec() else in_one_process,
        sparse_update="lazy",  # rows of Adam that a step does not look up stay as they are
    )
    print(strategy)

    with strategy.scope():
        model = build_model(options.size)
    coordinator = dist.coordinator.ClusterCoordinator(strategy)
    model.fit(
        coordinator.create_per_worker_dataset(batches),
        steps_per_epoch=len(PAIRS) // BATCH_SIZE,
        epochs=options.epochs,
        verbose=2 if sys.stdout.isatty() else 0,
    )

    files, names, popularity = (
        model.get_layer(name).get_weights()[0] for name in ("files", "names", "popularity")
    )
    recommended = ten_best(files @ names.T + popularity[:, 0])
    for file in (0, len(FILES) // 2):
        print(f"{FILES[file]}: {', '.join(NAMES[name] for name in recommended[file, :3])}")
    counts = np.bincount(PAIRS[:, 1], minlength=len(NAMES))
    ours, popular = hits(recommended), hits(ten_best(np.tile(counts, (len(FILES), 1)) * 1.0))
    print(f"Held back name among ten: {ours:.0%} (the most popular ones: {popular:.0%})")
    return 0 if ours > popular else 1


if __name__ == "__main__":
    sys.exit(main())
