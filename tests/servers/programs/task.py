"""A worker or a parameter server, as TF_CONFIG says."""

import pathlib
import threading

import distributary as dist


def wait(path):
    """A dataset function that never returns, and says so."""
    pathlib.Path(path).touch()
    threading.Event().wait()


dist.Server(dist.cluster_resolver.TFConfigClusterResolver()).join()
