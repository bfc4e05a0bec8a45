"""Places where a tape works: a replica of `Strategy.run`, and `distributary.function`."""

from collections.abc import Callable
from typing import Any

import pytest

import distributary as dist


class Place:
    """Runs a function in one of three ways, on variables of one strategy of two replicas."""

    def __init__(self, strategy: dist.Strategy, way: str):
        self.strategy = strategy
        self.way = way

    def variable(self, value: Any, **kwargs: Any) -> dist.Variable:
        with self.strategy.scope():
            return dist.Variable(value, **kwargs)

    def __call__(self, step: Callable[..., Any], *args: Any) -> Any:
        """The result of `step(*args)`, of replica 0."""
        if self.way == "eager":
            return step(*args)
        if self.way == "function":
            return dist.function(step)(*args)
        return self.strategy.experimental_local_results(self.strategy.run(step, args))[0]


@pytest.fixture(params=["run", "function", "eager"])
def place(request, strategy_of) -> Place:
    return Place(strategy_of(2), request.param)


@pytest.fixture(params=["run", "function"])
def traced(request, strategy_of) -> Place:
    return Place(strategy_of(2), request.param)


@pytest.fixture
def run(strategy_of) -> Place:
    return Place(strategy_of(2), "run")
