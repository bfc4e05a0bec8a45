"""Layers under a strategy compute, and learn, what they do on one device.

`fit` traces the whole batch once, so layers differ only in how XLA divides what they compute.
"""

import keras
import numpy as np
import pytest
from keras import layers as kl

import distributary as dist

_ROWS = 16
_RANDOM = np.random.default_rng(0)
_TARGET = _RANDOM.normal(size=(_ROWS, 2)).astype(np.float32)


def _floats(*shape):
    return _RANDOM.normal(size=(_ROWS, *shape)).astype(np.float32)


def _compiled(model, learning_rate=0.1, loss="mse", **kwargs):
    model.compile(keras.optimizers.SGD(learning_rate), loss, **kwargs)
    return model


def _model(inputs, outputs, **kwargs):
    return _compiled(keras.Model(inputs, outputs), **kwargs)


def _head(branches):
    """Joins branches of any shape into two numbers per row."""
    return kl.Dense(2, name="head")(kl.Concatenate()([kl.Flatten()(branch) for branch in branches]))


# XLA has another rule for each of these layers. Those of one kind of input are in one program.


def _images():
    inputs = keras.Input((6, 6, 4))
    below = kl.Dense(4, name="below")(inputs)
    layers = [
        kl.Conv2D(2, 3, strides=2),
        kl.Conv2D(4, 2, padding="same", groups=2),
        kl.Conv2DTranspose(2, 2, strides=2),
        kl.DepthwiseConv2D(2),
        kl.MaxPooling2D(2),
        kl.AveragePooling2D(3, strides=2, padding="same"),
        kl.Resizing(3, 3),
        kl.LayerNormalization(),
        kl.SpectralNormalization(kl.Conv2D(2, 2, strides=3)),
        kl.Dropout(0.5),
        kl.RandomFlip(),
    ]
    return _model(inputs, _head([layer(below) for layer in layers]), metrics=["mae"])


def _padded_sequences():
    tokens = _RANDOM.integers(1, 7, size=(_ROWS, 4)).astype(np.int32)
    lengths = _RANDOM.integers(1, 5, size=(_ROWS, 1))
    lengths[:4] = 1  # replica 0 of the first batch has far fewer valid steps than replica 1
    return np.where(np.arange(4) < lengths, tokens, 0).astype(np.int32)


def _sequences():
    inputs = keras.Input((4,), dtype="int32")
    below = kl.Embedding(7, 3, mask_zero=True)(inputs)
    # Plain Keras on JAX refuses synchronized=True; there is nothing to synchronize.
    flag = {"synchronized": True} if dist.has_strategy() else {}
    branches = [
        kl.Bidirectional(kl.SimpleRNN(2))(below),
        kl.GlobalAveragePooling1D()(kl.TimeDistributed(kl.Dense(2))(below)),
        kl.GlobalAveragePooling1D()(kl.MultiHeadAttention(2, 2)(below, below)),
        kl.GRU(2)(kl.BatchNormalization(momentum=0.5, **flag)(below)),
    ]
    return _model(inputs, _head(branches), learning_rate=1.0)


# A bias of keys adds the same to all scores of a row, which softmax takes away again.
_WITHOUT_GRADIENT = ("key/bias",)


@pytest.mark.parametrize(
    ("build", "x", "num_replicas"),
    [(_images, _floats(6, 6, 4), 4), (_sequences, _padded_sequences(), 2)],
    ids=["images", "sequences"],
)
def test_layers_learn_as_on_one_device(
    build, x, num_replicas, train_twice, assert_same_training, assert_same_evaluation
):
    alone, distributed = train_twice(build, x, _TARGET, num_replicas=num_replicas)

    assert_same_training(alone, distributed, rtol=1e-3, unchanged=_WITHOUT_GRADIENT)
    if build is _images:  # without dropout
        assert_same_evaluation(alone, distributed, x, _TARGET)


def test_normalization_adapted_in_a_scope_has_the_statistics_of_the_data(strategy_of):
    x = _floats(3) * 4 + 1

    with strategy_of(2).scope():
        normalization = kl.Normalization()
        normalization.adapt(x)

    np.testing.assert_allclose(normalization.mean[0], x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(normalization.variance[0], x.var(0), rtol=1e-5)


class _Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [kl.Dense(4, "tanh"), kl.Dense(2)]

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_subclassed_model_that_fit_builds_equals_one_device(train_twice):
    alone, distributed = train_twice(lambda: _compiled(_Subclassed()), _floats(3), _TARGET)

    assert alone.initial == distributed.initial == []
    assert len(alone.model.trainable_variables) == 4
    for expected, actual in zip(alone.model.variables, distributed.model.variables, strict=True):
        assert len(actual.value.sharding.device_set) == 2
        np.testing.assert_allclose(actual.value, expected.value, rtol=1e-5, atol=1e-6)


def test_frozen_layers_stay_and_learn_again_after_another_compile(strategy_of, train):
    x = _floats(3)

    def build():
        first = kl.Dense(4, "tanh", trainable=False, name="first")
        return _compiled(keras.Sequential([keras.Input((3,)), first, kl.Dense(2)]))

    trained = train(build, x, _TARGET, strategy=strategy_of(2))
    model, initial = trained.model, trained.initial
    first, second = model.layers
    before = first.kernel.numpy(), second.kernel.numpy()
    first.trainable, second.trainable = True, False
    _compiled(model)
    model.fit(x, _TARGET, batch_size=8, shuffle=False, verbose=0)

    np.testing.assert_array_equal(before[0], initial[0])
    assert np.max(np.abs(before[1] - initial[2])) > 1e-4
    assert np.max(np.abs(first.kernel.numpy() - before[0])) > 1e-4
    np.testing.assert_array_equal(second.kernel, before[1])
