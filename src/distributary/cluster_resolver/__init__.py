"""Describes where a job runs: its tasks, their addresses, and which of them this process is.

Importing it does not import JAX: the command line checks its options without.
"""

from distributary.cluster_resolver._cluster_spec import (
    TOKEN_VARIABLE,
    ClusterSpec,
    is_ip,
    is_loopback,
    join_address,
    parse_address,
    split_port,
)
from distributary.cluster_resolver._gce import GCEClusterResolver
from distributary.cluster_resolver._kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from distributary.cluster_resolver._mpi import OpenMPIClusterResolver
from distributary.cluster_resolver._multi_worker import MultiWorker, Peer, multi_worker, place_of
from distributary.cluster_resolver._resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    UnionResolver,
)
from distributary.cluster_resolver._slurm import SlurmClusterResolver, visible_gpus
from distributary.cluster_resolver._tf_config import TFConfigClusterResolver, size_of_job
from distributary.cluster_resolver._tpu import TPUClusterResolver

__all__ = [  # for users
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "MultiWorker",
    "OpenMPIClusterResolver",
    "Peer",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
    "multi_worker",
]
