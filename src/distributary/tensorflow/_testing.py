"""`tf.test`: what is there to run on."""

import platform

import jax

from distributary.topology import local_devices_of


def is_gpu_available(cuda_only: bool = False, min_cuda_compute_capability: object = None) -> bool:
    """`tf.test.is_gpu_available`: starts JAX."""
    return bool(local_devices_of("GPU"))


def gpu_device_name() -> str:
    """`tf.test.gpu_device_name`: "" without a GPU."""
    return "/device:GPU:0" if is_gpu_available() else ""


def is_built_with_cuda() -> bool:
    """`tf.test.is_built_with_cuda`: whether JAX can use GPUs here."""
    return is_gpu_available()


def is_built_with_rocm() -> bool:
    """`tf.test.is_built_with_rocm`: whether JAX uses GPUs of AMD here."""
    return any("rocm" in device.client.platform_version.lower() for device in jax.devices())


def is_cpu_target_available(target: str) -> bool:
    """`tf.test.is_cpu_target_available`: whether XLA runs on CPUs of this kind here."""
    return {"aarch64": "arm", "x86_64": "x86"}.get(platform.machine()) == target


def is_built_with_xla() -> bool:
    """`tf.test.is_built_with_xla`."""
    return True
