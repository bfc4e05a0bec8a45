"""Creates the strategy, with a fault if the first argument names one, and adds up its replicas."""

import ctypes
import importlib.metadata
import json
import sys

import distributary as dist

fault = sys.argv[1] if len(sys.argv) > 1 else ""
if fault == "other version":
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "9.9" if name == "jax" else version(name)
if fault == "too late":
    import jax.numpy as jnp

    jnp.ones(3).block_until_ready()
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
options = dist.experimental.CommunicationOptions(timeout_seconds=seconds, hierarchical=True)
try:
    strategy = dist.MultiWorkerMirroredStrategy(communication_options=options)
except dist.errors.DistributaryError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
    sys.exit(3)
ctypes.CDLL(None).fflush(None)  # what gloo has printed comes before
print("started", flush=True)
dist.OneDeviceStrategy("CPU:0").run(lambda: 1)  # accepted beside it
ones = strategy.run(lambda: 1.0 * dist.get_replica_context().replica_id_in_sync_group)
print(
    json.dumps(
        {
            "strategy": repr(strategy),
            "total": float(strategy.reduce("SUM", ones, None)),
            "tasks": [strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id],
        }
    )
)
