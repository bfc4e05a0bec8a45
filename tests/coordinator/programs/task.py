"""A worker or a parameter server, as TF_CONFIG says."""

import distributary as dist

dist.Server(dist.cluster_resolver.TFConfigClusterResolver()).join()
