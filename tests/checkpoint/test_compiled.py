"""A training that starts again finds its compiled programs beside its checkpoints."""

import os
import subprocess

import numpy as np
import pytest

from tests.forks import Fork

_PROGRAM = """
import sys, warnings
import distributary as dist
import jax, keras, numpy as np

warnings.simplefilter("error", UserWarning)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
if len(sys.argv) > 4:
    jax.config.update("jax_compilation_cache_dir", sys.argv[4])
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
dist.config.set_logical_cpu_devices(2)
strategy = dist.MirroredStrategy()
x = np.arange(32, dtype=np.float32).reshape(8, 4)
if sys.argv[1] == "fit":
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    ends = sys.argv[3] == "ends"
    backup = keras.callbacks.BackupAndRestore(sys.argv[2], delete_checkpoint=ends)
    model.fit(x, x[:, 0], epochs=1 + ends, verbose=0, callbacks=[backup])
    result = model.predict(x, verbose=0)
else:
    with strategy.scope():
        w = dist.Variable(np.float32(2), aggregation=dist.VariableAggregation.SUM)
    dist.checkpoint.CheckpointManager(dist.checkpoint.Checkpoint(w=w), sys.argv[2], 1)

    @dist.function
    def step(x):
        strategy.run(lambda x: w.assign_add(x.sum()), (x,))

    for row in strategy.experimental_distribute_dataset(list(x[:, None])):
        step(row)
    result = w.numpy()
print(found.count("/jax/compilation_cache/cache_hits"), np.sum(result).item().hex())
"""


@pytest.fixture
def start(tmp_path):
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(_PROGRAM)

    def start(kind, ends="goes on", *folder):
        command = [program, kind, tmp_path / "saved", ends, *folder]
        with log.open("w") as errors:
            process = Fork(command, os.environ, stdout=subprocess.PIPE, stderr=errors)
            with process.stdout:
                output = process.stdout.read()
            assert process.wait(100) == 0, log.read_text()
        hits, result = output.split()
        return int(hits), float.fromhex(result)

    return start


def test_own_loops_find_programs_beside_checkpoints_or_where_the_user_says(start, tmp_path):
    start("loop", "goes on", tmp_path / "mine")
    assert any((tmp_path / "mine").iterdir())
    assert not (tmp_path / "saved" / ".compiled").exists()
    first = start("loop")
    again = start("loop")

    assert first == (0, 2 + np.arange(32).sum())
    assert again[0] > 0
    assert again[1] == first[1]
    assert any((tmp_path / "saved" / ".compiled").iterdir())


def test_fit_finds_programs_beside_its_backup_until_it_ends(start, tmp_path):
    assert start("fit")[0] == 0
    assert start("fit", "ends")[0] > 0
    assert not (tmp_path / "saved").exists()
