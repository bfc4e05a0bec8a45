"""The strategy that is current outside of every scope."""

from typing import final

from distributary.context import Mode, ReplicaContext, register_default_mode
from distributary.engine import Placement
from distributary.errors import ContextError
from distributary.strategies._base import Strategy
from distributary.strategies._extended import StrategyExtended


@final
class DefaultStrategy(Strategy):
    """One replica on the device that JAX chooses; `get_strategy()` returns it outside of scopes.

    Source: the default strategy of `tf.distribute`.
    """

    def __init__(self) -> None:
        # Not `super().__init__`: nobody asks for this strategy.
        self._extended = StrategyExtended(self, Placement(num_replicas=1))

    def __deepcopy__(self, memo: object) -> Strategy:
        raise ContextError("There is one default strategy; it cannot be copied.")

    def __repr__(self) -> str:
        return "<the default strategy: 1 replica on JAX's default device>"


def _make_default_mode() -> Mode:
    strategy = DefaultStrategy()
    return Mode(strategy, "replica", ReplicaContext(strategy, 0))


register_default_mode(_make_default_mode)
