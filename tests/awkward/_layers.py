"""Layers: own ones that relate rows or keep state, and those of Keras."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from keras import layers as kl, ops

from tests.awkward._case import add, compiled, net


def _mixes(name: str, function: Callable[[Any], Any], x: str = "vectors") -> None:
    """Adds a case of a layer that computes a function of the whole batch."""
    add(name, "layers", lambda: compiled(net(_Of(function), x=x)), x=x)


class _Of(kl.Layer):
    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape


def _count(x):
    return jnp.asarray(x.shape[0], x.dtype)


def _ghost_statistics(x):
    """Standardizes groups of four rows; the last group may be smaller."""
    groups = -(-x.shape[0] // 4)
    of = jnp.arange(x.shape[0]) // 4
    count = jax.ops.segment_sum(jnp.ones(x.shape[0], x.dtype), of, groups)[:, None]
    mean = jax.ops.segment_sum(x, of, groups) / count
    var = jax.ops.segment_sum(jnp.square(x - mean[of]), of, groups) / count
    return (x - mean[of]) / jnp.sqrt(var[of] + 0.1)


def _whitened(x):
    z = x - jnp.mean(x, 0)
    root = jnp.linalg.cholesky(z.T @ z / x.shape[0] + 0.1 * jnp.eye(x.shape[1], dtype=x.dtype))
    return jax.scipy.linalg.solve_triangular(root, z.T, lower=True).T


def _attention_over_rows(x):
    return x + jax.nn.softmax(x @ x.T / 3, -1) @ x


def _scan_over_rows(x):
    def step(state, row):
        state = jnp.tanh(0.5 * state + row)
        return state, state

    return lax.scan(step, jnp.zeros(x.shape[1], x.dtype), x)[1]


def _capacity(x):
    """Sends rows to experts that take four of them, in the order of the batch."""
    expert = jax.nn.one_hot(jnp.argmax(x[:, :3], -1), 3, dtype=x.dtype)
    place = jnp.cumsum(expert, 0) * expert
    taken = jnp.sum(expert * (place <= 4), -1, keepdims=True)
    return x * (1 + taken)


def _expert_choice(x):
    """Every expert takes the three rows with its largest gates."""
    gates = jax.nn.softmax(x[:, :3], 0)
    values, rows = lax.top_k(gates.T, 3)
    return x.at[rows.reshape(-1)].add(values.reshape(-1, 1))


def _fixed_noise(x):
    return x + jax.random.normal(jax.random.key(0), x.shape, x.dtype)


def _shuffled(x):
    partner = jax.random.permutation(jax.random.key(1), x.shape[0])
    return 0.5 * (x + x[partner])


def _reshaped(x):
    return jnp.tanh(x.reshape(x.shape[1], x.shape[0]).T + x)


def _shuffled_batch_channels(x):
    n, h, w, c = x.shape
    return x.reshape(h, n, w, c).transpose(1, 0, 2, 3)


def _branch(x):
    return lax.cond(jnp.mean(x) > 0, lambda: 2 * x, lambda: jnp.tanh(x))


def _called_back(x):
    order = lambda a: np.argsort(np.argsort(np.asarray(a), 0), 0).astype(a.dtype)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x * jax.pure_callback(order, shape, lax.stop_gradient(x)) / 10


def _pooled(x, function, window):
    """Returns what a function makes of windows that move over the rows, too."""
    start = -jnp.inf if function is lax.max else 0.0
    return lax.reduce_window(x, start, function, window, (1, 1), "SAME")


for _name, _function in {
    "times_position": lambda x: x * jnp.arange(x.shape[0], dtype=x.dtype)[:, None] / 10,
    "times_rows": lambda x: x * ops.cast(ops.shape(x)[0], x.dtype) / 10,
    "minus_mean": lambda x: x - jnp.mean(x, 0),
    "by_largest": lambda x: x / jnp.max(jnp.abs(x)),
    "sorted_columns": lambda x: x + jnp.sort(x, 0),
    "ranks": lambda x: x + jnp.argsort(jnp.argsort(x, 0), 0) / _count(x),
    "softmax_of_columns": lambda x: x + jax.nn.softmax(x, 0),
    "cumulative_mean": lambda x: (
        jnp.cumsum(x, 0) / (1 + jnp.arange(x.shape[0], dtype=x.dtype))[:, None]
    ),
    "previous_row": lambda x: x + jnp.roll(x, 1, 0),
    "reversed_batch": lambda x: x + x[::-1],
    "gram": lambda x: jnp.tanh(x @ (x.T @ x) / 20),
    "whitened": _whitened,
    "singular_values": lambda x: x / jnp.linalg.norm(x, 2),
    "attention_over_rows": _attention_over_rows,
    "scan_over_rows_in_layer": _scan_over_rows,
    "ghost_statistics": _ghost_statistics,
    "expert_capacity": _capacity,
    "expert_choice": _expert_choice,
    "fixed_noise": _fixed_noise,
    "shuffled_rows": _shuffled,
    "reshaped_batch": _reshaped,
    "branch_in_layer": _branch,
    "called_back": _called_back,
    "largest_of_neighbors": lambda x: x + _pooled(x, lax.max, (3, 2)),
    "sum_of_neighbors": lambda x: x + _pooled(x, lax.add, (3, 1)),
}.items():
    _mixes(_name, _function)
_mixes("rows_as_pixels", _shuffled_batch_channels, "images")
_mixes(
    "fourier_of_transposed_rows",
    lambda x: jnp.swapaxes(jnp.fft.irfft(2 * jnp.fft.rfft(jnp.swapaxes(x, 1, 2))), 1, 2),
    "series",
)
_mixes("time_and_rows", lambda x: x + jnp.swapaxes(x, 0, 1)[:, :1].mean(0)[None], "series")


# State of one's own.


class _Keeps(kl.Layer):
    """A layer whose state `change` makes of the old one and the batch, and `use` reads."""

    def __init__(self, shape, change, use, initial=0.0, dtype=None):
        super().__init__()
        self.size, self.change, self.use = shape, change, use
        self.initial, self.of = initial, dtype

    def build(self, shape):
        size = [shape[-1] if dim == "width" else dim for dim in self.size]
        self.state = self.add_weight(
            shape=size,
            initializer=keras.initializers.Constant(self.initial),
            trainable=False,
            dtype=self.of,
            name="state",
        )

    def call(self, x, training=False):
        state = ops.convert_to_tensor(self.state)
        if training:
            state = self.change(state, lax.stop_gradient(x))
            self.state.assign(state)
        return self.use(state, x)

    def compute_output_shape(self, shape):
        return shape


def _keeps(name, change, use, shape=("width",), initial=0.0, dtype=None):
    add(name, "state", lambda: compiled(net(_Keeps(shape, change, use, initial, dtype))))


def _merged(state, x):
    """Mean, variance and count of all rows so far, as Chan et al. merge them."""
    count, mean, square = state[0], state[1], state[2]
    n, d = x.shape[0], jnp.mean(x, 0) - mean
    total = count + n
    square = square + jnp.sum(jnp.square(x - jnp.mean(x, 0)), 0) + d**2 * count * n / total
    return jnp.stack([total, mean + d * n / total, square])


def _queued(state, x):
    return jnp.concatenate([x, state])[: state.shape[0]]


_sum = lambda state, x: x + 0.1 * jnp.tanh(state)
for _name, _change, _use, _more in [
    ("running_maximum", lambda s, x: jnp.maximum(s, jnp.max(x, 0)), _sum, {"initial": -9.0}),
    ("running_median", lambda s, x: 0.8 * s + 0.2 * jnp.median(x, 0), _sum, {}),
    (
        "running_variance",
        lambda s, x: 0.8 * s + 0.2 * jnp.var(x, 0, ddof=1),
        lambda s, x: x / jnp.sqrt(s + 0.1),
        {"initial": 1.0},
    ),
    ("running_largest_norm", lambda s, x: jnp.maximum(0.9 * s, jnp.linalg.norm(x)), _sum, {}),
    ("sum_of_rows", lambda s, x: s + jnp.sum(x, 0), _sum, {}),
    (
        "merged_moments",
        _merged,
        lambda s, x: (x - s[1]) / jnp.sqrt(s[2] / jnp.maximum(s[0], 1) + 0.1),
        {"shape": (3, "width")},
    ),
    ("count_of_rows", lambda s, x: s + x.shape[0], lambda s, x: x / (1 + 0.1 * s), {"shape": ()}),
    ("steps", lambda s, x: s + 1, lambda s, x: x / (1 + 0.1 * s), {"shape": ()}),
    ("last_row_seen", lambda s, x: x[-1], _sum, {}),
    ("first_row_ever", lambda s, x: jnp.where(jnp.all(s == 0), x[0], s), _sum, {}),
    (
        "queue",
        _queued,
        lambda s, x: x + jax.nn.softmax(x @ s.T, -1) @ s,
        {"shape": (16, "width"), "initial": 0.1},
    ),
    (
        "running_covariance",
        lambda s, x: 0.9 * s + 0.1 * x.T @ x / x.shape[0],
        lambda s, x: x @ s,
        {"shape": (8, 8), "initial": 0.1},
    ),
    (
        "key_of_state",
        lambda s, x: s + jnp.asarray(x.shape[0], s.dtype),
        lambda s, x: x + 0.3 * jax.random.normal(jax.random.key(s), x.shape, x.dtype),
        {"shape": (), "initial": 0, "dtype": "uint32"},
    ),
    (
        "seen",
        lambda s, x: s | jnp.any(x > 0.9, 0),
        lambda s, x: jnp.where(s, x, 0.5 * x),
        {"initial": False, "dtype": "bool"},
    ),
    (
        "state_of_a_branch",
        lambda s, x: lax.cond(jnp.mean(x) > 0, lambda: s + jnp.mean(x, 0), lambda: s * 0.5),
        _sum,
        {},
    ),
    (
        "state_of_a_scan",
        lambda s, x: lax.scan(lambda c, row: (0.9 * c + 0.1 * row, None), s, x)[0],
        _sum,
        {},
    ),
]:
    _keeps(_name, _change, _use, **_more)


class _Codebook(kl.Layer):
    """Vector quantization whose code book is an average of the rows it stands for."""

    def build(self, shape):
        random = keras.initializers.RandomNormal(0.0, 0.5, seed=1)
        self.codes = self.add_weight(shape=(4, shape[-1]), initializer=random, trainable=False)
        self.sizes = self.add_weight(shape=(4,), initializer="ones", trainable=False)

    def call(self, x, training=False):
        d = ops.sum(ops.square(x[:, None] - self.codes[None]), -1)
        near = ops.one_hot(ops.argmin(d, -1), 4)
        quantized = ops.matmul(near, self.codes)
        self.add_loss(0.25 * ops.mean(ops.square(x - ops.stop_gradient(quantized))))
        if training:
            sizes = 0.9 * self.sizes + 0.1 * ops.sum(near, 0)
            sums = 0.9 * self.codes * self.sizes[:, None]
            sums = sums + 0.1 * ops.matmul(ops.transpose(near), ops.stop_gradient(x))
            self.sizes.assign(sizes)
            self.codes.assign(sums / sizes[:, None])
        return x + ops.stop_gradient(quantized - x)


class _OwnNormalization(kl.Layer):
    """Batch normalization with Bessel's correction and weights of its own."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[-1:], initializer="zeros", trainable=False)
        self.variance = self.add_weight(shape=shape[-1:], initializer="ones", trainable=False)
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x, training=False):
        if not training:
            return self.scale * (x - self.mean) / ops.sqrt(self.variance + 1e-3)
        n = x.shape[0]
        mean, variance = ops.mean(x, 0), ops.var(x, 0)
        self.mean.assign(0.8 * self.mean + 0.2 * mean)
        self.variance.assign(0.8 * self.variance + 0.2 * variance * n / (n - 1))
        return self.scale * (x - mean) / ops.sqrt(variance + 1e-3)


class _Adds(kl.Layer):
    """Adds a function of the batch to the loss."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        self.add_loss(self.function(x))
        return x


def _of_layers(name, *make, kind="layers", x="vectors", optimizer=None, y="targets", **options):
    add(
        name,
        kind,
        lambda: compiled(net(*(one() for one in make), x=x), optimizer=optimizer and optimizer()),
        x=x,
        y=y,
        **options,
    )


_of_layers("codebook", _Codebook, kind="state")
_of_layers("own_normalization", _OwnNormalization, kind="state")
for _name, _function in {
    "adds_mean": lambda x: 0.1 * ops.mean(ops.square(x)),
    "adds_sum": lambda x: 0.01 * ops.sum(ops.square(x)),
    "adds_entropy_of_mean": lambda x: ops.sum(
        ops.mean(ops.softmax(x), 0) * ops.log(ops.mean(ops.softmax(x), 0))
    ),
    "adds_rows": lambda x: 0.1 * ops.mean(ops.square(x), -1),
}.items():
    _of_layers(_name, lambda function=_function: _Adds(function))


# Layers of Keras.

_of_layers("batch_normalization", kl.BatchNormalization)
_of_layers("batch_normalization_of_images", kl.BatchNormalization, x="images")
_of_layers("batch_normalization_of_axis", lambda: kl.BatchNormalization(axis=1), x="images")
_of_layers("batch_normalization_of_series", kl.BatchNormalization, x="series")
_of_layers("batch_normalization_masked", kl.Masking, kl.BatchNormalization, x="series")
_of_layers("batch_renormalization", lambda: kl.BatchNormalization(renorm=True, momentum=0.7))


def _frozen_normalization():
    layer = kl.BatchNormalization(moving_variance_initializer=keras.initializers.Constant(0.5))
    layer.trainable = False
    return layer


def _normalization():
    layer = kl.Normalization()
    layer.adapt(np.random.default_rng(0).normal(2.0, 3.0, (9, 8)).astype("float32"))
    return layer


_of_layers("batch_normalization_frozen", _frozen_normalization)
_of_layers("normalization", _normalization)
_of_layers("layer_normalization", kl.LayerNormalization)
_of_layers("group_normalization", lambda: kl.GroupNormalization(2), x="images")
_of_layers("unit_normalization", kl.UnitNormalization)
_of_layers("root_mean_square_normalization", kl.RMSNormalization)
_of_layers("spectral_normalization", lambda: kl.SpectralNormalization(kl.Dense(5)))
for _name, _make, _x in [
    ("dropout", lambda: kl.Dropout(0.4), "vectors"),
    ("dropout_seeded", lambda: kl.Dropout(0.4, seed=7), "vectors"),
    ("dropout_of_columns", lambda: kl.Dropout(0.4, noise_shape=(1, None)), "vectors"),
    ("dropout_of_rows", lambda: kl.Dropout(0.3, noise_shape=(None, 1)), "vectors"),
    ("alpha_dropout", lambda: kl.AlphaDropout(0.3), "vectors"),
    ("gaussian_dropout", lambda: kl.GaussianDropout(0.3), "vectors"),
    ("gaussian_noise", lambda: kl.GaussianNoise(0.5), "vectors"),
    ("spatial_dropout_1d", lambda: kl.SpatialDropout1D(0.4), "series"),
    ("spatial_dropout_2d", lambda: kl.SpatialDropout2D(0.4), "images"),
    ("spatial_dropout_3d", lambda: kl.SpatialDropout3D(0.4), "volumes"),
    ("random_flip", kl.RandomFlip, "images"),
    ("random_rotation", lambda: kl.RandomRotation(0.2), "images"),
    ("random_translation", lambda: kl.RandomTranslation(0.2, 0.2), "images"),
    ("random_zoom", lambda: kl.RandomZoom(0.3), "images"),
    ("random_contrast", lambda: kl.RandomContrast(0.4, value_range=(-3, 3)), "images"),
    ("random_brightness", lambda: kl.RandomBrightness(0.1, value_range=(-3, 3)), "images"),
]:
    _of_layers(_name, _make, kind="random", x=_x)


for _name, _make, _x in [
    ("convolution_1d", lambda: kl.Conv1D(3, 3, padding="causal", activation="tanh"), "series"),
    ("convolution_2d", lambda: kl.Conv2D(3, 3, strides=2, activation="tanh"), "images"),
    ("convolution_3d", lambda: kl.Conv3D(2, 2, activation="tanh"), "volumes"),
    ("convolution_dilated", lambda: kl.Conv2D(3, 2, dilation_rate=2), "images"),
    ("convolution_grouped", lambda: kl.Conv2D(4, 3, groups=2), "images"),
    ("depthwise_convolution", lambda: kl.DepthwiseConv2D(3, depth_multiplier=2), "images"),
    ("depthwise_convolution_1d", lambda: kl.DepthwiseConv1D(3), "series"),
    ("separable_convolution", lambda: kl.SeparableConv2D(3, 3), "images"),
    ("transposed_convolution", lambda: kl.Conv2DTranspose(2, 3, strides=2), "images"),
    ("max_pooling", kl.MaxPooling2D, "images"),
    ("average_pooling", lambda: kl.AveragePooling2D(3, strides=2), "images"),
    ("adaptive_pooling", lambda: kl.AdaptiveAveragePooling2D(4), "images"),
    ("global_max_pooling", kl.GlobalMaxPooling2D, "images"),
    ("global_average_pooling", kl.GlobalAveragePooling1D, "series"),
    ("up_sampling", lambda: kl.UpSampling2D(2, interpolation="bilinear"), "images"),
    ("resizing", lambda: kl.Resizing(4, 8), "images"),
    ("padding_and_cropping", lambda: kl.ZeroPadding2D(2), "images"),
    ("cropping", lambda: kl.Cropping2D(1), "images"),
    ("films", lambda: kl.ConvLSTM2D(2, 2, return_sequences=True), "films"),
    ("recurrent", lambda: kl.SimpleRNN(4), "series"),
    ("lstm", lambda: kl.LSTM(4, return_sequences=True), "series"),
    ("lstm_with_dropout", lambda: kl.LSTM(4, dropout=0.3, recurrent_dropout=0.2), "series"),
    ("gru", lambda: kl.GRU(4, go_backwards=True), "series"),
    ("gru_unrolled", lambda: kl.GRU(4, unroll=True), "series"),
    ("bidirectional", lambda: kl.Bidirectional(kl.LSTM(3)), "series"),
    ("stacked_cells", lambda: kl.RNN([kl.GRUCell(4), kl.LSTMCell(3)]), "series"),
    ("time_distributed", lambda: kl.TimeDistributed(kl.Dense(3, "tanh")), "series"),
    ("einsum_dense", lambda: kl.EinsumDense("btc,cd->btd", (6, 5), bias_axes="d"), "series"),
    ("prelu", lambda: kl.PReLU(shared_axes=[1, 2]), "images"),
    ("activity", lambda: kl.ActivityRegularization(l1=0.01, l2=0.02), "vectors"),
    (
        "orthogonal_regularizer",
        lambda: kl.Dense(5, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.1)),
        "vectors",
    ),
    ("unit_norm", lambda: kl.Dense(5, kernel_constraint=keras.constraints.UnitNorm()), "vectors"),
    ("max_norm", lambda: kl.Dense(5, kernel_constraint=keras.constraints.MaxNorm(0.7)), "vectors"),
    ("non_negative", lambda: kl.Dense(5, kernel_constraint=keras.constraints.NonNeg()), "vectors"),
    ("repeat_and_permute", lambda: kl.RepeatVector(4), "vectors"),
    ("category_encoding", lambda: kl.Discretization([-1.0, 0.0, 1.0]), "vectors"),
    ("lora", lambda: _with_lora(), "vectors"),
    ("threshold", lambda: kl.Dense(6, "hard_shrink"), "vectors"),
    ("lambda_of_rows", lambda: kl.Lambda(lambda x: x - ops.mean(x, 0)), "vectors"),
    ("reshape_of_example", lambda: kl.Reshape((-1, 2)), "vectors"),
]:
    if _name in {"repeat_and_permute", "reshape_of_example"}:
        _of_layers(_name, _make, kl.Flatten, x=_x)
    elif _name == "category_encoding":
        _of_layers(_name, _make, lambda: kl.Rescaling(0.5), x=_x)
    else:
        _of_layers(_name, _make, x=_x)


def _with_lora():
    layer = kl.Dense(5)
    layer.build((None, 8))
    layer.enable_lora(2)
    return layer


def _of_tokens(name, *layers, mask=True, **options):
    def build():
        embedding = kl.Embedding(12, 4, mask_zero=mask)
        made = [one() for one in layers]
        return compiled(
            keras.Sequential([keras.Input((7,), dtype="int32"), embedding, *made, kl.Dense(3)]),
            **options,
        )

    add(name, "layers", build, x="tokens")


_of_tokens("embedding", kl.Flatten, mask=False)
_of_tokens("embedding_masked_mean", kl.GlobalAveragePooling1D)
_of_tokens("embedding_masked_lstm", lambda: kl.LSTM(4))
_of_tokens("embedding_masked_gru", lambda: kl.Bidirectional(kl.GRU(3)))
_of_tokens("embedding_normalized", kl.BatchNormalization, kl.GlobalAveragePooling1D)
_of_tokens("embedding_with_dropout", lambda: kl.Dropout(0.3), kl.GlobalMaxPooling1D)


def _attention(make, self_attention=True, mask=True):
    def build():
        tokens = keras.Input((7,), dtype="int32")
        x = kl.Embedding(12, 4, mask_zero=mask)(tokens)
        layer = make()
        x = layer(x, x) if self_attention else layer([x, x])
        return compiled(keras.Model(tokens, kl.Dense(3)(kl.GlobalAveragePooling1D()(x))))

    return build


add("multi_head", "layers", _attention(lambda: kl.MultiHeadAttention(2, 3)), x="tokens")
add("grouped_query", "layers", _attention(lambda: kl.GroupQueryAttention(3, 4, 2)), x="tokens")
add("dot_attention", "layers", _attention(lambda: kl.Attention(use_scale=True), False), x="tokens")
add("additive_attention", "layers", _attention(kl.AdditiveAttention, False), x="tokens")


class _RowsOfOthers(kl.Layer):
    """Attends from every row to the rows of the whole batch, with weights."""

    def build(self, shape):
        self.attention = kl.MultiHeadAttention(2, 4)
        self.attention.build((1, None, shape[-1]), (1, None, shape[-1]))

    def call(self, x):
        return x + self.attention(x[None], x[None])[0]


class _SortedWeights(kl.Layer):
    """The gradient of its sort has ids of a size that no number of devices divides."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(101, 3), name="weight")

    def call(self, x):
        return ops.mean(x, axis=1, keepdims=True) * ops.sort(self.weight, axis=0)[2]


class _FastWeights(kl.Layer):
    """Takes a step of gradient descent on the batch inside the layer."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        loss = lambda kernel: jnp.mean(jnp.square(x @ kernel - x))
        kernel = ops.convert_to_tensor(self.kernel)
        return x @ (kernel - 0.5 * jax.grad(loss)(kernel))


_of_layers("attention_to_other_rows", _RowsOfOthers)
_of_layers("fast_weights", _FastWeights)
_of_layers("sorted_weights", _SortedWeights)
