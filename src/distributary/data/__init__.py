"""Datasets with the method names of tf.data, on NumPy arrays and without TensorFlow."""

from distributary.data._batching import Batch as Batch, BatchedStream as BatchedStream
from distributary.data._dataset import SHARD_HINT, Dataset
from distributary.data._foreign import foreign as foreign, is_hugging_face as is_hugging_face
from distributary.data._iterables import (
    Once as Once,
    OneShot as OneShot,
    RandomAccess as RandomAccess,
)
from distributary.data._iterator import (
    DatasetIterator,
    Optional as Optional,
    PassIterator as PassIterator,
)
from distributary.data._nodes import Node as Node
from distributary.data._options import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    DistributeOptions,
    Options,
    combined as combined,
)
from distributary.data._order import WithOptions as WithOptions
from distributary.data._prefetch import Prefetch as Prefetch, Prefetched as Prefetched
from distributary.data._record_files import (
    FixedLengthRecordDataset,
    ParquetDataset,
    TextLineDataset,
    TFRecordDataset,
    record_files as record_files,
)
from distributary.data._records import framed as framed
from distributary.data._replica_rows import (
    WorkerBatch as WorkerBatch,
    WorkerShare as WorkerShare,
    split_rows as split_rows,
)
from distributary.data._sharding import worker_dataset as worker_dataset
from distributary.data._streams import Stream as Stream
from distributary.data._structure import (
    TensorSpec,
    check_dense as check_dense,
    kept as kept,
    sized_spec as sized_spec,
    some_rows as some_rows,
)

__all__ = [  # for users
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
