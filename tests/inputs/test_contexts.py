import numpy as np
import pytest

import distributary as dist
from distributary.errors import InvalidTypeError, InvalidValueError


def test_input_context_says_which_pipeline_it_is():
    context = dist.InputContext(3, 2, 12)

    assert context.num_input_pipelines == 3
    assert context.input_pipeline_id == 2
    assert context.num_replicas_in_sync == 12
    assert repr(context) == "distributary.InputContext(input pipeline id 2, total: 3, replicas: 12)"
    alone = dist.InputContext()
    assert (alone.num_input_pipelines, alone.input_pipeline_id) == (1, 0)
    assert alone.num_replicas_in_sync == 1


@pytest.mark.parametrize("size", [8, np.int64(8), 0])
def test_per_replica_batch_size(size):
    result = dist.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(size)

    assert result == size // 4
    assert type(result) is int


@pytest.mark.parametrize(("size", "suggestion"), [(10, 8), (3, 4), (1, 4)])
def test_per_replica_batch_size_must_divide(size, suggestion):
    context = dist.InputContext(num_replicas_in_sync=4)

    with pytest.raises(InvalidValueError, match=f"size {size} is not .* such as {suggestion}"):
        context.get_per_replica_batch_size(size)


@pytest.mark.parametrize("size", [8.0, "8", None, True, np.float32(8)])
def test_per_replica_batch_size_must_be_an_int(size):
    context = dist.InputContext(num_replicas_in_sync=4)

    with pytest.raises(InvalidTypeError, match=r"global_batch_size is .*, expected an int"):
        context.get_per_replica_batch_size(size)


def test_value_context_says_which_replica_it_is(strategy_of):
    contexts = []

    values = strategy_of(3).experimental_distribute_values_from_function(
        lambda context: contexts.append(context) or np.float32(context.replica_id_in_sync_group)
    )

    assert [context.replica_id_in_sync_group for context in contexts] == [0, 1, 2]
    assert {context.num_replicas_in_sync for context in contexts} == {3}
    assert values.values == (0.0, 1.0, 2.0)
    assert repr(contexts[1]) == (
        "distributary.ValueContext(replica id 1, total replicas in sync: 3)"
    )


def test_contexts_cannot_be_changed():
    with pytest.raises(AttributeError):
        dist.InputContext().num_replicas_in_sync = 3
    with pytest.raises(AttributeError):
        dist.ValueContext().replica_id_in_sync_group = 3


def test_options_are_compared_by_value_and_frozen():
    assert dist.InputOptions() == dist.InputOptions(experimental_per_replica_buffer_size=1)
    with pytest.raises(AttributeError):
        dist.InputOptions().experimental_fetch_to_device = False
