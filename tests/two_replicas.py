"""Fixtures for tests of one strategy; a folder's `conftest.py` imports those that it needs."""

from collections.abc import Callable

import pytest

import distributary as dist


@pytest.fixture
def strategy(strategy_of) -> dist.MirroredStrategy:
    """A `MirroredStrategy` of two replicas."""
    return strategy_of(2)


@pytest.fixture
def variable(strategy) -> Callable[..., dist.Variable]:
    """A function that creates a variable in the scope of `strategy`."""

    def create(*args, **kwargs):
        with strategy.scope():
            return dist.Variable(*args, **kwargs)

    return create
