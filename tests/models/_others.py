"""Models of keras.applications, keras-rs and other packages, in small sizes, and a GAN."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import keras_climate.forecasting as forecasting
import keras_climate.weather as weather
import keras_rs
import numpy as np
from _case import Case
from k3im.cait_1d import CAiT_1DModel
from k3im.convmixer_1d import ConvMixer1DModel
from k3im.eanet_1d import EANet1DModel
from k3im.fnet_1d import FNet1DModel
from k3im.gmlp_1d import gMLP1DModel
from k3im.mlp_mixer_1d import Mixer1DModel
from k3im.simple_vit_3d import SimpleViT3DModel
from k3im.vit_1d import ViT1DModel
from keras import layers, ops
from keras_bio.dna.dnabert.modeling import DNABERTModel
from keras_bio.dna.hyena.modeling import HyenaDNAModel
from keras_bio.protein.esm2.modeling import ESM2Model
from medicai.models import UNETR, UNet
from mingru_keras import MinGRU

_IMAGE = (32, 32, 3)


def _sgd() -> Any:
    return keras.optimizers.SGD(0.01, momentum=0.9)


# keras.applications


def _application(name: str, size: int = 32, **options: Any) -> Case:
    cls = getattr(keras.applications, name)
    return Case(
        name,
        "keras",
        lambda: cls(weights=None, input_shape=(size, size, 3), classes=5, **options),
        classes=5,
        amplifies=name not in ("VGG16", "ConvNeXtTiny"),  # the others normalize batches many times
    )


def _applications() -> Iterator[Case]:
    for name in ("MobileNet", "MobileNetV2", "MobileNetV3Small", "MobileNetV3Large"):
        yield _application(name)
    for name in ("VGG16", "ResNet50", "ResNet50V2", "DenseNet121", "NASNetMobile"):
        yield _application(name)
    for name in ("Xception", "InceptionV3", "InceptionResNetV2"):
        yield _application(name, 75)
    for name in ("ConvNeXtTiny", "EfficientNetB0", "EfficientNetV2B0"):
        yield _application(name)


# keras-rs


def _categories(prefix: str, count: int) -> list[Any]:
    return [keras.Input((), dtype="int32", name=f"{prefix}{i}") for i in range(count)]


def _dlrm() -> Any:
    numbers = keras.Input((4,), name="numbers")
    ids = _categories("id", 3)
    features = [layers.Embedding(16, 8)(x) for x in ids]
    features.append(layers.Dense(8, "relu")(numbers))
    together = keras_rs.layers.DotInteraction()(features)
    hidden = layers.Dense(8, "relu")(layers.Concatenate()([together, features[-1]]))
    return keras.Model([numbers, *ids], layers.Dense(2, "softmax")(hidden))


def _deep_and_cross() -> Any:
    ids = _categories("id", 3)
    x = layers.Concatenate()([layers.Embedding(16, 8)(x) for x in ids])
    crossed = keras_rs.layers.FeatureCross(projection_dim=4)(x)
    crossed = keras_rs.layers.FeatureCross()(x, crossed)
    deep = layers.Dense(16, "relu")(x)
    return keras.Model(ids, layers.Dense(1)(layers.Concatenate()([crossed, deep])))


def _embed_reduce() -> Any:
    ids = keras.Input((5,), dtype="int32", name="ids")
    return keras.Model(ids, layers.Dense(1)(keras_rs.layers.EmbedReduce(16, 8)(ids)))


def _distributed_embedding() -> Any:
    table = keras_rs.layers.TableConfig("table", vocabulary_size=16, embedding_dim=8)
    features = {
        name: keras_rs.layers.FeatureConfig(name, table, (None, 5), (None, 8))
        for name in ("seen", "bought")
    }
    inputs = {name: keras.Input((5,), dtype="int32", name=name) for name in features}
    outputs = keras_rs.layers.DistributedEmbedding(features)(inputs)
    joined = layers.Concatenate()([outputs[name] for name in sorted(outputs)])
    return keras.Model(inputs, layers.Dense(1)(joined))


def _two_towers() -> Any:
    ids = _categories("id", 2)
    towers = [layers.Dense(8)(layers.Embedding(16, 8)(x)) for x in ids]
    return keras.Model(ids, layers.Dot(-1)(towers))


def _retrieval() -> Any:
    """Returns two towers whose loss is a softmax over the other rows of the batch."""
    ids = _categories("id", 2)
    towers = [layers.Dense(8)(layers.Embedding(16, 8)(x)) for x in ids]
    return keras.Model(ids, layers.Concatenate()(towers))


def _in_batch_softmax(y: Any, towers: Any) -> Any:
    query, candidate = ops.split(towers, 2, axis=-1)
    scores = ops.matmul(query, ops.transpose(candidate))
    labels = ops.eye(ops.shape(scores)[0])
    return keras.losses.categorical_crossentropy(labels, scores, from_logits=True)


def _ranking() -> Any:
    items = keras.Input((6, 4), name="items")
    return keras.Model(items, ops.squeeze(layers.Dense(1)(layers.Dense(8, "relu")(items)), -1))


def _keras_rs() -> Iterator[Case]:
    yield Case("DLRM", "keras-rs", _dlrm, classes=2)
    yield Case("Deep and cross network", "keras-rs", _deep_and_cross)
    yield Case("EmbedReduce", "keras-rs", _embed_reduce)
    yield Case("DistributedEmbedding", "keras-rs", _distributed_embedding)
    yield Case("Two towers", "keras-rs", _two_towers)
    yield Case("Two towers, in-batch softmax", "keras-rs", _retrieval, loss=_in_batch_softmax)
    for name in ("ListMLELoss", "PairwiseHingeLoss", "PairwiseLogisticLoss"):
        loss = getattr(keras_rs.losses, name)
        yield Case(f"Ranking with {name}", "keras-rs", _ranking, loss=loss())


# Forecasting, vision, biology, inference


def _wrapped(model: Any, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Returns a functional model around one that is not."""
    inputs = keras.Input(shape, dtype=dtype, name="inputs")
    outputs = model(inputs)
    if isinstance(outputs, dict):
        outputs = outputs["last_hidden_state"]
    return keras.Model(inputs, outputs)


def _bio(cls: Any, **sizes: Any) -> Callable[[], Any]:
    return lambda: _wrapped(cls(**sizes), (8,), "int32")


_BERT_SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_SERIES = {"seq_len": 16, "pred_len": 8, "num_channels": 3}
_ATTENDING = {"d_model": 16, "num_heads": 2, "d_ff": 32, "dropout": 0.0}
_PATCHED = {"seq_len": 16, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": 1}
_HEADED = {**_PATCHED, "heads": 2, "mlp_dim": 32}


def _denoiser() -> Any:
    """Returns the U-Net of a diffusion model: it sees an image with noise, and the time."""
    import bayesflow  # starts JAX

    image = keras.Input((8, 8, 3), name="image")
    time = keras.Input((1,), name="time")
    condition = keras.Input((8, 8, 1), name="condition")
    net = bayesflow.networks.UNet(
        widths=(8, 16), res_blocks=1, attn_stage=(False, True), time_emb_dim=8, groups=4
    )
    return keras.Model([image, time, condition], net((image, time, condition)))


def _min_gru() -> Any:
    words = keras.Input((8,), dtype="int32", name="words")
    x = MinGRU(16)(layers.Embedding(16, 16)(words))
    return keras.Model(words, layers.Dense(5, "softmax")(x[:, -1]))


def _recurrent() -> Any:
    words = keras.Input((8,), dtype="int32", name="words")
    x = layers.Embedding(16, 8, mask_zero=True)(words)
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(x)
    return keras.Model(words, layers.Dense(5, "softmax")(layers.GRU(8)(x)))


def _packages() -> Iterator[Case]:
    yield Case("MinGRU", "mingru-keras", _min_gru, classes=5)
    yield Case(
        "Bidirectional LSTM and GRU with masks",
        "keras",
        _recurrent,
        classes=5,
        inputs={"words": lambda random, shape: np.sort(random.integers(0, 9, shape))[:, ::-1]},
    )
    for name, options in {
        "Autoformer": {**_SERIES, "label_len": 8, **_ATTENDING, "encoder_layers": 1},
        "Informer": {**_SERIES, "label_len": 8, **_ATTENDING, "encoder_layers": 1},
        "DLinear": {**_SERIES, "kernel_size": 5},
        "NBeats": {"seq_len": 16, "pred_len": 8, "num_blocks_per_stack": 1, "hidden_dim": 16},
        "PatchTST": {
            **_SERIES,
            "patch_len": 4,
            "stride": 4,
            "d_model": 16,
            "depth": 1,
            "num_heads": 2,
            "dropout": 0.0,
        },
        "TemporalFusionTransformer": {
            "encoder_len": 8,
            "decoder_len": 4,
            "hidden_dim": 16,
            "num_heads": 2,
            "dropout": 0.0,
        },
        "TimesNet": {**_SERIES, "d_model": 8, "d_ff": 8, "num_layers": 1, "num_kernels": 2},
    }.items():
        build = functools.partial(getattr(forecasting, name), **options)
        yield Case(name, "keras-climate", build)
    for name, options in {
        "ConvLSTMNowcaster": {"input_shape": (4, 8, 8, 1), "pred_steps": 2, "filters": (4, 4)},
        "FourCastNet": {
            "img_size": (8, 16),
            "patch_size": 4,
            "in_chans": 2,
            "out_chans": 2,
            "embed_dim": 16,
            "depth": 1,
            "num_blocks": 2,
        },
    }.items():
        yield Case(name, "keras-climate", functools.partial(getattr(weather, name), **options))
    for build, options in (
        (CAiT_1DModel, {**_HEADED, "dim_head": 8, "cls_depth": 1}),
        (EANet1DModel, _HEADED),
        (FNet1DModel, _PATCHED),
        (Mixer1DModel, {**_PATCHED, "hidden_units": 16}),
        (ViT1DModel, {**_HEADED, "dim_head": 8}),
        (gMLP1DModel, _PATCHED),
        (
            ConvMixer1DModel,
            {"seq_len": 16, "filters": 8, "depth": 1, "kernel_size": 3, "num_classes": 5},
        ),
        (
            SimpleViT3DModel,
            {
                "image_size": 8,
                "image_patch_size": 4,
                "frames": 2,
                "frame_patch_size": 2,
                "num_classes": 5,
                "dim": 12,
                "depth": 1,
                "heads": 2,
                "mlp_dim": 32,
                "dim_head": 8,
            },
        ),
    ):
        yield Case(build.__name__, "k3im", functools.partial(build, **options))
    yield Case("DNABERTModel", "keras-bio", _bio(DNABERTModel, **_BERT_SIZES))
    yield Case("ESM2Model", "keras-bio", _bio(ESM2Model, **_BERT_SIZES))
    yield Case(
        "HyenaDNAModel",
        "keras-bio",
        _bio(HyenaDNAModel, vocab_size=16, d_model=16, n_layer=1, d_inner=32, max_seq_len=10),
    )
    yield Case(
        "UNet",
        "medicai",
        lambda: UNet(
            input_shape=_IMAGE, encoder_name="resnet18", encoder_depth=3, decoder_filters=(8, 8, 8)
        ),
    )
    yield Case(
        "UNETR", "medicai", lambda: UNETR(input_shape=(32, 32, 32, 1), encoder_name="vit_base")
    )
    yield Case("UNet of a diffusion model", "bayesflow", _denoiser)


# A model with a training step of its own


@keras.saving.register_keras_serializable("tests")
class _Gan(keras.Model):
    """Two networks that are trained in turns, each with its gradients and the loss of the other."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.generator = keras.Sequential(
            [keras.Input((4,)), layers.Dense(16, "relu"), layers.Dense(8)], name="generator"
        )
        self.discriminator = keras.Sequential(
            [keras.Input((8,)), layers.Dense(16, "leaky_relu"), layers.Dense(1)],
            name="discriminator",
        )
        self.built = True

    @property
    def input(self) -> Any:
        return {"noise": keras.KerasTensor((None, 4), name="noise"),
                "real": keras.KerasTensor((None, 8), name="real")}  # fmt: skip

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.generator(inputs["noise"])

    def compute_output_shape(self, shapes: Any) -> Any:
        return (shapes["noise"][0], 8)

    def _both(self, trainable: Any, non_trainable: Any, data: Any) -> tuple[Any, Any]:
        mapping = [*zip(self.trainable_variables, trainable, strict=True),
                   *zip(self.non_trainable_variables, non_trainable, strict=True)]  # fmt: skip
        with keras.StatelessScope(mapping):
            fake = self.generator(data["noise"])
            loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
            on_fake, on_real = self.discriminator(fake), self.discriminator(data["real"])
            of_generator = loss_of(ops.ones_like(on_fake), on_fake)
            of_discriminator = loss_of(ops.zeros_like(on_fake), on_fake) + loss_of(
                ops.ones_like(on_real), on_real
            )
        return of_generator, of_discriminator

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        count = len(self.generator.trainable_variables)

        def total(trainable: Any) -> Any:
            # What is differentiated by the one network is a constant for the other.
            fixed = [jax.lax.stop_gradient(value) for value in trainable]
            of_generator, _ = self._both([*trainable[:count], *fixed[count:]], non_trainable, data)
            _, of_discriminator = self._both(
                [*fixed[:count], *trainable[count:]], non_trainable, data
            )
            return of_generator + of_discriminator, (of_generator, of_discriminator)

        (loss, parts), gradients = jax.value_and_grad(total, has_aux=True)(list(trainable))
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs = {"loss": loss, "generator": parts[0], "discriminator": parts[1]}
        return logs, (trainable, non_trainable, optimizer, metrics)

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, metrics = state
        of_generator, of_discriminator = self._both(trainable, non_trainable, data)
        return {"loss": of_generator + of_discriminator}, (trainable, non_trainable, metrics)


def _own_steps() -> Iterator[Case]:
    yield Case("GAN", "our own", _Gan, own_loss=True)


# Optimizers and their options


def _mlp() -> Any:
    inputs = keras.Input((8,), name="inputs")
    hidden = layers.LayerNormalization()(layers.Dense(16, "tanh")(inputs))
    return keras.Model(inputs, layers.Dense(5, "softmax")(hidden))


def _optimizers() -> Iterator[Case]:
    for name, build in {
        "Adam": lambda: keras.optimizers.Adam(1e-3),
        "AdamW, clipped by the global norm": lambda: keras.optimizers.AdamW(
            1e-3, global_clipnorm=0.1
        ),
        "Lion": lambda: keras.optimizers.Lion(1e-4),
        "Adafactor": lambda: keras.optimizers.Adafactor(1e-3),
        "RMSprop with EMA": lambda: keras.optimizers.RMSprop(1e-3, use_ema=True),
        "SGD with accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        "Adam with loss scaling": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(1e-3)
        ),
        "Muon": lambda: keras.optimizers.Muon(1e-3),
    }.items():
        yield Case(f"Dense layers, {name}", "keras", _mlp, classes=5, optimizer=build)


def cases() -> Iterator[Case]:
    """Yields the models."""
    yield from _applications()
    yield from _keras_rs()
    yield from _packages()
    yield from _own_steps()
    yield from _optimizers()
