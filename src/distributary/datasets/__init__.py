"""Sources of data and operations on them; the public names are in `distributary.data`."""

from distributary.datasets._dataset import SHARD_HINT, Dataset
from distributary.datasets._foreign import foreign, is_hugging_face
from distributary.datasets._iterables import Once, OneShot, RandomAccess
from distributary.datasets._iterator import (
    DatasetIterator,
    Optional,
    PassIterator,
    show_arrays_by,
)
from distributary.datasets._nodes import Node
from distributary.datasets._options import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    DistributeOptions,
    Options,
)
from distributary.datasets._order import WithOptions
from distributary.datasets._prefetch import Prefetch, Prefetched
from distributary.datasets._record_files import TextLineDataset, TFRecordDataset
from distributary.datasets._sharding import (
    WorkerBatch,
    WorkerBatches,
    WorkerShare,
    WorkerStream,
    split_rows,
)
from distributary.datasets._streams import Stream
from distributary.datasets._structure import TensorSpec, check_dense, sized_spec
from distributary.datasets._tables import ParquetDataset

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "Dataset",
    "DatasetIterator",
    "DistributeOptions",
    "Node",
    "Once",
    "OneShot",
    "Optional",
    "Options",
    "ParquetDataset",
    "PassIterator",
    "Prefetch",
    "Prefetched",
    "RandomAccess",
    "Stream",
    "TFRecordDataset",
    "TensorSpec",
    "TextLineDataset",
    "WithOptions",
    "WorkerBatch",
    "WorkerBatches",
    "WorkerShare",
    "WorkerStream",
    "check_dense",
    "foreign",
    "is_hugging_face",
    "show_arrays_by",
    "sized_spec",
    "split_rows",
]
