"""Datasets with the method names of tf.data, in NumPy, and their batches for replicas."""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.data._arguments import (
    check_callable as check_callable,
    checked_int as checked_int,
    drawn_seed as drawn_seed,
)
from distributary.data._batching import Batch as Batch, BatchedStream as BatchedStream
from distributary.data._contexts import (
    DistributedInput as DistributedInput,
    InputContext as InputContext,
    ValueContext as ValueContext,
)
from distributary.data._dataset import SHARD_HINT, Dataset
from distributary.data._foreign import foreign as foreign, is_hugging_face as is_hugging_face
from distributary.data._generated import Drawn as Drawn, Generated as Generated
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
from distributary.data._mapping import call as call
from distributary.data._nodes import (
    FileSource as FileSource,
    Node as Node,
    SameElements as SameElements,
)
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
    TextLineDataset,
    TFRecordDataset,
)
from distributary.data._records import (
    framed as framed,
    read_file as read_file,
    records as records,
)
from distributary.data._replica_rows import (
    WorkerBatch as WorkerBatch,
    WorkerShare as WorkerShare,
    split_rows as split_rows,
)
from distributary.data._several import common_spec as common_spec
from distributary.data._sharding import worker_dataset as worker_dataset
from distributary.data._statistics import (
    Loop as Loop,
    StepCounts as StepCounts,
    StepStatistics as StepStatistics,
)
from distributary.data._streams import (
    IteratedStream as IteratedStream,
    Path as Path,
    Stream as Stream,
    is_peek as is_peek,
)
from distributary.data._structure import (
    TensorSpec,
    as_array as as_array,
    check_dense as check_dense,
    flatten as flatten,
    kept as kept,
    map_arrays as map_arrays,
    some_rows as some_rows,
)

if TYPE_CHECKING:
    from distributary.data._coworkers import Coworkers as Coworkers, spec_of as spec_of
    from distributary.data._distributed_dataset import (
        DistributedDataset as DistributedDataset,
        DistributedIterator as DistributedIterator,
        PerReplicaSpec as PerReplicaSpec,
    )
    from distributary.data._step_data import (
        Batches as Batches,
        Elements as Elements,
        checked as checked,
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
    "TFRecordDataset",
    "TensorSpec",
    "TextLineDataset",
]

# Imported on first use: many programs never distribute a dataset, and importing takes a while.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "_coworkers": "Coworkers spec_of",
            "_distributed_dataset": "DistributedDataset DistributedIterator PerReplicaSpec",
            "_step_data": "Batches Elements checked",
        },
    )
