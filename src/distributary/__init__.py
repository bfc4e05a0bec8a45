"""Distribution strategies for JAX and Keras 3, with the tf.distribute API."""

from distributary import (
    cluster_resolver,
    config,
    data,
    errors,
    experimental,
    keras_bridge,  # noqa: F401  (connects Keras)
)
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
from distributary.gradients import GradientTape, UnconnectedGradients, grad, value_and_grad
from distributary.inputs import (
    DistributedDataset,
    DistributedIterator,
    InputContext,
    ValueContext,
)
from distributary.options import InputOptions, InputReplicationMode, RunOptions
from distributary.strategies import (
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    StrategyExtended,
    function,
)
from distributary.values import DistributedValues, IndexedSlices, Mirrored, PerReplica
from distributary.variables import Variable, VariableAggregation, VariableSynchronization

__all__ = [
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
    "NcclAllReduce",
    "OneDeviceStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "UnconnectedGradients",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "cluster_resolver",
    "config",
    "data",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_replica_context",
    "get_strategy",
    "grad",
    "has_strategy",
    "in_cross_replica_context",
    "value_and_grad",
]
