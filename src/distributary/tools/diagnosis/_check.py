"""The results of the doctor's checks."""

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

Json: TypeAlias = Any
Status: TypeAlias = Literal["ok", "warning", "problem", "skipped"]


@final
@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: Name of the check, `"all-reduce"` for example.
        status: `"problem"` if training would fail, `"warning"` if it would be slow or surprising.
        detail: The finding.
        fix: A way to get rid of the warning or problem.
        numbers: The measurements.
    """

    name: str
    status: Status
    detail: str
    fix: str | None = None
    numbers: dict[str, Json] = field(default_factory=dict)
