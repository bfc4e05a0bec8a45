"""What can happen to a message on its way: instead of `deliver(message)`."""

from distributary.servers._links import ConnectionLostError


def lose_request(message, deliver):
    """It does not arrive."""
    raise ConnectionLostError


def lose_reply(message, deliver):
    """It arrives, but its sender does not come to know."""
    deliver(message)
    raise ConnectionLostError


def duplicate(message, deliver):
    """It arrives twice."""
    deliver(message)
    return deliver(message)
