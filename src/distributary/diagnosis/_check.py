"""What the doctor finds."""

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

__all__ = ["Check", "Json", "Status"]

Json: TypeAlias = Any
Status: TypeAlias = Literal["ok", "warning", "problem", "skipped"]


@final
@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: What was checked, `"all-reduce"` for example.
        status: `"problem"` if training would fail, `"warning"` if it would be slow or surprising.
        detail: What was found.
        fix: How to get rid of a warning or problem.
        numbers: What was measured.
    """

    name: str
    status: Status
    detail: str
    fix: str | None = None
    numbers: dict[str, Json] = field(default_factory=dict)
