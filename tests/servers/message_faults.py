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
    return _noted(
        cluster,
        lambda source, arrays: [len(a) for a in arrays if a.ndim and source.startswith("worker")],
    )


def spy_on_bytes(cluster):
    """A list that grows by the sizes in bytes of the arrays in all messages."""
    return _noted(cluster, lambda source, arrays: [a.nbytes for a in arrays])


def _noted(cluster, sizes_of):
    sizes = []

    def look(source, target, message, deliver):
        reply = deliver(message)
        sizes.extend(sizes_of(source, (*message.arrays, *reply.arrays)))
        return reply

    cluster.fault = look
    return sizes
