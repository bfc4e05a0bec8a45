"""TPUStrategy on CPU devices."""

from typing import Any

import jax

import distributary as dist
from distributary.tpu.experimental import DeviceAssignment, Topology


def tpu_strategy(num_replicas: int, num_cores: int, **options: Any) -> dist.TPUStrategy:
    """Returns a strategy of replicas with so many cores each."""
    devices = jax.devices("cpu")[: num_replicas * num_cores]
    topology = Topology.of_devices(devices, [num_replicas, 1, 1, num_cores])
    assignment = DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, num_cores], num_replicas=num_replicas
    )
    return dist.TPUStrategy(experimental_device_assignment=assignment, **options)
