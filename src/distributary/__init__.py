"""Distribution strategies for JAX and Keras 3, with the tf.distribute API."""

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from distributary import errors
from distributary._elsewhere import OF_MODULE
from distributary._late import assemble_with, late_names

if TYPE_CHECKING:
    from distributary import (
        autograph,
        checkpoint,
        cluster_resolver,
        config,
        coordinator,
        data,
        experimental,
        tpu,
    )
    from distributary.context import (
        ReplicaContext,
        experimental_set_strategy,
        get_replica_context,
        has_strategy,
        in_cross_replica_context,
    )
    from distributary.coordinator import ParameterServerStrategy, Server
    from distributary.data import (
        DistributedDataset,
        DistributedIterator,
        InputContext,
        PerReplicaSpec,
        StepStatistics,
        ValueContext,
    )
    from distributary.engine import function
    from distributary.gradients import (
        GradientTape,
        UnconnectedGradients,
        global_batch_loss,
        grad,
        value_and_grad,
    )
    from distributary.options import (
        InputOptions,
        InputReplicationMode,
        ReduceOp,
        RunOptions,
        VariableAggregation,
        VariableSynchronization,
    )
    from distributary.strategies import (
        CentralStorageStrategy,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        Strategy,
        StrategyExtended,
        TPUStrategy,
    )
    from distributary.values import (
        CrossDeviceOps,
        DistributedValues,
        HierarchicalCopyAllReduce,
        IndexedSlices,
        Mirrored,
        NcclAllReduce,
        PerReplica,
        ReductionToOneDevice,
        ShardedVariable,
        Variable,
        embedding_lookup,
    )

    def get_strategy() -> Strategy:
        """Returns the current strategy; defined in `context`, which does not know the class."""


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
    "autograph",
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

# The one effect of an import: Keras reads this when it is imported, and would look for TensorFlow.
if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")

# Imported on first use: importing jax takes a second, which the command line does without.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "distributary.autograph": "autograph",
            "distributary.checkpoint": "checkpoint",
            "distributary.cluster_resolver": "cluster_resolver",
            "distributary.config": "config",
            "distributary.context": (
                "ReplicaContext experimental_set_strategy get_replica_context get_strategy"
                " has_strategy in_cross_replica_context"
            ),
            "distributary.coordinator": "ParameterServerStrategy Server coordinator",
            "distributary.data": (
                "DistributedDataset DistributedIterator InputContext PerReplicaSpec"
                " StepStatistics ValueContext data"
            ),
            "distributary.engine": "function",
            "distributary.experimental": "experimental",
            "distributary.gradients": (
                "GradientTape UnconnectedGradients global_batch_loss grad value_and_grad"
            ),
            "distributary.options": (
                "InputOptions InputReplicationMode ReduceOp RunOptions VariableAggregation"
                " VariableSynchronization"
            ),
            "distributary.strategies": (
                "CentralStorageStrategy MirroredStrategy MultiWorkerMirroredStrategy"
                " OneDeviceStrategy Strategy StrategyExtended TPUStrategy"
            ),
            "distributary.tpu": "tpu",
            "distributary.values": (
                "CrossDeviceOps DistributedValues HierarchicalCopyAllReduce IndexedSlices"
                " Mirrored NcclAllReduce PerReplica ReductionToOneDevice ShardedVariable"
                " Variable embedding_lookup"
            ),
        },
        OF_MODULE,
    )


def _assemble() -> None:
    from distributary import keras_bridge, strategies  # noqa: F401

    if importlib.util.find_spec(f"{__name__}.tensorflow"):  # a wing, which may be taken away
        from distributary.tensorflow import autograph  # noqa: F401


assemble_with(_assemble)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
