from collections.abc import Callable, Sequence
from typing import Any

import pytest

import distributary as dist


@pytest.fixture
def on_replicas(strategy_of) -> Callable[..., tuple[Any, ...]]:
    """A function that calls `step` with one component per replica; gives a result per replica."""

    def call(step: Callable[..., Any], components: Sequence[Any]) -> tuple[Any, ...]:
        replicas = strategy_of(len(components))
        result = replicas.run(step, (dist.PerReplica(components),))
        return replicas.experimental_local_results(result)

    return call


def tape_gradient(function: Callable[[Any], Any], x: Any) -> Any:
    """The gradient of a function by a tape."""
    with dist.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)
