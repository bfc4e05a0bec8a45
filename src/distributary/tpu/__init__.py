"""TPUs: their topology, and which of their cores make up replicas."""

from distributary.options import XLAOptions
from distributary.tpu import experimental

__all__ = ["XLAOptions", "experimental"]
