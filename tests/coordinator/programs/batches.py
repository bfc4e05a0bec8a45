"""Functions that workers import from beside their script."""

import itertools


def make():
    """10, 11, 12 and so on."""
    return itertools.count(10)


def value():
    """What every worker multiplies with."""
    return 10
