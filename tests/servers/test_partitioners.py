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
    ("make", "message"),
    [
        (lambda: FixedShardsPartitioner(0), "FixedShardsPartitioner: num_shards is 0, expected 1"),
        (lambda: MinSizePartitioner(0), "MinSizePartitioner: min_shard_bytes is 0"),
        (lambda: MaxSizePartitioner(4, max_shards=0), "max_shards is 0"),
        (lambda: FixedShardsPartitioner(2)((), "float32"), r"shape \(\) has no axis 0"),
        (lambda: MaxSizePartitioner(2)((3,), "float32", 1), r"shape \(3,\) has no axis 1"),
    ],
)
def test_impossible_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_of_another_type_is_named():
    with pytest.raises(TypeError, match=r"num_shards is 2\.0 \(float\), expected an int"):
        FixedShardsPartitioner(2.0)
    with pytest.raises(TypeError, match="variable_partitioner is 3"):
        dist.ParameterServerStrategy(local_cluster(1, 1), 3)
    with pytest.raises(ValueError, match="sparse_update is 'fast'"):
        dist.ParameterServerStrategy(local_cluster(1, 1), sparse_update="fast")


def test_a_partitioner_of_ones_own_defines_call():
    with pytest.raises(NotImplementedError, match="Partitioner does not define __call__"):
        Partitioner()((2,), "float32")
