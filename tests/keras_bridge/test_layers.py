"""Layers under a strategy compute, and learn, what they do on one device."""

import functools
import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers as kl
from keras.src.backend.common import dtypes

import distributary as dist
from distributary.errors import DistributaryWarning

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
    flat = [
        kl.Dense(2, name=f"head_of_{index}")(kl.Flatten()(branch))
        for index, branch in enumerate(branches)
    ]
    return kl.Add()(flat) if len(flat) > 1 else flat[0]


def _side_by_side(shape, make_layers):
    """One model with all layers next to each other, behind a layer that learns through them."""

    def build():
        inputs = keras.Input(shape)
        below = kl.Dense(shape[-1], name="below")(inputs)
        return _model(inputs, _head([layer(below) for layer in make_layers()]))

    return build


def _masked(make_layers):
    """Layers for sequences with padding, behind an embedding that masks zeros."""

    def build():
        inputs = keras.Input((4,), dtype="int32")
        below = kl.Embedding(7, 3, mask_zero=True)(inputs)
        outputs = _head([layer(below) for layer in make_layers()])
        return _model(inputs, outputs, learning_rate=1.0)

    return build


def _padded_sequences():
    tokens = _RANDOM.integers(1, 7, size=(_ROWS, 4)).astype(np.int32)
    lengths = _RANDOM.integers(1, 5, size=(_ROWS, 1))
    return np.where(np.arange(4) < lengths, tokens, 0).astype(np.int32)


def _tokens():
    return _RANDOM.integers(0, 7, size=(_ROWS, 4)).astype(np.int32)


def _attend():
    inputs = keras.Input((4, 3))
    query, value = kl.Dense(4, name="query_of")(inputs), kl.Dense(4, name="value_of")(inputs)
    branches = [
        kl.MultiHeadAttention(2, 2, name="multi_head")(query, value, use_causal_mask=True),
        kl.GroupQueryAttention(2, 2, 1, name="group_query")(query, value),
        kl.Attention(use_scale=True, name="dot")([query, value]),
        kl.AdditiveAttention(name="additive")([query, value]),
    ]
    return _model(inputs, _head(branches))


def _embed():
    inputs = keras.Input((4,), dtype="int32")
    reversible = kl.ReversibleEmbedding(7, 3, name="reversible")
    there = reversible(inputs)
    return _model(inputs, _head([kl.Embedding(7, 3)(inputs), reversible(there, reverse=True)]))


def _preprocess_numbers():
    normalization = kl.Normalization(mean=[0.5, -1.0, 2.0], variance=[4.0, 0.25, 1.0])
    inputs = keras.Input((3,))
    buckets = kl.Discretization([-0.5, 0.0, 0.5])(inputs)
    branches = [
        normalization(inputs),
        kl.Rescaling(0.5, offset=1.0)(inputs),
        kl.CategoryEncoding(4, output_mode="multi_hot")(buckets),
    ]
    return _model(inputs, _head(branches))


def _preprocess_integers():
    inputs = keras.Input((1,), dtype="int32")
    one_hot = kl.CategoryEncoding(7, output_mode="one_hot")(inputs)
    count = kl.CategoryEncoding(7, output_mode="count")(inputs)
    return _model(inputs, _head([one_hot, count]))


def _preprocess_images():
    inputs = keras.Input((4, 4, 3))
    scaled = {"value_range": (0, 1)}
    branches = [
        layer(inputs)
        for layer in (
            kl.AutoContrast(**scaled),
            kl.ContrastLimitedAdaptiveHistogramEqualization(**scaled),
            kl.RandomPosterization(2, **scaled),  # in spite of its name
            kl.Solarization(**scaled),
        )
    ]
    return _model(inputs, _head(branches))


def _preprocess_sounds():
    inputs = keras.Input((32,))
    spectrogram = kl.STFTSpectrogram(frame_length=8, frame_step=4, fft_length=8)
    mel = kl.MelSpectrogram(8, 4, sampling_rate=16, num_mel_bins=4, min_freq=1, max_freq=8)
    branches = [spectrogram(kl.Reshape((32, 1))(inputs)), mel(inputs)]
    return _model(inputs, _head(branches), learning_rate=0.001)


def _convolve_over_time():
    inputs = keras.Input((2, 2, 2, 2, 1))
    branches = [
        kl.ConvLSTM1D(1, 2)(kl.Reshape((2, 8, 1))(inputs)),
        kl.ConvLSTM2D(1, 2)(kl.Reshape((2, 4, 2, 1))(inputs)),
        kl.ConvLSTM3D(1, 2)(inputs),
    ]
    return _model(inputs, _head(branches))


def _skip_rows_of_zeros():
    inputs = keras.Input((4, 3))
    return _model(inputs, _head([kl.RNN(kl.LSTMCell(2))(kl.Masking()(inputs))]))


def _merge():
    inputs = keras.Input((4, 3))
    a, b = kl.Dense(3, name="left")(inputs), kl.Dense(3, name="right")(inputs)
    merged = [
        layer([a, b])
        for layer in (
            kl.Add(),
            kl.Subtract(),
            kl.Multiply(),
            kl.Average(),
            kl.Maximum(),
            kl.Minimum(),
            kl.Concatenate(),
            kl.Dot(axes=2),
        )
    ]
    return _model(inputs, _head(merged))


_ZOO = {
    "dense": (
        _side_by_side(
            (3,),
            lambda: [
                kl.Dense(4, "relu"),
                kl.Dense(2, use_bias=False),
                kl.EinsumDense("ab,bc->ac", 4, bias_axes="c"),
                kl.JaxLayer(lambda params, inputs: inputs @ params, params=np.eye(3, 2)),
                kl.RepeatVector(2),
                kl.Identity(),
                kl.Dropout(0.0),
                *([kl.TernaryDense(2)] if hasattr(kl, "TernaryDense") else []),  # Keras 3.16
            ],
        ),
        _floats(3),
    ),
    "activations": (
        _side_by_side(
            (3,),
            lambda: [
                kl.PReLU("uniform"),
                kl.LeakyReLU(),
                kl.ELU(),
                kl.ReLU(),
                kl.Softmax(),
                kl.Activation("gelu"),
            ],
        ),
        _floats(3),
    ),
    "convolutions_1d": (
        _side_by_side(
            (6, 2),
            lambda: [
                kl.Conv1D(2, 3, strides=2),
                kl.Conv1D(2, 2, padding="causal", dilation_rate=2),
                kl.Conv1DTranspose(2, 3),
                kl.DepthwiseConv1D(2, depth_multiplier=2),
                kl.SeparableConv1D(2, 2),
            ],
        ),
        _floats(6, 2),
    ),
    "convolutions_2d": (
        _side_by_side(
            (6, 6, 2),
            lambda: [
                kl.Conv2D(2, 3, strides=2),
                kl.Conv2D(4, 2, padding="same", groups=2),
                kl.Conv2DTranspose(2, 2, strides=2),
                kl.DepthwiseConv2D(2),
                kl.SeparableConv2D(2, 2),
            ],
        ),
        _floats(6, 6, 2),
    ),
    "convolutions_3d": (
        _side_by_side((3, 3, 3, 1), lambda: [kl.Conv3D(2, 2), kl.Conv3DTranspose(1, 2)]),
        _floats(3, 3, 3, 1),
    ),
    "pooling_1d": (
        _side_by_side(
            (6, 2),
            lambda: [
                kl.MaxPooling1D(2),
                kl.AveragePooling1D(2),
                kl.GlobalMaxPooling1D(),
                kl.GlobalAveragePooling1D(),
                kl.AdaptiveMaxPooling1D(2),
                kl.AdaptiveAveragePooling1D(2),
            ],
        ),
        _floats(6, 2),
    ),
    "pooling_2d": (
        _side_by_side(
            (6, 6, 2),
            lambda: [
                kl.MaxPooling2D(2),
                kl.AveragePooling2D(3, strides=2, padding="same"),
                kl.GlobalMaxPooling2D(),
                kl.GlobalAveragePooling2D(),
                kl.AdaptiveMaxPooling2D(2),
                kl.AdaptiveAveragePooling2D(2),
            ],
        ),
        _floats(6, 6, 2),
    ),
    "pooling_3d": (
        _side_by_side(
            (2, 2, 4, 1),
            lambda: [
                kl.MaxPooling3D(2),
                kl.AveragePooling3D(2),
                kl.GlobalMaxPooling3D(),
                kl.GlobalAveragePooling3D(),
                kl.AdaptiveMaxPooling3D(2),
                kl.AdaptiveAveragePooling3D(2),
            ],
        ),
        _floats(2, 2, 4, 1),
    ),
    "shapes_1d": (
        _side_by_side((4, 2), lambda: [kl.ZeroPadding1D(1), kl.Cropping1D(1), kl.UpSampling1D(2)]),
        _floats(4, 2),
    ),
    "shapes_2d": (
        _side_by_side(
            (4, 4, 2),
            lambda: [
                kl.ZeroPadding2D(1),
                kl.Cropping2D(1),
                kl.UpSampling2D(2),
                kl.Permute((3, 1, 2)),
                kl.Reshape((8, 4)),
                kl.Resizing(3, 3),
                kl.CenterCrop(2, 2),
                kl.Lambda(lambda x: x * x),
            ],
        ),
        _floats(4, 4, 2),
    ),
    "shapes_3d": (
        _side_by_side(
            (3, 3, 3, 1), lambda: [kl.ZeroPadding3D(1), kl.Cropping3D(1), kl.UpSampling3D(2)]
        ),
        _floats(3, 3, 3, 1),
    ),
    "merging": (_merge, _floats(4, 3)),
    "recurrent": (
        _masked(
            lambda: [
                kl.LSTM(2),
                lambda x: kl.GlobalAveragePooling1D()(kl.GRU(2, return_sequences=True)(x)),
                kl.SimpleRNN(2),
                kl.Bidirectional(kl.SimpleRNN(2)),
                kl.RNN(kl.StackedRNNCells([kl.GRUCell(2), kl.SimpleRNNCell(2)])),
                lambda x: kl.GlobalAveragePooling1D()(kl.TimeDistributed(kl.Dense(2))(x)),
            ]
        ),
        _padded_sequences(),
    ),
    "masking": (_skip_rows_of_zeros, _floats(4, 3) * (_padded_sequences() > 0)[..., None]),
    "convolution_lstm": (_convolve_over_time, _floats(2, 2, 2, 2, 1)),
    "attention": (_attend, _floats(4, 3)),
    "masked_attention": (
        _masked(
            lambda: [
                lambda x: kl.GlobalAveragePooling1D()(kl.MultiHeadAttention(2, 2)(x, x)),
                lambda x: kl.GlobalAveragePooling1D()(kl.Attention()([x, x])),
                kl.GlobalAveragePooling1D(),
            ]
        ),
        _padded_sequences(),
    ),
    "embedding": (_embed, _tokens()),
    "normalizations": (
        _side_by_side(
            (4, 4, 4),
            lambda: [
                kl.LayerNormalization(),
                kl.GroupNormalization(2),
                kl.UnitNormalization(),
                kl.RMSNormalization(),
                kl.SpectralNormalization(kl.Conv2D(2, 2)),
            ],
        ),
        _floats(4, 4, 4),
    ),
    "preprocessed_numbers": (_preprocess_numbers, _floats(3)),
    "preprocessed_integers": (_preprocess_integers, _tokens()[:, :1]),
    "preprocessed_images": (_preprocess_images, _RANDOM.uniform(size=(_ROWS, 4, 4, 3))),
    "preprocessed_sounds": (_preprocess_sounds, _floats(32)),
}

# A bias of keys adds the same to all scores of a row, which softmax takes away again.
_WITHOUT_GRADIENT = {"attention": ("key/bias",), "masked_attention": ("key/bias",)}


@pytest.mark.parametrize("name", _ZOO)
def test_layers_learn_as_on_one_device(name, train_twice, assert_same_training):
    build, x = _ZOO[name]

    alone, distributed = train_twice(build, x, _TARGET)

    assert_same_training(alone, distributed, unchanged=_WITHOUT_GRADIENT.get(name, ()))


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_a_convolutional_model_equals_one_device_on_any_number_of_replicas(
    num_replicas, train_twice, assert_same_training, assert_same_evaluation
):
    def build():
        inputs = keras.Input((6, 6, 2))
        hidden = kl.MaxPooling2D()(kl.Conv2D(3, 3, activation="relu")(inputs))
        return _model(inputs, _head([hidden]), metrics=["mae"])

    x = _floats(6, 6, 2)

    alone, distributed = train_twice(build, x, _TARGET, num_replicas=num_replicas)

    assert_same_training(alone, distributed)
    assert_same_evaluation(alone, distributed, x, _TARGET)


def test_a_recurrent_model_with_masks_evaluates_and_predicts_as_on_one_device(
    train_twice, assert_same_training, assert_same_evaluation
):
    build, x = _masked(lambda: [kl.GRU(3)]), _padded_sequences()

    alone, distributed = train_twice(build, x, _TARGET)

    assert_same_training(alone, distributed)
    assert_same_evaluation(alone, distributed, x, _TARGET)


def test_normalization_adapted_in_a_scope_has_the_statistics_of_the_data(
    train_twice, assert_same_training
):
    x = _floats(3) * 4 + 1

    def build():
        normalization = kl.Normalization()
        normalization.adapt(x)
        return _compiled(keras.Sequential([keras.Input((3,)), normalization, kl.Dense(2)]))

    alone, distributed = train_twice(build, x, _TARGET)

    np.testing.assert_allclose(distributed.model.layers[0].mean[0], x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(distributed.model.layers[0].variance[0], x.var(0), rtol=1e-5)
    assert_same_training(alone, distributed)


def test_spectral_normalization_keeps_the_same_vector_on_every_replica(strategy_of, train):
    build, x = _side_by_side((4,), lambda: [kl.SpectralNormalization(kl.Dense(3))]), _floats(4)

    model = train(build, x, _TARGET, strategy=strategy_of(4)).model

    (vector,) = [v for v in model.variables if "vector_u" in v.path]
    copies = [np.asarray(shard.data) for shard in vector.value.addressable_shards]
    assert len(copies) == 4
    for copy in copies[1:]:
        np.testing.assert_array_equal(copy, copies[0])


class _Clip(keras.constraints.Constraint):
    def __call__(self, w):
        return keras.ops.clip(w, -0.3, 0.3)


_ORTHOGONAL = keras.regularizers.OrthogonalRegularizer()


def test_regularizers_constraints_and_added_losses_equal_one_device(
    train_twice, assert_same_training, assert_same_evaluation
):
    class MeanSquareLoss(kl.Layer):
        def call(self, x):
            self.add_loss(0.3 * keras.ops.mean(keras.ops.square(x)))
            return x

    def build():
        return _compiled(
            keras.Sequential(
                [
                    keras.Input((3,)),
                    kl.Dense(4, kernel_regularizer="l2", bias_regularizer="l1"),
                    kl.Dense(4, activity_regularizer=keras.regularizers.L2(0.2)),
                    MeanSquareLoss(),
                    kl.ActivityRegularization(l1=0.1),
                    kl.Dense(3, kernel_constraint=keras.constraints.MaxNorm(0.5)),
                    kl.Dense(2, kernel_constraint=_Clip(), kernel_regularizer=_ORTHOGONAL),
                ]
            )
        )

    x = _floats(3)

    alone, distributed = train_twice(build, x, _TARGET, epochs=2)

    assert_same_training(alone, distributed)
    assert_same_evaluation(alone, distributed, x, _TARGET)
    constrained = distributed.model.layers
    assert np.max(np.abs(constrained[-1].kernel)) == pytest.approx(0.3)
    assert np.max(np.linalg.norm(constrained[-2].kernel, axis=0)) == pytest.approx(0.5, rel=1e-5)


def test_only_added_losses_train_a_model_without_targets(train_twice, assert_same_training):
    class Reconstruction(keras.Model):
        def __init__(self):
            super().__init__()
            self.code = kl.Dense(2)
            self.back = kl.Dense(3)
            self(np.zeros((1, 3), np.float32))

        def call(self, x):
            y = self.back(self.code(x))
            self.add_loss(keras.ops.mean(keras.ops.square(y - x)))
            return y

    alone, distributed = train_twice(lambda: _compiled(Reconstruction(), loss=None), _floats(3))

    assert_same_training(alone, distributed)


def test_several_inputs_and_outputs_with_loss_weights_equal_one_device(
    train_twice, assert_same_training, assert_same_evaluation
):
    def build():
        left, right = keras.Input((3,), name="left"), keras.Input((2,), name="right")
        tower = keras.Sequential([keras.Input((3,)), kl.Dense(4, "tanh"), kl.Dense(2)])
        block = keras.Model(tower.inputs[0], tower.outputs[0], name="nested")
        joined = kl.Concatenate()([block(left), right, block(kl.Dense(3)(right))])
        outputs = {
            "number": kl.Dense(2, name="number")(joined),
            "kind": kl.Dense(3, "softmax", name="kind")(joined),
        }
        return _model(
            {"left": left, "right": right},
            outputs,
            loss={"number": "mae", "kind": "sparse_categorical_crossentropy"},
            loss_weights={"number": 0.3, "kind": 1.7},
            metrics={"number": ["mse"], "kind": ["accuracy"]},
        )

    x = {"left": _floats(3), "right": _floats(2)}
    y = {"number": _TARGET, "kind": _tokens()[:, :1] % 3}

    alone, distributed = train_twice(build, x, y)

    assert_same_training(alone, distributed)
    assert {"number_loss", "kind_loss", "number_mse", "kind_accuracy"} <= set(distributed.history)
    assert_same_evaluation(alone, distributed, x, y)


def test_a_subclassed_model_that_fit_builds_equals_one_device(strategy_of, train):
    class Small(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [kl.Dense(4, "tanh"), kl.Dense(2)]
            self.dropout = kl.Dropout(0.0)

        def call(self, x, training=False):
            for block in self.blocks:
                x = block(x)
            return self.dropout(x, training=training)

    x = _floats(3)

    alone = train(lambda: _compiled(Small()), x, _TARGET)
    distributed = train(lambda: _compiled(Small()), x, _TARGET, strategy=strategy_of(2))

    assert alone.initial == distributed.initial == []
    assert len(alone.model.trainable_variables) == 4
    for expected, actual in zip(alone.model.variables, distributed.model.variables, strict=True):
        assert len(actual.value.sharding.device_set) == 2
        np.testing.assert_allclose(actual.value, expected.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(distributed.history["loss"], alone.history["loss"], rtol=1e-6)


def test_frozen_layers_stay_and_learn_again_after_another_compile(strategy_of, train):
    x = _floats(3)

    def build():
        first = kl.Dense(4, "tanh", trainable=False, name="first")
        return _compiled(keras.Sequential([keras.Input((3,)), first, kl.Dense(2)]))

    def go_on(model):
        model.layers[0].trainable = True
        model.layers[1].trainable = False
        kept = [np.array(v.value) for v in model.layers[1].variables]
        learning = np.array(model.layers[0].kernel.value)
        _compiled(model)
        model.fit(x, _TARGET, batch_size=8, shuffle=False, verbose=0)
        for before, variable in zip(kept, model.layers[1].variables, strict=True):
            np.testing.assert_array_equal(variable.value, before)
        assert np.max(np.abs(model.layers[0].kernel.value - learning)) > 1e-4
        return [np.array(v.value) for v in model.variables]

    alone = train(build, x, _TARGET)
    distributed = train(build, x, _TARGET, strategy=strategy_of(2))
    for trained in (alone, distributed):
        np.testing.assert_array_equal(trained.model.layers[0].kernel.value, trained.initial[0])
        assert np.max(np.abs(trained.model.layers[1].kernel.value - trained.initial[2])) > 1e-4

    for expected, actual in zip(go_on(alone.model), go_on(distributed.model), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


# Batch normalization


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_moving_statistics_are_those_of_the_whole_batch_step_by_step(
    num_replicas, strategy_of, train
):
    x = np.random.default_rng(5).normal(size=(24, 2)).astype(np.float32) * [1, 5]
    x[::8] += 4  # so that the devices' rows have other means

    def build():
        layers = [keras.Input((2,)), kl.BatchNormalization(momentum=0.8), kl.Dense(2)]
        return _compiled(keras.Sequential(layers))

    model = train(build, x, np.zeros((24, 2)), strategy=strategy_of(num_replicas)).model

    mean, variance = np.zeros(2), np.ones(2)
    for batch in x.reshape(3, 8, 2):  # [step, row, feature]
        mean = 0.8 * mean + 0.2 * batch.mean(0)
        variance = 0.8 * variance + 0.2 * batch.var(0)
    np.testing.assert_allclose(model.layers[0].moving_mean, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.layers[0].moving_variance, variance, rtol=1e-5)


def test_synchronized_batch_normalization_equals_one_device(
    train_twice, assert_same_training, assert_same_evaluation
):
    def build():
        # Plain Keras on JAX refuses synchronized=True; there is nothing to synchronize.
        flag = {"synchronized": True} if dist.has_strategy() else {}
        inputs = keras.Input((4, 4, 2))
        hidden = kl.BatchNormalization(momentum=0.7, **flag)(kl.Conv2D(3, 2)(inputs))
        return _model(inputs, _head([kl.Activation("tanh")(hidden)]))

    x = _floats(4, 4, 2)
    x[::3] += 3  # so that the replicas' own statistics differ

    alone, distributed = train_twice(build, x, _TARGET, num_replicas=4)

    # The loss does not depend on what is added before a normalization.
    assert_same_training(alone, distributed, rtol=5e-4, unchanged=["conv2d/bias"])
    assert_same_evaluation(alone, distributed, x, _TARGET)


def test_synchronized_batch_normalization_has_the_precision_of_float64(
    train, strategy_of, monkeypatch
):
    def build():
        flag = {"synchronized": True} if dist.has_strategy() else {}
        return _compiled(
            keras.Sequential(
                [keras.Input((6,)), kl.Dense(4), kl.BatchNormalization(**flag), kl.Dense(2)]
            )
        )

    random = np.random.default_rng(0)
    x, y = random.normal(size=(13, 6)), random.normal(size=(13, 2))  # 8 rows, and 5
    # Else, Keras computes means and normalizations in float32.
    monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float64")
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        with jax.enable_x64(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DistributaryWarning)  # 8 rows for 3 replicas
            alone = train(build, x, y)
            distributed = train(build, x, y, strategy=strategy_of(3))
    finally:
        keras.config.set_floatx(floatx)

    for name in alone.history:
        np.testing.assert_allclose(distributed.history[name], alone.history[name], rtol=1e-13)
    for expected, actual in zip(
        alone.model.get_weights(), distributed.model.get_weights(), strict=True
    ):
        assert actual.dtype == expected.dtype == np.float64
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-13)


def test_synchronized_batch_normalization_leaves_masked_steps_out_of_the_whole_batch(
    train_twice, assert_same_training
):
    def build():
        flag = {"synchronized": True} if dist.has_strategy() else {}
        inputs = keras.Input((4,), dtype="int32")
        hidden = kl.Embedding(7, 3, embeddings_initializer="normal", mask_zero=True)(inputs)
        hidden = kl.BatchNormalization(momentum=0.5, **flag)(hidden)
        return _model(inputs, _head([kl.GRU(3)(hidden)]))

    x = _padded_sequences()
    x[:4, 1:] = 0  # replica 0 of the first batch has far fewer valid steps than replica 1
    x[4:8, -1] = 3

    alone, distributed = train_twice(build, x, _TARGET)

    assert_same_training(alone, distributed, rtol=1e-3)


# Random layers


def _noisy(make_layers, rows):
    """A model that learns in one step what each of the layers makes of every row of a batch.

    The loss multiplies each row's output with a row of an embedding that starts at zero, so the
    embedding's gradient is that output.
    """

    def build():
        inputs, index = keras.Input(rows.shape[1:]), keras.Input((), dtype="int32")
        products = []
        for name, make_layer in make_layers.items():
            noisy = kl.Flatten()(make_layer()(inputs))
            learned = kl.Embedding(
                len(rows), noisy.shape[-1], embeddings_initializer="zeros", name=name
            )
            products.append(kl.Dot(axes=1)([noisy, learned(index)]))
        return _model(
            [inputs, index],
            kl.Add()(products) if len(products) > 1 else products[0],
            learning_rate=float(len(rows)),
            loss=lambda target, output: keras.ops.mean(output - target, axis=-1),
        )

    return build


def _fit_noise(fit, rows, **kwargs):
    indices = np.arange(len(rows), dtype=np.int32)
    zeros = np.zeros((len(rows), 1), np.float32)
    return fit([rows, indices], zeros, batch_size=len(rows), shuffle=False, verbose=0, **kwargs)


def _noise(model):
    """What each layer made of every row, by the names of the layers."""
    return {v.path.split("/")[0]: -np.array(v.value) for v in model.trainable_variables}


_DROPOUT = {"Dropout": lambda: kl.Dropout(0.5)}
_ONES = np.ones((8, 16), np.float32)
_SCALED = {"value_range": (0, 1)}
# Both replicas get the same rows.
_RANDOM_LAYERS = {
    "numbers": (
        {
            **_DROPOUT,
            "Dropout_with_seed": lambda: kl.Dropout(0.5, seed=9),
            "AlphaDropout": lambda: kl.AlphaDropout(0.5),
            "GaussianDropout": lambda: kl.GaussianDropout(0.5),
            "GaussianNoise": lambda: kl.GaussianNoise(1.0),
        },
        _ONES,
    ),
    "sequences": (
        {"SpatialDropout1D": lambda: kl.SpatialDropout1D(0.5)},
        np.ones((8, 1, 16), np.float32),
    ),
    "images": (
        {
            "CutMix": lambda: kl.CutMix(),
            "Pipeline": lambda: kl.Pipeline([kl.RandomFlip(), kl.Rescaling(0.5)]),
            "RandomColorJitter": lambda: kl.RandomColorJitter(
                **_SCALED, brightness_factor=0.5, saturation_factor=0.5, hue_factor=0.5
            ),
            "RandomErasing": lambda: kl.RandomErasing(**_SCALED),
            "RandomFlip": lambda: kl.RandomFlip(),
            "RandomRotation": lambda: kl.RandomRotation(0.5),
            "SpatialDropout2D": lambda: kl.SpatialDropout2D(0.5),
            # Keras 3.16; last, because the others take the seeds after it.
            **({"Mosaic": lambda: kl.Mosaic()} if hasattr(kl, "Mosaic") else {}),
        },
        np.tile(_RANDOM.uniform(0.2, 1.0, size=(4, 4, 4, 3)).astype(np.float32), (2, 1, 1, 1)),
    ),
    "volumes": (
        {"SpatialDropout3D": lambda: kl.SpatialDropout3D(0.5)},
        np.ones((8, 1, 1, 2, 16), np.float32),
    ),
}


@pytest.mark.parametrize("kind", _RANDOM_LAYERS)
def test_random_layers_differ_between_replicas_and_repeat_with_the_seed(kind, strategy_of, train):
    make_layers, rows = _RANDOM_LAYERS[kind]
    fit = functools.partial(train, _noisy(make_layers, rows), strategy=strategy_of(2))

    trained = _fit_noise(fit, rows)
    first = _noise(trained.model)
    # Another model of the same seed has drawn the same so far; its program would be the same, too.
    fresh = _fit_noise(fit, rows, epochs=0)
    for variable, value in zip(trained.model.variables, fresh.initial, strict=True):
        variable.assign(value)
    _fit_noise(trained.model.fit, rows)
    again = _noise(trained.model)

    assert first.keys() == make_layers.keys()
    for name, noise in first.items():
        assert np.max(np.abs(noise[:4] - noise[4:])) > 0.05, f"both replicas drew the same: {name}"
        np.testing.assert_array_equal(again[name], noise, err_msg=name)
    for variable in trained.model.non_trainable_variables:
        copies = [np.asarray(shard.data) for shard in variable.value.addressable_shards]
        np.testing.assert_array_equal(copies[1], copies[0], err_msg=variable.path)


def test_random_numbers_change_with_the_seed_and_with_the_step(strategy_of, train):
    fit = functools.partial(train, _noisy(_DROPOUT, _ONES), strategy=strategy_of(2))

    model = _fit_noise(fit, _ONES).model
    first = _noise(model)["Dropout"]
    other_seed = _noise(_fit_noise(fit, _ONES, seed=4).model)["Dropout"]
    _fit_noise(model.fit, _ONES)
    second_step = _noise(model)["Dropout"] - first

    np.testing.assert_array_equal(np.unique(first), [0, 2])
    np.testing.assert_array_equal(np.unique(second_step), [0, 2])
    assert np.any(other_seed != first)
    assert np.any(second_step != first)


def test_one_replica_draws_the_random_numbers_of_plain_keras(strategy_of, train):
    plain, one = (
        _fit_noise(
            functools.partial(train, _noisy(_DROPOUT, _ONES), strategy=strategy), _ONES
        ).model
        for strategy in (None, strategy_of(1))
    )

    assert np.any(_noise(one)["Dropout"])
    for expected, actual in zip(plain.variables, one.variables, strict=True):
        np.testing.assert_array_equal(actual.value, expected.value, err_msg=actual.path)


# Layers with tests of their own.
_ELSEWHERE = {kl.ActivityRegularization, kl.BatchNormalization}
_NOT_COMPARED = {
    **dict.fromkeys(
        (
            *(kl.RandomColorDegeneration, kl.RandomGaussianBlur, kl.RandomGrayscale),
            *(kl.RandomContrast, kl.RandomInvert, kl.RandomSharpness),
        ),
        "draws what RandomColorJitter draws",
    ),
    **dict.fromkeys(
        (kl.RandomPerspective, kl.RandomShear, kl.RandomTranslation, kl.RandomZoom),
        "draws what RandomRotation draws",
    ),
    kl.Layer: "the base class",
    kl.Wrapper: "a base class",
    kl.FlaxLayer: "needs Flax",
    kl.TorchModuleWrapper: "needs PyTorch",
    kl.TFSMLayer: "needs TensorFlow",
    kl.HashedCrossing: "needs TensorFlow",
    kl.Hashing: "needs TensorFlow",
    kl.IntegerLookup: "needs TensorFlow",
    kl.StringLookup: "needs TensorFlow",
    kl.TextVectorization: "needs TensorFlow",
    kl.Equalization: "has one histogram for all rows, of a replica or of one device",
    kl.MaxNumBoundingBoxes: "changes bounding boxes only, which no model takes",
    kl.RandomCrop: "raises IndexError when Keras itself traces it with JAX",
    kl.RandomElasticTransform: "raises AttributeError when Keras itself traces it with JAX",
    kl.AugMix: "takes long to compile",
    kl.MixUp: "takes long to compile; draws what CutMix draws",
    kl.RandAugment: "takes minutes to compile",
}


def test_every_public_layer_is_compared(public_classes, quick_initializers):
    builds = [build for build, _ in _ZOO.values()]
    builds += [_noisy(*random) for random in _RANDOM_LAYERS.values()]

    compared = {type(layer) for build in builds for layer in build()._flatten_layers()}

    assert public_classes(kl, kl.Layer) - compared == set(_NOT_COMPARED) | _ELSEWHERE


def test_dropout_is_off_when_a_model_evaluates_and_predicts(train_twice, assert_same_evaluation):
    def build():
        return _compiled(
            keras.Sequential([keras.Input((3,)), kl.Dense(8), kl.Dropout(0.5), kl.Dense(2)]),
            learning_rate=0.0,
        )

    x = _floats(3)

    alone, distributed = train_twice(build, x, _TARGET)

    assert_same_evaluation(alone, distributed, x, _TARGET)


class _CountsPositives(keras.layers.Layer):
    """Keeps an integer and a flag that depend on the rows."""

    def build(self, shape):
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="count"
        )
        self.seen = self.add_weight(
            shape=(), dtype="bool", initializer="zeros", trainable=False, name="seen"
        )

    def call(self, x):
        positive = x[:, 0] > 0
        self.count.assign(self.count + keras.ops.sum(keras.ops.cast(positive, "int32")))
        self.seen.assign(keras.ops.any(positive))
        return x


def test_counts_and_flags_are_those_of_the_whole_batch_on_every_device(strategy_of):
    rows = np.float32([[-1], [-1], [-1], [-1], [1], [-1], [1], [-1]])  # 0 positive, then 2
    with strategy_of(2).scope():
        layer = _CountsPositives()
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    model.fit(rows, rows, batch_size=8, epochs=2, shuffle=False, verbose=0)

    for variable, expected in ((layer.count, 4), (layer.seen, True)):
        copies = [np.asarray(shard.data) for shard in variable.value.addressable_shards]
        assert [copy.item() for copy in copies] == [expected, expected]
