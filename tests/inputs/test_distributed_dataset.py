import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist


def _local(strategy, value):
    return [np.asarray(v).tolist() for v in strategy.experimental_local_results(value)]


def test_every_row_of_an_uneven_dataset_arrives_once_and_in_order(strategy_of):
    strategy = strategy_of(4)
    batches = [(np.arange(10.0), np.ones((10, 2))), (np.arange(10.0, 13.0), np.zeros((3, 2)))]

    seen = list(strategy.experimental_distribute_dataset(batches))

    assert _local(strategy, seen[0][0]) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert _local(strategy, seen[1][0]) == [[10], [11], [12], []]
    assert [len(part) for part in _local(strategy, seen[1][1])] == [1, 1, 1, 0]
    np.testing.assert_array_equal(strategy.gather(seen[0][0], axis=0), np.arange(10))


def test_one_replica_receives_plain_arrays_and_the_default_strategy_the_dataset():
    dataset = [{"x": np.arange(3)}]

    (batch,) = dist.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(dataset)

    np.testing.assert_array_equal(batch["x"], [0, 1, 2])
    assert dist.get_strategy().experimental_distribute_dataset(dataset) is dataset


def test_a_list_starts_over_and_a_generator_does_not(strategy_of):
    strategy = strategy_of(2)
    again = strategy.experimental_distribute_dataset([np.arange(4), np.arange(2)])
    once = strategy.experimental_distribute_dataset(np.arange(2) for _ in range(3))

    assert [len(list(again)), len(list(again))] == [2, 2]
    assert len(list(once)) == 3
    with pytest.warns(dist.errors.DistributaryWarning, match="generator or iterator"):
        assert len(list(once)) == 0


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (5, TypeError, "got 5, an int"),
        ([np.float32(3.0)], ValueError, "not batched"),
        ([(np.zeros(3), np.zeros(4))], ValueError, r"\[3, 4\] rows"),
        ([np.array(["a", "b"])], TypeError, "strings and objects cannot go to a device"),
        ("text", TypeError, "got .text., a str, which cannot be iterated"),
        ([()], TypeError, "holds no arrays"),
        ((np.zeros((4, 2)), np.zeros(4)), TypeError, r"pass \[data\]"),
        (np.zeros((4, 3)), TypeError, r"an array float64\[4, 3\], not batches"),
        (
            jnp.zeros((2, 3, 4)),
            TypeError,
            r"float32\[2, 3, 4\], not .* counts batches, list\(data\)",
        ),
        (
            {"x": np.zeros((2, 3)), "y": np.zeros(2)},
            TypeError,
            r"a dict of 2 \(array\), not batches",
        ),
    ],
)
def test_unusable_datasets_are_refused(strategy_of, dataset, error, message):
    with pytest.raises(error, match=message):
        list(strategy_of(2).experimental_distribute_dataset(dataset))


def test_a_function_gives_batches_of_one_replica(strategy_of):
    strategy = strategy_of(2)
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        size = context.get_per_replica_batch_size(4)
        return [np.arange(i, i + size) for i in range(4)]

    seen = list(strategy.distribute_datasets_from_function(dataset_fn))

    assert [_local(strategy, batch) for batch in seen] == [[[0, 1], [1, 2]], [[2, 3], [3, 4]]]
    (context,) = contexts
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.num_replicas_in_sync == 2


def test_per_replica_input_calls_the_function_for_each_replica(strategy_of):
    strategy = strategy_of(2)
    mode = dist.InputReplicationMode.PER_REPLICA

    seen = list(
        strategy.distribute_datasets_from_function(
            lambda context: [np.full(1, 10 * context.input_pipeline_id + i) for i in range(2)],
            dist.InputOptions(experimental_replication_mode=mode),
        )
    )

    assert [_local(strategy, batch) for batch in seen] == [[[0], [10]], [[1], [11]]]


def test_unusable_dataset_functions_are_refused(strategy_of):
    strategy = strategy_of(2)
    with pytest.raises(TypeError, match="dataset_fn is 3"):
        strategy.distribute_datasets_from_function(3)
    with pytest.raises(TypeError, match="returned 7"):
        strategy.distribute_datasets_from_function(lambda _: 7)
    with pytest.raises(TypeError, match="options is 'fast'"):
        strategy.experimental_distribute_dataset([np.zeros(2)], "fast")
    with pytest.raises(ValueError, match="scalars"):
        list(strategy.distribute_datasets_from_function(lambda _: [1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experimental_replication_mode": "PER_WORKER"}, "PER_WORKER"),
        ({"experimental_place_dataset_on_device": True}, "on the host"),
        ({"experimental_per_replica_buffer_size": -1}, "is -1"),
    ],
)
def test_input_options_check_themselves(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        dist.InputOptions(**options)
