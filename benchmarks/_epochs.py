"""Epochs of `fit` as blocks of the interleaved clock."""

from dataclasses import dataclass
from typing import final

from _served import ServedPeer

__all__ = ["Epochs", "FitPeer"]


@dataclass(frozen=True)
class Epochs:
    """Steps of the epoch that is reported, and of a shorter one for the marginal cost."""

    long: int
    short: int


@final
class FitPeer:
    """A served peer that takes an epoch of each length when it is its turn."""

    def __init__(self, served: ServedPeer, epochs: Epochs) -> None:
        self.name = served.name
        self.losses = served.losses
        self.close = served.close
        self.marginal_seconds: list[float] = []
        self._served = served
        self._epochs = epochs

    def time_block(self, num_steps: int) -> float:
        """Seconds per step of the long epoch; keeps those per additional step."""
        short = self._epochs.short
        seconds_short = self._served.time_block(short) * short
        seconds = self._served.time_block(num_steps) * num_steps
        self.marginal_seconds.append((seconds - seconds_short) / (num_steps - short))
        return seconds / num_steps
