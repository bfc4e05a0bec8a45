"""What XLA plans in memory for compiled programs."""

from typing import Any, TypeAlias

__all__ = ["Program", "largest_plan", "programs"]

Program: TypeAlias = Any  # jaxlib's LoadedExecutable


def programs() -> list[Program]:
    """All compiled programs of this process; asking JAX serves whoever holds them alike."""
    import jax

    try:
        return list(jax.devices()[0].client.live_executables())
    except AttributeError:
        return []


def largest_plan(programs: list[Program]) -> dict[str, int] | None:
    """XLA's memory plan of the program that needs most, or None if there is none."""
    try:
        all_stats = [program.get_compiled_memory_stats() for program in programs]
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    plans = [
        {
            "argument_bytes": stats.argument_size_in_bytes,
            "output_bytes": stats.output_size_in_bytes,
            "donated_bytes": stats.alias_size_in_bytes,
            "temporary_bytes": stats.temp_size_in_bytes,
            "total_bytes": stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            - stats.alias_size_in_bytes
            + stats.temp_size_in_bytes,
        }
        for stats in all_stats
    ]
    return max(plans, key=lambda plan: plan["total_bytes"], default=None)
