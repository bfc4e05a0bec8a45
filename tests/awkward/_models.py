"""Models with several inputs and outputs, shared and nested parts, masks, constraints, policies."""

import keras
import numpy as np
from keras import layers as kl, ops

from tests.awkward._case import DATA, add, adder, compiled, net, sgd

case = adder("models")


def _root(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)))


def _top(y, p):
    return ops.max(p)


def _text_and_numbers():
    tokens, numbers = (
        keras.Input((7,), dtype="int32", name="tokens"),
        keras.Input((6,), name="numbers"),
    )
    text = kl.GlobalAveragePooling1D()(kl.Embedding(12, 4, mask_zero=True)(tokens))
    return tokens, numbers, kl.Concatenate()([text, kl.Dense(5, "tanh")(numbers)])


@case(x=("tokens", "vectors"))
def two_inputs():
    tokens, numbers, x = _text_and_numbers()
    return compiled(keras.Model([tokens, numbers], kl.Dense(3)(x)), _root)


@case(y=("targets", "onehot"))
def two_outputs():
    x = keras.Input((6,))
    h = kl.Dense(8, "tanh")(x)
    outputs = [kl.Dense(3, name="a")(h), kl.Dense(3, "softmax", name="b")(h)]
    return compiled(
        keras.Model(x, outputs),
        [_root, "categorical_crossentropy"],
        loss_weights=[0.3, 2.0],
        metrics=[[_top], ["accuracy", keras.metrics.F1Score("macro")]],
    )


@case(x={"one": "vectors", "two": "vectors"}, y={"a": "targets", "b": "bits"})
def outputs_by_name():
    x = {name: keras.Input((6,), name=name) for name in ("one", "two")}
    h = kl.BatchNormalization()(kl.Dense(8, "tanh")(kl.Concatenate()([*x.values()])))
    outputs = {"a": kl.Dense(3, name="a")(h), "b": kl.Dense(3, "sigmoid", name="b")(h)}
    return compiled(
        keras.Model(x, outputs),
        {"a": "mse", "b": keras.losses.Dice()},
        metrics={"a": [_top], "b": [keras.metrics.AUC(num_thresholds=20)]},
    )


@case(y=("targets", "targets"))
def outputs_that_are_related():
    """The loss of one output is a function of the batch of the other."""
    x = keras.Input((6,))
    a, b = kl.Dense(3)(x), kl.Dense(3)(kl.Dense(5, "relu")(x))
    b = kl.Lambda(lambda ab: ab[1] - ops.mean(ab[0], 0))([a, b])
    return compiled(keras.Model(x, [a, b]), ["mse", _root])


@case(x=("vectors", "vectors"))
def shared_layers():
    one, other = keras.Input((6,)), keras.Input((6,))
    tower = keras.Sequential([keras.Input((6,)), kl.Dense(8, "tanh"), kl.BatchNormalization()])
    gap = kl.Lambda(lambda ab: ops.abs(ab[0] - ops.flip(ab[1], 0)))([tower(one), tower(other)])
    return compiled(keras.Model([one, other], kl.Dense(3)(gap)))


@case()
def nested():
    inner = net(kl.BatchNormalization(), kl.Dropout(0.2), units=5)
    x = keras.Input((6,))
    outer = keras.Sequential([inner, kl.Dense(4, "tanh"), net_of_width(4)])
    return compiled(keras.Model(x, outer(x)))


def net_of_width(width):
    return keras.Sequential([keras.Input((width,)), kl.GaussianNoise(0.3), kl.Dense(3)])


@case(x="tokens")
def transformer():
    tokens = keras.Input((7,), dtype="int32")
    h = kl.Embedding(12, 8, mask_zero=True)(tokens)
    a = kl.MultiHeadAttention(2, 4, dropout=0.2)(h, h, use_causal_mask=True)
    h = kl.LayerNormalization()(kl.Add()([h, a]))
    h = kl.LayerNormalization()(kl.Add()([h, kl.Dense(8)(kl.Dense(16, "gelu")(h))]))
    return compiled(keras.Model(tokens, kl.Dense(3)(kl.GlobalAveragePooling1D()(h))))


@case(x="series", y="sequences")
def masked_sequences():
    """The loss is a mean over the time steps that are not masked, of the whole batch."""
    model = keras.Sequential(
        [keras.Input((6, 4)), kl.Masking(), kl.LSTM(5, return_sequences=True), kl.Dense(3)]
    )
    return compiled(model, "mse", weighted_metrics=["mae"])


@case(x="tokens", y=lambda: np.roll(DATA["tokens"](), -1, 1))
def language_model():
    tokens = keras.Input((7,), dtype="int32")
    h = kl.LSTM(6, return_sequences=True)(kl.Embedding(12, 6, mask_zero=True)(tokens))
    return compiled(
        keras.Model(tokens, kl.Dense(12)(h)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
        weighted_metrics=["accuracy"],
    )


@case()
def own_class():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.two = kl.Dense(8, "relu"), kl.Dense(3)
            self.drop = kl.Dropout(0.3)

        def call(self, x, training=False):
            h = self.drop(self.one(x), training=training)
            self.add_loss(0.1 * ops.max(ops.mean(ops.square(h), 0)))
            return self.two(h) - ops.mean(h)

    return compiled(Own(), optimizer=keras.optimizers.Adam(0.02))


@case()
def rows_joined():
    """Rows are concatenated to twice as many in the model, and split again."""
    x = keras.Input((6,))
    both = kl.Concatenate(axis=0)([kl.Dense(5, "tanh")(x), kl.Dense(5)(x)])
    h = kl.BatchNormalization()(both)
    join = lambda z: ops.concatenate(ops.split(z, 2, 0), -1)
    halves = kl.Lambda(join, output_shape=(10,))(h)
    return compiled(keras.Model(x, kl.Dense(3)(halves)))


@case(y=None)
def without_targets():
    class Loss(kl.Layer):
        def call(self, z):
            covariance = ops.matmul(ops.transpose(z), z) / ops.cast(ops.shape(z)[0], z.dtype)
            self.add_loss(ops.mean(ops.square(covariance - ops.eye(3))))
            return z

    x = keras.Input((6,))
    return compiled(keras.Model(x, Loss()(kl.Dense(3)(x))), None)


@case()
def frozen_half():
    model = net(kl.Dense(6, "tanh"), kl.BatchNormalization())
    model.layers[0].trainable = False
    model.layers[2].trainable = False
    return compiled(model)


@case()
def regularized():
    dense = kl.Dense(
        6,
        kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02),
        bias_regularizer="l2",
        activity_regularizer="l1",
    )
    return compiled(net(dense))


@case(y="labels")
def sparse_classes():
    return compiled(
        net(activation="softmax"),
        "sparse_categorical_crossentropy",
        keras.optimizers.Adam(0.02),
        metrics=["accuracy"],
    )


@case()
def mixture_of_experts():
    class Experts(kl.Layer):
        def build(self, shape):
            self.gate, self.experts = kl.Dense(4), [kl.Dense(5, "relu") for _ in range(4)]
            for layer in [self.gate, *self.experts]:
                layer.build(shape)

        def call(self, x):
            gates = ops.softmax(self.gate(x))
            best = ops.one_hot(ops.argmax(gates, -1), 4)
            place = ops.cumsum(best, 0) * best
            taken = best * ops.cast(place <= 4, best.dtype)
            self.add_loss(0.1 * ops.sum(ops.mean(best, 0) * ops.mean(gates, 0)))
            outputs = ops.stack([expert(x) for expert in self.experts], 1)
            return ops.sum(outputs * (gates * taken)[..., None], 1)

    return compiled(net(Experts()))


def _policy(name, optimizer=sgd):
    def build():
        keras.config.set_dtype_policy(name)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                kl.Dense(8, "tanh"),
                kl.BatchNormalization(),
                kl.Dense(3, dtype="float32"),
            ]
        )
        return compiled(model, "mse", optimizer())

    return build


# Rounding of half precision is larger than what is compared: see `rounding_of`.
add("mixed_bfloat16", "models", _policy("mixed_bfloat16"))
add("mixed_float16", "models", _policy("mixed_float16"))


@case()
def remat():
    with keras.RematScope(mode="full"):
        layer = kl.Dense(8, "tanh")
    return compiled(net(layer, kl.BatchNormalization()))


@case(x="images", y=lambda: (np.sum(DATA["images"](), -1, keepdims=True) > 0).astype("float32"))
def segmentation():
    model = keras.Sequential(
        [keras.Input((6, 6, 2)), kl.Conv2D(4, 3, padding="same", activation="relu"),
         kl.BatchNormalization(), kl.Conv2D(1, 1, activation="sigmoid")]
    )  # fmt: skip
    return compiled(model, keras.losses.Dice(), metrics=[keras.metrics.BinaryIoU([0, 1], 0.5)])


@case(y="positive", predict=False)
def sampled_output():
    """The model's output is drawn with a generator of seeds, in training and afterwards."""

    class Draws(kl.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(3)

        def call(self, z):
            return z + 0.3 * keras.random.normal(ops.shape(z), seed=self.seeds)

    return compiled(net(kl.Dense(5), Draws()))
