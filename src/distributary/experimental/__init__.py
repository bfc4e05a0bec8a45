"""Names that may still change."""

import importlib
from typing import TYPE_CHECKING, Any

from distributary.inputs import ValueContext
from distributary.options import CommunicationImplementation, CommunicationOptions
from distributary.strategies import CentralStorageStrategy

if TYPE_CHECKING:
    from distributary import coordinator
    from distributary.checkpoint import PreemptionCheckpointHandler, TerminationConfig
    from distributary.coordinator import ParameterServerStrategy, local_cluster, ray_cluster
    from distributary.datasets import Optional
    from distributary.monitoring import StatisticsLogger, dashboard, profile
    from distributary.strategies import MultiWorkerMirroredStrategy, TPUStrategy

__all__ = [
    "CentralStorageStrategy",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "Optional",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "StatisticsLogger",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "dashboard",
    "local_cluster",
    "partitioners",
    "profile",
    "ray_cluster",
]


def __getattr__(name: str) -> Any:
    # With them come modules that take a while to read.
    if name == "Optional":
        from distributary.datasets import Optional

        return Optional
    if name == "coordinator":
        return importlib.import_module("distributary.coordinator")
    if name == "partitioners":
        return importlib.import_module("distributary.experimental.partitioners")
    if name in ("ParameterServerStrategy", "local_cluster", "ray_cluster"):
        from distributary import coordinator

        return getattr(coordinator, name)
    if name in ("StatisticsLogger", "dashboard", "profile"):
        from distributary import monitoring

        return getattr(monitoring, name)
    if name in ("MultiWorkerMirroredStrategy", "TPUStrategy"):
        from distributary import strategies

        return getattr(strategies, name)
    if name in ("PreemptionCheckpointHandler", "TerminationConfig"):
        from distributary import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
