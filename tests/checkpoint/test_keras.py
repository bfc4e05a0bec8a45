"""Keras objects in checkpoints."""

import json

import keras
import numpy as np
import pytest

import distributary as dist
from distributary.checkpoint import Checkpoint

X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def _model(strategy):
    with strategy.scope():
        tower = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
        layers = [keras.layers.Dense(4), tower, keras.layers.Dense(1, name="head")]
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
        return model, keras.metrics.MeanSquaredError()


def _fit(model, x, y, **kwargs):
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **kwargs)


def test_a_model_goes_on_bit_for_bit_from_a_checkpoint_in_the_middle_of_an_epoch(
    strategy_of, tmp_path
):
    model, metric = _model(strategy_of(2))
    metric.update_state(Y, 0 * Y)
    # The optimizer is saved under its own name, although the model has it as well.
    checkpoint = Checkpoint(model=model, optimizer=model.optimizer, metric=metric)

    def save(batch, logs):
        if batch == 1:
            checkpoint.write(tmp_path / "ckpt")

    _fit(model, X, Y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=save)])
    # Keras numbers these layers on; their names in a checkpoint are the same.
    other, other_metric = _model(strategy_of(2))

    with pytest.raises(ValueError, match="Only in the checkpoint: optimizer/iteration"):
        Checkpoint(model=other, metric=other_metric).restore(tmp_path / "ckpt")
    restored = Checkpoint(model=other, optimizer=other.optimizer, metric=other_metric)
    restored.restore(tmp_path / "ckpt")

    assert int(other.optimizer.iterations.value) == 2
    assert float(other_metric.result()) == float(metric.result()) > 0
    _fit(other, X[16:], Y[16:])
    variables = [(model.variables, other.variables)]
    variables += [(model.optimizer.variables, other.optimizer.variables)]
    for expected, got in variables:
        for a, b in zip(expected, got, strict=True):
            np.testing.assert_array_equal(np.asarray(a.value), np.asarray(b.value), err_msg=a.path)
    index = json.loads((tmp_path / "ckpt" / "checkpoint.json").read_text(encoding="utf-8"))
    names = set(index["entries"])
    assert {
        "model/dense/kernel",
        "model/sequential/batch_normalization/moving_mean",
        "model/sequential/dropout/seed_generator_state",
        "model/head/kernel",
        "model/dense_1/bias",
        "optimizer/iteration",
        "optimizer/momentum.7",
        "metric/total",
    } <= names


class _Odd(keras.layers.Layer):
    """A layer of weights without names, some of dtypes that JAX stores in 32 bits."""

    def build(self, shape):
        for dtype in ("float32", "int64", "uint64", "float64", "bfloat16", "bool", "int8"):
            self.add_weight(shape=(2, 3), dtype=dtype, initializer="ones", trainable=False)
        self.built = True

    def call(self, x):
        return x


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_names_do_not_count_the_objects_of_the_process(strategy, tmp_path):
    def make():
        with strategy.scope():
            cells = keras.layers.Bidirectional(keras.layers.GRU(2)), keras.layers.Dense(1)
            model = keras.Sequential([keras.Input((3, 2)), _Odd(), *cells, _Odd()])
            return model, keras.metrics.MeanIoU(2)

    model, metric = make()
    path = Checkpoint(model=model, metric=metric).save(tmp_path / "ckpt")
    other, metric = make()
    other.set_weights([np.zeros_like(w) for w in other.get_weights()])

    Checkpoint(model=other, metric=metric).restore(path)

    for restored, saved in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(restored, saved)


@pytest.mark.parametrize("sharded", ["parameters", "optimizer_state"])
def test_parts_with_one_element_and_padding_are_saved(sharded, tmp_path):
    options = {f"experimental_shard_{sharded}": True}
    with dist.MirroredStrategy([f"CPU:{i}" for i in range(4)], **options).scope():
        # Of the 10 and 7 channels, the last device with any has one.
        convolutions = keras.layers.Conv2D(10, 3), keras.layers.Conv2D(7, 3)
        model = keras.Sequential([keras.Input((6, 6, 3)), *convolutions])
        model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    for variable in (*model.weights, *model.optimizer.variables[2:]):
        variable.assign(random.normal(size=variable.shape))
    variables = [*model.weights, *model.optimizer.variables]
    values = [np.array(variable) for variable in variables]
    checkpoint = Checkpoint(model=model)

    path = checkpoint.save(tmp_path / "ckpt")
    for variable in variables:
        variable.assign(np.zeros(variable.shape))
    checkpoint.restore(path)

    for variable, value in zip(variables, values, strict=True):
        np.testing.assert_array_equal(variable, value)
