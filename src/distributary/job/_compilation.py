"""Programs that one worker compiles for all workers of its machine.

The workers of a machine share its cores, so each would wait for the compilers of the others. JAX
can pass a program on. It finds it by a key, as in its folder of compiled programs, which on CPUs
describes the process, too. Here all workers take the key of worker 0: it has the same processor.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax

from distributary.devices import key_of_devices, set_key_of_devices
from distributary.job._consensus import consensus

_is_shared = False


def share_compilation(devices: Sequence[jax.Device]) -> None:
    """Lets worker 0 compile what spans all workers, if they are on one machine and have CPUs.

    All workers call it together.
    """
    global _is_shared
    job = consensus()
    if job is None or not job.is_on_one_machine or devices[0].platform != "cpu" or _is_shared:
        return
    flags = job.exchange("the flags of compilers", os.environ.get("XLA_FLAGS", "").encode())
    if flags.count(flags[0]) == len(flags):  # or the keys differ, and the others wait for worker 0
        key = job.broadcast("the key of the devices", lambda: key_of_devices(devices))
        _is_shared = set_key_of_devices(key)


@contextmanager
def compiled_once(title: str, is_new: bool) -> Iterator[None]:
    """Lets worker 0 compile what runs in the block; call it when all workers have met.

    Args:
        title: The program in messages, the same on all workers.
        is_new: Whether this worker has not compiled the program yet. Where garbage is collected at
            other times, some have and others have not; then each compiles its own.
    """
    job = consensus()
    if not _is_shared or job is None:
        yield
        return
    is_shared = all(job.exchange(f"a first run of {title}", b"." * is_new))
    jax.config.update("jax_share_binary_between_hosts", is_shared)
    try:
        yield
    finally:
        jax.config.update("jax_share_binary_between_hosts", False)
