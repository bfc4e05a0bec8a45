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


@pytest.mark.parametrize(
    ("size", "expected", "message"),
    [
        *((size, size // 4, None) for size in (8, np.int64(8), 0)),
        (10, InvalidValueError, "size 10 is not .* such as 8"),
        (3, InvalidValueError, "size 3 is not .* such as 4"),
        (1, InvalidValueError, "size 1 is not .* such as 4"),
        *((size, InvalidTypeError, "is .*, expected an int") for size in (8.0, "8", None, True)),
        (np.float32(8), InvalidTypeError, "global_batch_size is .*, expected an int"),
    ],
)
def test_per_replica_batch_size(size, expected, message):
    context = dist.InputContext(num_replicas_in_sync=4)

    if message is None:
        result = context.get_per_replica_batch_size(size)
        assert (result, type(result)) == (expected, int)
        return
    with pytest.raises(expected, match=message):
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
