"""Variables of models of which every device holds a part: the same numbers, less memory."""

import math
import os
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from keras import layers as kl, optimizers as ko

import distributary as dist

_RANDOM = np.random.default_rng(5)
_IDS = _RANDOM.integers(0, 67, (22, 6))  # with batches of 8, the last one is uneven
_IMAGES = _RANDOM.normal(size=(22, 6, 6, 3)).astype(np.float32)
_LABELS = _RANDOM.integers(0, 5, 22)


_OPTIONS = ("experimental_shard_parameters", "experimental_shard_optimizer_state")


def _parts(num_replicas, option=_OPTIONS[0]):
    return dist.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)], **{option: True})


def _transformer():
    ids = keras.Input((6,), dtype="int32")
    x = kl.Embedding(67, 20)(ids)  # no dim of it divides by 3
    x = kl.LayerNormalization()(x + kl.MultiHeadAttention(2, 10, use_bias=False)(x, x))
    x = kl.LayerNormalization()(x + kl.Dense(20)(kl.Dense(40, "gelu")(x)))
    return keras.Model(ids, kl.Dense(5)(kl.GlobalAveragePooling1D()(x)))


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


class _OfTensorFlow(keras.Model):
    """A model with a step of its own, as it is written for TensorFlow."""

    def train_step(self, data):
        x, y = data
        with dist.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def _own_step():
    inner = _transformer()
    return _OfTensorFlow(inner.inputs, inner.outputs)


def _build(make_model, make_optimizer=lambda: ko.SGD(0.1, momentum=0.9), **kwargs):
    def build():
        model = make_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make_optimizer(), loss, **kwargs)
        return model

    return build


def _assert_in_parts(variables, num_replicas):
    """Every device holds, of every variable from 1 KiB on, one part of a dim."""
    divided = 0
    for variable in variables:
        whole = math.prod(variable.shape) * np.dtype(variable.dtype).itemsize
        sizes = {shard.data.nbytes for shard in variable._value.addressable_shards}
        if whole < 1024:
            continue
        divided += 1
        least = min(whole // n * -(-n // num_replicas) for n in variable.shape)
        assert sizes == {least}, variable.path
    assert divided >= 2


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
    "several steps at once": (_IDS, _build(_transformer, steps_per_execution=2)),
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
def test_training_ends_where_it_does_on_one_device(name, train, assert_same_training):
    x, build = _TRAININGS[name]
    num_replicas = 3 if name == "transformer" else 2

    alone = train(build, x, _LABELS)
    divided = train(build, x, _LABELS, strategy=_parts(num_replicas))

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


@pytest.mark.parametrize("option", _OPTIONS)
def test_what_is_saved_goes_on_with_any_number_of_replicas(option, train, tmp_path):
    def fit(model):
        model.fit(_IMAGES[:16], _LABELS[:16], batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    def slots(model):
        return [variable.numpy() for variable in model.optimizer.variables]

    build = _build(_convolutional)
    model = train(build, _IMAGES[:16], _LABELS[:16], strategy=_parts(3, option)).model
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    saved = dist.checkpoint.Checkpoint(model=model).save(tmp_path / "checkpoint")
    expected, state = model.get_weights(), slots(model)
    evaluated = model.evaluate(_IMAGES, _LABELS, verbose=0)
    later = fit(model)

    for strategy in (_parts(2, option), dist.OneDeviceStrategy("CPU:3")):
        with strategy.scope():
            loaded = keras.models.load_model(tmp_path / "model.keras")
            other = build()
        other.optimizer.build(other.trainable_variables)
        np.testing.assert_allclose(
            loaded.evaluate(_IMAGES, _LABELS, verbose=0), evaluated, rtol=1e-5
        )
        jax.tree.map(np.testing.assert_array_equal, slots(loaded), state)
        fit(loaded)
        dist.checkpoint.Checkpoint(model=loaded).restore(saved)
        jax.tree.map(np.testing.assert_array_equal, slots(loaded), state)
        other.load_weights(tmp_path / "model.weights.h5")
        for restored in (loaded, other):
            jax.tree.map(np.testing.assert_array_equal, restored.get_weights(), expected)
        for value, goal in zip(fit(loaded), later, strict=True):  # seeds of dropout are restored
            np.testing.assert_allclose(value, goal, rtol=1e-3, atol=1e-5)
    alone = build()
    alone.set_weights(expected)
    assert alone.count_params() == model.count_params()


def test_models_built_elsewhere_are_divided_by_fit(train):
    with _parts(2).scope():
        model = keras.Sequential([kl.Dense(40, "relu"), kl.Dense(20), kl.Flatten(), kl.Dense(5)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    model.fit(_IMAGES, _LABELS, batch_size=8, verbose=0)

    kernel = max(model.variables, key=lambda v: math.prod(v.shape))
    assert len({str(shard.index) for shard in kernel._value.addressable_shards}) == 2


def test_loops_of_ones_own_train_parts(train_in_loop):
    batches = [(_IMAGES[:8], _LABELS[:8]), (_IMAGES[8:14], _LABELS[8:14])]

    divided = train_in_loop(_convolutional, batches, _parts(2))
    whole = train_in_loop(_convolutional, batches, dist.OneDeviceStrategy("CPU:0"))

    _assert_in_parts(divided.variables, 2)
    for value, expected in zip(divided.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("option", _OPTIONS)
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
        lambda: kinds.HeNormal(),
        lambda: kinds.RandomNormal(0.5, 0.3),
        lambda: kinds.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=3),
        lambda: kinds.Orthogonal(seed=4),
        lambda: kinds.RandomNormal(seed=keras.random.SeedGenerator(5)),
        lambda: changed,
        lambda: kinds.RandomNormal(stddev=np.linspace(0.1, 1, 21), seed=2),
        lambda: kinds.Ones(),
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
os.environ["KERAS_BACKEND"] = "jax"
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
    is_over.set()
    thread.join()
print(largest - before, sum(v._value.nbytes for v in variables))
"""


def test_only_one_variable_at_a_time_is_whole_in_memory():
    code = [sys.executable, "-c", _MEASURED]

    # The C library gives memory of this size back when it is freed.
    env = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    run = subprocess.run(code, env=env, capture_output=True, text=True, check=True)

    most, of_parts = map(int, run.stdout.split())
    # Two variables: on the host, and on each of the devices, which are in the same memory.
    assert most < of_parts * (1 + 10 / 16)
