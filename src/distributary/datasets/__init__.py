"""Sources of data and operations on them; the public names are in `distributary.data`."""

from distributary.datasets._dataset import SHARD_HINT, Dataset
from distributary.datasets._elements import Prefetch
from distributary.datasets._file_datasets import ParquetDataset, TextLineDataset, TFRecordDataset
from distributary.datasets._foreign import foreign, is_hugging_face
from distributary.datasets._iterator import (
    DatasetIterator,
    Optional,
    go_to,
    next_as_optional,
    next_or_out_of_range,
    restored,
    show_arrays_by,
    state_of,
)
from distributary.datasets._nodes import Node, describe, drawn_seeds, with_drawn_seeds
from distributary.datasets._options import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    DistributeOptions,
    Options,
)
from distributary.datasets._order import WithOptions
from distributary.datasets._prefetch import Prefetched
from distributary.datasets._runs import runs_of
from distributary.datasets._sharding import (
    WorkerBatch,
    WorkerBatches,
    WorkerShare,
    split_rows,
)
from distributary.datasets._sources import Once, OneShot, from_list
from distributary.datasets._structure import TensorSpec, check_dense

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
    "Prefetch",
    "Prefetched",
    "TFRecordDataset",
    "TensorSpec",
    "TextLineDataset",
    "WithOptions",
    "WorkerBatch",
    "WorkerBatches",
    "WorkerShare",
    "check_dense",
    "describe",
    "drawn_seeds",
    "foreign",
    "from_list",
    "go_to",
    "is_hugging_face",
    "next_as_optional",
    "next_or_out_of_range",
    "restored",
    "runs_of",
    "show_arrays_by",
    "split_rows",
    "state_of",
    "with_drawn_seeds",
]
