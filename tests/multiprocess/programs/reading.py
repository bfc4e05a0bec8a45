"""Datasets of which every worker reads something else; the results are what each step got."""

import itertools
import pathlib
import tempfile
import threading

import jax
import numpy as np

import distributary as dist
from distributary.data import (
    AutoShardPolicy,
    Dataset,
    Options,
    OwnRows,
    TensorSpec,
    TextLineDataset,
)

FILE_SIZES = (5, 3, 8, 1, 6, 2, 4)


def _with_policy(dataset, policy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def _lines(files):
    return TextLineDataset(files).map(np.float32)


def results(strategy):
    """What the steps got, by the name of the case."""
    with tempfile.TemporaryDirectory() as folder:
        return _results(strategy, pathlib.Path(folder))


def _results(strategy, folder):
    extended = strategy.extended
    worker, num_workers = extended.worker_number, extended.num_workers
    found = {}
    ends = np.cumsum([0, *FILE_SIZES])
    files = []
    for a, b in itertools.pairwise(ends):
        files.append(folder / f"{a:02}.txt")
        files[-1].write_text("".join(f"{number}\n" for number in range(a, b)))

    def rows(batch):
        return np.asarray(strategy.gather(batch, axis=0)).tolist()

    def steps(distributed, limit=None):
        return [rows(batch) for batch in itertools.islice(distributed, limit)]

    distribute = strategy.experimental_distribute_dataset

    # Files.
    from_files = _with_policy(_lines(files).batch(12), AutoShardPolicy.FILE)
    distributed = distribute(from_files)
    found["file"] = steps(distributed)
    assert distributed.cardinality == dist.data.UNKNOWN_CARDINALITY
    assert distributed.element_spec.value_specs[0].shape == (None,)
    assert steps(distributed) == found["file"]
    mapped = _lines(files).shuffle(100).batch(12).map(lambda x: x)
    found["mapped"] = steps(distribute(_with_policy(mapped, AutoShardPolicy.FILE)))
    endless = distribute(_lines(files).repeat().batch(12, drop_remainder=True))
    assert endless.cardinality == dist.data.INFINITE_CARDINALITY
    assert endless.element_spec.value_specs[0].shape == (12 // strategy.num_replicas_in_sync,)
    found["endless"] = steps(endless, 5)
    for thread in threading.enumerate():  # that of the loop that was left ends with it
        if thread.name == "distributary-prefetch":
            thread.join()

    # Two iterators in turns.
    distributed = distribute(from_files)
    first, second = iter(distributed), iter(distributed)
    turns = [rows(next(iterator)) for iterator in (first, second, first)]
    assert turns == [found["file"][i] for i in (0, 0, 1)]
    assert steps(first) == found["file"][2:]
    second.close()
    assert list(second) == []

    # The parts of several replicas in one array: of this worker's, or of all.
    parts = distribute(from_files).global_batches()
    found["global"] = [(jax.tree.leaves(p)[0].tolist(), isinstance(p, OwnRows)) for p in parts]

    # A function per worker: the first one has no data, the others have more and more.
    contexts = []

    def make(context):
        contexts.append(context)
        number = context.input_pipeline_id
        spec = {"x": TensorSpec((None,), np.float32), "y": (TensorSpec((None, None), np.int32),)}

        def elements():
            for i in range(3 * number):
                size = 1 + i % 2
                x = np.full(size, 100 * number + i, np.float32)
                yield {"x": x, "y": (np.full((size, 1 + i), i, np.int32),)}

        return Dataset.from_generator(elements, output_signature=spec)

    distributed = strategy.distribute_datasets_from_function(make)
    (context,) = contexts
    assert (context.num_input_pipelines, context.input_pipeline_id) == (num_workers, worker)
    assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
    found["function"] = []
    for batch in distributed:
        shapes = strategy.run(lambda b: np.array(b["y"][0].shape), (batch,))
        shapes = np.asarray(strategy.gather(shapes, 0)).reshape(-1, 2).tolist()
        total = strategy.run(lambda b: b["x"].sum() + b["y"][0].sum(), (batch,))
        found["function"].append(
            [rows(batch["x"]), shapes, float(strategy.reduce("SUM", total, axis=None))]
        )
    num_elements = 2 * len(extended.worker_devices)
    generated = strategy.distribute_datasets_from_function(
        lambda c: ((np.full(2, 10.0 * c.input_pipeline_id + i),) for i in range(num_elements))
    )
    iterator = iter(generated)  # a generator: what one loop leaves is there for the next
    found["generator"] = [rows(next(iterator)[0]), rows(next(iter(generated))[0])]

    # Errors reach all workers, who can go on.
    def error(act):
        try:
            act()
        except dist.errors.DistributaryError as problem:
            return f"{type(problem).__name__}: {problem}"
        except ArithmeticError as problem:
            return f"own: {problem}"

    def failing_function(context):
        return [np.zeros(2) + 1 // context.input_pipeline_id]

    def fails_at(context):
        for i in range(4 * extended.num_replicas):
            if i == 2 * len(extended.worker_devices) and context.input_pipeline_id == 1:
                raise ArithmeticError("no row")
            yield np.zeros(2)

    two = _lines(files[:1]).batch(12)
    other = [distribute(from_files), distribute(from_files)]
    found["errors"] = [
        error(lambda: strategy.distribute_datasets_from_function(failing_function)),
        error(lambda: steps(strategy.distribute_datasets_from_function(fails_at))),
        error(lambda: distribute(_with_policy(two, AutoShardPolicy.FILE))),
        error(lambda: distribute(Dataset.range(12 + worker).batch(12))),
        error(lambda: next(iter(other[worker > 0]))),
        error(
            lambda: steps(
                strategy.distribute_datasets_from_function(
                    lambda c: iter([np.zeros((2, 1 + worker), (np.int32, np.float32)[worker > 0])])
                )
            )
        ),
    ]
    assert steps(distribute(from_files)) == found["file"]
    return found
