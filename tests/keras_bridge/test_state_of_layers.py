"""What layers keep besides weights: that of one device in `fit`, combined by `run`."""

import keras
import numpy as np
import pytest
from keras import layers as kl, ops

import distributary as dist
from distributary.errors import InvalidValueError

_RANDOM = np.random.default_rng(0)
_X = _RANDOM.normal(size=(8, 6)).astype(np.float32)
_Y = _RANDOM.normal(size=(8, 3)).astype(np.float32)


@keras.saving.register_keras_serializable("tests")
class Keeping(kl.Layer):
    """Keeps what each update makes of its state and the input; `shapes` hold shape and dtype."""

    def __init__(self, updates, shapes):
        super().__init__()
        self._updates = updates
        self._shapes = shapes

    def build(self, input_shape):
        self.state = {
            name: self.add_weight(
                shape=shape, initializer="zeros", trainable=False, dtype=dtype, name=name
            )
            for name, (shape, dtype) in self._shapes.items()
        }

    def call(self, x):
        for name, update in self._updates.items():
            self.state[name].assign(update(self.state[name].value, ops.stop_gradient(x)))
        return x


def _nearest(x):
    """Returns which of three fixed codes is the nearest to each row, as one-hot rows."""
    codes = np.linspace(-1, 1, 18, dtype=np.float32).reshape(3, 6)
    distances = ops.sum(ops.square(x[:, None] - codes), -1)
    return ops.one_hot(ops.argmin(distances, -1), 3)


def _over_all_replicas(x):
    context = dist.get_replica_context()
    return x if context is None else context.all_reduce("SUM", x)


# By name: the update, and the shape and dtype of the state.
_STATES = {
    "sums": (
        lambda s, x: 0.9 * s + (1 - 0.9) * ops.matmul(ops.transpose(_nearest(x)), x),
        ((3, 6), "float32"),
    ),
    "counts": (
        lambda s, x: s + ops.sum(ops.cast(_nearest(x), "int32"), 0),
        ((3,), "int32"),
    ),
    "flag": (lambda s, x: ops.any(x[:, 0] > 1.0), ((), "bool")),
    "segments": (
        lambda s, x: s + ops.segment_sum(x, ops.argmax(_nearest(x), -1), 3),
        ((3, 6), "float32"),
    ),
    "mean": (lambda s, x: 0.9 * s + 0.1 * ops.mean(x, 0), ((6,), "float32")),
    "moments": (
        lambda s, x: ops.matmul(ops.transpose(x), x) / (ops.shape(x)[0] - 1),
        ((6, 6), "float32"),
    ),
    "sum over all replicas": (
        lambda s, x: s + _over_all_replicas(ops.sum(x, 0)),
        ((6,), "float32"),
    ),
    "steps": (lambda s, x: s + 1, ((), "float32")),
}


def _model(strategy, updates, shapes):
    with strategy.scope():
        layer = Keeping(updates, shapes)
        model = keras.Sequential([keras.Input((6,)), layer, kl.Dense(3)], name="keeper")
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return model, layer


def _fitted(strategy, num_rows):
    """Returns what a layer keeps on each device after two steps of `fit`."""
    updates, shapes = ({name: case[i] for name, case in _STATES.items()} for i in (0, 1))
    model, layer = _model(strategy, updates, shapes)
    model.fit(_X[:num_rows], _Y[:num_rows], epochs=2, shuffle=False, verbose=0)
    return {
        name: [np.asarray(shard.data) for shard in state.value.addressable_shards]
        for name, state in layer.state.items()
    }


@pytest.mark.parametrize("num_rows", [8, 7])
def test_fit_keeps_what_one_device_keeps(num_rows, strategy_of):
    expected = _fitted(strategy_of(1), num_rows)

    kept = _fitted(strategy_of(2), num_rows)

    for name, copies in kept.items():
        assert len(copies) == 2
        assert np.any(copies[0]), name
        for copy in copies:
            np.testing.assert_allclose(copy, expected[name][0], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("aggregation", ["only_first_replica", "mean", "sum"])
def test_an_aggregation_of_state_counts_for_run_and_not_for_fit(aggregation, strategy):
    def step(method):
        model, layer = _model(
            strategy, {"state": lambda s, x: s + ops.mean(x, 0)}, {"state": ((6,), "float32")}
        )
        layer.state["state"]._aggregation = aggregation
        if method == "fit":
            model.fit(_X, _Y, batch_size=8, shuffle=False, verbose=0)
        else:
            data = dist.data.Dataset.from_tensor_slices(_X).batch(8)
            strategy.run(layer, args=(next(iter(strategy.experimental_distribute_dataset(data))),))
        return np.asarray(layer.state["state"].value)

    np.testing.assert_allclose(step("fit"), _X.mean(0), rtol=1e-5, atol=1e-7)
    if aggregation == "sum":
        with pytest.raises(
            InvalidValueError, match=r"has aggregation 'sum'.*all_reduce\('SUM', value\)"
        ):
            step("run")
    else:
        rows = _X if aggregation == "mean" else _X[:4]
        np.testing.assert_allclose(step("run"), rows.mean(0), rtol=1e-5, atol=1e-7)
