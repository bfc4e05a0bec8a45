"""Asynchronous training: a coordinator gives work to workers, and servers keep the variables."""

from distributary.options import RecoveryOptions
from distributary.servers import (
    ClusterCoordinator,
    CoordinatorStatistics,
    ParameterServerStrategy,
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    RemoteValue,
    Server,
    ServerStatistics,
    WorkerStatistics,
    experimental_get_current_worker_index,
    local_cluster,
    ray,
    ray_cluster,
)

__all__ = [
    "ClusterCoordinator",
    "CoordinatorStatistics",
    "ParameterServerStrategy",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RecoveryOptions",
    "RemoteValue",
    "Server",
    "ServerStatistics",
    "WorkerStatistics",
    "experimental_get_current_worker_index",
    "local_cluster",
    "ray",
    "ray_cluster",
]

#: The name in `tf.distribute.coordinator`. In its `experimental`, it is `PerWorkerValues`.
PerWorkerValue = PerWorkerValues
