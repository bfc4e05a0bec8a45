"""MultiWorkerMirroredStrategy: the numbers of one process with as many devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest


@pytest.fixture(scope="module")
def alone():
    """What a program computes in one process with the given number of devices."""
    cache = {}

    def result(make_job, num_replicas, program, *args):
        key = num_replicas, program
        if key not in cache:
            job = make_job(1)
            job.start(program, 0, *args, devices=num_replicas, TF_CONFIG="{}")
            (ended,) = job.wait()
            assert ended.code == 0, ended.output
            cache[key] = ended.result
        return cache[key]

    return result


@pytest.mark.parametrize(("num_workers", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_workers_compute_what_one_process_computes(num_workers, devices, job, alone):
    workers = job(num_workers)
    for worker in range(num_workers):
        workers.start("contract", worker, devices=devices)
    ended = workers.wait()

    assert [e.code for e in ended] == [0] * num_workers, "\n\n".join(e.output for e in ended)
    expected = alone(job, num_workers * devices, "contract")
    for worker, one in enumerate(ended):
        got = dict(one.result)
        assert got.pop("worker") == worker
        assert got.pop("writes") == (worker == 0)
        assert got.pop("local_devices") == devices
        mine = slice(worker * devices, (worker + 1) * devices)
        for name in ("local ids", "local values"):
            assert got.pop(name) == expected[name][mine]
        for name, value in got.items():
            jax.tree.map(
                lambda a, b, name=name: np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=name),
                value,
                expected[name],
            )
    # On every worker the same, bit for bit.
    for name in ("w", "table", "losses", "merge_call"):
        assert len({json.dumps(one.result[name]) for one in ended}) == 1


@pytest.mark.parametrize(("num_workers", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_keras_computes_what_it_computes_in_one_process(num_workers, devices, job, alone, tmp_path):
    workers = job(num_workers)
    for worker in range(num_workers):
        workers.start("keras_contract", worker, tmp_path, devices=devices)
    ended = workers.wait()

    assert [e.code for e in ended] == [0] * num_workers, "\n\n".join(e.output for e in ended)
    other = tmp_path / "alone"
    other.mkdir()
    expected = alone(job, num_workers * devices, "keras_contract", other)
    for worker, one in enumerate(ended):
        got = dict(one.result)
        assert got.pop("worker") == worker
        assert "The first batch of the data differs" in got.pop("different data")
        for name, value in got.items():
            jax.tree.map(
                lambda a, b, name=name: np.testing.assert_allclose(
                    a, b, rtol=1e-3, atol=1e-4, err_msg=name
                ),
                value,
                expected[name],
            )
        # Only the chief prints progress.
        assert ("Epoch 1/5" in one.output) == (worker == 0)
    for name in set(ended[0].result) - {"worker", "different data"}:
        assert len({json.dumps(one.result[name]) for one in ended}) == 1, name
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    files = {f"of_worker{worker}.weights.h5" for worker in range(num_workers)}
    files |= {"alone", "log.csv", "epoch1.keras", "epoch2.keras", "shared.keras"}
    assert {path.name for path in tmp_path.iterdir()} == files


def test_without_a_cluster_it_is_a_strategy_of_one_machine(job):
    alone = job(1)
    alone.start("start", 0, devices=2, TF_CONFIG="{}")
    (ended,) = alone.wait()

    assert ended.code == 0, ended.output
    assert ended.result["strategy"].startswith("<MultiWorkerMirroredStrategy: 2 replicas on CPU:0")
    assert ended.result["total"] == 1.0


def test_a_cluster_of_one_worker_needs_no_connection(job):
    alone = job(1)
    alone.start("start", 0, devices=2)
    (ended,) = alone.wait()

    assert ended.code == 0, ended.output
    assert ended.result["total"] == 1.0


def _launch(*command):
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environ |= {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false",
    }
    return subprocess.run(
        [sys.executable, "-m", "distributary", "launch", "--workers", "2", *command],
        env=environ,
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_the_launcher_starts_a_job():
    program = Path(__file__).parent / "programs" / "start.py"

    ended = _launch(str(program))

    assert ended.returncode == 0, ended.stderr
    for worker in (0, 1):
        line = f'[worker {worker}] {{"strategy": "<MultiWorkerMirroredStrategy: 2 replicas'
        assert line in ended.stdout


@pytest.mark.parametrize("victim", [0, 1])
def test_a_fit_whose_worker_is_killed_ends_as_one_that_was_not(victim, tmp_path):
    def weights(name, *plan):
        folder = tmp_path / name
        folder.mkdir()
        program = Path(__file__).parent / "programs" / "keras_recovery.py"
        launched = _launch("--max-restarts", "1", str(program), str(folder), *plan)
        assert launched.returncode == 0, launched.stderr
        return [dict(np.load(folder / f"weights{worker}.npz")) for worker in (0, 1)]

    undisturbed = weights("undisturbed")
    disturbed = weights("disturbed", "2", str(victim))

    for one in (*disturbed, undisturbed[1]):
        for name, value in one.items():
            np.testing.assert_array_equal(value, undisturbed[0][name])
