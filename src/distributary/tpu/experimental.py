"""Names that may still change."""

from distributary.devices import DeviceAssignment, DeviceOrderMode, Topology, TPUSystemMetadata
from distributary.strategies import initialize_tpu_system, shutdown_tpu_system

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "TPUSystemMetadata",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]
