"""Strategies: the choice of devices, variables, collectives and inputs that go together."""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.strategies._base import MISSING, Strategy, accept_any_strategy, check_job
from distributary.strategies._distributed_dataset import (
    ArrayBatches,
    DatasetBatches,
    DistributedDataset,
    DistributedIterator,
    PerReplicaSpec,
    ReadAhead,
    drawn_permutation,
    next_own,
    random_state,
    set_random_state,
    share_random_state,
    take_stacked,
)
from distributary.strategies._extended import RemoteSteps, StrategyExtended, unused_strategies
from distributary.strategies._one_machine import (
    CentralStorageStrategy,
    DefaultStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
)

if TYPE_CHECKING:
    from distributary.strategies._multi_worker import MultiWorkerMirroredStrategy
    from distributary.strategies._tpu import (
        TPUStrategy,
        experimental_connect_to_cluster,
        initialize_tpu_system,
        shutdown_tpu_system,
    )


# Imported on first use: most of them import the cluster resolvers, which few programs need.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "_multi_worker": "MultiWorkerMirroredStrategy",
            "_tpu": (
                "TPUStrategy experimental_connect_to_cluster initialize_tpu_system"
                " shutdown_tpu_system"
            ),
        },
    )
