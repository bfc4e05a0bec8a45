"""Every strategy a machine can have.

With `JAX_PLATFORMS=cuda,cpu` on a machine with NVIDIA GPUs, also those that use them.
"""

import os

import jax
import pytest

import distributary as dist
from tests.strategies.tpu import tpu_strategy

STRATEGIES = {
    "default": dist.get_strategy,
    "one device": lambda: dist.OneDeviceStrategy("CPU:1"),
    "mirrored 1": lambda: dist.MirroredStrategy(["CPU:2"]),
    "mirrored 2": lambda: dist.MirroredStrategy(["CPU:1", "CPU:0"]),
    "mirrored 8": lambda: dist.MirroredStrategy(),
    "mirrored 4, one device reduces": lambda: dist.MirroredStrategy(
        [f"CPU:{i}" for i in range(4)], cross_device_ops=dist.ReductionToOneDevice()
    ),
    "mirrored 4, hierarchical": lambda: dist.MirroredStrategy(
        [f"CPU:{i}" for i in range(4)], cross_device_ops=dist.HierarchicalCopyAllReduce()
    ),
    "TPU 2": lambda: tpu_strategy(2, 1),
    "TPU 1 of 4 cores": lambda: tpu_strategy(1, 4),
    "TPU 2 of 2 cores": lambda: tpu_strategy(2, 2),
    "central 1": lambda: dist.CentralStorageStrategy(["CPU:1"], "CPU:2"),
    "central host": lambda: dist.CentralStorageStrategy(
        ["CPU:0", "CPU:1"],
        jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"),
    ),
    "central 4": lambda: dist.CentralStorageStrategy([f"CPU:{i}" for i in range(4)]),
}

if "cuda" in os.environ["JAX_PLATFORMS"]:
    STRATEGIES |= {
        "one GPU": lambda: dist.OneDeviceStrategy("GPU:0"),
        "mirrored GPUs": lambda: dist.MirroredStrategy(),
        "mirrored GPUs, sharded": lambda: dist.MirroredStrategy(
            experimental_shard_optimizer_state=True
        ),
        "central GPU": lambda: dist.CentralStorageStrategy(["GPU:0"], "CPU:0"),
        "mirrored 8": lambda: dist.MirroredStrategy([f"CPU:{i}" for i in range(8)]),
    }


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES)
def strategy(request) -> dist.Strategy:
    return request.param()
