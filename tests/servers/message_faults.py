"""What can happen to a message on its way: instead of `deliver(message)`."""


def lose_request(message, deliver):
    """It does not arrive."""
    raise ConnectionError


def lose_reply(message, deliver):
    """It arrives, but its sender does not come to know."""
    deliver(message)
    raise ConnectionError


def duplicate(message, deliver):
    """It arrives twice."""
    deliver(message)
    return deliver(message)
