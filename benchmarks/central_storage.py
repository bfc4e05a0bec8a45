"""What does `CentralStorageStrategy` save on the devices that compute, and what does it cost?

The same model, optimizer and batches under `CentralStorageStrategy` and `MirroredStrategy`, on the
same logical CPU devices; the variables of the first lie on a further one.

    between    bytes of arrays on one computing device between steps, batches left out
    step       what XLA plans for one computing device: arguments + outputs - donated + temporary
               buffers of the largest program that runs on all of them
    time       of a step; copies between logical devices cost little, those to a GPU more

    python benchmarks/central_storage.py
"""

from argparse import Namespace
from collections.abc import Iterator

import _harness
from _harness import MEBIBYTE, Request, Row, number, pair
from _plans import Plans
from _workloads import WORKLOADS


def requests(arguments: Namespace) -> Iterator[Request]:
    """Yields every workload with every number of replicas, which need one more device."""
    for workload in arguments.only:
        for count in arguments.replicas:
            yield {"workload": workload, "replicas": count, "devices": count + 1}


def measure(request: Request) -> list[Row]:
    """Measures both strategies at one replica count."""
    import _distributary

    import distributary as dist

    workload, num_replicas = WORKLOADS[request["workload"]], request["replicas"]
    devices = [f"CPU:{i + 1}" for i in range(num_replicas)]
    strategies = {
        "mirrored": lambda: dist.MirroredStrategy(devices),
        "central": lambda: dist.CentralStorageStrategy(devices, "CPU:0"),
    }
    peers, numbers = [], []
    batches = [array for batch in workload.batches(num_replicas) for array in batch]
    batch_bytes = sum(array.nbytes for array in batches) // num_replicas
    for name, make in strategies.items():
        before, plans = _bytes_by_device(), Plans()
        peer = _distributary.build(workload, make(), name)
        peer.losses(4)
        after = _bytes_by_device()
        on_all = plans.largest_new(lambda program: len(program.local_devices()) == num_replicas)
        for what, num_bytes in {
            "between steps": after[1] - before[1] - batch_bytes,
            "step": on_all,
            "parameter device": after[0] - before[0],
        }.items():
            if num_bytes is not None:
                numbers.append(number(f"{what}, {name}", num_bytes / MEBIBYTE, "MiB"))
        peer.group, peer.num_checked = "central", 10
        peers.append(peer)
    pairs = [pair("central", "mirrored")]
    row = _harness.compare(request, f"central storage, {workload.name}", peers, pairs)
    return [{**row, "numbers": numbers}]


def _bytes_by_device() -> list[int]:
    """Returns the bytes of live arrays on each device of this process."""
    import jax

    found = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return list(found.values())


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(9, 3),
        options={
            "--only": {"choices": ("mlp256", "transformer32", "wide256_dense")},
            "--replicas": {"choices": (2, 4)},
        },
    )
