"""MultiWorkerMirroredStrategy: the numbers of one process with as many devices."""

import itertools
import json

import jax
import keras
import numpy as np
import pytest

# As in programs/reading.py.
_FILE_SIZES = (5, 3, 8, 1, 6, 2, 4)
_GLOBAL_BATCH = 12


@pytest.fixture(scope="module")
def alone():
    """What a program computes in one process with the given number of devices."""
    cache = {}

    def result(make_job, num_replicas, program, *args):
        key = num_replicas, program
        if key not in cache:
            job = make_job(1)
            # In no cluster, or in one of one worker.
            environ = {"TF_CONFIG": "{}"} if program == "contract" else {}
            job.start(program, 0, *args, devices=num_replicas, **environ)
            (ended,) = job.wait()
            assert ended.code == 0, ended.output
            cache[key] = ended.result
        return cache[key]

    return result


@pytest.mark.parametrize(("num_workers", "devices"), [(2, 2), (3, 1)])
def test_workers_compute_what_one_process_computes(num_workers, devices, job, alone):
    parts = ["training"] if devices > 1 else []  # which three workers do as two
    ended = job(num_workers).start_all("contract", *parts, devices=devices).wait()

    assert [e.code for e in ended] == [0] * num_workers, "\n\n".join(e.output for e in ended)
    expected = alone(job, num_workers * devices, "contract", *parts)
    for worker, one in enumerate(ended):
        got = dict(one.result)
        assert got.pop("worker") == worker
        assert got.pop("writes") == (worker == 0)
        assert got.pop("local_devices") == devices
        _check_reading(got.pop("reading"), num_workers, devices, worker)
        _check_uneven(got.pop("uneven"), num_workers, devices, worker)
        _check_collectives(got.pop("collectives"), num_workers, devices)
        # In a loop a sum stays an all-reduce.
        assert got.pop("kinds of many") == ["all-reduce", "collective-permute"]
        if parts:
            assert got.pop("largest of a table") == 0  # KiB, of 128
        average = (num_workers * devices + 1) / 2
        ramp, values, number = got["two levels"]
        np.testing.assert_allclose(ramp, 2 * average * np.arange(5), rtol=1e-6)
        np.testing.assert_allclose(values, [average] * 2, rtol=1e-6)
        assert number == 2.0
        mine = slice(worker * devices, (worker + 1) * devices)
        for name in ("local ids", "local values"):
            assert got.pop(name) == expected[name][mine]
        _check_close(got, expected, rtol=1e-5)
    # On every worker the same, bit for bit.
    for name in got:
        assert len({json.dumps(one.result[name]) for one in ended}) == 1, name


def _check_close(found, expected, **tolerance):
    for name, value in found.items():
        jax.tree.map(
            lambda a, b, name=name: np.testing.assert_allclose(a, b, err_msg=name, **tolerance),
            value,
            expected[name],
        )


def _check_collectives(found, num_workers, devices):
    """Of a float and an int vector that are to be reduced inside the workers first."""
    replicas = np.arange(num_workers * devices).reshape(num_workers, devices)

    inside, across = replicas.tolist(), replicas.T.tolist()
    expected = [("reduce-scatter", inside), ("all-reduce", across), ("all-gather", inside)]
    if devices == 1:
        # There are no levels. Workers swap in pairs, and one without a partner joins in.
        swaps = [[[0, 1], [1, 0]]] if num_workers == 2 else [[[2, 0]], [[0, 1], [1, 0]], [[0, 2]]]
        expected = [("collective-permute", pairs) for pairs in swaps]
    assert {json.dumps(one) for one in found} == {json.dumps(one) for one in expected}


def _check_uneven(found, num_workers, devices, worker):
    """Of values whose shapes differ between the workers, as by TensorFlow."""
    num_replicas = num_workers * devices
    parts = [
        np.arange(2 * (i + 1), dtype=np.float32).reshape(i + 1, 2) + 10 * i
        for i in range(num_replicas)
    ]
    everything = np.concatenate(parts)
    assert found["gather"] == everything.tolist()
    assert found["all_gather"] == found["all_reduce"] == [everything.sum()] * devices
    assert found["sum"] == everything.sum(axis=0).tolist()
    np.testing.assert_allclose(found["mean"], everything.mean(axis=0), rtol=1e-6)
    own = parts[worker * devices : (worker + 1) * devices]
    assert found["local"] == [part.tolist() for part in own]
    assert found["same"] == sum(range(num_replicas))
    assert "with axis=None all replicas must agree" in found["no axis"]
    assert "dtype and number of dims must agree" in found["dtypes"]


def _check_reading(found, num_workers, devices, worker):
    _check_errors(found.pop("errors"), worker)
    # Shuffled, and cut from batches: other steps, but every row once.
    steps = found.pop("mapped")
    assert sorted(itertools.chain(*steps)) == list(range(sum(_FILE_SIZES)))
    assert max(map(len, steps)) <= _GLOBAL_BATCH
    assert found == _expected_reading(num_workers, devices, worker)


def _chunks(rows, size):
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _together(workers):
    """The rows of every step, given the batches of every worker."""
    return [list(itertools.chain(*step)) for step in itertools.zip_longest(*workers, fillvalue=[])]


def _expected_reading(num_workers, devices, worker):
    """The results on one worker, without those that are random."""
    size = _GLOBAL_BATCH // num_workers
    ends = np.cumsum([0, *_FILE_SIZES])
    files = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
    own = [list(itertools.chain(*files[w::num_workers])) for w in range(num_workers)]
    batches = [_chunks(rows, size) for rows in own]
    result = {"file": _together(batches)}
    result["endless"] = _together([_chunks((5 * rows)[: 5 * size], size) for rows in own])
    result["global"] = []
    for batches_of_step in itertools.zip_longest(*batches, fillvalue=[]):
        sizes = [len(part) for batch in batches_of_step for part in np.array_split(batch, devices)]
        even = len(set(sizes)) == 1
        rows = batches_of_step[worker] if even else list(itertools.chain(*batches_of_step))
        result["global"].append([rows, even])
    result["function"] = _function(num_workers, devices)
    result["generator"] = [
        [10 * w + i for w in range(num_workers) for i in replicas for _ in range(2)]
        for replicas in (range(devices), range(devices, 2 * devices))
    ]
    return result


def _function(num_workers, devices):
    """Per step the rows of x, the shape of y on every replica, and the sum of all."""
    num_steps = -(-3 * (num_workers - 1) // devices)
    result = []
    for step in range(num_steps):
        numbers = [
            [i if i < 3 * w else None for i in range(step * devices, (step + 1) * devices)]
            for w in range(num_workers)
        ]
        rows, shapes, total = [], [], 0
        for w, own in enumerate(numbers):
            # Replicas without data get what the first one with data has, without its rows.
            filled = own if own[0] is not None else next(n for n in numbers if n[0] is not None)
            for i in own:
                if i is None:
                    shapes.append([0, 1 + filled[0]])
                    continue
                count = 1 + i % 2
                rows += [100 * w + i] * count
                shapes.append([count, 1 + i])
                total += count * (100 * w + i) + count * (1 + i) * i
        result.append([rows, shapes, total])
    return result


def _check_errors(errors, worker):
    """What every worker reports of faults, most of which are those of one worker."""
    of_function, of_data, files, datasets, order, shapes = errors
    if worker == 0:
        assert of_function.startswith("own: integer division")
    else:
        assert of_function.startswith("ClusterError: worker 0 failed at distributed dataset")
        assert "ZeroDivisionError" in of_function
    if worker == 1:
        assert of_data == "own: no row"
    else:
        assert of_data.startswith("ClusterError: worker 1 failed at step 2 of pass 1 of")
        assert of_data.endswith("ArithmeticError: no row")
    assert "files are too few for" in files
    assert "worker 0: DATA range(0, 12, 1) > batch" in datasets
    assert "worker 1: DATA range(0, 13, 1) > batch" in datasets
    assert "at different places of their programs" in order
    assert shapes.startswith("ReplicaMismatchError")
    assert "dtype and number of dims" in shapes


# Files, and single operations, are the same for any number of devices.
@pytest.mark.parametrize("divided", ["sharded", "host"])
def test_keras_computes_what_it_computes_in_one_process(divided, job, alone, tmp_path):
    ended = job(2).start_all("keras_contract", tmp_path, divided, devices=2).wait()

    assert [e.code for e in ended] == [0, 0], "\n\n".join(e.output for e in ended)
    other = tmp_path / "alone"
    other.mkdir()
    expected = alone(job, 4, "keras_contract", other)
    for worker, one in enumerate(ended):
        got = dict(one.result)
        assert got.pop("worker") == worker
        if divided == "sharded":
            assert "worker 1" in got["different data"]
            assert "got another one than worker 0" in got.pop("different data")
        _check_close(got, expected, rtol=1e-3, atol=1e-4)
        # Only the chief prints progress.
        assert ("Epoch 1/5" in one.output) == (worker == 0)
    for name in set(ended[0].result) - {"worker", "different data"}:
        assert len({json.dumps(one.result[name]) for one in ended}) == 1, name
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    files = {f"of_worker{worker}.weights.h5" for worker in range(2)}
    for worker in range(2):
        files |= {f"own{worker}.keras", f"own{worker}.h5"}
        files |= {f"data{worker}"} if divided == "sharded" else set()
    files |= {"alone", "folder", "log.csv", "epoch1.keras", "epoch2.keras", "shared.keras"}
    assert {path.name for path in tmp_path.iterdir()} == files


def test_a_fit_whose_workers_are_killed_ends_as_one_that_was_not(launch, strategy_of, tmp_path):
    launched = launch(["--max-restarts", "2"], "keras_recovery", tmp_path, "1.3:0", "2.5:1")

    assert launched.stderr.count("ended by SIGKILL") == 2, launched.stderr
    undisturbed = np.load(tmp_path / "undisturbed0.npz")
    for name in ("disturbed0", "disturbed1", "undisturbed1"):
        weights = np.load(tmp_path / f"{name}.npz")
        assert weights.files == undisturbed.files
        for array in weights.files:
            np.testing.assert_array_equal(weights[array], undisturbed[array], err_msg=name)
    # Another number of workers goes on from the backup of two.
    with strategy_of(3).scope():
        layers = keras.layers.Dense(64), keras.layers.Dropout(0.2), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("adam", "mse")
    backup = keras.callbacks.BackupAndRestore(tmp_path / "of_worker0")
    history = model.fit(np.ones((6, 4)), np.ones(6), epochs=4, verbose=0, callbacks=[backup])
    assert history.epoch == []
    for value, expected in zip(model.get_weights(), undisturbed.values(), strict=True):
        np.testing.assert_array_equal(value, expected)
