"""Peers that take the same steps, and the interleaved clock that compares them."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, final

__all__ = [
    "Batches",
    "InProcessPeer",
    "Peer",
    "RatioSummary",
    "Timed",
    "check_agreement",
    "choose_steps",
    "interleave",
    "summarize_ratio",
]

Output: TypeAlias = Any
"""What one step returns: an array or a container of arrays that may still be computed."""

RatioSummary: TypeAlias = dict[str, float]


class Timed(Protocol):
    """Something whose steps are timed."""

    name: str

    def time_block(self, num_steps: int) -> float:
        """Takes `num_steps` steps, waits for the last and returns the seconds per step."""
        ...


class Peer(Timed, Protocol):
    """One implementation of a workload. Its state goes on from call to call."""

    def losses(self, num_steps: int) -> list[float]:
        """Takes `num_steps` steps and returns the loss of each."""
        ...

    def close(self) -> None:
        """Frees what the peer holds."""
        ...


@final
class InProcessPeer:
    """A peer that runs on this process's devices.

    Args:
        name: What the report calls it.
        step: Takes the number of the step and dispatches it, without waiting for its result.
        wait: Blocks until a step's output is computed on every device.
        to_float: The loss on the host.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[int], Output],
        wait: Callable[[Output], object],
        to_float: Callable[[Output], float],
    ) -> None:
        self.name = name
        self._step = step
        self._wait = wait
        self._to_float = to_float
        self._num_steps_taken = 0

    def losses(self, num_steps: int) -> list[float]:
        """Takes `num_steps` steps and returns the loss of each."""
        return [self._to_float(self._dispatch()) for _ in range(num_steps)]

    def time_block(self, num_steps: int) -> float:
        """Takes `num_steps` steps, waits for the last and returns the seconds per step."""
        start = time.perf_counter()
        output = None
        for _ in range(num_steps):
            output = self._dispatch()
        self._wait(output)
        return (time.perf_counter() - start) / num_steps

    def close(self) -> None:
        """Nothing to do: the arrays go with the object."""

    def _dispatch(self) -> Output:
        output = self._step(self._num_steps_taken)
        self._num_steps_taken += 1
        return output


@final
class Batches:
    """A peer that takes batches from an iterator."""

    def __init__(
        self, name: str, batches: Iterator[Any], use: Callable[[Any], Any] | None = None
    ) -> None:
        self.name = name
        self._batches = batches
        self._use = use

    def losses(self, num_steps: int) -> list[float]:
        """Nothing to compare."""
        return []

    def time_block(self, num_steps: int) -> float:
        """Takes `num_steps` batches and returns the seconds per batch."""
        start = time.perf_counter()
        use, batches, last = self._use, self._batches, None
        for _ in range(num_steps):
            last = next(batches) if use is None else use(next(batches))
        if use is not None:
            import jax

            jax.block_until_ready(last)
        return (time.perf_counter() - start) / num_steps

    def close(self) -> None:
        """Nothing to do."""


def choose_steps(peer: Peer, block_seconds: float) -> int:
    """How many steps of `peer` fill a block, from 4 to 1000."""
    peer.time_block(4)
    seconds_per_step = peer.time_block(4)
    return max(4, min(1000, round(block_seconds / seconds_per_step)))


def interleave(
    peers: Sequence[Timed], num_rounds: int, num_steps: Mapping[str, int]
) -> dict[str, list[float]]:
    """Times one block of every peer per round, after one block each that does not count.

    Every round starts with another peer, so a drift of the machine's speed, or what a peer
    leaves in the caches, meets all of them alike.

    Args:
        peers: In the order of the first round.
        num_rounds: Rounds that count.
        num_steps: Steps per block, by the peer's name.

    Returns:
        Seconds per step by the peer's name, one number per round.
    """
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for peer in peers:
        peer.time_block(num_steps[peer.name])
    for round_number in range(num_rounds):
        first = round_number % len(peers)
        for peer in [*peers[first:], *peers[:first]]:
            seconds[peer.name].append(peer.time_block(num_steps[peer.name]))
    return seconds


def summarize_ratio(ours: Sequence[float], theirs: Sequence[float]) -> RatioSummary:
    """Ratios of two peers' times: per round (median, quartiles) and of their minima."""
    per_round = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    quartiles = (
        statistics.quantiles(per_round, n=4, method="inclusive")
        if len(per_round) > 1
        else per_round * 3
    )
    return {
        "median": statistics.median(per_round),
        "lower_quartile": quartiles[0],
        "upper_quartile": quartiles[2],
        "of_minima": min(ours) / min(theirs),
    }


def check_agreement(losses: Mapping[str, Sequence[float]], reference: str) -> dict[str, float]:
    """Largest difference between each peer's losses and those of `reference`.

    NaN compares as infinitely far away.
    """
    differences: dict[str, float] = {}
    for name, values in losses.items():
        gaps = [abs(a - b) for a, b in zip(values, losses[reference], strict=True)]
        differences[name] = max((gap if gap == gap else float("inf")) for gap in gaps)
    return differences
