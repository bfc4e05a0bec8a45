"""The memory that XLA plans for programs."""

from collections.abc import Callable
from typing import Any

__all__ = ["Plans"]


class Plans:
    """Tells programs that are compiled from now on from those that are there."""

    def __init__(self) -> None:
        # Held, so that none is freed and replaced.
        self._known = _programs()

    def largest_new(self, counts: Callable[[Any], bool] = lambda program: True) -> int | None:
        """Returns the bytes on one device of the new program that needs most, if there is one.

        Arguments, results and temporary buffers, but donated memory once. Programs that do not
        count, such as those of another device, are left out.
        """
        new = [p for p in _programs() if not any(p is known for known in self._known) and counts(p)]
        try:
            all_stats = [program.get_compiled_memory_stats() for program in new]
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
    import jax

    try:
        return list(jax.devices()[0].client.live_executables())
    except AttributeError:
        return []
