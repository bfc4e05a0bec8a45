"""Asynchronous training: a coordinator gives work to workers, and servers keep the variables."""

from distributary.options import RecoveryOptions
from distributary.servers._cluster import local_cluster
from distributary.servers._processes import Server
from distributary.servers._queue import RemoteValue
from distributary.servers._ray import ray, ray_cluster
from distributary.servers._sources import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    experimental_get_current_worker_index,
)
from distributary.servers._statistics import (
    CoordinatorStatistics,
    ServerStatistics,
    WorkerStatistics,
)
from distributary.servers._strategy import ClusterCoordinator, ParameterServerStrategy

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
