"""Layers under a strategy compute, and learn, what they do on one device."""

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
    flat = [
        kl.Dense(2, name=f"head_of_{index}")(kl.Flatten()(branch))
        for index, branch in enumerate(branches)
    ]
    return kl.Add()(flat) if len(flat) > 1 else flat[0]


def _side_by_side(shape, make_layers, first=None):
    """One model with all layers next to each other, behind a layer that learns through them."""

    def build():
        inputs = keras.Input(shape)
        below = first()(inputs) if first else kl.Dense(shape[-1], name="below")(inputs)
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
                kl.Dropout(0.0),
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
            ],
        ),
        _floats(2, 2, 4, 1),
    ),
    "shapes": (
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
    "convolution_lstm": (
        _side_by_side((3, 5, 1), lambda: [kl.ConvLSTM1D(2, 2)]),
        _floats(3, 5, 1),
    ),
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


def test_batch_normalization_has_statistics_per_replica_and_the_mean_of_moving_ones(
    strategy_of, train
):
    x, y = _floats(3) * 2 + 1, _TARGET

    def build():
        normalization = kl.BatchNormalization(momentum=0.9)
        return _compiled(keras.Sequential([keras.Input((3,)), normalization, kl.Dense(2)]))

    # One step of 16 rows on two replicas, of 8 rows on each of two lone models.
    halves = [train(build, x[part], y[part]) for part in (slice(8), slice(8, 16))]
    both = train(build, x, y, strategy=strategy_of(2), batch_size=16)

    layer = both.model.layers[0]
    per_replica = x.reshape(2, 8, 3)
    np.testing.assert_allclose(layer.moving_mean, 0.1 * per_replica.mean(1).mean(0), rtol=1e-5)
    np.testing.assert_allclose(
        layer.moving_variance, 0.9 + 0.1 * per_replica.var(1).mean(0), rtol=1e-5
    )
    assert np.max(np.abs(per_replica.var(1).mean(0) - x.var(0))) > 0.05
    for index, variable in enumerate(both.model.variables):
        expected = np.mean([np.array(half.model.variables[index].value) for half in halves], 0)
        np.testing.assert_allclose(
            variable.value, expected, rtol=1e-5, atol=1e-6, err_msg=variable.path
        )
    losses = [half.history["loss"][0] for half in halves]
    np.testing.assert_allclose(both.history["loss"], [np.mean(losses)], rtol=1e-6)


def test_moving_statistics_accumulate_the_mean_over_replicas_step_by_step(strategy_of, train):
    x = np.random.default_rng(5).normal(size=(24, 2)).astype(np.float32) * [1, 5]

    def build():
        layers = [keras.Input((2,)), kl.BatchNormalization(momentum=0.8), kl.Dense(2)]
        return _compiled(keras.Sequential(layers))

    model = train(build, x, np.zeros((24, 2)), strategy=strategy_of(4)).model

    mean, variance = np.zeros(2), np.ones(2)
    for batch in x.reshape(3, 4, 2, 2):  # [step, replica, row, feature]
        mean = 0.8 * mean + 0.2 * batch.mean(1).mean(0)
        variance = 0.8 * variance + 0.2 * batch.var(1).mean(0)
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


def _noise_seen_by_each_row(train, strategy, make_layer, row, num_rows=8, seed=3, rows_of=None):
    """What a layer makes of the same `row` in one training step, for every row of a batch.

    The loss multiplies each row's output with a row of an embedding that starts at zero, so the
    embedding's gradient is that output.
    """
    row = np.asarray(row, np.float32)
    x = np.broadcast_to(row, (num_rows, *row.shape)).copy()

    def build():
        inputs, index = keras.Input(row.shape), keras.Input((), dtype="int32")
        noisy = kl.Flatten()(make_layer()(inputs))
        weights = kl.Embedding(num_rows, row.size, embeddings_initializer="zeros")(index)
        output = kl.Dot(axes=1)([noisy, weights])
        return _model(
            [inputs, index],
            output,
            learning_rate=float(num_rows),
            loss=lambda target, output: keras.ops.mean(output - target, axis=-1),
        )

    indices = np.arange(num_rows, dtype=np.int32)
    trained = train(
        build,
        [x, indices],
        np.zeros((num_rows, 1)),
        strategy=strategy,
        seed=seed,
        batch_size=num_rows,
    )
    (embedding,) = trained.model.trainable_variables
    return -np.array(embedding.value), trained.model


_IMAGE = np.random.default_rng(1).uniform(0.2, 1.0, size=(4, 4, 1))
_RANDOM_LAYERS = {
    "Dropout": (lambda: kl.Dropout(0.5), np.ones(16)),
    "Dropout with seed": (lambda: kl.Dropout(0.5, seed=9), np.ones(16)),
    "SpatialDropout2D": (lambda: kl.SpatialDropout2D(0.5), np.ones((2, 2, 16))),
    "GaussianNoise": (lambda: kl.GaussianNoise(1.0), np.ones(16)),
    "RandomFlip": (lambda: kl.RandomFlip(), _IMAGE),
    "RandomRotation": (lambda: kl.RandomRotation(0.5), _IMAGE),
}


@pytest.mark.parametrize("name", _RANDOM_LAYERS)
def test_random_layers_differ_between_replicas_and_repeat_with_the_seed(name, strategy_of, train):
    make_layer, row = _RANDOM_LAYERS[name]

    first, model = _noise_seen_by_each_row(train, strategy_of(2), make_layer, row)
    again, _ = _noise_seen_by_each_row(train, strategy_of(2), make_layer, row)

    assert np.ptp(first, axis=0).max() > 0.05, "the layer did nothing random"
    assert np.max(np.abs(first[:4] - first[4:])) > 0.05, "both replicas drew the same"
    np.testing.assert_array_equal(again, first)
    for variable in model.non_trainable_variables:
        copies = [np.asarray(shard.data) for shard in variable.value.addressable_shards]
        np.testing.assert_array_equal(copies[1], copies[0], err_msg=variable.path)


def test_random_numbers_change_with_the_seed_and_with_the_step(strategy_of, train):
    make_layer, row = _RANDOM_LAYERS["Dropout"]
    x, indices = np.ones((8, 16), np.float32), np.arange(8, dtype=np.int32)

    first, model = _noise_seen_by_each_row(train, strategy_of(2), make_layer, row)
    other_seed, _ = _noise_seen_by_each_row(train, strategy_of(2), make_layer, row, seed=4)
    model.fit([x, indices], np.zeros((8, 1)), batch_size=8, verbose=0, shuffle=False)
    second_step = -np.array(model.trainable_variables[0].value) - first

    np.testing.assert_array_equal(np.unique(first), [0, 2])
    np.testing.assert_array_equal(np.unique(second_step), [0, 2])
    assert np.any(other_seed != first)
    assert np.any(second_step != first)


def test_one_replica_draws_the_random_numbers_of_plain_keras(strategy_of, train):
    make_layer, row = _RANDOM_LAYERS["Dropout"]

    plain, plain_model = _noise_seen_by_each_row(train, None, make_layer, row)
    one, model = _noise_seen_by_each_row(train, strategy_of(1), make_layer, row)

    np.testing.assert_array_equal(one, plain)
    for expected, actual in zip(plain_model.variables, model.variables, strict=True):
        np.testing.assert_array_equal(actual.value, expected.value, err_msg=actual.path)


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


def test_state_that_has_no_mean_is_that_of_replica_0_on_every_device(strategy_of):
    rows = np.float32([[1], [1], [1], [-1], [-1], [-1], [1], [-1]])  # 3 positive, then 1
    with strategy_of(2).scope():
        layer = _CountsPositives()
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    model.fit(rows, rows, batch_size=8, epochs=2, shuffle=False, verbose=0)

    for variable, expected in ((layer.count, 6), (layer.seen, True)):
        copies = [np.asarray(shard.data) for shard in variable.value.addressable_shards]
        assert [copy.item() for copy in copies] == [expected, expected]
