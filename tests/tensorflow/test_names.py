"""Every name of the tables is there, and every other one names something in its place."""

import importlib
import re
import subprocess
import sys

import keras
import pytest

import distributary as dist
import distributary.compat.tensorflow as tf
from distributary.tensorflow._equivalents import EQUIVALENTS
from distributary.tensorflow._operations import resolve
from distributary.tensorflow._tables import CONSTANTS, OPERATIONS, TARGETS


def _find(name):
    found = tf
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_every_name_of_the_tables_is_there_once():
    names = [*TARGETS, *OPERATIONS, *CONSTANTS]

    for name in names:
        _find(name)
    assert len(names) == len(set(names))
    assert all(operation.target for operation in OPERATIONS.values())


def test_names_are_public_ones_of_distributary():
    of_distributary = [t for t in TARGETS.values() if t.startswith("distributary.")]
    own = "distributary.tensorflow."

    for target in of_distributary:
        module, _, name = target.rpartition(".")
        assert target.startswith(own) or name in importlib.import_module(module).__all__, target
    assert tf.distribute.MirroredStrategy is dist.MirroredStrategy
    assert tf.distribute.coordinator.ClusterCoordinator is dist.coordinator.ClusterCoordinator
    assert tf.keras.Model is keras.Model
    assert tf.float32 == "float32"
    assert tf.newaxis is None


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("hessians", "jax.hessian"),
        ("diff", "jax.numpy.diff"),
        ("math.erf_inv", "jax.lax.erf_inv"),
        ("nn.ctc_loss", "keras.ops.ctc_loss"),
        ("image.rot90", "keras.ops.image"),
        ("linalg.svd", "jax.numpy.linalg"),
        ("saved_model.SaveOptions", "no options"),
        ("config.experimental.ClusterDeviceFilters", "jax.config"),
        ("distribute.experimental.rpc", "schedule"),
        ("no_such_name", "docs/api/tensorflow.md"),
    ],
)
def test_a_name_that_is_not_there_names_what_to_use(name, advice):
    with pytest.raises(AttributeError, match=rf"^tf\.{re.escape(name)} is not .*{advice}"):
        _find(name)


def test_advice_is_only_given_for_what_is_not_there_and_names_what_is():
    for name, advice in EQUIVALENTS.items():
        if not any(known.startswith(f"{name}.") for known in (*TARGETS, *OPERATIONS)):
            with pytest.raises(AttributeError):
                _find(name)
        for path in re.findall(r"\b(?:jax|keras|tf|numpy)(?:\.[a-z]\w*)+(?![\w.]*\()", advice):
            if path.startswith("tf."):
                _find(path.removeprefix("tf."))
                continue
            resolve(path)


def test_modules_can_be_imported_by_name():
    from distributary.compat.tensorflow.keras.layers import Dense
    from distributary.compat.tensorflow.keras.optimizers import schedules
    from distributary.compat.tensorflow.nn import relu

    from distributary.compat.tensorflow import distribute, keras as same_keras

    assert same_keras is tf.keras
    assert Dense is keras.layers.Dense
    assert schedules is keras.optimizers.schedules
    assert distribute.ReduceOp is dist.ReduceOp
    assert float(relu(-1.0)) == 0
    assert "MirroredStrategy" in dir(tf.distribute)
    assert {"keras", "nn", "reduce_sum", "distribute"} <= set(dir(tf))


_FIRST_USE_OF_KERAS = """
import os, sys
import distributary.compat.tensorflow as tf
from distributary.errors import UnsupportedError

os.environ["KERAS_BACKEND"] = "torch"
try:
    tf.keras
except UnsupportedError as error:
    assert "is to run on the backend 'torch'" in str(error), error
assert "keras" not in sys.modules

del os.environ["KERAS_BACKEND"]
tf.config.experimental.enable_op_determinism()
assert os.environ["XLA_FLAGS"].split()[-1] == "--xla_gpu_deterministic_ops=true"
cpu = tf.config.list_physical_devices("CPU")[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
strategy = tf.distribute.MirroredStrategy()
(numbers,) = strategy.experimental_local_results(strategy.run(lambda: tf.random.normal([2])))[:1]
assert numbers[0] != numbers[1]
assert tf.keras.backend.backend() == "jax"
tf.config.experimental.enable_op_determinism()
assert [device.name for device in tf.config.list_logical_devices("CPU")] == [
    "/device:CPU:0", "/device:CPU:1"
]
"""


def test_keras_may_be_used_first_inside_of_a_step_and_runs_on_jax():
    environ = {"PYTHONPATH": ":".join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", _FIRST_USE_OF_KERAS],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert process.returncode == 0, process.stderr
