"""The code of one replica in a step of `fit`, `evaluate` or `predict`."""

import inspect
import warnings
from contextlib import nullcontext
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from distributary._types import Nest
from distributary.collectives import ReduceOp
from distributary.context import ReplicaContext
from distributary.errors import DistributaryWarning, InvalidTypeError, shown
from distributary.keras_bridge._custom_loops import assign_agreed, is_kept_as_sum
from distributary.keras_bridge._replica import (
    agreed_state,
    in_trainer,
    is_summed,
    mean_over_rows,
    run_replica,
    sole_replica,
    sums,
    trainer_replica,
)
from distributary.keras_bridge._variables import keeps_on_servers
from distributary.tracing import user_stacklevel

Kind = Literal["train", "test", "predict"]
# The variables whose values Keras passes to a step and gets from it, in this order.
PARTS: dict[Kind, tuple[str, ...]] = {
    "train": ("trainable", "non_trainable", "optimizer", "metrics"),
    "test": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}


@final
class ModelStep:
    """The model's own `train_step`, `test_step` or `predict_step`, as a function for `run`.

    The step reads the variables of the model, and assigns those that it changes, like a step of a
    custom loop.

    Args:
        trainer: The model.
        kind: Selects one of the three methods.
        strategy: The strategy of the model.

    Attributes:
        gathers: Whether each replica returns the predictions of all. Workers need this, and so do
            loops of several steps, whose predictions come in the order of the steps.
    """

    def __init__(self, trainer: Any, kind: Kind, strategy: Any) -> None:
        self._trainer = trainer
        self._kind = kind
        self._strategy = strategy
        in_loop = int(trainer.steps_per_execution) > 1
        self.gathers = strategy.extended.num_workers > 1 or in_loop
        # The sums of metrics, which the logs need, are assigned, too, so that they are summed once.
        # In a loop, the next step adds to the replica's own part.
        self._assigns_sums = not in_loop
        #: The method, if it takes only the batch: it reads and assigns the variables itself, as
        #: methods for TensorFlow do.
        is_stateful = takes_only_data(trainer, kind)
        self.stateful = getattr(trainer, f"{kind}_step") if is_stateful else None

    def alone(self, data: Nest) -> Nest:
        """Runs the step on a whole batch; returns the logs or predictions."""
        if self.stateful is None:
            return self._run(data, None)
        is_sole = self._strategy.num_replicas_in_sync == 1 and not keeps_on_servers(self._strategy)
        with sole_replica(self._strategy) if is_sole else nullcontext():
            return self.stateful(data)

    def of_replica(self, data: Nest) -> Nest:
        """Runs the step of one of several replicas on its part of a batch.

        Returns:
            The logs of the whole batch, or the predictions for the part.
        """
        if self.stateful is None:
            replica = trainer_replica(self._strategy, num_rows(data))
        else:  # as in `Strategy.run`, for which such methods scale their losses
            replica = run_replica(self._strategy)
        with replica as context:
            out = self._run(data, context) if self.stateful is None else self.stateful(data)
            if self._kind != "predict":
                return (
                    logs_of_all(context, out) if self.stateful is None else self._logs(context, out)
                )
            if any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(out)):
                raise InvalidTypeError(
                    f"{self._trainer.name}.predict_step returned a scalar. Under"
                    f" {shown(self._strategy)} every replica predicts a part of the batch, and the"
                    " parts are joined along dim 0: return arrays with one entry per example."
                )
            self._check_rows(out, num_rows(data))
            return context.all_gather(out, axis=0) if self.gathers else out

    def _check_rows(self, out: Nest, rows: int) -> None:
        """Warns of outputs that do not have rows for each example, such as one for the batch."""
        for size in {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(out)}:
            if rows and size % rows:
                warnings.warn(
                    f"{self._trainer.name}.predict: an output has {size} rows for the {rows} rows"
                    " of a replica, and gets those of every replica, one after the other. Return"
                    " arrays with one row per example.",
                    DistributaryWarning,
                    stacklevel=user_stacklevel(),
                )

    def _logs(self, context: ReplicaContext, logs: Nest) -> Nest:
        """Returns the logs of a method that assigns variables itself, for the whole batch."""
        if not isinstance(logs, dict):
            return logs_of_all(context, logs)
        variables = self._trainer.metrics_variables
        values = [variable.value for variable in variables]
        summed = [i for i, variable in enumerate(variables) if is_kept_as_sum(variable)]
        totals = context.all_reduce(ReduceOp.SUM, [values[i] for i in summed]) if summed else []
        for i, value in zip(summed, totals, strict=True):
            values[i] = value
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            results = self._trainer.get_metrics_result()
        nested = [log if isinstance(log, dict) else {name: log} for name, log in logs.items()]
        flat = {name: log for own in nested for name, log in own.items()}
        others = {name: log for name, log in flat.items() if name not in results}
        of_all = logs_of_all(context, others)
        return {name: results[name] if name in results else of_all[name] for name in flat}

    def call(self, state: list[list[Any]], data: Nest) -> tuple[Nest, tuple[Any, ...]]:
        """Calls the method of the model; returns its output and the new state, see `PARTS`."""
        given = [list(part) for part in state]
        if self._kind == "predict":
            out, non_trainable = self._trainer.predict_step(tuple(given), data)
            return out, (given[0], non_trainable)
        method = self._trainer.train_step if self._kind == "train" else self._trainer.test_step
        out, new = method(tuple(given), data)
        return out, new

    def variables(self) -> list[list[Any]]:
        """Returns the variables of the model whose values make up the state, see `PARTS`."""
        return [variables_of_part(self._trainer, part) for part in PARTS[self._kind]]

    def _run(self, data: Nest, context: ReplicaContext | None) -> Nest:
        on_servers = keeps_on_servers(self._strategy)
        mirrored = None if on_servers else context  # servers combine what replicas assign
        variables = dict(zip(PARTS[self._kind], self.variables(), strict=True))
        state = {name: [v.value for v in part] for name, part in variables.items()}
        if mirrored is not None and "metrics" in state:
            state["metrics"] = _own_parts(mirrored, variables["metrics"], state["metrics"])
        is_alone = context is None and not on_servers
        with sole_replica(self._strategy) if is_alone else nullcontext():
            out, after = self.call(list(state.values()), data)
        new = {name: list(part) for name, part in zip(variables, after, strict=True)}
        # An optimizer has made the new values of trainable variables, too.
        agreed = {"trainable", "optimizer"} if on_servers else set(variables)
        if mirrored is not None:
            new["non_trainable"] = agreed_state(
                mirrored, variables["non_trainable"], state["non_trainable"], new["non_trainable"]
            )
            if "metrics" in new:
                new["metrics"] = self._agreed_metrics(variables["metrics"], new["metrics"])
        for name, part in variables.items():
            is_total = mirrored is not None and name == "metrics" and self._assigns_sums
            changed = {
                id(variable): (variable, value)  # a list may have a variable twice
                for variable, old, value in zip(part, state[name], new[name], strict=True)
                if value is not old
            }
            for variable, value in changed.values():
                if name in agreed:
                    assign_agreed(variable, value, is_total)
                else:
                    variable.assign(value)
        return out

    def _agreed_metrics(self, variables: list[Any], values: list[Any]) -> list[Any]:
        """Returns the values to assign to metrics: those of all replicas, or parts of sums."""
        of_all = sums().of(values, variables)
        if self._assigns_sums:
            return of_all
        return [
            own if is_kept_as_sum(variable) else value
            for variable, own, value in zip(variables, values, of_all, strict=True)
        ]


def _own_parts(context: ReplicaContext, variables: list[Any], values: list[Any]) -> list[Any]:
    """Returns what a replica adds to: the state of sums on replica 0, and zeros on the others."""
    is_first = context.replica_id_in_sync_group == 0
    return [
        jnp.where(is_first, value, jnp.zeros_like(value))
        if is_summed(variable) and not is_kept_as_sum(variable)  # then the engine does this
        else value
        for variable, value in zip(variables, values, strict=True)
    ]


def variables_of_part(trainer: Any, part: str) -> list[Any]:
    """Returns the variables of a model that belong to a part of the state, see `PARTS`."""
    owner = trainer.optimizer if part == "optimizer" else trainer
    variables: list[Any] = getattr(
        owner, "variables" if part == "optimizer" else f"{part}_variables"
    )
    return variables


def takes_only_data(trainer: object, kind: Kind) -> bool:
    """Returns whether a model's step has one parameter, the batch, and none for the state."""
    try:
        parameters = inspect.signature(getattr(trainer, f"{kind}_step")).parameters.values()
    except (TypeError, ValueError):
        return False
    return [p.kind for p in parameters] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def logs_of_all(context: ReplicaContext, logs: Nest) -> Nest:
    """Turns logs of one replica into those of the whole batch; results of metrics already are."""
    leaves, tree = jax.tree.flatten(logs)
    own = [i for i, leaf in enumerate(leaves) if not (in_trainer() and sums().is_of_all(leaf))]
    numbers = [jnp.asarray(leaves[i]) for i in own]
    numbers = [x.astype(jnp.float32) if x.dtype == bool else x for x in numbers]
    if in_trainer():
        means = mean_over_rows(context, numbers)
    else:
        means = context.all_reduce(ReduceOp.MEAN, numbers) if own else []
    for i, mean in zip(own, means, strict=True):
        leaves[i] = mean
    return jax.tree.unflatten(tree, leaves)


def num_rows(data: Nest, axis: int = 0) -> int:
    """Returns the size of dim `axis` of the first array of a batch; 0 if unknown or missing."""
    leaves = jax.tree.leaves(data)
    shape = np.shape(leaves[0]) if leaves else ()
    return int(shape[axis] or 0) if len(shape) > axis else 0
