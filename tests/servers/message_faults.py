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


def spy(cluster):
    """A list that grows by the sizes of dim 0 of the arrays between workers and servers."""
    sizes = []

    def look(source, target, message, deliver):
        reply = deliver(message)
        if source.startswith("worker"):
            sizes.extend(len(a) for a in (*message.arrays, *reply.arrays) if a.ndim)
        return reply

    cluster.fault = look
    return sizes
