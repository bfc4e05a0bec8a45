"""Makes the results of metrics in a step of one replica those of the whole batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from distributary.keras_bridge._replica import (
    in_trainer,
    replica_context,
    sums,
    weight_of_rows,
)


def get_metrics_result(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the results of metrics in a step those of all replicas."""

    def get_metrics_result(self: Any) -> Any:
        if replica_context() is None or not in_trainer():
            return original(self)
        variables = self.metrics_variables
        values = sums().of([variable.value for variable in variables], variables)
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            results = original(self)
        sums().note_of_all(jax.tree.leaves(results))
        return results

    return get_metrics_result


def stateless_result(original: Callable[..., Any]) -> Callable[..., Any]:
    """Does the same for a metric whose state the user's own step handles."""

    def stateless_result(self: Any, metric_variables: Any) -> Any:
        if replica_context() is None or not in_trainer():
            return original(self, metric_variables)
        results = original(self, sums().of(list(metric_variables), self.variables))
        sums().note_of_all(jax.tree.leaves(results))
        return results

    return stateless_result


def reduce_to_samplewise_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Counts a number for the whole batch, such as its loss, once instead of once per replica."""

    def reduce_to_samplewise_values(
        values: Any, sample_weight: object, reduce_fn: object, dtype: object
    ) -> Any:
        context = replica_context()
        is_number = sample_weight is None and not jnp.ndim(values)
        if is_number and context is not None and in_trainer():
            sample_weight = weight_of_rows() / context.num_replicas_in_sync
        return original(values, sample_weight, reduce_fn, dtype)

    return reduce_to_samplewise_values
