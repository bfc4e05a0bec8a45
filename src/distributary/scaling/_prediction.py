"""What several machines like this one would do, by a model: nothing here was measured on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from distributary.scaling._measurement import Row

__all__ = ["Network", "Prediction", "predict"]


@final
@dataclass(frozen=True)
class Network:
    """What connects the hosts.

    Args:
        latency_seconds: One way.
        bytes_per_second: Of a host, in each direction at the same time.
        origin: Where these numbers come from.
    """

    latency_seconds: float
    bytes_per_second: float
    origin: str


@final
@dataclass(frozen=True)
class Prediction:
    """What the model says about a number of hosts.

    Args:
        num_hosts: Number of hosts.
        num_replicas: Number of replicas on all of them.
        seconds: Per step.
        examples_per_second: Of all replicas; None if the size of the batch cannot be told.
        efficiency: Time of a step of one host over `seconds`.
    """

    num_hosts: int
    num_replicas: int
    seconds: float
    examples_per_second: float | None
    efficiency: float


def predict(row: Row, network: Network, hosts: Sequence[int]) -> list[Prediction]:
    """Adds to the measured step of one host a ring all-reduce between hosts, not overlapped.

    The ring takes 2 (N - 1) / N times the bytes over the bandwidth, and for each all-reduce
    2 (N - 1) times the latency; a host keeps its batch, so the global batch grows with the hosts.

    Args:
        row: The measurement of one host, with several replicas: one reduces nothing.
        network: What connects the hosts.
        hosts: Numbers of hosts.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations" (2009).
    """
    found = []
    for num_hosts in hosts:
        turns = 2 * (num_hosts - 1)
        transfer = turns / num_hosts * row.timing.reduced_bytes / network.bytes_per_second
        latency = turns * network.latency_seconds * row.timing.num_reductions
        seconds = row.timing.seconds + transfer + latency
        examples = row.timing.examples_per_step
        found.append(
            Prediction(
                num_hosts,
                num_hosts * row.timing.num_replicas,
                seconds,
                None if examples is None else num_hosts * examples / seconds,
                row.timing.seconds / seconds,
            )
        )
    return found
