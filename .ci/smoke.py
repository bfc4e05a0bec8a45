"""Uses an installed distributary where nothing but its dependencies is installed.

If more is installed, the arguments name it, as modules: `smoke.py grpc keras`.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import distributary as dist
import distributary.compat.tensorflow as tf

place = Path(dist.__file__)
assert "site-packages" in place.parts, place
assert (place.parent / "py.typed").is_file()

dist.config.set_logical_cpu_devices(2)
strategy = dist.MirroredStrategy()
with strategy.scope():
    weights = dist.Variable(np.zeros(3, np.float32), name="weights")
x = np.random.default_rng(0).normal(size=(640, 3)).astype(np.float32)
dataset = dist.data.Dataset.from_tensor_slices((x, x @ np.array([1, -2, 3], np.float32))).batch(64)


def step(x, y):
    gradient = dist.grad(lambda: ((x @ weights - y) ** 2).sum() / 64, weights)()
    weights.assign_sub(0.3 * dist.get_replica_context().all_reduce("SUM", gradient))


for _ in range(3):
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=batch)
np.testing.assert_allclose(weights, [1, -2, 3], atol=0.01)
with tempfile.TemporaryDirectory() as directory:
    path = dist.checkpoint.Checkpoint(weights=weights).save(f"{directory}/ckpt")
    trained = weights.numpy()
    weights.assign(np.zeros(3))
    dist.checkpoint.Checkpoint(weights=weights).restore(path)
    np.testing.assert_array_equal(weights, trained)


@dist.function
def collatz(n):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


assert int(collatz(27)) == 111


def message_of(use):
    try:
        use()
    except ImportError as error:
        return str(error)
    return "no ImportError"


# What needs another package says which.
cluster = {"worker": ["127.0.0.1:2222"], "ps": ["127.0.0.1:2223"]}
for use, module, package in (
    (lambda: dist.Server(cluster, job_name="ps", task_index=0), "grpc", "grpcio>="),
    (lambda: dist.experimental.ray_cluster(workers=1, ps=1), "ray", "ray>="),
    (lambda: tf.keras, "keras", "keras>="),
):
    is_installed = importlib.util.find_spec(module) is not None
    assert is_installed == (module in sys.argv), f"{module} {is_installed=}"
    if is_installed:
        continue
    assert f"'{package}" in message_of(use), message_of(use)

command = Path(sys.executable).with_name("distributary")
process = subprocess.run([command, "devices"], capture_output=True, text=True, check=True)
print(process.stdout.splitlines()[0])
assert importlib.metadata.version("distributary") in process.stdout
