"""Every kind of data that Keras takes trains under a strategy as on one device."""

import contextlib
import functools
import warnings

import jax.numpy as jnp
import keras
import numpy as np
import pytest

from distributary.data import Dataset
from tests.keras_bridge import small

_ROWS = 14  # with batches of 4, the last one has 2


def _batches(rows=_ROWS, size=4):
    x, y = small.data(rows)
    for start in range(0, rows, size):
        yield x[start : start + size], y[start : start + size]


class _Batches(keras.utils.PyDataset):
    """Batches of any sizes, by index."""

    def __init__(self, batches, **kwargs):
        super().__init__(**kwargs)
        self.batches = list(batches)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def _trained(strategy, data, build=small.model, **kwargs):
    model = build(strategy)
    sizes = {} if len(data) == 1 else {"batch_size": 4}
    options = {"epochs": 2, "verbose": 0, "shuffle": False, **sizes, **kwargs}
    return model, model.fit(*data, **options).history


@functools.cache
def _alone():
    """What one device makes of the arrays."""
    return _trained(None, small.data(_ROWS), validation_data=small.data(6))


def _assert_equals_arrays_on_one_device(strategy, data, **kwargs):
    """Other forms of the same numbers train a model to the same weights."""
    trained = _trained(strategy, data, **{"validation_data": small.data(6), **kwargs})
    return _compare(trained, _alone(), small.model)


def _assert_equals_one_device(strategy, make_data, *, build=small.model, **kwargs):
    """`make_data` returns the positional arguments of `fit`, anew at each call."""
    both = [_trained(s, make_data(), build, **kwargs) for s in (strategy, None)]
    return _compare(*both, build)


def _compare(trained, alone, build):
    models, (got, expected) = zip(trained, alone, strict=True)
    small.assert_equal_logs(got, expected)
    initial = build(None)
    for one, other, before in zip(*(m.get_weights() for m in (*models, initial)), strict=True):
        np.testing.assert_allclose(one, other, **small.CLOSE)
        assert not np.allclose(one, before, **small.CLOSE)
    steps = [int(m.optimizer.iterations) for m in models]
    assert steps[0] == steps[1] > 0
    return models


def _as_jax():
    return tuple(jnp.asarray(a) for a in small.data(_ROWS))


def _as_float64():
    return tuple(a.astype(np.float64) for a in small.data(_ROWS))


def _as_pandas():
    pandas = pytest.importorskip("pandas")
    return tuple(pandas.DataFrame(a) for a in small.data(_ROWS))


@pytest.mark.parametrize("make_data", [_as_jax, _as_float64, _as_pandas])
def test_arrays_equal_one_device(make_data, strategy_of):
    models = _assert_equals_arrays_on_one_device(strategy_of(2), make_data())

    results = [model.predict(make_data()[0], batch_size=4, verbose=0) for model in models]
    assert results[0].shape == (_ROWS, 1)
    np.testing.assert_allclose(*results, **small.CLOSE)


# Of Keras 3.15 with JAX 0.12, without a strategy too.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64 requested in ShapeDtypeStr")
@pytest.mark.parametrize("sample_weight", [None, np.linspace(0, 1, _ROWS)], ids=["none", "array"])
def test_batches_with_sample_weights_or_none_equal_one_device(sample_weight, strategy_of):
    def batches():
        for index, (x, y) in enumerate(_batches()):
            rows = slice(4 * index, 4 * index + 4)
            yield x, y, None if sample_weight is None else sample_weight[rows]

    _assert_equals_one_device(strategy_of(2), lambda: (_Batches(batches()),))


@pytest.mark.parametrize("steps", [{}, {"steps_per_epoch": 6}], ids=["unknown", "fewer"])
def test_a_generator_that_ends_warns_as_on_one_device(steps, strategy_of):
    messages, losses = [], []
    for strategy in (strategy_of(2), None):
        model = small.model(strategy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(_batches(), shuffle=False, verbose=0, **steps)
        messages.append([str(w.message) for w in caught])
        losses += history.history["loss"]
        assert int(model.optimizer.iterations) == 4

    assert messages[0] == messages[1]
    # Keras 3.16 does not warn if nobody has said how many batches there are.
    assert any("ran out of data" in message for message in messages[0]) or not steps
    np.testing.assert_allclose(*losses, **small.CLOSE)


def _accumulating(strategy):
    model = small.model(strategy)
    with strategy.scope() if strategy else contextlib.nullcontext():
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


# With threads, Keras begins an epoch after the batches at which it has looked before, whose number
# depends on the device. To add up gradients hides the order of the 4 batches of an epoch.
@pytest.mark.parametrize(
    ("workers", "build", "shuffle"), [(1, small.model, True), (2, _accumulating, False)]
)
def test_a_py_dataset_equals_one_device(workers, build, shuffle, strategy_of):
    models = _assert_equals_one_device(
        strategy_of(2),
        lambda: (_Batches(_batches(), workers=workers),),
        build=build,
        shuffle=shuffle,
        validation_data=_Batches(_batches(6)),
    )

    data = _Batches(_batches(), workers=workers)
    results = [model.predict(data, verbose=0) for model in models]
    np.testing.assert_allclose(*results, **small.CLOSE)


def _outcome(function, model):
    """What a call gives, or the kind of error; numbers may be NaN."""
    try:
        return function(model)
    except Exception as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:.*(empty|divide|invalid).*:RuntimeWarning")
def test_an_empty_last_batch_does_what_it_does_on_one_device(strategy_of):
    x, y = small.data(8)
    batches = _Batches([(x[:4], y[:4]), (x[4:], y[4:]), (x[:0], y[:0])])
    models = [small.model(strategy_of(2)), small.model(None)]

    for call in (
        lambda model: model.predict(batches, verbose=0),
        lambda model: model.evaluate(batches, verbose=0),
        lambda model: model.fit(batches, shuffle=False, verbose=0).history["loss"],
    ):
        got, expected = (_outcome(call, model) for model in models)
        if isinstance(expected, type):
            assert got is expected
        else:
            np.testing.assert_allclose(got, expected, **small.CLOSE)


def test_sparse_matrices_of_scipy_train_as_in_keras(strategy_of):
    sparse = pytest.importorskip("scipy.sparse")
    x, y = small.data(_ROWS)
    x[x < 0] = 0
    matrix = sparse.csr_matrix(x)
    options = {"batch_size": 6, "verbose": 0}
    results = []
    for strategy in (None, strategy_of(3)):
        model, history = _trained(strategy, (matrix, y), validation_data=(matrix, y), **options)
        results.append(
            [
                *history.values(),
                model.evaluate(matrix, y, **options),
                model.predict(matrix, **options),
                model.get_weights()[0],
            ]
        )

    for own, expected in zip(*results, strict=True):
        np.testing.assert_allclose(own, expected, **small.CLOSE)


class _Refilled(keras.utils.PyDataset):
    """Batches that are all read into the same two arrays."""

    def __init__(self, batches):
        super().__init__()
        self._batches = batches
        self._arrays = [np.empty_like(array) for array in batches[0]]

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        for array, content in zip(self._arrays, self._batches[index], strict=True):
            array[:] = content
        return tuple(self._arrays)

    def generator(self):
        for index in range(len(self)):
            yield self[index]


def _trained_on_slow_steps(strategy, *data, **options):
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(0)
        dense = [keras.layers.Dense(256, "tanh") for _ in range(4)]
        model = keras.Sequential([keras.Input((512,)), *dense, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", **options)
    model.fit(*data, batch_size=64, steps_per_epoch=5, shuffle=False, verbose=0)
    return model.get_weights()


@functools.cache
def _slow_batches():
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(5, 64, size)).astype(np.float32) for size in (512, 1))
    return list(zip(x, y, strict=True)), _trained_on_slow_steps(None, *map(np.concatenate, (x, y)))


@pytest.mark.parametrize(
    ("source", "steps_per_execution", "num_replicas"),
    [("PyDataset", 1, 1), ("generator", 3, 2), ("Dataset", 3, 2)],
)
def test_a_producer_may_fill_the_same_arrays_again(
    source, steps_per_execution, num_replicas, strategy_of
):
    contents, expected = _slow_batches()
    batches = _Refilled(contents)
    if source != "PyDataset":
        batches = batches.generator() if source == "generator" else Dataset.from_source(batches)

    got = _trained_on_slow_steps(
        strategy_of(num_replicas), batches, steps_per_execution=steps_per_execution
    )

    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, **small.CLOSE)


@pytest.mark.parametrize(("column", "dtype"), [("age", None), ("age", "category"), ("city", None)])
def test_text_in_pandas_is_named(column, dtype, strategy_of):
    pandas = pytest.importorskip("pandas")
    numbers = pandas.DataFrame({"size": np.ones(8), "age": np.ones(8)})
    text = pandas.Series(["a", "b"] * 4, name=column, dtype=dtype)
    data = (numbers.assign(age=text), np.ones(8)) if column == "age" else (numbers, text)
    with strategy_of(2).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    problem = f"with strings or objects in column '{column}', which can"
    with pytest.raises(TypeError, match=problem):
        model.fit(*data, verbose=0)
