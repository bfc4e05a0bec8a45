"""The devices of connected processes, and the methods of a strategy that has them."""

import itertools
from collections.abc import Sequence

import jax
import numpy as np

from distributary.cluster_resolver import MultiWorker
from distributary.devices import replica_devices
from distributary.engine import Placement
from distributary.errors import ClusterError
from distributary.job import share_compilation
from distributary.options import CommunicationOptions
from distributary.strategies._extended import Sharded, StrategyExtended
from distributary.strategies._layout_rules import LayoutRules


def devices_of_all(place: MultiWorker) -> tuple[jax.Device, ...]:
    """Returns the devices of all workers, worker by worker, of the kind this worker would use."""
    local = replica_devices(None)
    platform = local[0].platform
    devices: list[list[jax.Device]] = [[] for _ in range(place.num_workers)]
    for device in jax.devices(platform):
        devices[device.process_index].append(device)
    counts = [len(of_worker) for of_worker in devices]
    if len(set(counts)) > 1:
        seen = ", ".join(
            f"{peer.name} {count}" for peer, count in zip(place.workers, counts, strict=True)
        )
        raise ClusterError(
            f"The workers have different numbers of {platform.upper()} devices: {seen}. Give every"
            " worker the same number, with CUDA_VISIBLE_DEVICES or JAX_NUM_CPU_DEVICES."
        )
    return tuple(itertools.chain.from_iterable(devices))


def extended_of_job(
    strategy: object,
    place: MultiWorker | None,
    devices: Sequence[jax.Device] | Sequence[Sequence[jax.Device]],
    options: CommunicationOptions | None,
    sharded: Sharded = Sharded.NOTHING,
    layout_rules: LayoutRules | None = None,
) -> StrategyExtended:
    """Makes the methods of a strategy that may span processes; all of them call this together.

    Args:
        strategy: The strategy.
        place: The processes; None for this process alone.
        devices: Like `replicas` of `Placement.on_each`, of all processes.
        options: Communication options.
        sharded: Like `sharded` of `StrategyExtended`.
        layout_rules: Like `layout_rules` of `StrategyExtended`.
    """
    extended = StrategyExtended(
        strategy,
        Placement.on_each(devices),
        options=options,
        workers=place,
        sharded=sharded,
        layout_rules=layout_rules,
    )
    # The first collective connects the workers, and gloo waits 30 s for this. Run one now, while
    # all workers are at the same point: before their first step, one may read data for longer than
    # that.
    extended.from_chief([np.zeros(1 << 15, np.int32)], f"the start of {type(strategy).__name__}")
    share_compilation(extended.mesh.devices.flat)
    return extended
