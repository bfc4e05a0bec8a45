"""What may be distributed, and what reaches a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.data import Dataset
from distributary.errors import InvalidTypeError, ReplicaMismatchError, UnsupportedError


def _batches(num_batches=2, num_rows=4):
    for i in range(num_batches):
        rows = np.arange(num_rows, dtype=np.float32) + 10 * i
        yield {"x": np.stack([rows, -rows], 1), "y": (rows, [rows.astype(np.int32)])}


class _Reiterable:
    def __iter__(self):
        return _batches()


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(_batches()),
        _batches,
        _Reiterable,
        lambda: iter(list(_batches())),
        lambda: [jax.tree.map(jnp.asarray, batch) for batch in _batches()],
    ],
    ids=["list", "generator", "re-iterable", "iterator", "jax arrays"],
)
def test_every_source_gives_the_same_batches(make, strategy_of):
    strategy = strategy_of(2)

    seen = list(strategy.experimental_distribute_dataset(make()))

    assert len(seen) == 2
    for batch, expected in zip(seen, _batches(), strict=True):
        whole = strategy.gather(batch, axis=0)
        assert jax.tree.structure(whole) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, whole, expected)


def test_dtypes_become_those_jax_holds(strategy_of):
    arrays = [np.ones(2, dtype) for dtype in ("float64", "float16", "int64", "uint8", "bool")]

    (batch,) = strategy_of(2).experimental_distribute_dataset([arrays])

    assert [part.values[0].dtype.name for part in batch] == [
        "float32",
        "float16",
        "int32",
        "uint8",
        "bool",
    ]


def test_random_keys_are_rows_like_others(strategy_of):
    strategy = dist.OneDeviceStrategy("CPU:0")

    (keys,) = strategy.experimental_distribute_dataset([jax.random.split(jax.random.key(0), 4)])

    assert strategy.run(lambda keys: jax.vmap(jax.random.uniform)(keys), (keys,)).shape == (4,)


def test_elements_of_a_function_may_be_scalars_and_differ_in_length_but_not_in_structure(strategy):

    dataset = strategy.distribute_datasets_from_function(
        lambda _: [(1.0, np.ones(2)), (2.0, np.ones(3))]
    )

    ((scalar, rows),) = dataset
    assert scalar.values == (1.0, 2.0)
    assert [part.shape for part in rows.values] == [(2,), (3,)]
    assert strategy.run(lambda s, r: s * jnp.sum(r), (scalar, rows)).values == (2.0, 6.0)
    ones = np.ones(2)
    for elements in ([{"x": ones}, {"y": ones}], [(ones,), (ones, ones)]):
        dataset = strategy.distribute_datasets_from_function(lambda _, elements=elements: elements)
        with pytest.raises(ReplicaMismatchError, match="dataset: the value of replica 1 has"):
            list(dataset)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_scalars_of_a_function_are_counted_once_for_each_replica(num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    dataset = strategy.distribute_datasets_from_function(lambda _: Dataset.range(4))

    seen = [[int(part) for part in strategy.experimental_local_results(value)] for value in dataset]

    assert seen == ([[0], [1], [2], [3]] if num_replicas == 1 else [[0, 1], [2, 3]])
    assert dataset.counts.num_examples == 4


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_cardinality_is_that_of_tensorflow(num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    numbers = Dataset.range(8)
    for dataset, expected in [
        (numbers.batch(4), 2),
        (numbers.repeat().batch(4), -1),
        (numbers.batch(4).repeat().prefetch(2), -1),
        (Dataset.from_generator(lambda: [1.0]).batch(2).repeat(), -1),
        (numbers.repeat().batch(2).unbatch().batch(4), -1),
        (numbers.repeat().filter(lambda x: True).batch(4), -2),
    ]:
        assert strategy.experimental_distribute_dataset(dataset).cardinality == expected
        function = strategy.distribute_datasets_from_function(lambda _, d=dataset: d)
        whole = -(-expected // num_replicas) if expected > 0 else expected
        assert function.cardinality == whole


def test_a_step_with_one_element_left_runs_and_counts_it_once(strategy_of):
    strategy = strategy_of(4)
    dataset = strategy.distribute_datasets_from_function(lambda _: [np.ones(3, np.float32)] * 5)

    totals = [
        strategy.reduce("SUM", strategy.run(lambda x: jnp.sum(x), (batch,)), None)
        for batch in dataset
    ]

    assert totals == [12.0, 3.0]


def test_what_is_distributed_and_global_batches_are_not_distributed_again(strategy):
    dataset = strategy.experimental_distribute_dataset([np.ones(2)])
    options = dist.InputOptions(experimental_replication_mode=dist.InputReplicationMode.PER_REPLICA)

    for again in (dataset, iter(dataset)):
        with pytest.raises(InvalidTypeError, match="is distributed already"):
            list(strategy.experimental_distribute_dataset(again))
    with pytest.raises(UnsupportedError, match="distribute_datasets_from_function"):
        strategy.experimental_distribute_dataset([np.ones(2)], options)
