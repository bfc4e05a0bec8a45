"""One script for every strategy, also for the chief, the workers and the servers of a job."""

import ast
import subprocess
import sys

import pytest

import distributary.compat.tensorflow as tf

_SCRIPT = """
import os, sys
import numpy as np
import distributary.compat.tensorflow as tf


def dataset_fn(context):
    x = np.arange(64, dtype=np.float32).reshape(32, 2) / 64
    dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).repeat()
    return dataset.batch(context.get_per_replica_batch_size(8))


if "TF_CONFIG" in os.environ:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        tf.distribute.Server(
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
        ).join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
else:
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(int(sys.argv[1]))])
with strategy.scope():
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.keras.utils.experimental.DatasetCreator(dataset_fn)
history = model.fit(data, epochs=2, steps_per_epoch=4, verbose=0)
print([*history.history["loss"], model.evaluate(data, steps=4, verbose=0)])
"""


def test_one_script_trains_alike_under_every_strategy(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)

    def losses(*command):
        out = subprocess.check_output([sys.executable, *map(str, command)], text=True)
        (line,) = [line for line in out.splitlines() if line.endswith("]")]
        return ast.literal_eval(line.removeprefix("[chief 0] "))

    with_one_replica = pytest.approx(losses(script, 1), rel=1e-5)

    assert losses(script, 2) == with_one_replica
    launch = ["-m", "distributary", "launch", "--ps", 1, "--workers", 1]
    assert losses(*launch, script) == with_one_replica


def test_the_function_is_checked_where_it_is_given():
    with pytest.raises(TypeError, match=r"DatasetCreator: dataset_fn is .*, expected a function"):
        tf.keras.utils.experimental.DatasetCreator([1, 2])
