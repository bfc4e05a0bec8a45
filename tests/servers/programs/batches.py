"""Functions that workers import from beside their script."""

import itertools

import numpy as np


def make():
    """10, 11, 12 and so on."""
    return itertools.count(10)


def of_replicas(context):
    """Rows of numbers that grow by 1 from replica to replica."""
    assert context.num_replicas_in_sync == 2
    return (np.full(3, i, np.float32) for i in itertools.count())


def value():
    """What every worker multiplies with."""
    return 10
