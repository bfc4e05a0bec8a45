"""Numbers of shards, against those of tf.distribute."""

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.coordinator import local_cluster
from distributary.experimental.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)


@pytest.mark.parametrize(
    ("partitioner", "shape", "expected"),
    [
        # What TensorFlow 2.21 returns.
        (FixedShardsPartitioner(3), (6, 1), [3, 1]),
        (FixedShardsPartitioner(3), (2, 1), [2, 1]),
        (MinSizePartitioner(4, max_shards=10), (6, 1), [6, 1]),
        (MaxSizePartitioner(4), (6, 1), [6, 1]),
        (MaxSizePartitioner(1024), (6, 1), [1, 1]),
        # By the documented rule.
        (MinSizePartitioner(), (1 << 20, 64), [1, 1]),
        (MinSizePartitioner(max_shards=8), (1 << 20, 64), [8, 1]),
        (MinSizePartitioner(10, max_shards=10), (6, 1), [3, 1]),  # 2.4 is rounded up
        (MaxSizePartitioner(20), (7, 2, 1), [4, 1, 1]),  # 2.5 rows are rounded down
        (MaxSizePartitioner(1), (3, 2), [3, 1]),  # a row is not split
        (FixedShardsPartitioner(3), (0, 4), [1, 1]),
        (MaxSizePartitioner(4), (4, 0), [1, 1]),
    ],
)
def test_numbers_of_shards(partitioner, shape, expected):
    assert partitioner(shape, jnp.float32) == expected


def test_the_size_of_an_element_counts():
    partitioner = MaxSizePartitioner(16, bytes_per_string=8)

    numbers = [partitioner((16,), dtype)[0] for dtype in ("int8", jnp.bfloat16, "float64", object)]

    assert numbers == [1, 2, 8, 8]
    assert partitioner((16,), np.dtype("U7")) == [8]


@pytest.mark.parametrize("axis", [1, -1])
def test_another_axis_can_be_split(axis):
    shape = (2, 6)

    assert FixedShardsPartitioner(3)(shape, "float32", axis) == [1, 3]
    assert MinSizePartitioner(4, max_shards=4)(shape, "float32", axis) == [1, 4]
    assert MaxSizePartitioner(8)(shape, "float32", axis) == [1, 6]


@pytest.mark.parametrize(
    ("error", "make", "message"),
    [
        (ValueError, lambda: FixedShardsPartitioner(0), "FixedShardsPartitioner: num_shards is 0"),
        (ValueError, lambda: MinSizePartitioner(0), "MinSizePartitioner: min_shard_bytes is 0"),
        (ValueError, lambda: MaxSizePartitioner(4, max_shards=0), "max_shards is 0"),
        (ValueError, lambda: FixedShardsPartitioner(2)((), "float32"), r"shape \(\) has no axis 0"),
        (ValueError, lambda: MaxSizePartitioner(2)((3,), "float32", 1), "has no axis 1"),
        (TypeError, lambda: FixedShardsPartitioner(2.0), r"num_shards is 2\.0 \(float\)"),
        (TypeError, lambda: _strategy(3), "variable_partitioner is 3"),
        (ValueError, lambda: _strategy(sparse_update="fast"), "sparse_update is 'fast'"),
        (NotImplementedError, lambda: Partitioner()((2,), "float32"), "does not define __call__"),
    ],
)
def test_wrong_values_are_refused(error, make, message):
    with pytest.raises(error, match=message):
        make()


def _strategy(*args, **options):
    return dist.ParameterServerStrategy(local_cluster(1, 1), *args, **options)
