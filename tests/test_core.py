"""The core works without the wings: servers, TensorFlow's names, tools."""

import shutil
from pathlib import Path

import distributary as dist
from tests.interpreters import run_python

_WINGS = ("servers", "tensorflow", "tools", "compat", "coordinator.py", "autograph.py")
_PROGRAM = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import distributary as dist
from importlib.util import find_spec

assert not any(map(find_spec, ["distributary.servers", "distributary.tensorflow"]))
dist.config.set_logical_cpu_devices(2)
strategy = dist.MirroredStrategy()
x = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
y = x.sum(axis=1, keepdims=True)


def trained(scope):
    with scope:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    return model.get_weights()


import contextlib
np.testing.assert_allclose(
    trained(strategy.scope())[0], trained(contextlib.nullcontext())[0], rtol=1e-5
)

with strategy.scope():
    total = dist.Variable(np.float32(0), name="total")


@dist.function
def step(batch):
    total.assign_add(dist.get_replica_context().all_reduce("SUM", batch.sum()))


for batch in strategy.experimental_distribute_dataset([x, x]):
    strategy.run(step, args=(batch,))
np.testing.assert_allclose(total.numpy(), 2 * x.sum(), rtol=1e-5)
print("trained")
"""


def test_fit_and_run_work_where_the_wings_are_taken_away(tmp_path):
    source = Path(dist.__path__[0])
    ignored = shutil.ignore_patterns("__pycache__", *_WINGS)
    shutil.copytree(source, tmp_path / "distributary", ignore=ignored)

    done = run_python("-c", _PROGRAM, environ={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
