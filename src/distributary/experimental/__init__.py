"""Names that may still change."""

from typing import TYPE_CHECKING, Any

from distributary.inputs import ValueContext
from distributary.options import CommunicationImplementation, CommunicationOptions

if TYPE_CHECKING:
    from distributary.datasets import Optional
    from distributary.strategies import MultiWorkerMirroredStrategy

__all__ = [
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "Optional",
    "ValueContext",
]


def __getattr__(name: str) -> Any:
    # With them come modules that take a while to read.
    if name == "Optional":
        from distributary.datasets import Optional

        return Optional
    if name == "MultiWorkerMirroredStrategy":
        from distributary.strategies import MultiWorkerMirroredStrategy

        return MultiWorkerMirroredStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
