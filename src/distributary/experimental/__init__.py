"""Names that may still change."""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.inputs import ValueContext
from distributary.options import CommunicationImplementation, CommunicationOptions
from distributary.strategies import CentralStorageStrategy

if TYPE_CHECKING:
    from distributary import coordinator
    from distributary.checkpoint import PreemptionCheckpointHandler, TerminationConfig
    from distributary.coordinator import ParameterServerStrategy, local_cluster, ray_cluster
    from distributary.datasets import Optional
    from distributary.experimental import partitioners
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


# Imported on first use, because their modules take a while to import.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "MultiWorkerMirroredStrategy": "distributary.strategies",
            "Optional": "distributary.datasets",
            "ParameterServerStrategy": "distributary.coordinator",
            "PreemptionCheckpointHandler": "distributary.checkpoint",
            "StatisticsLogger": "distributary.monitoring",
            "TPUStrategy": "distributary.strategies",
            "TerminationConfig": "distributary.checkpoint",
            "coordinator": "distributary.coordinator",
            "dashboard": "distributary.monitoring",
            "local_cluster": "distributary.coordinator",
            "partitioners": "distributary.experimental.partitioners",
            "profile": "distributary.monitoring",
            "ray_cluster": "distributary.coordinator",
        },
    )
