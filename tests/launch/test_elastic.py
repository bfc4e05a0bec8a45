"""A job that loses a host and gets it back ends as one that was never disturbed."""

import os

import numpy as np

from tests.forks import Fork
from tests.launch.conftest import wait_until

# Each epoch waits until the launcher has started the job with the number of workers of the
# schedule. Without workers, the number is 1.
_TRAIN = """
import os, sys, time
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np

import distributary as dist

folder, schedule = Path(sys.argv[1]), list(map(int, sys.argv[2]))
strategy = dist.MultiWorkerMirroredStrategy()
num_workers = strategy.extended.num_workers


class Waits(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        (folder / f"{epoch}.{num_workers}").touch()
        while num_workers != schedule[epoch]:
            time.sleep(0.05)


keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse")
backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
callbacks = [backup, Waits()]
y = x.sum(axis=1, keepdims=True)
model.fit(x, y, batch_size=10, epochs=len(schedule), verbose=0, callbacks=callbacks)
if strategy.is_chief:
    np.savez(folder / "weights.npz", *model.get_weights())
"""


def test_a_job_that_shrinks_and_grows_ends_with_the_weights_of_one_device(start, address, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(_TRAIN)
    for name in ("job", "alone"):
        (tmp_path / name).mkdir()

    def host(rank):
        where = ("--nnodes", "1:2", "--node-rank", rank, "--master", address)
        job = ("--max-restarts", 1, "--grace-seconds", 1, program, tmp_path / "job", "2112")
        return start(*where, *job, environ={"DISTRIBUTARY_TOKEN": "0123456789abcdef"})

    first, second = map(host, range(2))
    wait_until((tmp_path / "job" / "1.2").exists, "two workers have trained an epoch")
    second.kill()
    second.communicate()
    wait_until((tmp_path / "job" / "3.1").exists, "one worker has trained two epochs")
    second = host(1)
    ends = [one.communicate() for one in (first, second)]

    assert [one.returncode for one in (first, second)] == [0, 0], ends
    with open(tmp_path / "output", "w") as output:
        environ = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
        assert Fork([program, tmp_path / "alone", "1111"], environ, stdout=output).wait(100) == 0
    found, expected = (np.load(tmp_path / name / "weights.npz") for name in ("job", "alone"))
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)
