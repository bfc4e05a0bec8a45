"""Numbers of a run by name: the same on the page, in files and on the way to a launcher.

Names have the form of TensorBoard's tags, `"step/compute_seconds"` for example.
"""

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

from distributary.devices import progress
from distributary.errors import DistributaryError

Numbers: TypeAlias = dict[str, float]

# Reported per step, for the time between two samples.
_PER_STEP = (
    "seconds",
    "host_seconds",
    "input_wait_seconds",
    "compute_seconds",
    "collective_bytes",
)


def numbers_of(extended: Any) -> Numbers:
    """Returns all numbers of a strategy's run in this process, as sums since its beginning.

    Args:
        extended: `strategy.extended`.

    Returns:
        The numbers of `StepStatistics`; below `"coordinator/"`, those of a `ClusterCoordinator`'s
        `statistics()`; the latest logs of `fit`; and the numbers passed to `launch.report`.
    """
    numbers: Numbers = {
        "num_replicas": extended.num_replicas,
        "num_restarts": int(os.environ.get("DISTRIBUTARY_RESTART", 0)),
    }
    numbers |= _flat(extended.step_counts.snapshot(), "")
    for name, collect in list(extended.statistics_sources.items()):
        with contextlib.suppress(DistributaryError):  # raised if a server is lost
            numbers |= _flat(collect(), f"{name}/")
    if "coordinator/num_done" in numbers:
        numbers["num_steps"] += numbers["coordinator/num_done"]
    return numbers | progress.numbers(numbers["num_steps"])


def _flat(statistics: object, prefix: str) -> Numbers:
    """Returns the numbers in a dataclass, and in dataclasses in its tuples."""
    assert is_dataclass(statistics)
    numbers: Numbers = {}
    for field in fields(statistics):
        value = getattr(statistics, field.name)
        if isinstance(value, (int, float)):
            numbers[prefix + field.name] = value
        elif isinstance(value, tuple):
            for i, part in enumerate(value):
                numbers |= _flat(part, f"{prefix}{field.name}/{i}/")
    return numbers


def finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Returns the numbers with None for those that JSON cannot represent."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def rates(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> Numbers:
    """Returns the changes between two samples `seconds` apart, per second and per step."""
    changes = {name: after[name] - before[name] for name in after.keys() & before.keys()}
    if not seconds or any(changes.get(name, 0) < 0 for name in ("num_steps", "num_examples")):
        return {}  # the process has been started again in between
    num_steps = changes.get("num_steps", 0)
    numbers: Numbers = {}
    for name in ("steps", "examples", "runs"):
        if f"num_{name}" in changes and after[f"num_{name}"]:
            numbers[f"{name}_per_second"] = changes[f"num_{name}"] / seconds
    if num_steps and changes.get("seconds"):
        numbers |= {f"step/{name}": changes[name] / num_steps for name in _PER_STEP}
    return numbers
