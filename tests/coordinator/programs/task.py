"""A worker or a parameter server, as TF_CONFIG says."""

from distributary.cluster_resolver import TFConfigClusterResolver
from distributary.coordinator._server import Server

Server(TFConfigClusterResolver()).join()
