"""Several steps in one program."""

from collections.abc import Callable

import jax
from jax import lax

from distributary.devices import Nest

__all__ = ["several_steps"]


def several_steps(step: Callable[[Nest], Nest], keep_all: bool = False) -> Callable[[Nest], Nest]:
    """Returns a step that runs `step` on stacked batches, one after the other, in one program.

    Every step sees the variables that the steps before it have assigned.

    Args:
        step: A function of a batch for `Strategy.run`.
        keep_all: Whether to return the results of all steps, joined along dim 0; else those of the
            last one.

    Returns:
        A function of a nest of arrays `[step, *shape]`.
    """

    def steps(batches: Nest) -> Nest:
        _, results = lax.scan(lambda _, batch: (None, step(batch)), None, batches)
        if keep_all:
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)
        return jax.tree.map(lambda x: x[-1], results)

    return steps
