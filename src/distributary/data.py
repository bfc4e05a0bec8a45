"""Datasets with the method names of tf.data, on NumPy arrays and without TensorFlow."""

from distributary.datasets import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    SHARD_HINT,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    Dataset,
    DatasetIterator,
    DistributeOptions,
    FixedLengthRecordDataset,
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
    "FixedLengthRecordDataset",
    "Options",
    "ParquetDataset",
    "TFRecordDataset",
    "TensorSpec",
    "TextLineDataset",
]
