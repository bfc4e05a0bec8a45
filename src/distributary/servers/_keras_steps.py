"""`fit`, `evaluate` and `predict` with parameter servers: each batch is a step of one worker."""

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary.devices import progress
from distributary.errors import UnsupportedError, shown
from distributary.keras_bridge import ModelStep, current_call, num_rows
from distributary.servers._keras_data import WorkerBatches
from distributary.servers._plans import share_rows
from distributary.servers._queue import RemoteValue
from distributary.servers._sources import PerWorkerIterator
from distributary.variables import PerReplica, map_leaves

_MAX_AHEAD_PER_WORKER = 32


@final
class ServerSteps:
    """The `train_function`, `test_function` or `predict_function` of a model with servers.

    A call schedules steps and does not wait for them; `join` does.

    Args:
        trainer: The model.
        kind: Selects one of the three functions.
        strategy: The strategy of the model.
        coordinator: Schedules its steps.
    """

    def __init__(self, trainer: Any, kind: str, strategy: Any, coordinator: Any) -> None:
        if trainer.run_eagerly:
            raise UnsupportedError(
                f"{trainer.name}: run_eagerly=True is not possible under {shown(strategy)}, where"
                " the steps are programs that run on workers. To look into a step use a model that"
                " is created outside of the scope."
            )
        self._kind = kind
        self._step = ModelStep(trainer, kind, strategy)
        self._coordinator = coordinator
        self._counts = strategy.extended.step_counts
        self._max_ahead = _MAX_AHEAD_PER_WORKER * strategy.num_workers
        self._steps = max(1, int(trainer.steps_per_execution))
        self._running: deque[RemoteValue] = deque()
        self._logs: Any = None
        self._outputs: Any = None  # structure of the predictions

        def on_batch(batch: Any) -> Any:
            if isinstance(batch, PerWorkerIterator):
                batch = next(batch)
            if strategy.num_replicas_in_sync == 1:
                return strategy.run(self._step, args=(batch,))
            share_rows()
            return self._step(_whole(batch))

        self._on_batch = on_batch  # kept, because the coordinator knows functions by object

    def __call__(self, state: Any, iterator: Any) -> tuple[Any, Any]:
        """Schedules `steps_per_execution` steps, or fewer at the end of the data.

        Returns:
            The latest logs, or stand-ins for the predictions; and the state, which is on the
            servers: looking into it waits for the steps.

        Raises:
            StopIteration: if there is no batch left.
        """
        # One by one, because the next batch may reuse the memory of this one.
        batches = itertools.islice(iterator, self._steps)
        scheduled = [self._schedule(iterator, batch) for batch in batches]
        if not scheduled:
            raise StopIteration
        after = (_Unfinished(self),) * len(state)
        if self._kind == "predict":
            return self._predictions(scheduled), after
        return self._latest_logs(scheduled[-1]), after

    def join(self) -> None:
        """Waits until all steps have ended; raises the first error of a step."""
        last = self._running[-1] if self._running else None
        self._running.clear()
        self._coordinator.join()
        if last is not None and self._kind != "predict":
            self._set_logs(last.fetch())

    def _schedule(self, iterator: Any, batch: object) -> RemoteValue:
        data = iterator.of_workers if isinstance(iterator, WorkerBatches) else batch
        value = self._coordinator.schedule(self._on_batch, args=(data,))
        self._counts.num_examples += num_rows(batch)
        if self._kind != "predict":
            self._running.append(value)
        return value

    def _latest_logs(self, last: RemoteValue) -> Any:
        """Returns the logs of the latest step that ended; `train_on_batch` waits for its own."""
        call = current_call.get()
        if self._logs is None or (call is not None and call.method.endswith("_on_batch")):
            self._set_logs(last.fetch())
        while self._running and (
            self._running[0].is_ready() or len(self._running) > self._max_ahead
        ):
            self._set_logs(self._running.popleft().fetch())
        return self._logs

    def _set_logs(self, logs: object) -> None:
        if self._kind == "train":
            progress.note_logs(logs)
        # In place, because `fit` keeps the logs of the last batch, and uses them after `join`.
        if isinstance(self._logs, dict) and isinstance(logs, dict):
            self._logs.update(logs)
        else:
            self._logs = dict(logs) if isinstance(logs, dict) else logs

    def _predictions(self, values: list[RemoteValue]) -> Any:
        if self._outputs is None:
            self._outputs = jax.tree.structure(values[0].fetch())
        self._running += values
        while len(self._running) > self._max_ahead:
            self._running.popleft().fetch()
        leaves = [_Prediction(values, i) for i in range(self._outputs.num_leaves)]
        return jax.tree.unflatten(self._outputs, leaves)


@final
class _Unfinished(Sequence[Any]):
    """The empty part of a model's state; whoever looks into it waits for the scheduled steps.

    Keras looks into the state of its loops before it, or a callback, uses the model's variables.
    """

    def __init__(self, steps: ServerSteps) -> None:
        self._steps = steps

    def __len__(self) -> int:
        self._steps.join()
        return 0

    def __getitem__(self, index: object) -> Any:
        raise IndexError(index)


def _whole(nest: object) -> Any:
    """Joins the parts of all replicas along dim 0, in every array of a nest."""

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        if leaf.form == "stacked":  # XLA sees through this, so rows stay where they are
            return jnp.reshape(leaf.payload, (-1, *leaf.payload.shape[2:]))
        return jnp.concatenate(leaf.values)

    return map_leaves(whole, nest)


@final
class _Prediction:
    """A prediction of scheduled steps; converting it to a NumPy array waits for them."""

    def __init__(self, values: list[RemoteValue], number: int) -> None:
        self._values = values
        self._number = number

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        parts = [jax.tree.leaves(value.fetch())[self._number] for value in self._values]
        return np.asarray(parts[0] if len(parts) == 1 else np.concatenate(parts), dtype)
