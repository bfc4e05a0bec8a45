"""Names that may still change."""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.context import ValueContext
from distributary.options import CommunicationImplementation, CommunicationOptions
from distributary.strategies import CentralStorageStrategy

if TYPE_CHECKING:
    from distributary import coordinator
    from distributary.checkpoint import PreemptionCheckpointHandler, TerminationConfig
    from distributary.coordinator import ParameterServerStrategy, local_cluster, ray, ray_cluster
    from distributary.data import Optional
    from distributary.experimental import partitioners
    from distributary.strategies import MultiWorkerMirroredStrategy, TPUStrategy
    from distributary.tools.monitoring import StatisticsLogger, dashboard, profile

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
    "ray",
    "ray_cluster",
]

# Other names of `tf.distribute.experimental`.
_ELSEWHERE = {
    "CollectiveHints": "Use distributary.experimental.CommunicationOptions.",
    "CollectiveCommunication": "Use distributary.experimental.CommunicationImplementation.",
    "MirroredStrategy OneDeviceStrategy": "It is in distributary itself.",
    "PreemptionWatcher": "Use distributary.experimental.PreemptionCheckpointHandler.",
}

# Imported on first use, because their modules take a while to import.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "distributary.checkpoint": "PreemptionCheckpointHandler TerminationConfig",
            "distributary.coordinator": (
                "ParameterServerStrategy coordinator local_cluster ray ray_cluster"
            ),
            "distributary.data": "Optional",
            "distributary.experimental.partitioners": "partitioners",
            "distributary.tools.monitoring": "StatisticsLogger dashboard profile",
            "distributary.strategies": "MultiWorkerMirroredStrategy TPUStrategy",
        },
        _ELSEWHERE,
    )
