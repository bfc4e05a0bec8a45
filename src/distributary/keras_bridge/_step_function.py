"""The functions behind `fit`, `evaluate` and `predict`.

Keras' JAX trainer calls `train_function(state, iterator)`. Under a strategy, the state stays in the
variables. The function takes a batch from the iterator, lays its rows out over the devices, and
gives it with the model's step to the engine, which traces the step on the whole batch.
"""

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from distributary.context import entered
from distributary.data import OwnRows
from distributary.devices import Loop, Nest, current_trial, latest_program, local_copy, progress
from distributary.engine import Programs, StepKind, global_batch, mode_of, several_steps
from distributary.errors import TracedValueError, check_type, warn
from distributary.keras_bridge._custom_loops import assign_agreed
from distributary.keras_bridge._data import Limit, current_call, limits_of, warn_beyond
from distributary.keras_bridge._variables import keeps_on_servers, model_step, optimizing
from distributary.strategies import DatasetBatches, next_own, take_stacked
from distributary.tracing import current_scope
from distributary.variables import ForeignVariable

# The model's own step of `fit`, `evaluate` or `predict`, as a function for the engine.

Kind = Literal["train", "test", "predict"]
_MODEL = ("trainable_variables", "non_trainable_variables")
# The attributes with the variables whose values Keras passes to a step and gets from it, in order.
PARTS: dict[Kind, tuple[str, ...]] = {
    "train": (*_MODEL, "optimizer.variables", "metrics_variables"),
    "test": (*_MODEL, "metrics_variables"),
    "predict": _MODEL,
}
_OF_OPTIMIZER = ("trainable_variables", "optimizer.variables")  # what it assigns


@final
class ModelStep:
    """The model's own `train_step`, `test_step` or `predict_step`, on a whole batch.

    The step reads the variables of the model, and assigns those that it changes, like a step of a
    custom loop.

    Args:
        trainer: The model.
        kind: Selects one of the three methods.
        strategy: The strategy of the model.
    """

    def __init__(self, trainer: Any, kind: Kind, strategy: Any) -> None:
        self._trainer = trainer
        self._kind = kind
        self._on_servers = keeps_on_servers(strategy)
        #: The method, if it takes only the batch: it reads and assigns the variables itself, as
        #: methods for TensorFlow do.
        self.stateful = getattr(trainer, f"{kind}_step") if takes_only_data(trainer, kind) else None

    def __call__(self, data: Nest) -> Nest:
        """Runs the step; returns the logs or predictions."""
        if self.stateful is not None:
            logs = values_of_variables(self.stateful(data))
            self._check_logs(logs)
            return logs
        variables = dict(zip(PARTS[self._kind], self.variables(), strict=True))
        with optimizing():  # reads parts, which layers gather
            state = {name: [v.value for v in part] for name, part in variables.items()}
        with model_step() as is_kept:
            step = getattr(self._trainer, f"{self._kind}_step")
            out, after = step(tuple(map(list, state.values())), data)
        if self._kind == "predict":  # changes no trainable variable, so Keras returns the others
            after = state["trainable_variables"], after
        # Servers combine what workers assign; an optimizer has done so with the others. A step that
        # runs operation by operation assigns as any other Python code does.
        is_traced = current_scope() is not None
        for (name, part), new in zip(variables.items(), after, strict=True):
            is_agreed = is_traced and (name in _OF_OPTIMIZER or not self._on_servers)
            changed = {
                id(variable): (variable, value)  # a list may have a variable twice
                for variable, old, value in zip(part, state[name], new, strict=True)
                if value is not old and not is_kept(variable)
            }
            for variable, value in changed.values():
                if is_agreed:
                    assign_agreed(variable, value)
                else:
                    variable.assign(value)
        self._check_logs(out)
        return out

    def _check_logs(self, logs: Any) -> None:
        """Checks the result of a step, in whose place Keras shows the metrics of the same names."""
        step, scope = f"{self._trainer.name}.{self._kind}_step", current_scope()
        if self._kind == "predict" or scope is None or self._on_servers:
            return
        if self._kind == "train":
            check_type(f"{step}: the result", logs, dict, 'a dict of logs: return {"loss": loss}')
        of_keras = getattr(keras.Model, f"{self._kind}_step")
        if getattr(getattr(self._trainer, f"{self._kind}_step"), "__func__", None) is of_keras:
            return  # it updates the metrics that Keras knows
        metrics = self._trainer.metrics
        written = [handle.cell() for handle, _ in scope.writes.values()]
        changed = {id(one.variable) for one in written if isinstance(one, ForeignVariable)}
        for metric in metrics if {metric.name for metric in metrics} == {*(logs or ())} else ():
            if metric.variables and changed.isdisjoint(map(id, metric.variables)):
                warn(
                    f"{step} returns {metric.name!r}, but Keras shows the metric of this name, and"
                    " the step does not update it: call its update_state(value) there, or leave it"
                    " out of the result."
                )

    def variables(self) -> list[list[Any]]:
        """Returns the variables of the model whose values make up the state, see `PARTS`."""
        return [list(attrgetter(part)(self._trainer)) for part in PARTS[self._kind]]


def values_of_variables(results: Nest) -> Nest:
    """Returns results of a model with values in place of variables."""
    return jax.tree.map(lambda x: x.value if isinstance(x, keras.Variable) else x, results)


def takes_only_data(trainer: object, kind: Kind) -> bool:
    """Returns whether a model's step has one parameter, the batch, and none for the state."""
    parameters = inspect.signature(getattr(trainer, f"{kind}_step")).parameters.values()
    return [p.kind for p in parameters] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def num_rows(data: Nest, axis: int = 0) -> int:
    """Returns the size of dim `axis` of the first array of a batch; 0 if unknown or missing."""
    leaves = jax.tree.leaves(data)
    shape = np.shape(leaves[0]) if leaves else ()
    return int(shape[axis] or 0) if len(shape) > axis else 0


# The functions

_log = logging.getLogger(__name__)
_METHODS: dict[Kind, str] = {"train": "fit", "test": "evaluate", "predict": "predict"}


@final
class StepFunction:
    """The `train_function`, `test_function` or `predict_function` of a model under a strategy.

    Args:
        trainer: The model.
        kind: Selects one of the three functions.
        strategy: The strategy of the model.
    """

    def __init__(self, trainer: Any, kind: Kind, strategy: Any) -> None:
        self._trainer = trainer
        self._kind = kind
        self._strategy = strategy
        self._step = ModelStep(trainer, kind, strategy)
        extended = strategy.extended
        self._engine = extended.engine
        self._placement = extended.placement
        self._share = extended.worker_share()
        self._counts = extended.step_counts
        self._loop: Loop | None = None  # over the data, unless the data counts its own
        self._loops_over: Callable[[], Any] = lambda: None
        self._steps = max(1, int(trainer.steps_per_execution))
        # If eager, every step runs on the whole batch, operation by operation.
        self._eager = bool(trainer.run_eagerly)
        # Workers need all predictions, and so do loops, which return those of the last dim.
        keeps_rows = kind == "predict" and self._share.num_workers == 1 and self._steps == 1
        results: Any = "per replica" if keeps_rows else "shared"
        title = f"{trainer.name}.{_METHODS[kind]}"
        self._kind_of_step = StepKind("global", results, title, trainer.name)
        self._programs: dict[int, Programs] = {}  # by number of steps
        self._variables: list[list[Any]] | None = None  # that the programs use, see `_parts`
        self._fusible: bool | None = None
        self._limits: Sequence[Limit] = ()  # of the batches that are looked at
        if kind == "train" and self._placement.num_replicas > 1 and self._step.stateful is not None:
            _log.warning(
                "%s.train_step sees the whole batch, as the only replica of %d: in it,"
                " strategy.num_replicas_in_sync is 1, so do not divide by the number of replicas.",
                trainer.name,
                self._placement.num_replicas,
            )

    def __call__(self, state: object, iterator: Any) -> tuple[Any, Any]:
        """Runs `steps_per_execution` steps, or fewer at the end of the data.

        Returns:
            The logs of the last step, or the predictions of all; and `state`.

        Raises:
            StopIteration: if there is no batch left.
        """
        if iterator is not self._loops_over():
            self._begin_loop(iterator)
        if self._steps == 1:
            return self._run(self._wait(next_own, iterator)), state
        outputs: list[Any] = []
        batches = take_stacked(iterator, self._steps)
        while (several := self._wait(next, batches, None)) is not None:
            stacked, count = several
            if count > 1 and self._fuses(stacked):
                outputs.append(self._run(stacked, count))
            else:
                for i in range(count):
                    outputs.append(self._run(jax.tree.map(lambda x, i=i: x[i], stacked)))
        if not outputs:
            raise StopIteration
        if self._kind != "predict" or len(outputs) == 1:
            return outputs[-1], state
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs), state

    def _begin_loop(self, iterator: Any) -> None:
        if self._variables is not None and self._variables != self._parts():
            self._programs.clear()  # another optimizer, or layers that were added or frozen
        self._variables = None
        call = current_call.get()  # in its first pass, as it takes time; only `fit` counts them
        self._limits = [*limits_of(self._trainer)] if call is not None and call.passes <= 1 else ()
        self._loop = None if isinstance(iterator, DatasetBatches) else Loop(self._counts)
        self._loops_over = weakref.ref(iterator)

    def _parts(self) -> list[list[Any]]:
        """Returns what identifies the variables, by their part in the step."""
        # The references tell a variable from one that has got the `id` of one that is gone.
        return [[(id(v), weakref.ref(v)) for v in part] for part in self._step.variables()]

    def _wait(self, get: Callable[..., Any], *args: Any) -> Any:
        """Calls `get` for one or several batches, and counts the time as a wait of the devices."""
        if self._loop is None:
            return get(*args)
        batch = self._loop.wait_for(get, *args)
        self._loop.batch_is_there()
        return batch

    def _run(self, batch: Nest, count: int = 1) -> Nest:
        """Runs one step on a batch, or `count` steps on as many stacked batches."""
        rows: Nest = batch.rows if isinstance(batch, OwnRows) else batch
        is_first = self._variables is None
        if self._limits and warn_beyond(self._trainer, self._limits, rows, is_first):
            self._limits = ()
        if self._eager and not isinstance(batch, OwnRows):
            return self._run_eagerly(batch)
        data, num_examples = self._laid_out(batch, count)
        step = self._step
        try:
            out = self._engine.execute(
                self._programs.setdefault(count, {}),
                step if count == 1 else several_steps(step, keep_all=self._kind == "predict"),
                ((data,), {}),
                self._kind_of_step,
            )
        except TracedValueError:
            # Keras does not compile models with a layer that says that it cannot be compiled.
            if self._trainer.jit_compile or isinstance(batch, OwnRows) or count > 1:
                raise
            self._eager = True
            return self._run_eagerly(batch)
        if self._variables is None:  # now that the first step has built the optimizer
            self._variables = self._parts()
        if self._share.num_workers > 1:
            out = jax.tree.map(local_copy, out)
        self._counts.num_examples += num_examples
        if progress.is_watched:
            progress.add(count, num_examples)
        if latest_program.timer is not None and self._kind == "train":
            progress.note_logs(jax.tree.map(local_copy, out))
        return out

    def _laid_out(self, batch: Nest, count: int) -> tuple[Nest, int]:
        """Returns a batch as the step gets it, and how many rows this process computes."""
        dim = int(count > 1)
        is_own = isinstance(batch, OwnRows)
        rows: Nest = batch.rows if isinstance(batch, OwnRows) else batch
        trial = current_trial()
        if trial is not None and self._kind == "train":
            rows = trial.prepare(self._trainer, rows, dim)
        num_examples = count * num_rows(rows, dim)
        if self._placement.num_replicas == 1:
            return rows, num_examples
        if not is_own and self._share.num_workers > 1:
            num_examples = -(-num_examples // self._share.num_workers)
        return global_batch(rows, self._placement, dim, is_own), num_examples

    def _run_eagerly(self, batch: Nest) -> Nest:
        # Operations of a single worker need arrays of its own. All workers compute the same.
        if self._placement.num_replicas > 1 and self._share.num_workers == 1:
            batch = jax.device_put(batch, self._placement.home or self._placement.of_variables)
        with entered(mode_of(self._strategy, "global")):
            return self._step(batch)

    def _fuses(self, stacked: Nest) -> bool:
        """Returns whether several steps become one program."""
        if self._eager or not self._trainer.jit_compile:
            return False  # a layer may be impossible to compile, see `_run`
        if self._fusible is None:
            data, _ = self._laid_out(jax.tree.map(lambda x: x[0], stacked), 1)
            self._fusible = self._engine.fuses(self._step, data, self._kind_of_step)
        return self._fusible
