"""Names that may still change."""

from distributary.strategies import initialize_tpu_system, shutdown_tpu_system
from distributary.topology import DeviceAssignment, DeviceOrderMode, Topology, TPUSystemMetadata

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "TPUSystemMetadata",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]
