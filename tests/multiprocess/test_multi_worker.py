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
def alone(tmp_path_factory):
    """What one process with the given number of devices computes."""
    cache = {}

    def result(make_job, num_replicas):
        if num_replicas not in cache:
            job = make_job(1)
            job.start("contract", 0, devices=num_replicas, TF_CONFIG="{}")
            (ended,) = job.wait()
            assert ended.code == 0, ended.output
            cache[num_replicas] = ended.result
        return cache[num_replicas]

    return result


@pytest.mark.parametrize(("num_workers", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_workers_compute_what_one_process_computes(num_workers, devices, job, alone):
    workers = job(num_workers)
    for worker in range(num_workers):
        workers.start("contract", worker, devices=devices)
    ended = workers.wait()

    assert [e.code for e in ended] == [0] * num_workers, "\n\n".join(e.output for e in ended)
    expected = alone(job, num_workers * devices)
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


def test_the_launcher_starts_a_job():
    program = Path(__file__).parent / "programs" / "start.py"
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    ended = subprocess.run(
        [sys.executable, "-m", "distributary", "launch", "--workers", "2", str(program)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert ended.returncode == 0, ended.stderr
    for worker in (0, 1):
        line = f'[worker {worker}] {{"strategy": "<MultiWorkerMirroredStrategy: 2 replicas'
        assert line in ended.stdout
