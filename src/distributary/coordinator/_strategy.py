"""Asynchronous training with variables on servers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary.coordinator._closures import current_trace
from distributary.coordinator._processes import cluster_of
from distributary.errors import UnsupportedError
from distributary.options import RunOptions
from distributary.strategies import Strategy, StrategyExtended
from distributary.tracing import SparseUpdate, push
from distributary.variables import Variable, neighbor

__all__ = ["ParameterServerStrategy"]


@final
class ParameterServerStrategy(Strategy):
    """Variables on servers, and workers that compute on them without waiting for each other.

    Create a `ClusterCoordinator` of it, and schedule functions on the workers.

    Args:
        cluster_resolver: Names the workers and servers, each a process with a `Server`; or a
            cluster in this process, `local_cluster(workers=2, ps=2)`.
        variable_partitioner: Only None: variables cannot be divided yet.

    Raises:
        InvalidTypeError: if it is neither.
        InvalidValueError: if there are no workers or no servers, or this process is not the chief.
        ClusterError: if tasks do not come in time, or have other versions of packages.
        UnsupportedError: if `variable_partitioner` is given.

    Source: `tf.distribute.ParameterServerStrategy`.
    """

    def __init__(self, cluster_resolver: Any, variable_partitioner: Any = None) -> None:
        if variable_partitioner is not None:
            raise UnsupportedError(
                f"ParameterServerStrategy: variable_partitioner is {variable_partitioner!r}, but"
                " variables cannot be divided between servers yet. Leave it out."
            )
        self._cluster = cluster_of(cluster_resolver).open()
        self._coordinator: Any = None
        self._sparse_update: SparseUpdate = "exact"
        super().__init__(
            StrategyExtended(
                self,
                [jax.local_devices(backend="cpu")[0]],
                distributed=False,
                kind_of_variables=_ServerVariable,
            )
        )

    @property
    def num_workers(self) -> int:
        """Number of workers, of which each runs a step of its own at a time."""
        return len(self._cluster.workers)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` once, on the worker that runs the scheduled function around it.

        Source: `tf.distribute.ParameterServerStrategy.run`.
        """
        trace = current_trace()
        if trace is not None:
            fn = trace.repeatable(fn)
        return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Like `Strategy.reduce`; what the servers make of the result is theirs to compute."""
        result = super().reduce(reduce_op, value, axis)
        return result if current_trace() is None else jax.tree.map(push, result)

    def __repr__(self) -> str:
        cluster = self._cluster
        return (
            f"<ParameterServerStrategy: {len(cluster.workers)} workers,"
            f" {len(cluster.servers)} parameter servers>"
        )


class _ServerVariable(Variable):
    """A variable on a parameter server."""

    _place: tuple[int, int]

    def _initial_state(self, initial: Any) -> Any:
        cluster = self._layout.strategy._cluster
        beside = getattr(neighbor(), "_place", None)
        self._place = cluster.create(np.asarray(initial, self._dtype), beside)
        return None

    @property
    def _value(self) -> Any:
        return jnp.asarray(self._layout.strategy._cluster.read(self._place))

    @_value.setter
    def _value(self, value: Any) -> None:
        if value is not None:
            self._layout.strategy._cluster.assign(self._place, "assign", np.asarray(value))

    def _change_eager(self, kind: str, value: Any) -> None:
        self._layout.strategy._cluster.assign(self._place, kind, np.asarray(value, self._dtype))
