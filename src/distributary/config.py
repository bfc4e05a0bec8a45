"""Settings that you must make before JAX starts."""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.devices import set_logical_cpu_devices

if TYPE_CHECKING:
    from distributary.strategies import experimental_connect_to_cluster

__all__ = ["experimental_connect_to_cluster", "set_logical_cpu_devices"]


# Imported on first use, because it imports the cluster resolvers.
__getattr__ = late_names(__name__, {"distributary.strategies": "experimental_connect_to_cluster"})
