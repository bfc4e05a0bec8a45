"""Datasets with tf.data's method names, on NumPy arrays, without TensorFlow."""

from distributary.datasets import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    SHARD_HINT,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    Dataset,
    DatasetIterator,
    DistributeOptions,
    Options,
    ParquetDataset,
    TensorSpec,
    TextLineDataset,
    TFRecordDataset,
)

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "Dataset",
    "DatasetIterator",
    "DistributeOptions",
    "Options",
    "ParquetDataset",
    "TFRecordDataset",
    "TensorSpec",
    "TextLineDataset",
]
