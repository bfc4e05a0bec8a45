"""Asynchronous training: a coordinator gives work to workers, and servers keep the variables."""

from distributary.coordinator._cluster import local_cluster
from distributary.coordinator._cluster_coordinator import ClusterCoordinator
from distributary.coordinator._per_worker import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    experimental_get_current_worker_index,
)
from distributary.coordinator._queue import RemoteValue
from distributary.coordinator._ray import ray_cluster
from distributary.coordinator._server import Server
from distributary.coordinator._statistics import (
    CoordinatorStatistics,
    ServerStatistics,
    WorkerStatistics,
)
from distributary.coordinator._strategy import ParameterServerStrategy
from distributary.options import RecoveryOptions

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
    "ray_cluster",
]

#: The name in `tf.distribute.coordinator`. In its `experimental`, it is `PerWorkerValues`.
PerWorkerValue = PerWorkerValues
