"""Distribution strategies for JAX and Keras 3, with the tf.distribute API."""

import importlib.util
import os
import sys
import warnings
from typing import TYPE_CHECKING

from distributary import errors as errors
from distributary._late import assemble_with, late_names

if TYPE_CHECKING:
    from distributary import (
        autograph as autograph,
        checkpoint as checkpoint,
        cluster_resolver as cluster_resolver,
        config as config,
        coordinator as coordinator,
        data as data,
        experimental as experimental,
        nnx as nnx,
        tpu as tpu,
    )
    from distributary.context import (
        InputContext as InputContext,
        ReplicaContext as ReplicaContext,
        ValueContext as ValueContext,
        experimental_set_strategy as experimental_set_strategy,
        get_replica_context as get_replica_context,
        has_strategy as has_strategy,
        in_cross_replica_context as in_cross_replica_context,
    )
    from distributary.coordinator import (
        ParameterServerStrategy as ParameterServerStrategy,
        Server as Server,
    )
    from distributary.devices import StepStatistics as StepStatistics
    from distributary.engine import function as function
    from distributary.gradients import (
        GradientTape as GradientTape,
        UnconnectedGradients as UnconnectedGradients,
        global_batch_loss as global_batch_loss,
        grad as grad,
        value_and_grad as value_and_grad,
    )
    from distributary.options import (
        InputOptions as InputOptions,
        InputReplicationMode as InputReplicationMode,
        ReduceOp as ReduceOp,
        RunOptions as RunOptions,
        VariableAggregation as VariableAggregation,
        VariableSynchronization as VariableSynchronization,
    )
    from distributary.strategies import (
        CentralStorageStrategy as CentralStorageStrategy,
        DistributedDataset as DistributedDataset,
        DistributedIterator as DistributedIterator,
        MirroredStrategy as MirroredStrategy,
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
        OneDeviceStrategy as OneDeviceStrategy,
        PerReplicaSpec as PerReplicaSpec,
        Strategy as Strategy,
        StrategyExtended as StrategyExtended,
        TPUStrategy as TPUStrategy,
    )
    from distributary.variables import (
        CrossDeviceOps as CrossDeviceOps,
        DistributedValues as DistributedValues,
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
        IndexedSlices as IndexedSlices,
        Mirrored as Mirrored,
        NcclAllReduce as NcclAllReduce,
        PerReplica as PerReplica,
        ReductionToOneDevice as ReductionToOneDevice,
        ShardedVariable as ShardedVariable,
        Variable as Variable,
        assign as assign,
        embedding_lookup as embedding_lookup,
        values as values,
    )

    def get_strategy() -> Strategy:
        """Returns the current strategy; defined in `context`, which does not know the class."""


# What people who know TensorFlow, torch, Horovod or JAX look for here.
_RANK = (
    "A step has get_replica_context().replica_id_in_sync_group; strategy.is_chief is True in the"
    " process that saves and prints."
)
_MODEL = (
    "Create the model in `with distributary.MirroredStrategy().scope():` and call model.fit, or"
    " strategy.run in a loop of your own."
)
_COLLECTIVE = (
    "In a step, call distributary.get_replica_context().all_reduce or all_gather; after run,"
    " strategy.reduce or strategy.gather."
)
_ELSEWHERE = {
    "DistributedDataParallel FullyShardedDataParallel DataParallel DistributedOptimizer"
    " DistributedGradientTape Accelerator": _MODEL,
    "init_process_group init initialize": (
        "Create distributary.MultiWorkerMirroredStrategy(), which connects the workers that"
        " `distributary launch` starts."
    ),
    "destroy_process_group shutdown": "Leave it out: workers part when their programs end.",
    "get_rank rank local_rank is_chief is_main_process": _RANK,
    "get_world_size size world_size device_count": "Use strategy.num_replicas_in_sync.",
    "all_reduce allreduce all_gather allgather reduce gather broadcast reduce_scatter psum pmean": (
        _COLLECTIVE
    ),
    "barrier": "Leave it out: run, fit and checkpoints wait for all workers where they have to.",
    "pmap shard_map jit": "Use strategy.run for a step, and distributary.function around it.",
    "DistributedSampler DataLoader": "Loop over strategy.experimental_distribute_dataset(dataset).",
    "Dataset": "Use distributary.data.Dataset.",
    "Checkpoint CheckpointManager train": (
        "Use distributary.checkpoint.Checkpoint and distributary.checkpoint.CheckpointManager."
    ),
    "ClusterCoordinator": "Use distributary.coordinator.ClusterCoordinator.",
    "CommunicationOptions CommunicationImplementation": (
        "They are in distributary.experimental, as in tf.distribute."
    ),
    "CollectiveAllReduceStrategy": "Use distributary.MultiWorkerMirroredStrategy.",
    "AUTOTUNE TensorSpec TFRecordDataset": "It is in distributary.data.",
    "constant cast convert_to_tensor nn reduce_mean reduce_sum tf compute_average_loss": (
        "Names of TensorFlow are in distributary.compat.tensorflow; a step can use jax.numpy."
    ),
    "get_loss_reduction": "Use distributary.ReduceOp.SUM or MEAN.",
    "DistributionStrategy": "Use distributary.Strategy.",
    "keras": "Write `import keras`, with KERAS_BACKEND=jax.",
    "distribute": "Its names are those of this module: distributary.MirroredStrategy.",
}

# The one effect of an import: Keras reads this when it is imported, and would look for TensorFlow.
if "keras" not in sys.modules:
    _backend = os.environ.setdefault("KERAS_BACKEND", "jax")
    _is_wanted = _backend == "tensorflow" and "tensorflow" not in sys.modules
    _is_lost = _is_wanted and importlib.util.find_spec("tensorflow") is None
    if _is_lost or (_backend != "jax" and _backend.strip().lower() == "jax"):
        _why = "is not installed" if _is_lost else "Keras does not know"
        warnings.warn(
            f"KERAS_BACKEND is {_backend!r}, which {_why}: write KERAS_BACKEND=jax.",
            errors.DistributaryWarning,
            stacklevel=2,
        )

# Imported on first use: importing jax takes a second, which the command line does without.
if not TYPE_CHECKING:  # or type checkers accept any name
    _NAMES = {
        "distributary.autograph": "autograph",
        "distributary.checkpoint": "checkpoint",
        "distributary.cluster_resolver": "cluster_resolver",
        "distributary.config": "config",
        "distributary.context": (
            "InputContext ReplicaContext ValueContext experimental_set_strategy"
            " get_replica_context get_strategy has_strategy in_cross_replica_context"
        ),
        "distributary.coordinator": "ParameterServerStrategy Server coordinator",
        "distributary.data": "data",
        "distributary.devices": "StepStatistics",
        "distributary.engine": "function",
        "distributary.experimental": "experimental",
        "distributary.gradients": (
            "GradientTape UnconnectedGradients global_batch_loss grad value_and_grad"
        ),
        "distributary.nnx": "nnx",
        "distributary.options": (
            "InputOptions InputReplicationMode ReduceOp RunOptions VariableAggregation"
            " VariableSynchronization"
        ),
        "distributary.strategies": (
            "CentralStorageStrategy DistributedDataset DistributedIterator MirroredStrategy"
            " MultiWorkerMirroredStrategy OneDeviceStrategy PerReplicaSpec Strategy"
            " StrategyExtended TPUStrategy"
        ),
        "distributary.tpu": "tpu",
        "distributary.variables": (
            "CrossDeviceOps DistributedValues HierarchicalCopyAllReduce IndexedSlices"
            " Mirrored NcclAllReduce PerReplica ReductionToOneDevice ShardedVariable"
            " Variable assign embedding_lookup values"
        ),
    }
    __getattr__ = late_names(__name__, _NAMES, _ELSEWHERE)
    __all__ = sorted(["errors", *" ".join(_NAMES.values()).split()])

    def __dir__() -> list[str]:
        return [*__all__, *(name for name in globals() if name.startswith("__"))]


def _assemble() -> None:
    from distributary import keras_bridge, strategies  # noqa: F401

    if importlib.util.find_spec(f"{__name__}.tensorflow"):  # a wing, which may be taken away
        from distributary.tensorflow import autograph  # noqa: F401


assemble_with(_assemble)
