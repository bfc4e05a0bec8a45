"""Every strategy a machine can have."""

import pytest

import distributary as dist

STRATEGIES = {
    "default": dist.get_strategy,
    "one device": lambda: dist.OneDeviceStrategy("CPU:1"),
    "mirrored 1": lambda: dist.MirroredStrategy(["CPU:2"]),
    "mirrored 2": lambda: dist.MirroredStrategy(["CPU:1", "CPU:0"]),
    "mirrored 4": lambda: dist.MirroredStrategy([f"CPU:{i}" for i in range(4)]),
    "mirrored 8": lambda: dist.MirroredStrategy(),
    "mirrored 4, one device reduces": lambda: dist.MirroredStrategy(
        [f"CPU:{i}" for i in range(4)], cross_device_ops=dist.ReductionToOneDevice()
    ),
    "mirrored 4, hierarchical": lambda: dist.MirroredStrategy(
        [f"CPU:{i}" for i in range(4)], cross_device_ops=dist.HierarchicalCopyAllReduce()
    ),
}


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES)
def strategy(request) -> dist.Strategy:
    return request.param()
