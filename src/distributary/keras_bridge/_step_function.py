"""The functions behind `fit`, `evaluate` and `predict`.

Keras' JAX trainer calls `train_function(state, iterator)`. Under a strategy, the state stays in the
variables, and the function runs the step of the model as `Strategy.run` runs the step of a custom
loop: it takes a batch from the iterator, splits it over the replicas, and gives it to the engine.
"""

import dataclasses
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary._types import Nest
from distributary.datasets import WorkerShare, split_rows
from distributary.dispatch import latest_program, progress
from distributary.engine import Programs, StepKind, several_steps
from distributary.errors import DistributaryWarning
from distributary.inputs import Loop
from distributary.keras_bridge._data import DatasetBatches, OwnRows, next_own, own_rows, take
from distributary.keras_bridge._model_step import Kind, ModelStep, num_rows
from distributary.keras_bridge._replica import sole_replica
from distributary.topology import local_copy
from distributary.tracing import user_stacklevel
from distributary.values import PerReplica

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
        self._num_replicas = extended.num_replicas
        self._share = extended.worker_share()
        self._counts = extended.step_counts
        self._loop: Loop | None = None  # over the data, unless the data counts its own
        self._loops_over: Callable[[], Any] = lambda: None
        self._steps = max(1, int(trainer.steps_per_execution))
        # If eager, every step runs on the whole batch, operation by operation, as with one replica.
        # You cannot step through the code of one replica while the others wait.
        self._eager = bool(trainer.run_eagerly)
        name = f"{trainer.name}.{_METHODS[kind]}"
        results: Any = "rows" if kind == "predict" and not self._step.gathers else "shared"
        self._of_replicas = StepKind(
            "replica", results, False, name, trainer.name, None if kind == "predict" else _is_loss
        )
        self._of_several = dataclasses.replace(self._of_replicas, batch_dim=1)
        self._alone = StepKind("alone", "shared", False, name, trainer.name)
        self._programs: dict[int, Programs] = {}  # by number of steps
        self._fusible: bool | None = None
        self._uneven_in_a_row = 0
        self._warned = False

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
        batches = take(iterator, self._steps)
        while (several := self._wait(next, batches, None)) is not None:
            stacked, count = several
            if count > 1 and self._fuses(stacked):
                outputs.append(self._run(stacked, count))
            else:
                for i in range(count):
                    outputs.append(self._run(jax.tree.map(lambda x, i=i: x[i], stacked)))
        if not outputs:
            raise StopIteration
        if self._kind != "predict":
            return outputs[-1], state
        if len(outputs) == 1:
            return outputs[0], state
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs), state

    def _begin_loop(self, iterator: Any) -> None:
        self._loop = None if isinstance(iterator, DatasetBatches) else Loop(self._counts)
        try:
            self._loops_over = weakref.ref(iterator)
        except TypeError:
            self._loops_over = lambda: iterator

    def _wait(self, get: Callable[..., Any], *args: Any) -> Any:
        """Calls `get` for one or several batches, and counts the time as a wait of the devices."""
        if self._loop is None:
            return get(*args)
        begin = time.perf_counter()
        batch = get(*args)
        self._loop.waiting(time.perf_counter() - begin)
        self._loop.batch_is_there()
        return batch

    def _run(self, batch: Nest, count: int = 1) -> Nest:
        """Runs one step on a batch, or `count` steps on as many stacked batches."""
        if self._eager and not isinstance(batch, OwnRows):
            return self._run_eagerly(batch)
        data, num_examples = self._split(batch, count)
        is_split = isinstance(data, PerReplica)
        step = self._step.of_replica if is_split else self._step.alone
        out = self._engine.execute(
            self._programs.setdefault(count, {}),
            step if count == 1 else several_steps(step, keep_all=self._kind == "predict"),
            (data,),
            {},
            self._kind_of_step(is_split, count),
        )
        if self._share.num_workers > 1:
            out = jax.tree.map(local_copy, out)
        self._counts.num_examples += num_examples
        if progress.is_watched:
            progress.add(count, num_examples)
        if latest_program.timer is not None and self._kind == "train":
            progress.note_logs(jax.tree.map(local_copy, out))
        return out

    def _kind_of_step(self, is_split: bool, count: int) -> StepKind:
        if not is_split and self._num_replicas > 1:
            return self._alone
        return self._of_replicas if count == 1 else self._of_several

    def _split(self, batch: Nest, count: int) -> tuple[Nest, int]:
        """Splits a batch over the replicas.

        A batch whose rows do not divide by the number of replicas is split into parts that differ
        by one row, as for `Strategy.run`. One with fewer rows than replicas is not split.

        Returns:
            A `PerReplica`, or the batch itself if a single replica computes it; and the number of
            rows that this process computes.
        """
        axis = int(count > 1)
        if self._num_replicas == 1:
            return batch, count * num_rows(batch, axis)
        size = None if isinstance(batch, OwnRows) else common_size(batch, axis)
        if isinstance(batch, OwnRows) or (size and self._share.divides(size)):
            self._uneven_in_a_row = 0
            if isinstance(batch, OwnRows):
                rows = batch.rows
            elif self._share.num_workers > 1:
                rows = own_rows(batch, self._share, axis)
            else:
                rows = batch
            return self._stacked(rows, count), count * num_rows(rows, axis)
        self._note_uneven(size)
        if size is None or size < self._num_replicas:
            return batch, num_rows(batch)
        ends = WorkerShare(replicas_per_worker=self._num_replicas).ends(size)
        parts = split_rows(batch, np.diff(ends).tolist())
        return self._placement.place_components(parts), size

    def _stacked(self, rows: Nest, count: int) -> PerReplica:
        """Returns the rows of this process's replicas as a `PerReplica`."""
        num_own = self._share.replicas_per_worker

        def stacked(array: Any) -> Any:
            if count == 1:
                return array.reshape(num_own, len(array) // num_own, *array.shape[1:])
            rows_each = array.shape[1] // num_own
            split = array.reshape(count, num_own, rows_each, *array.shape[2:])
            return split.swapaxes(0, 1)

        value = PerReplica.from_stacked(jax.tree.map(stacked, rows), self._num_replicas)
        on_host = all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(rows))
        if on_host and self._placement.takes_host_arrays:
            return value
        return self._placement.place_rows(value)

    def _run_eagerly(self, batch: Nest) -> Nest:
        # Operations of a single worker need arrays of its own. All workers compute the same.
        if self._num_replicas > 1 and self._share.num_workers == 1:
            batch = jax.device_put(batch, self._placement.home or self._placement.of_variables)
        if self._step.stateful is not None:
            return self._step.alone(batch)
        variables = self._step.variables()
        with sole_replica(self._strategy):
            state = [[variable.value for variable in part] for part in variables]
            out, new = self._step.call(state, batch)
        for part, before, after in zip(variables, state, new, strict=True):
            for variable, old, value in zip(part, before, after, strict=True):
                if value is not old:
                    variable.assign(value)
        return out

    def _fuses(self, stacked: Nest) -> bool:
        """Returns whether several steps become one program; steps on uneven batches do not."""
        if self._eager:
            return False
        size = None if isinstance(stacked, OwnRows) else common_size(stacked, 1)
        if size is not None and not self._share.divides(size):
            return False
        if self._fusible is None:
            data, _ = self._split(jax.tree.map(lambda x: x[0], stacked), 1)
            step = self._step.alone if self._num_replicas == 1 else self._step.of_replica
            self._fusible = self._engine.fuses(step, data, self._of_replicas)
        return self._fusible

    def _note_uneven(self, size: int | None) -> None:
        """Warns once if batches other than the last cannot be split."""
        self._uneven_in_a_row += 1
        if self._kind != "train" or self._warned or self._uneven_in_a_row < 2:
            return
        self._warned = True
        warnings.warn(
            f"{self._trainer.name}: batches of {size} examples do not divide by"
            f" {self._num_replicas} replicas, so every device computes the parts of all replicas:"
            " exact, but without any gain in speed. Choose a batch size that is a multiple of"
            f" {self._num_replicas}; only the last batch of an epoch may then differ.",
            DistributaryWarning,
            stacklevel=user_stacklevel(),
        )


def _is_loss(path: Any) -> bool:
    """Returns whether a log is a loss; Keras shows this in its path."""
    return bool(path) and str(getattr(path[-1], "key", "")).endswith("loss")


def common_size(batch: Nest, axis: int = 0) -> int | None:
    """Returns the size of dim `axis` of all arrays of a batch; None if they differ."""
    sizes = {np.shape(leaf)[axis : axis + 1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or sizes == {()}:
        return None
    ((size,),) = sizes
    return int(size)
