"""Distribution strategies for JAX and Keras 3, with the tf.distribute API."""

from typing import TYPE_CHECKING

from distributary import config, errors, experimental, keras_bridge  # noqa: F401  (connects Keras)
from distributary._late import late_names
from distributary.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReduceOp,
    ReductionToOneDevice,
)
from distributary.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from distributary.engine import function
from distributary.gradients import (
    GradientTape,
    UnconnectedGradients,
    global_batch_loss,
    grad,
    value_and_grad,
)
from distributary.inputs import InputContext, StepStatistics, ValueContext
from distributary.options import InputOptions, InputReplicationMode, RunOptions
from distributary.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    StrategyExtended,
)
from distributary.values import DistributedValues, IndexedSlices, Mirrored, PerReplica
from distributary.variables import Variable, VariableAggregation, VariableSynchronization

if TYPE_CHECKING:
    from distributary import checkpoint, cluster_resolver, coordinator, data, tpu
    from distributary.coordinator import ParameterServerStrategy, Server
    from distributary.inputs import DistributedDataset, DistributedIterator, PerReplicaSpec
    from distributary.strategies import MultiWorkerMirroredStrategy, TPUStrategy
    from distributary.variables import ShardedVariable, embedding_lookup

__all__ = [
    "CentralStorageStrategy",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "GradientTape",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "PerReplicaSpec",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "ShardedVariable",
    "StepStatistics",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "UnconnectedGradients",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "checkpoint",
    "cluster_resolver",
    "config",
    "coordinator",
    "data",
    "embedding_lookup",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_replica_context",
    "get_strategy",
    "global_batch_loss",
    "grad",
    "has_strategy",
    "in_cross_replica_context",
    "tpu",
    "value_and_grad",
]

# Imported on first use: together these modules add a tenth to the time that importing jax takes.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "distributary.checkpoint": "checkpoint",
            "distributary.cluster_resolver": "cluster_resolver",
            "distributary.coordinator": "ParameterServerStrategy Server coordinator",
            "distributary.data": "data",
            "distributary.inputs": "DistributedDataset DistributedIterator PerReplicaSpec",
            "distributary.strategies": "MultiWorkerMirroredStrategy TPUStrategy",
            "distributary.tpu": "tpu",
            "distributary.variables": "ShardedVariable embedding_lookup",
        },
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
