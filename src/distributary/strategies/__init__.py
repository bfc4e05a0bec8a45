"""Policy: which topology, variables, collectives and inputs go together."""

import importlib
from typing import TYPE_CHECKING, Any

from distributary.strategies._base import Strategy
from distributary.strategies._compiled import is_dynamic, signature_of, split_result
from distributary.strategies._default import DefaultStrategy
from distributary.strategies._extended import StrategyExtended
from distributary.strategies._function import Function, function
from distributary.strategies._mirrored import MirroredStrategy
from distributary.strategies._one_device import OneDeviceStrategy

if TYPE_CHECKING:
    from distributary.strategies._multi_worker import MultiWorkerMirroredStrategy

__all__ = [
    "DefaultStrategy",
    "Function",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "Strategy",
    "StrategyExtended",
    "function",
    "is_dynamic",
    "signature_of",
    "split_result",
]


def __getattr__(name: str) -> Any:
    # With it come the cluster resolvers.
    if name == "MultiWorkerMirroredStrategy":
        return importlib.import_module(f"{__name__}._multi_worker").MultiWorkerMirroredStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
