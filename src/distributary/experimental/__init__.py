"""Names that may still change."""

from distributary.inputs import ValueContext
from distributary.options import CommunicationImplementation, CommunicationOptions

__all__ = ["CommunicationImplementation", "CommunicationOptions", "ValueContext"]
