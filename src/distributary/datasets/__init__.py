"""Sources of data and operations on them; the public names are in `distributary.data`."""

from distributary.datasets._batching import Batch, BatchedStream
from distributary.datasets._dataset import SHARD_HINT, Dataset
from distributary.datasets._foreign import foreign, is_hugging_face
from distributary.datasets._iterables import Once, OneShot, RandomAccess
from distributary.datasets._iterator import DatasetIterator, Optional, PassIterator
from distributary.datasets._nodes import Node
from distributary.datasets._options import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    DistributeOptions,
    Options,
    combined,
)
from distributary.datasets._order import WithOptions
from distributary.datasets._prefetch import Prefetch, Prefetched
from distributary.datasets._record_files import (
    FixedLengthRecordDataset,
    ParquetDataset,
    TextLineDataset,
    TFRecordDataset,
    record_files,
)
from distributary.datasets._records import framed
from distributary.datasets._replica_rows import WorkerBatch, WorkerShare, split_rows
from distributary.datasets._sharding import worker_dataset
from distributary.datasets._streams import Stream
from distributary.datasets._structure import TensorSpec, check_dense, kept, sized_spec, some_rows
