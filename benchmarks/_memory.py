"""The memory that a peer takes; in a process in which it is alone."""

import resource
from pathlib import Path
from typing import Any

import jax
from _peers import Peer

__all__ = ["memory_of"]

_MEBIBYTE = 2**20


def memory_of(peer: Peer, num_steps: int) -> dict[str, float]:
    """Returns MiB by kind, after a few steps. What the system or JAX cannot tell is left out.

    program    what XLA plans for the last device: arguments + outputs - donated + temporary
               buffers of the largest program that the steps have compiled
    resident   peak of the process while it takes `num_steps` steps, compilation excluded
    arrays     on the last device between steps, batches included

    Args:
        peer: Has not taken a step.
        num_steps: How many are taken.
    """
    known = _programs()  # held, so that none is freed and replaced
    peer.losses(2)
    new = [one for one in _programs() if not any(one is other for other in known)]
    last = jax.devices()[-1]
    found = {
        "program": _largest([one for one in new if last in one.local_devices()]),
        "arrays": sum(
            shard.data.nbytes
            for array in jax.live_arrays()
            for shard in array.addressable_shards
            if shard.device == last
        ),
    }
    was_reset = _reset_peak()
    peer.time_block(num_steps)
    if was_reset:
        # In KiB; where the peak can be reset, this is Linux.
        found["resident"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {kind: size / _MEBIBYTE for kind, size in found.items() if size is not None}


def _largest(programs: list[Any]) -> int | None:
    """Returns the bytes on a device of the program that needs most; donated memory counts once."""
    try:
        all_stats = [program.get_compiled_memory_stats() for program in programs]
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return max(
        (
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            - stats.alias_size_in_bytes
            + stats.temp_size_in_bytes
            for stats in all_stats
        ),
        default=None,
    )


def _programs() -> list[Any]:
    """Returns all compiled programs of this process; asking JAX serves whoever holds them alike."""
    try:
        return list(jax.devices()[0].client.live_executables())
    except AttributeError:
        return []


def _reset_peak() -> bool:
    """Lets Linux forget the process's peak; returns False where that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
