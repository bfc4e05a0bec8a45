"""Settings that must be made before JAX starts."""

from distributary.topology import set_logical_cpu_devices

__all__ = ["set_logical_cpu_devices"]
