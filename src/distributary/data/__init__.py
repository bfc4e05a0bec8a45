"""Datasets with the method names of tf.data, in NumPy, and their batches for replicas."""

from distributary.data._dataset import SHARD_HINT, Dataset, DatasetIterator, Optional, PassIterator
from distributary.data._making import Drawn, Generated, call, common_spec
from distributary.data._nodes import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    FileSource,
    IteratedStream,
    Node,
    Path,
    SameElements,
    Stream,
    combined,
    drawn_seed,
    is_peek,
)
from distributary.data._record_files import (
    FixedLengthRecordDataset,
    TextLineDataset,
    TFRecordDataset,
    framed,
    read_file,
    records,
)
from distributary.data._sources import RandomAccess, is_hugging_face
from distributary.data._step_data import (
    Batches,
    DistributedInput,
    Elements,
    OwnRows,
    StepData,
    WorkerBatch,
    WorkerShare,
    split_rows,
)
from distributary.data._structure import TensorSpec, as_array, flatten, kept, map_arrays
from distributary.options import AutoShardPolicy, DistributeOptions, Options

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
    "TFRecordDataset",
    "TensorSpec",
    "TextLineDataset",
]
