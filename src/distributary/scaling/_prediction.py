"""Predicts the step time on several machines like this one. Nothing here is measured on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from distributary.scaling._timer import Timing

__all__ = ["Network", "Prediction", "predict"]


@final
@dataclass(frozen=True)
class Network:
    """The network between the hosts.

    Args:
        latency_seconds: Latency in one direction.
        bytes_per_second: Bandwidth of a host, in each direction at the same time.
        origin: Where these numbers come from.
    """

    latency_seconds: float
    bytes_per_second: float
    origin: str


@final
@dataclass(frozen=True)
class Prediction:
    """The prediction for a number of hosts.

    Args:
        num_hosts: Number of hosts.
        num_replicas: Number of replicas on all hosts together.
        seconds: Seconds per step.
        examples_per_second: Examples per second of all replicas; None if the batch size is unknown.
        efficiency: Time of a step on one host, divided by `seconds`.
    """

    num_hosts: int
    num_replicas: int
    seconds: float
    examples_per_second: float | None
    efficiency: float


def predict(timing: Timing, network: Network, hosts: Sequence[int]) -> list[Prediction]:
    """Predicts steps on several hosts: the measured step, and then a ring all-reduce.

    The ring between the hosts does not overlap with the step. It takes 2 (N - 1) / N times the
    bytes divided by the bandwidth, and for each all-reduce 2 (N - 1) times the latency. Each host
    keeps its batch, so the global batch grows with the number of hosts.

    Args:
        timing: The measurement of one host. It must have several replicas, because a single one
            reduces nothing.
        network: The network between the hosts.
        hosts: Numbers of hosts.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations" (2009).
    """
    found = []
    for num_hosts in hosts:
        turns = 2 * (num_hosts - 1)
        transfer = turns / num_hosts * timing.reduced_bytes / network.bytes_per_second
        latency = turns * network.latency_seconds * timing.num_reductions
        seconds = timing.seconds + transfer + latency
        examples = timing.examples_per_step
        found.append(
            Prediction(
                num_hosts,
                num_hosts * timing.num_replicas,
                seconds,
                None if examples is None else num_hosts * examples / seconds,
                timing.seconds / seconds,
            )
        )
    return found
