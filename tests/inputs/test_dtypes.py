"""NumPy arrays in dtypes that JAX does not hold."""

import warnings

import keras
import numpy as np
import pytest

import distributary as dist
import distributary.compat.tensorflow as tf
from distributary.data import Dataset
from distributary.errors import DistributaryWarning

ROWS = np.arange(8).reshape(4, 2)


def _sums(strategy, values):
    results = [strategy.run(lambda x: x.sum(), args=(value,)) for value in values]
    return sum(float(strategy.reduce("SUM", result, axis=None)) for result in results)


def _assigned(strategy, rows):
    with strategy.scope():
        variable = dist.Variable(rows)
    variable.assign(rows)
    return float(variable.assign_add(rows).value().sum()) / 2


def _model(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile(keras.optimizers.SGD(0.0), "mae")
    return model


def _fitted(strategy, *data):
    history = _model(strategy).fit(*data, shuffle=False, steps_per_epoch=1, verbose=0).history
    return history["loss"][0] - 4 + ROWS.sum()  # the mean of the second column, 1, 3, 5, 7


def _evaluated(strategy, rows):
    model = _model(strategy)
    model.train_on_batch(rows, rows[:, :1])
    model.set_weights([np.ones((2, 1), rows.dtype), np.zeros(1, rows.dtype)])
    assert model.predict(rows, verbose=0).sum() == ROWS.sum()
    return model.evaluate(rows, rows[:, :1], verbose=0) - 4 + ROWS.sum()


TOTALS = {
    "run": lambda s, rows: _sums(s, [rows]) / s.num_replicas_in_sync,
    "function": lambda s, rows: float(dist.function(lambda x: x.sum())(rows)),
    "batches": lambda s, rows: _sums(s, s.experimental_distribute_dataset([rows])),
    "slices": lambda s, rows: _sums(
        s, s.experimental_distribute_dataset(Dataset.from_tensor_slices(rows).batch(4))
    ),
    "generator": lambda s, rows: _sums(
        s, s.experimental_distribute_dataset(Dataset.from_generator(lambda: iter(rows)).batch(4))
    ),
    "tf.constant": lambda s, rows: float(tf.reduce_sum(tf.constant(rows))),
    "map": lambda s, rows: sum(
        float(x) for x in tf.data.Dataset.from_tensor_slices(rows).map(tf.reduce_sum)
    ),
    "Variable": _assigned,
    "fit of arrays": lambda s, rows: _fitted(s, rows, rows[:, :1]),
    "fit of a generator": lambda s, rows: _fitted(s, ((rows, rows[:, :1]) for _ in range(3))),
    "fit of a dataset": lambda s, rows: _fitted(
        s, Dataset.from_tensor_slices((rows, rows[:, :1])).batch(4)
    ),
    "evaluate": _evaluated,
}


@pytest.mark.parametrize(
    ("entry", "dtype"),
    [*((entry, ">f4") for entry in TOTALS), ("run", ">i8"), ("generator", ">i8")],
)
def test_the_other_byte_order_is_converted(entry, dtype, strategy_of):
    assert TOTALS[entry](strategy_of(2), ROWS.astype(dtype)) == ROWS.sum()


@pytest.mark.parametrize(
    ("array", "value"),
    [
        (np.array([[1, 2], [3, 2**40]]), "1099511627776 at [1, 1]"),
        (np.array([1.0, 1e300]), "1e+300 at [1]"),
        (np.array([2, 2**32], np.uint64), "4294967296 at [1]"),
    ],
)
@pytest.mark.parametrize("enter", ["run", "dataset"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # by NumPy
def test_a_value_that_32_bits_cannot_hold_is_named_once(
    enter, array, value, strategy_of, monkeypatch
):
    monkeypatch.setattr("distributary.tracing._narrowing._told", set())
    strategy = strategy_of(1)

    def loop():
        values = [array] if enter == "run" else strategy.experimental_distribute_dataset([array])
        return [strategy.run(lambda x: x, args=(value,)) for value in values]

    with pytest.warns(DistributaryWarning) as warned:
        loop()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DistributaryWarning)
        loop()

    told = [str(one.message) for one in warned if one.category is DistributaryWarning]
    assert [value in message for message in told] == [True]


def test_values_that_fit_are_not_warned_of(strategy_of, monkeypatch):
    monkeypatch.setattr("distributary.tracing._narrowing._told", set())
    strategy = strategy_of(1)

    for array in (np.array([np.nan, np.inf, 0.1, 3e38]), np.array([-(2**31), 2**31 - 1])):
        strategy.run(lambda x: x, args=(array,))
