"""How a program ends that leaves threads at work."""

import json
import os

from tests.interpreters import run_python

_PROGRAM = """
import atexit, os, sys, threading


@atexit.register  # the first one, so it runs last
def print_threads():
    print("threads:", sorted(t.name for t in threading.enumerate() if "distributary" in t.name))


import jax.numpy as jnp
import numpy as np

import distributary as dist

mirrored = dist.MirroredStrategy()
dist.experimental.StatisticsLogger(mirrored, json_lines=sys.argv[1], seconds=1000)
dataset = dist.data.Dataset.range(100).batch(4).map(lambda x: x).prefetch(2)
batches = iter(mirrored.experimental_distribute_dataset(dataset))
for _ in range(3):
    mirrored.run(lambda x: x * 2, args=(next(batches),))

servers = dist.ParameterServerStrategy(dist.experimental.local_cluster(workers=2, ps=1))
with servers.scope():
    w = dist.Variable(np.zeros((64, 64), np.float32))
coordinator = dist.experimental.coordinator.ClusterCoordinator(servers)


def step():
    y = w.value()
    for _ in range(100):
        y = jnp.tanh(y @ y + 1)
    w.assign(y)


for value in [coordinator.schedule(step) for _ in range(1000)][:8]:
    value.fetch()
print("at work:", sorted({t.name.split()[0] for t in threading.enumerate()}))
raise KeyError("an error of the program")
"""


def test_a_program_that_fails_ends_all_threads_and_with_its_own_error(tmp_path):
    status, writing = os.pipe()
    environ, log = {"DISTRIBUTARY_STATUS_FD": str(writing)}, tmp_path / "statistics.jsonl"

    ended = run_python("-c", _PROGRAM, log, environ=environ, pass_fds=[writing])

    os.close(status)
    os.close(writing)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.endswith("KeyError: 'an error of the program'\n")
    at_work, left = ended.stdout.splitlines()
    for name in ("driver", "prefetch", "progress", "statistics"):
        assert f"'distributary-{name}'" in at_work
    assert "'distributary'" in at_work  # "distributary link to worker 0"
    assert left == "threads: []"
    (line,) = log.read_text().splitlines()  # the last numbers, though nobody has closed it
    assert json.loads(line)["num_runs"] == 3


_FREEING = """
import threading

import distributary as dist

begun, never = threading.Event(), threading.Event()


class Function:
    def __call__(self, element):
        return element

    def __del__(self):
        begun.set()
        never.wait(1)  # as long as arrays that JAX's C++ code frees could take
        print("freed")


elements = iter(dist.data.Dataset.range(100).map(Function()).prefetch(2))
next(elements)
del elements
begun.wait()
"""


def test_a_program_waits_for_a_thread_that_frees_what_it_held():
    ended = run_python("-c", _FREEING)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "freed\n", "")
