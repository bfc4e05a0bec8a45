"""Names that may still change."""

from typing import TYPE_CHECKING, Any

from distributary.inputs import ValueContext
from distributary.options import CommunicationImplementation, CommunicationOptions

if TYPE_CHECKING:
    from distributary.datasets import Optional

__all__ = ["CommunicationImplementation", "CommunicationOptions", "Optional", "ValueContext"]


def __getattr__(name: str) -> Any:
    if name == "Optional":
        from distributary.datasets import Optional

        return Optional
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
