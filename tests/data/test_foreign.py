"""Datasets of other libraries; each part runs where its library is installed.

pip install -e '.[dev,test-data]' && pytest tests/data/test_foreign.py
"""

import contextlib
import functools
import gc

import jax
import keras
import numpy as np
import pytest

from distributary.data import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset
from tests.interpreters import run_python

_X = np.arange(20, dtype=np.float32).reshape(10, 2)
_Y = np.arange(10, dtype=np.int32)


def _expected(batch_size=4):
    return [(_X[i : i + batch_size], _Y[i : i + batch_size]) for i in range(0, 10, batch_size)]


def _check(strategy, source):
    """Distributes batches from a source, twice, from a function, and fits as on one device."""
    expected = _expected()
    distributed = strategy.experimental_distribute_dataset(source)
    from_function = strategy.distribute_datasets_from_function(lambda _: source)
    for _ in range(2):
        seen = [strategy.gather(batch, axis=0) for batch in distributed]
        assert len(seen) == len(expected)
        for batch, wanted in zip(seen, expected, strict=True):
            assert type(batch) is type(wanted)
            jax.tree.map(np.testing.assert_allclose, batch, wanted)
    assert len(list(from_function)) == -(-len(expected) // strategy.num_replicas_in_sync)

    weights = []
    alone = {"x": _X, "y": _Y, "batch_size": 4}
    for scope, data in ((strategy.scope(), {"x": source}), (contextlib.nullcontext(), alone)):
        with scope:
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.layers[0].set_weights([np.ones((2, 1)), np.zeros(1)])
            model.compile(keras.optimizers.SGD(0.001), "mse")
        model.fit(**data, epochs=2, verbose=0, shuffle=False)
        weights.append(model.get_weights())
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(close, *weights)


# TensorFlow changes the environment when it is imported.
@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip("tensorflow")


def test_tf_data(tf, strategy):
    dataset = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(4)

    _check(strategy, dataset)
    assert Dataset.from_source(dataset).cardinality() == 3
    assert Dataset.from_source(dataset.repeat()).cardinality() == INFINITE_CARDINALITY
    for tensor in (tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[1, 0]])):
        dataset = tf.data.Dataset.from_tensors({"x": tensor})
        with pytest.raises(TypeError, match=r"yields .*; sparse and ragged tensors"):
            strategy.experimental_distribute_dataset(dataset)


def test_torch_loader(strategy):
    torch = pytest.importorskip("torch")
    pairs = torch.utils.data.TensorDataset(torch.tensor(_X), torch.tensor(_Y))

    _check(strategy, torch.utils.data.DataLoader(pairs, batch_size=4))
    with_workers = torch.utils.data.DataLoader(
        pairs, batch_size=4, num_workers=2, multiprocessing_context="spawn"
    )
    assert len(list(strategy.experimental_distribute_dataset(with_workers))) == 3
    rows = Dataset.from_source(pairs)
    np.testing.assert_array_equal(next(iter(rows.shuffle(10, seed=0).batch(10)))[1].sum(), 45)
    with pytest.raises(ValueError, match="batch_size=None"):
        single = torch.utils.data.DataLoader(pairs, batch_size=None)
        strategy.experimental_distribute_dataset(single)
    with pytest.raises(TypeError, match="not batches"):
        strategy.experimental_distribute_dataset(torch.tensor(_X))


# Keras' own adapter of grain says so at the end of every epoch.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_grain(strategy):
    grain = pytest.importorskip("grain")

    class Source:
        def __len__(self):
            return 10

        def __getitem__(self, i):
            return _X[i], _Y[i]

    mapped = grain.MapDataset.source(Source()).batch(4)
    _check(strategy, mapped)
    _check(strategy, mapped.to_iter_dataset())
    loader = grain.DataLoader(
        data_source=Source(),
        sampler=grain.samplers.SequentialSampler(num_records=10, shard_options=_no_shards(grain)),
        operations=[grain.transforms.Batch(4, drop_remainder=False)],
    )
    _check(strategy, loader)
    assert Dataset.from_source(mapped).cardinality() == 3
    assert Dataset.from_source(mapped.repeat()).cardinality() == INFINITE_CARDINALITY
    assert Dataset.from_source(loader).cardinality() == UNKNOWN_CARDINALITY
    filtered = grain.MapDataset.source(Source()).filter(lambda pair: pair[1] > 5)
    with pytest.raises(ValueError, match="to_iter_dataset"):
        list(Dataset.from_source(filtered))
    gc.collect()  # ends the threads of grain's iterators


def _no_shards(grain):
    return grain.sharding.ShardOptions(shard_index=0, shard_count=1)


# The fingerprint of `datasets` pickles whatever a function refers to.
@pytest.mark.filterwarnings("ignore:Cannot (locate|pickle)")
def test_hugging_face(strategy):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": _X.tolist(), "y": _Y.tolist()})
    pairs = lambda row: (row["x"].astype(np.float32), row["y"].astype(np.int32))

    batched = Dataset.from_source(rows).batch(4).map(pairs)
    _check(strategy, batched)
    _check(strategy, Dataset.from_source(rows.to_iterable_dataset()).batch(4).map(pairs))
    as_dicts = [{"x": x, "y": y} for x, y in _expected()]
    own_batches = strategy.experimental_distribute_dataset(rows.batch(4))
    for batch, wanted in zip(own_batches, as_dicts, strict=True):
        jax.tree.map(np.testing.assert_allclose, strategy.gather(batch, 0), wanted)
    with pytest.raises(ValueError, match="not batched"):
        list(strategy.experimental_distribute_dataset(rows))
    order = next(iter(Dataset.range(10).shuffle(10, seed=3).batch(10)))
    shuffled = next(iter(Dataset.from_source(rows).shuffle(10, seed=3).batch(10)))
    np.testing.assert_array_equal(shuffled["y"], _Y[order])
    with strategy.scope():
        x = keras.Input((2,), name="x")
        model = keras.Model({"x": x}, keras.layers.Dense(1)(x))
    features = rows.remove_columns("y").batch(5)
    assert model.predict(features, verbose=0).shape == (10, 1)
    ragged = datasets.Dataset.from_dict({"x": [[1.0], [1.0, 2.0]]})
    with pytest.raises(ValueError, match="column 'x' holds arrays of shapes"):
        list(Dataset.from_source(ragged).batch(2))


class _Batches:
    epochs = 0

    def __len__(self):
        return 3

    def __getitem__(self, number):
        return _expected()[number]


class _PyDataset(_Batches, keras.utils.PyDataset):
    def on_epoch_end(self):
        self.epochs += 1


@pytest.mark.parametrize("kind", [_Batches, _PyDataset])
def test_anything_with_len_and_getitem_or_iter(kind, strategy):
    source = kind()

    for _ in range(2):
        seen = [strategy.gather(b, 0) for b in strategy.experimental_distribute_dataset(source)]
        jax.tree.map(np.testing.assert_array_equal, seen, _expected())
    assert source.epochs >= 2 * (kind is _PyDataset)
    assert Dataset.from_source(source).cardinality() == 3
    assert len(Dataset.from_source(_X)) == 10
    with pytest.raises(TypeError, match="from_source: got 5, an int, which cannot be iterated"):
        Dataset.from_source(5)


def test_libraries_are_recognized_without_importing_them():
    program = (
        "import sys, distributary as dist;"
        "list(dist.data.Dataset.from_source([1, 2]));"
        "others = {'tensorflow', 'torch', 'grain', 'datasets', 'pyarrow', 'keras'};"
        "found = others & set(sys.modules);"
        "sys.exit(str(found) if found else 0)"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
