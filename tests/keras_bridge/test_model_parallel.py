"""Models whose layers are divided over the devices of a replica: the same numbers, less memory."""

import functools
import re

import keras
import numpy as np
import pytest
from keras import layers as kl, ops, optimizers as ko

import distributary as dist
from tests.keras_bridge import small
from tests.strategies.tpu import tpu_strategy

_RANDOM = np.random.default_rng(5)
_IDS = _RANDOM.integers(0, 64, (13, 6))  # with batches of 8, the last one is uneven
_LABELS = _RANDOM.integers(0, 5, 13)
_HEADS = ".*attention.*"
_RULES = {
    "embedding/embeddings": ("model", None),
    f"{_HEADS}(query|key|value)/kernel": (None, "model", None),
    f"{_HEADS}attention_output/kernel": ("model", None, None),
    "up.*kernel": (None, "model"),
    "up.*bias": ("model",),
    "down.*kernel": ("model", None),
}


def _map():
    mesh = keras.distribution.DeviceMesh((2, 2), ("data", "tensor"), [f"cpu:{i}" for i in range(4)])
    layout_map = keras.distribution.LayoutMap(mesh)
    axes = {"model": "tensor", None: None}
    for pattern, layout in _RULES.items():
        layout_map[pattern] = tuple(axes[axis] for axis in layout)
    del layout_map["down.*kernel"]
    layout_map["down.*kernel"] = ("tensor", "data")
    return layout_map


def _strategy(num_devices=4, layout="auto", **options):
    return dist.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_devices)], experimental_layout_map=layout, **options
    )


_transformer = functools.partial(small.transformer, 64, 16, 5)
_build = functools.partial(
    small.builder,
    _transformer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)


def _parts(variable):
    """Returns into how many parts each dim of a variable is divided, as its devices hold it."""
    stored = variable.value
    (shard, *_) = stored.addressable_shards
    return [n // own for n, own in zip(variable.shape, shard.data.shape, strict=True)]


def _variable(owner, ending):
    return next(v for v in owner.variables if v.path.endswith(ending))


@pytest.fixture
def alone_with(train):
    """A function that trains on one device; several trainings with parts are compared with it."""

    def alone_with(options):
        if str(options) not in _ALONE:
            alone = train(_build(**options), _IDS, _LABELS)
            evaluated = alone.model.evaluate(_IDS, _LABELS, verbose=0)
            _ALONE[str(options)] = alone, evaluated, alone.model.predict(_IDS, verbose=0)
        return _ALONE[str(options)]

    return alone_with


_ALONE = {}
_TRAININGS = {
    "one replica": (lambda: _strategy(2, _RULES, experimental_model_parallel=2), {}),
    "layers by themselves, steps at once": (
        lambda: _strategy(experimental_model_parallel=2),
        {"steps_per_execution": 2},
    ),
    "a map of Keras over both axes": (lambda: _strategy(layout=_map()), {}),
    "parts over replicas": (
        lambda: _strategy(
            layout=_RULES, experimental_model_parallel=2, experimental_shard_parameters=True
        ),
        {"make_optimizer": lambda: ko.Adam(0.001, epsilon=1e-3, use_ema=True)},
    ),
    "state in parts": (
        lambda: _strategy(experimental_model_parallel=2, experimental_shard_optimizer_state=True),
        {},
    ),
}


@pytest.mark.parametrize("name", _TRAININGS)
def test_training_ends_where_it_does_on_one_device(
    name, train, alone_with, assert_same_training, caplog
):
    make_strategy, options = _TRAININGS[name]

    alone, evaluated, predicted = alone_with(options)
    divided = train(_build(**options), _IDS, _LABELS, strategy=make_strategy())

    # In so few steps, attention learns little where to look.
    assert_same_training(alone, divided, rtol=1e-3, unchanged=("query", "key"))
    replicas = 2 if name == "parts over replicas" else 1
    model, optimizer = divided.model, divided.model.optimizer
    assert _parts(_variable(model, "query/kernel")) == [replicas, 2, 1]
    assert _parts(_variable(model, "attention_output/kernel")) == [2, replicas, 1]
    assert _parts(_variable(model, "up_0/kernel")) == [replicas, 2]
    if name == "layers by themselves, steps at once":
        assert "divide 96 % of its bytes by 2" in caplog.text
        assert "whole on every device of a replica: none" in caplog.text
    if name == "a map of Keras over both axes":
        assert _parts(_variable(model, "down_0/kernel")) == [2, 2]
    if name in ("one replica", "parts over replicas"):
        slot = next(v for v in optimizer.variables if "up_0_kernel" in v.path)
        assert _parts(slot) == [replicas, 2]
    np.testing.assert_allclose(model.evaluate(_IDS, _LABELS, verbose=0), evaluated, rtol=1e-4)
    np.testing.assert_allclose(model.predict(_IDS, verbose=0), predicted, atol=1e-4)
    # Operations of Python compute with the parts.
    np.testing.assert_allclose(model(_IDS), predicted, atol=1e-4)


class _Experts(keras.layers.Layer):
    """A bank of experts, as the mixtures of keras-hub have it."""

    def build(self, shape):
        self.num_experts = 4
        self.up = self.add_weight((4, shape[-1], 12), name="up")
        self.down = self.add_weight((4, 12, shape[-1]), name="down")
        self.bias = self.add_weight((4, 12), "zeros", name="bias")
        self.router = kl.Dense(4)
        self.router.build(shape)

    def call(self, x):
        hidden = ops.relu(ops.einsum("bd,edh->ebh", x, self.up) + self.bias[:, None])
        each = ops.einsum("ebh,ehd->ebd", hidden, self.down)
        return x + ops.einsum("ebd,be->bd", each, ops.softmax(self.router(x)))


def test_experts_of_a_layer_are_divided(train_twice, assert_same_training):
    rows = _RANDOM.normal(size=(21, 6)).astype(np.float32)  # batches of 8, 8 and 5

    def build():
        model = keras.Sequential([keras.Input((6,)), _Experts(), kl.Dense(3)])
        model.compile(ko.SGD(0.05), "mse")
        return model

    strategy = _strategy(experimental_model_parallel=2)
    alone, divided = train_twice(build, rows, rows[:, :3], strategy=strategy)

    assert_same_training(alone, divided)
    for name, parts in {"up": [2, 1, 1], "down": [2, 1, 1], "bias": [2, 1]}.items():
        assert _parts(_variable(divided.model.layers[0], f"/{name}")) == parts


def test_kernels_of_grouped_convolutions_have_their_gradient_once(
    train_twice, assert_same_training
):
    images = _RANDOM.normal(size=(21, 5, 5, 4)).astype(np.float32)  # batches of 8, 8 and 5

    def build():
        convolutions = [kl.DepthwiseConv2D(2), kl.Conv2D(8, 2, groups=2), kl.SeparableConv2D(4, 2)]
        model = keras.Sequential(
            [keras.Input((5, 5, 4)), *convolutions, kl.Flatten(), kl.Dense(64), kl.Dense(3)]
        )
        model.compile(ko.SGD(0.05), "mse", steps_per_execution=2)
        return model

    strategy = _strategy(experimental_model_parallel=2)
    assert_same_training(*train_twice(build, images, images[:, 0, 0, :3], strategy=strategy))


def test_kernels_of_grouped_convolutions_in_parts(train_twice, assert_same_training):
    layout = {
        ".*a/kernel": (None, "batch", "model"),
        ".*b/kernel": (None, None, "model"),
        ".*c/depthwise_kernel": (None, "model", None),
        ".*c/pointwise_kernel": (None, "model", "batch"),
        ".*d/kernel": ("model", None),
    }
    rows = _RANDOM.normal(size=(8, 8, 32)).astype(np.float32)

    def build():
        convolutions = [
            kl.Conv1D(16, 3, padding="causal", dilation_rate=2, activation="tanh", name="a"),
            kl.Conv1D(8, 3, groups=4, name="b"),
            kl.SeparableConv1D(8, 3, padding="same", name="c"),
        ]
        model = keras.Sequential(
            [keras.Input((8, 32)), *convolutions, kl.Flatten(), kl.Dense(4, name="d")]
        )
        model.compile(ko.Adam(), "mse")
        return model

    strategy = _strategy(
        layout=layout, experimental_model_parallel=2, experimental_shard_parameters=True
    )
    assert_same_training(*train_twice(build, rows, rows[:, 0, :4], strategy=strategy))


@pytest.mark.parametrize("channels", [3, 1])
def test_a_kernel_of_which_replicas_have_parts_has_its_gradient_once(
    channels, train_twice, assert_same_training, monkeypatch
):
    """Parts of its channels, or of its window, which has two rows, if there is one channel."""
    monkeypatch.setattr("distributary.strategies._extended._MIN_BYTES_IN_PARTS", 1)
    images = _RANDOM.normal(size=(8, 6, 6, 2)).astype(np.float32)

    def build():
        convolutions = [kl.Conv2D(channels, 3), kl.UpSampling2D(), kl.Conv2D(channels, 2)]
        layers = [*convolutions, kl.GlobalAveragePooling2D(), kl.Dense(3)]
        model = keras.Sequential([keras.Input((6, 6, 2)), *layers])
        model.compile(ko.SGD(0.05), "mse")
        return model

    strategy = _strategy(experimental_model_parallel=2, experimental_shard_parameters=True)
    assert_same_training(*train_twice(build, images, images[:, 0, :3, 0], strategy=strategy))


def test_a_step_has_two_sums_per_block_and_pass_and_gathers_no_weight():
    strategy = _strategy(2, experimental_model_parallel=2)
    blocks, passes = 2, 2
    with strategy.scope():
        model = _transformer(num_blocks=blocks)
        optimizer = ko.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(x, y):
        def loss():
            logits = model(x)
            return ops.mean(
                keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            )

        return small.descend(optimizer, model.trainable_variables, loss)

    batch = (_IDS[:8].astype(np.int32), _LABELS[:8])
    text = strategy.extended.lower(step, batch).compile().as_text()

    found = re.findall(r" (all-[a-z-]+|collective-permute|reduce-scatter)(?:-start)?\(", text)
    # One more is for the rows of the embedding, and the input of the first block has a gradient.
    assert set(found) == {"all-reduce"}
    assert len(found) == 2 * blocks * passes + 1


def test_own_loops_train_divided_layers(train_in_loop):
    batches = [(_IDS[:8], _LABELS[:8]), (_IDS[8:], _LABELS[8:])]

    divided = train_in_loop(_transformer, batches, _strategy(experimental_model_parallel=2))
    whole = train_in_loop(_transformer, batches, dist.OneDeviceStrategy("CPU:0"))

    assert _parts(_variable(divided, "up_0/kernel")) == [1, 2]
    small.assert_equal_weights(divided, whole, rtol=1e-4, atol=1e-6)


def test_what_is_saved_goes_on_in_other_layouts(train, tmp_path):
    def fit(model):
        model.fit(_IDS, _LABELS, batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    others = (
        _strategy(4, experimental_model_parallel=4, layout={"up.*kernel": (None, "model")}),
        _strategy(2, None, experimental_shard_parameters=True),
        dist.OneDeviceStrategy("CPU:3"),
    )
    strategy = _strategy(experimental_model_parallel=2)
    model = train(_build(), _IDS, _LABELS, strategy=strategy).model

    small.assert_goes_on_in(others, model, _build(), fit, tmp_path)


def test_a_tpu_strategy_divides_layers_over_its_cores(train, alone_with):
    strategy = tpu_strategy(2, 2, experimental_layout_map=_RULES)

    alone, *_ = alone_with({})
    divided = train(_build(), _IDS, _LABELS, strategy=strategy)

    assert _parts(_variable(divided.model, "up_0/kernel")) == [1, 2]
    np.testing.assert_allclose(divided.history["loss"], alone.history["loss"], rtol=1e-5)


_UNUSABLE = {
    "fits no variable": ({"up.*kernl": (None, "model")}, "'up_0/kernel'"),
    "all fit the variable": ({"up.*": (None, "model"), ".*kernel": ()}, "'up_0/kernel'"),
    "the shape [16, 5]": ({"head/kernel": (None, "model")}, "that of the model by 2"),
    "the replicas must divide by 3": ({"up_0/kernel": ("batch", "model")}, "is ('batch', 'model')"),
    "a dim for each axis": ({"up_0/bias": (None, "model")}, "'up_0/bias'"),
    "each axis once": ({"up_0/kernel": ("model", "model")}, "('model', 'model')"),
    "one of 'batch', 'model' or None": ({"up_0/kernel": ("heads",)}, "('heads',)"),
    "no regular expression": ({"(": ("model",)}, "'('"),
}


@pytest.mark.parametrize("problem", _UNUSABLE)
def test_rules_that_cannot_be_used_are_refused(problem, train):
    rules, what = _UNUSABLE[problem]

    with pytest.raises(dist.errors.InvalidValueError) as error:
        train(_build(), _IDS, _LABELS, strategy=_strategy(6, rules, experimental_model_parallel=2))

    assert problem in str(error.value)
    assert what in str(error.value)


def test_devices_that_do_not_make_replicas_are_refused():
    with pytest.raises(dist.errors.DeviceError, match="3 devices do not divide into replicas of 2"):
        _strategy(3, experimental_model_parallel=2)
    with pytest.raises(dist.errors.InvalidValueError, match=r"shape \(2, 2\), expected \(1, 2\)"):
        _strategy(2, _map())
    with pytest.raises(dist.errors.InvalidValueError, match="is 4, expected 2 as in the layout"):
        _strategy(4, _map(), experimental_model_parallel=4)
    with pytest.raises(dist.errors.InvalidTypeError, match="'2', expected an int"):
        _strategy(2, experimental_model_parallel="2")
    with pytest.raises(dist.errors.InvalidTypeError, match="a dict of rules"):
        _strategy(2, ["up"], experimental_model_parallel=2)
