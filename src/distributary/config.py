"""Settings that must be made before JAX starts."""

from typing import TYPE_CHECKING, Any

from distributary.topology import set_logical_cpu_devices

if TYPE_CHECKING:
    from distributary.strategies import experimental_connect_to_cluster

__all__ = ["experimental_connect_to_cluster", "set_logical_cpu_devices"]


def __getattr__(name: str) -> Any:
    # With it come the cluster resolvers.
    if name == "experimental_connect_to_cluster":
        from distributary.strategies import experimental_connect_to_cluster

        return experimental_connect_to_cluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
