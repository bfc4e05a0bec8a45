"""Policy: which topology, variables, collectives and inputs go together."""

from distributary.strategies._base import Strategy
from distributary.strategies._default import DefaultStrategy
from distributary.strategies._extended import StrategyExtended
from distributary.strategies._function import Function, function
from distributary.strategies._mirrored import MirroredStrategy
from distributary.strategies._one_device import OneDeviceStrategy

__all__ = [
    "DefaultStrategy",
    "Function",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "Strategy",
    "StrategyExtended",
    "function",
]
