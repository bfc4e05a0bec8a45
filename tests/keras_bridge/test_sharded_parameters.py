"""Variables of models of which every device holds a part: the same numbers, less memory."""

import functools
import math

import jax
import keras
import numpy as np
import pytest
from keras import layers as kl, optimizers as ko

import distributary as dist
from tests.keras_bridge import small

_RANDOM = np.random.default_rng(5)
_IDS = _RANDOM.integers(0, 67, (22, 6))  # with batches of 8, the last one is uneven
_IMAGES = _RANDOM.normal(size=(22, 6, 6, 3)).astype(np.float32)
_LABELS = _RANDOM.integers(0, 5, 22)


def _parts(num_replicas):
    devices = [f"CPU:{i}" for i in range(num_replicas)]
    return dist.MirroredStrategy(devices, experimental_shard_parameters=True)


def _convolutional():
    return keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            kl.Conv2D(17, 3, use_bias=False, kernel_regularizer="l2"),
            kl.BatchNormalization(),
            kl.ReLU(),
            kl.Dropout(0.3),
            kl.Flatten(),
            kl.Dense(31, "relu", kernel_constraint="unit_norm"),
            kl.Dense(5),
        ]
    )


def _adapted():
    """Returns a model with LoRA on weights that are quantized and frozen."""
    wide = kl.Dense(64, "relu")
    model = keras.Sequential([keras.Input((6, 6, 3)), kl.Flatten(), wide, kl.Dense(5)])
    wide.quantize("int8")
    wide.enable_lora(4)
    return model


def _transformer():
    return small.transformer(67, 20, 5)  # no dim of the table divides by 3


class _OfTensorFlow(keras.Model):
    """A model with a step of its own, as it is written for TensorFlow."""

    def train_step(self, data):
        x, y = data
        loss_of = lambda: self.compute_loss(y=y, y_pred=self(x, training=True))
        return {"own": small.descend(self.optimizer, self.trainable_variables, loss_of)}


def _own_step():
    inner = _transformer()
    return _OfTensorFlow(inner.inputs, inner.outputs)


_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_build = functools.partial(small.builder, loss=_LOSS)
_assert_in_parts = functools.partial(small.assert_in_parts, min_bytes=1024)
_TRAININGS = {
    "transformer": (_IDS, _build(_transformer, lambda: ko.Adam(0.001, epsilon=1e-3))),
    "batch statistics, dropout, constraint": (_IMAGES, _build(_convolutional)),
    "accumulated and averaged": (
        _IDS,
        _build(_transformer, lambda: ko.SGD(0.1, gradient_accumulation_steps=2, use_ema=True)),
    ),
    "global norm, scaled loss": (
        _IDS,
        _build(
            _transformer, lambda: ko.LossScaleOptimizer(ko.Adamax(0.01, global_clipnorm=0.3), 8.0)
        ),
    ),
    "single operations": (_IMAGES, _build(_convolutional, run_eagerly=True)),
    "adapters of a quantized layer": (_IMAGES, _build(_adapted)),
    "a step of one's own": (_IDS, _build(_own_step)),
}
_OF_EACH_MODEL = {  # Evaluation does not depend on the optimizer.
    "transformer",
    "batch statistics, dropout, constraint",
    "adapters of a quantized layer",
    "single operations",
}


@pytest.mark.parametrize("name", _TRAININGS)
def test_training_ends_where_it_does_on_one_device(name, train_twice, assert_same_training):
    x, build = _TRAININGS[name]
    num_replicas = 3 if name == "transformer" else 2

    alone, divided = train_twice(build, x, _LABELS, strategy=_parts(num_replicas))

    # In so few steps, attention learns little where to look.
    assert_same_training(alone, divided, rtol=1e-3, unchanged=("query", "key"))
    optimizer = divided.model.optimizer
    for owner in (divided.model, getattr(optimizer, "inner_optimizer", optimizer)):
        _assert_in_parts(owner.variables, num_replicas)
    if name not in _OF_EACH_MODEL:
        return
    np.testing.assert_allclose(
        divided.model.evaluate(x, _LABELS, verbose=0),
        alone.model.evaluate(x, _LABELS, verbose=0),
        rtol=1e-4,
    )
    np.testing.assert_allclose(
        divided.model.predict(x, verbose=0), alone.model.predict(x, verbose=0), atol=1e-4
    )


def test_several_steps_at_once_gather_as_each_step_does(train):
    def build(num_steps):
        layers = [kl.Dense(32, "relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((32,)), *layers])
        model.compile("sgd", "mse", steps_per_execution=num_steps)
        return model

    x = _RANDOM.normal(size=(16, 32)).astype(np.float32)
    sent = []
    for num_steps in (1, 2):
        strategy = _parts(2)
        train(lambda num_steps=num_steps: build(num_steps), x, x, strategy=strategy)
        statistics = strategy.step_statistics
        sent.append(statistics.collective_bytes / statistics.num_runs)

    # In a loop, too, each weight is gathered again for its backward pass.
    assert sent[1] == pytest.approx(2 * sent[0], rel=0.05)


def test_what_is_saved_goes_on_with_any_number_of_replicas(train, tmp_path):
    def fit(model):
        model.fit(_IMAGES[:16], _LABELS[:16], batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    build, others = _build(_convolutional), (_parts(2), dist.OneDeviceStrategy("CPU:3"))
    model = train(build, _IMAGES[:16], _LABELS[:16], strategy=_parts(3)).model

    assert build().count_params() == model.count_params()
    small.assert_goes_on_in(others, model, build, fit, tmp_path)


def test_models_built_elsewhere_are_divided_by_fit(train):
    with _parts(2).scope():
        model = keras.Sequential([kl.Dense(40, "relu"), kl.Dense(20), kl.Flatten(), kl.Dense(5)])
        model.compile("sgd", _LOSS)

    model.fit(_IMAGES, _LABELS, batch_size=8, verbose=0)

    kernel = max(model.variables, key=lambda v: math.prod(v.shape))
    assert len({str(shard.index) for shard in kernel._value.addressable_shards}) == 2


def test_loops_of_ones_own_train_parts(train_in_loop):
    batches = [(_IMAGES[:8], _LABELS[:8]), (_IMAGES[8:14], _LABELS[8:14])]

    divided = train_in_loop(_convolutional, batches, _parts(2))
    whole = train_in_loop(_convolutional, batches, dist.OneDeviceStrategy("CPU:0"))

    _assert_in_parts(divided.variables, 2)
    small.assert_equal_weights(divided, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "option", ["experimental_shard_parameters", "experimental_shard_optimizer_state"]
)
def test_reductions_of_ones_own_cannot_be_scattered(option):
    with pytest.raises(dist.errors.InvalidValueError, match="ReductionToOneDevice"):
        dist.MirroredStrategy(["CPU:0", "CPU:1"], dist.ReductionToOneDevice(), **{option: True})


def test_first_values_are_those_of_keras_and_lie_in_parts():
    kinds = keras.initializers
    generator = np.random.default_rng(0)
    changed = kinds.GlorotUniform(seed=3)
    changed.scale = 9.0
    made = [
        lambda: "glorot_uniform",
        lambda: kinds.RandomNormal(0.5, 0.3),
        lambda: kinds.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=3),
        lambda: kinds.Orthogonal(seed=4),
        lambda: kinds.RandomNormal(seed=keras.random.SeedGenerator(5)),
        lambda: changed,
        lambda: kinds.RandomNormal(stddev=np.linspace(0.1, 1, 21), seed=2),
        lambda: kinds.Constant(0.25),
        lambda: lambda shape, dtype: generator.normal(size=shape).astype(dtype),
    ]

    def variables():
        keras.utils.set_random_seed(1)
        return [keras.Variable(initializer(), (37, 21)) for initializer in made for _ in range(2)]

    state = generator.bit_generator.state
    expected = variables()
    generator.bit_generator.state = state
    with _parts(3).scope():
        found = variables()

    for variable, other in zip(found, expected, strict=True):
        (size,) = {shard.data.nbytes for shard in variable._value.addressable_shards}
        assert size == 4 * 37 * 21 / 3
        np.testing.assert_allclose(variable, other, rtol=2e-7, atol=1e-7)


def test_first_values_follow_the_options_of_jax():
    def first():
        keras.utils.set_random_seed(0)
        return keras.Variable("glorot_uniform", (4, 5)).numpy()

    for context in (
        jax.threefry_partitionable(True),
        jax.threefry_partitionable(False),
        jax.disable_jit(),
    ):
        with context:
            expected = first()
            with _parts(2).scope():
                found = first()
        np.testing.assert_allclose(found, expected, rtol=2e-7, atol=1e-7)


def test_sizes_that_do_not_divide_are_those_of_keras():
    values = [np.ones(401, np.float32), np.ones((3, 257), np.int32)]
    with _parts(2).scope():
        variables = [keras.Variable(value) for value in values]
        layer = kl.Dense(65, use_bias=False, dtype="mixed_bfloat16")
        layer.build((None, 41))
        model = keras.Sequential([keras.Input((41,)), layer, kl.Dense(1)])
        model.compile("sgd", "mse")

    for variable, value in zip(variables, values, strict=True):
        assert variable.shape == value.shape
        np.testing.assert_array_equal(variable, value)
    x = np.ones((6, 41), np.float32)
    loss = np.square(model.predict(x, verbose=0)).mean()
    np.testing.assert_allclose(model.train_on_batch(x, np.zeros(6)), loss, rtol=1e-2)
    # In another trace than that of a step, too.
    for x in (np.ones((2, 41), np.float32), np.ones((3, 41), np.float32)):
        assert jax.jit(layer.__call__)(x).shape == (len(x), 65)


def test_values_of_many_new_variables_are_donated_to_steps():
    with _parts(2).scope():
        model = keras.Sequential([keras.Input((16,)), *[kl.Dense(16) for _ in range(16)]])
        model.compile("sgd", "mse")
    x = np.zeros((80, 16), np.float32)

    history = model.fit(x, x, batch_size=2, verbose=0)  # more steps than may be in flight

    assert history.history["loss"] == [0]


_MEASURED = """
import os, threading
import keras, numpy as np, distributary as dist

def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

dist.config.set_logical_cpu_devices(4)
devices = [f"CPU:{i}" for i in range(4)]
largest, is_over = 0, threading.Event()

def watch():
    global largest
    while not is_over.wait(0.001):
        largest = max(largest, used())

with dist.MirroredStrategy(devices, experimental_shard_parameters=True).scope():
    keras.Variable("glorot_uniform", (64, 64))
    thread = threading.Thread(target=watch, daemon=True)
    before = used()
    thread.start()
    variables = [keras.Variable("glorot_uniform", (2048, 2048)) for _ in range(16)]
    for variable in variables:
        np.asarray(variable.value)
        variable.assign(np.ones((2048, 2048), "float32"))
    for variable in variables:  # whoever reads one does not leave it whole in memory
        np.asarray(variable.value), variable.numpy()
    is_over.set()
    thread.join()
print(largest - before, sum(v._value.nbytes for v in variables))
"""


def test_only_one_variable_at_a_time_is_whole_in_memory():
    # The C library gives memory of this size back when it is freed.
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}

    most, of_parts = map(int, small.python(_MEASURED, **allocator).split())

    # Of one variable: on the host, and what each device makes its first value from.
    assert most < of_parts * (1 + 5 / 16)
