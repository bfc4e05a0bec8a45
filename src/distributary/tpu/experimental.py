"""Names that may still change."""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.tpu._device_assignment import DeviceAssignment, DeviceOrderMode
from distributary.tpu._topology import Topology, TPUSystemMetadata

if TYPE_CHECKING:
    from distributary.strategies import initialize_tpu_system, shutdown_tpu_system

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "TPUSystemMetadata",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]

# Their package is above this one, so they are imported on first use.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {"distributary.strategies._tpu_system": "initialize_tpu_system shutdown_tpu_system"},
    )
