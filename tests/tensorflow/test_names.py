"""Every name of `dir(tf)` is there, and every other one names something in its place."""

import importlib
import re

import keras
import pytest

import distributary as dist
import distributary.compat.tensorflow as tf
from tests.tensorflow.names import advice, advised, find, known


def test_names_are_public_ones_of_distributary():
    names = known(tf)

    assert len(names) == len(set(names))
    assert len(names) > 800
    assert tf.distribute.MirroredStrategy is dist.MirroredStrategy
    assert tf.distribute.coordinator.ClusterCoordinator is dist.coordinator.ClusterCoordinator
    assert tf.keras.Model is keras.Model
    assert tf.float32 == "float32"
    assert tf.newaxis is None
    assert tf.keras.losses.mse is keras.losses.mean_squared_error
    assert tf.keras.losses.mean_squared_error is keras.losses.mean_squared_error  # newer
    assert tf.losses is tf.keras.losses


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hessians", "jax.hessian"),
        ("nn.ctc_loss", "keras.ops.ctc_loss"),
        ("image.ssim", "keras.ops.image"),
        ("linalg.expm", "jax.scipy.linalg.expm"),
        ("keras.experimental", "tf.keras.optimizers.schedules"),
        ("keras.layers.DenseFeatures", "tf.keras.utils.FeatureSpace"),
        ("keras.losses.no_such_name", "the names of Keras 3"),
        ("config.experimental.ClusterDeviceFilters", "jax.config"),
        ("distribute.experimental.rpc", "schedule"),
        ("__internal__", "tf.saved_model.save"),  # from `model.export`
        ("no_such_name", "docs/api/tensorflow.md"),
    ],
)
def test_a_name_that_is_not_there_names_what_to_use(name, expected):
    with pytest.raises(AttributeError, match=rf"^tf\.{re.escape(name)} is not .*{expected}"):
        find(tf, name)


def test_advice_names_what_is_there():
    for name in advised():
        text = advice(tf, name)
        assert text, name
        for path in re.findall(r"\b(?:jax|keras|tf|numpy)(?:\.[a-z]\w*)+(?![\w.]*\()", text):
            library, _, rest = path.partition(".")
            _find_in(tf if library == "tf" else importlib.import_module(library), rest)


def _find_in(module, name):
    for part in name.split("."):
        if not hasattr(module, part):
            importlib.import_module(f"{module.__name__}.{part}")
        module = getattr(module, part)


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


_ANOTHER_BACKEND = """
import os, sys
os.environ["KERAS_BACKEND"] = "torch"
import distributary.compat.tensorflow as tf
from distributary.errors import UnsupportedError

try:
    tf.keras
except UnsupportedError as error:
    assert "is to run on the backend 'torch'" in str(error), error
assert "keras" not in sys.modules
"""
_FIRST_USE_OF_KERAS = """
import os
import distributary.compat.tensorflow as tf

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


@pytest.mark.parametrize("program", [_ANOTHER_BACKEND, _FIRST_USE_OF_KERAS])
def test_keras_may_be_used_first_inside_of_a_step_and_runs_on_jax(run_python, program):
    run_python(program)


_KERAS_BESIDE = """
import numpy as np
import distributary.compat.tensorflow as tf
import keras
from keras.layers import StringLookup

class Generator(keras.Model):
    def __init__(self):
        super().__init__()
        self.d = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.d(x) ** 2) + 3
        variables = self.d.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"own": loss}

model = Generator()
model.compile(keras.optimizers.SGD(0.0))
assert model.fit(np.zeros((8, 4), "float32"), verbose=0).history == {"own": [3.0]}
assert StringLookup(vocabulary=["a", "b"])(["b", "z"]).tolist() == [2, 0]
assert keras.Input((1,), dtype=tf.string).dtype == "string"
windows = keras.utils.timeseries_dataset_from_array(
    np.arange(6), np.arange(6), sequence_length=3, sampling_rate=2, batch_size=1
)
assert [(x.tolist(), y.tolist()) for x, y in windows] == [([[0, 2, 4]], [0]), ([[1, 3, 5]], [1])]
"""


def test_keras_imported_beside_tf_has_its_steps_layers_and_datasets(run_python):
    run_python(_KERAS_BESIDE)
