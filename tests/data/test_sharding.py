"""What the workers of a job read of one dataset, together."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distributary.data import (
    SHARD_HINT,
    AutoShardPolicy,
    Batches,
    Dataset,
    Options,
    TextLineDataset,
    WorkerShare,
    split_rows,
)


def _with_policy(dataset, policy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def _steps(dataset, num_workers, replicas_per_worker, path=(0,)):
    """Per worker the steps, each a list of what its replicas get."""
    result = []
    for worker in range(num_workers):
        share = WorkerShare(num_workers, worker, replicas_per_worker)
        stream = Batches(dataset, share).stream(path)
        steps = [split_rows(batch.rows, batch.sizes) for batch in stream]
        # If all of them see an uneven batch, each gets the whole of it.
        first = worker * replicas_per_worker
        result.append([parts[first:][:replicas_per_worker] or parts for parts in steps])
    return result


def _rows(step):
    return [int(x) for part in step for x in jax.tree.leaves(part)[0]]


def _lines(folder, numbers):
    """A dataset of text files in a folder, one for each row of numbers."""
    names = [folder / f"{i}.txt" for i in range(len(numbers))]
    for name, row in zip(names, numbers, strict=True):
        name.write_text("".join(f"{number}\n" for number in row))
    return TextLineDataset(names).map(int)


_SIZES = dict(
    num_rows=st.integers(0, 25),
    batch_size=st.integers(1, 9),
    num_workers=st.integers(1, 5),
    num_replicas=st.integers(1, 4),
    drop=st.booleans(),
)


@pytest.mark.parametrize("kind", ["rows", "elements", "mapped batches", "shuffled", "batches"])
@settings(max_examples=60, deadline=None)
@given(**_SIZES)
def test_data_sharding_splits_every_global_batch_over_all_replicas(
    kind, num_rows, batch_size, num_workers, num_replicas, drop
):
    rows = Dataset.range(num_rows)
    if kind == "elements":
        rows = Dataset.from_generator(lambda: iter(range(num_rows)))
    if kind == "shuffled":
        rows = rows.shuffle(7, seed=num_rows)
    dataset = rows.batch(batch_size, drop_remainder=drop)
    if kind == "mapped batches":
        dataset = dataset.map(lambda x: x)
    if kind == "batches":
        dataset = Dataset.from_source([batch.tolist() for batch in dataset if len(batch)])
        dataset = dataset.map(np.asarray)
    batches = [batch.tolist() for batch in iter(dataset)]
    if kind == "shuffled":
        batches = [batch.tolist() for batch in dataset.node.stream((0,))]

    workers = _steps(_with_policy(dataset, AutoShardPolicy.DATA), num_workers, num_replicas)

    assert {len(steps) for steps in workers} == {len(batches)}
    for number, batch in enumerate(batches):
        parts = [part for steps in workers for part in steps[number]]
        assert len(parts) == num_workers * num_replicas
        assert _rows(parts) == batch  # all rows, once, in replica order
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=60, deadline=None)
@given(num_files=st.integers(1, 7), rows_per_file=st.integers(1, 6), data=st.data())
def test_file_sharding_reads_every_file_once_and_keeps_the_global_batch(
    num_files, rows_per_file, data, tmp_path_factory
):
    num_workers = data.draw(st.integers(1, min(5, num_files)))
    num_replicas = data.draw(st.integers(1, 4))
    batch_size = data.draw(st.integers(num_workers, 12))
    policy = data.draw(st.sampled_from([AutoShardPolicy.FILE, AutoShardPolicy.AUTO]))
    folder = tmp_path_factory.mktemp("files")
    numbers = np.arange(num_files * rows_per_file).reshape(num_files, rows_per_file)
    dataset = _lines(folder, numbers).shuffle(5, seed=0).batch(batch_size)

    workers = _steps(_with_policy(dataset, policy), num_workers, num_replicas)

    seen = [_rows(part) for steps in workers for part in steps]
    assert sorted(x for part in seen for x in part) == list(range(numbers.size))
    if num_workers > 1:
        for worker, steps in enumerate(workers):
            own = numbers[worker::num_workers].ravel().tolist()
            assert sorted(x for step in steps for x in _rows(step)) == own
    first = sum(len(_rows(steps[0])) for steps in workers)
    assert first <= batch_size
    if min(map(len, workers)) > 1:
        assert first == batch_size


@pytest.mark.parametrize("num_workers", [2, 3])
def test_off_gives_every_worker_everything_in_parts_of_its_size(num_workers):
    for dataset in (Dataset.range(12).batch(6), Dataset.range(12).batch(6).map(lambda x: x)):
        workers = _steps(_with_policy(dataset, AutoShardPolicy.OFF), num_workers, 1)

        for steps in workers:
            assert [x for step in steps for x in _rows(step)] == list(range(12))
            assert [len(_rows(step)) for step in steps] == [6 // num_workers] * 2 * num_workers


def test_a_hint_is_replaced_by_the_workers_shard():
    dataset = Dataset.range(8).shard(SHARD_HINT, SHARD_HINT).batch(4)
    hinted = _steps(_with_policy(dataset, AutoShardPolicy.HINT), 2, 1)

    assert [[_rows(step) for step in steps] for steps in hinted] == [
        [[0, 2], [4, 6]],
        [[1, 3], [5, 7]],
    ]
    assert len(dataset.unbatch().batch(8).node.spec().shape) == 1
    assert _rows(_steps(dataset, 1, 1)[0][0]) == [0, 1, 2, 3]  # not distributed: everything


def test_names_of_files_are_dealt_before_their_contents_are_interleaved(tmp_path):
    _lines(tmp_path, [range(10 * i, 10 * i + 3) for i in range(4)])
    listed = Dataset.list_files(str(tmp_path / "*.txt"), shuffle=False)
    named = Dataset.from_tensor_slices(sorted(str(p) for p in tmp_path.iterdir()))

    for names in (listed, named):
        dataset = names.interleave(lambda name: TextLineDataset(str(name)).map(int)).batch(4)
        workers = _steps(_with_policy(dataset, AutoShardPolicy.FILE), 2, 1)
        rows = [sorted(x for step in steps for x in _rows(step)) for steps in workers]
        assert rows == [[0, 1, 2, 20, 21, 22], [10, 11, 12, 30, 31, 32]]


def test_policies_that_cannot_be_followed_say_why(tmp_path):
    files = _lines(tmp_path, [range(3)]).batch(2)

    with pytest.raises(ValueError, match="1 files are too few for 2 workers"):
        _steps(_with_policy(files, AutoShardPolicy.FILE), 2, 1)
    with pytest.raises(ValueError, match=r"range\(0, 4, 1\) > batch.* reads no files"):
        _steps(_with_policy(Dataset.range(4).batch(2), AutoShardPolicy.FILE), 2, 1)
    with pytest.raises(
        ValueError, match="global batch of 2 examples is less than one example for each"
    ):
        _steps(_with_policy(Dataset.range(4).batch(2), AutoShardPolicy.OFF), 3, 1)
    # TensorFlow gives one worker an error and the other nothing.
    workers = _steps(files, 2, 1)
    assert [[_rows(step) for step in steps] for steps in workers] == [[[0], [2]], [[1], []]]


def test_workers_that_shuffle_by_data_see_the_same_order():
    dataset = Dataset.range(30).shuffle(30).batch(5)  # no seed

    for path in ((0,), (1,)):
        first, second = _steps(dataset, 2, 1, path)
        seen = [x for a, b in zip(first, second, strict=True) for x in _rows(a) + _rows(b)]
        assert sorted(seen) == list(range(30))


def test_rows_of_other_workers_are_not_fetched():
    fetched = []
    dataset = Dataset.range(12).map(lambda x: fetched.append(int(x)) or x).batch(6)

    share = WorkerShare(3, 1, 1)
    steps = list(Batches(dataset, share).stream((0,)))
    assert [step.rows.tolist() for step in steps] == [[2, 3], [8, 9]]
    assert fetched == [2, 3, 8, 9]


def test_a_cache_of_all_files_is_not_that_of_one_worker(tmp_path):
    dataset = _lines(tmp_path, [[0, 1], [2, 3]]).cache()

    assert [int(x) for x in dataset] == [0, 1, 2, 3]
    workers = _steps(dataset.batch(2), 2, 1)
    assert [[_rows(step) for step in steps] for steps in workers] == [[[0], [1]], [[2], [3]]]
