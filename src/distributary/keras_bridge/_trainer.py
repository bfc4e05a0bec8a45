"""The compiled steps behind `fit`, `evaluate` and `predict`.

Keras' JAX trainer calls `train_function(state, iterator)`, and passes the state that it returns to
the next call. A `StepFunction` is such a function for a model under a strategy. It takes batches
from the iterator, splits them over the replicas, and calls the model's own `train_step`,
`test_step` or `predict_step` once per replica, in one program.
"""

import functools
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, final

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from distributary.collectives import ReduceOp
from distributary.datasets import WorkerShare
from distributary.dispatch import (
    JobEvent,
    dispatcher_for,
    interrupts,
    job_programs,
    latest_program,
    progress,
)
from distributary.engine import placed_struct_of
from distributary.errors import DistributaryWarning, InvalidTypeError
from distributary.inputs import Loop, StepCounts
from distributary.job import copies
from distributary.keras_bridge._data import DatasetBatches, OwnRows, next_own, own_rows, take
from distributary.keras_bridge._joined_sums import METRICS, with_joined_sums
from distributary.keras_bridge._replica import (
    agreed_state,
    is_summed,
    sharing_a_batch,
    sole_replica,
    sums,
    trainer_replica,
)
from distributary.keras_bridge._stages import in_stages, staged_call
from distributary.keras_bridge._variables import stored_value, whole_value
from distributary.rows import relation_of, relation_warning
from distributary.topology import (
    REPLICA_AXIS,
    ProgramKind,
    compile_ahead,
    for_target,
    local_copy,
    put_own,
    shard_dim,
    stored_shards,
    whole_shards,
)
from distributary.tracing import describe_jaxpr, sharded_map, user_stacklevel
from distributary.xla_cpu import with_cpu_rewrites, with_exchanged_sums

Kind = Literal["train", "test", "predict"]
_warned_of_relations: weakref.WeakSet[Any] = weakref.WeakSet()  # models
_METHODS: dict[Kind, str] = {"train": "fit", "test": "evaluate", "predict": "predict"}
# The state that Keras passes from step to step, in this order.
PARTS: dict[Kind, tuple[str, ...]] = {
    "train": ("trainable", "non_trainable", "optimizer", "metrics"),
    "test": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}


def variables_of_part(trainer: Any, part: str) -> list[Any]:
    """Returns the variables of a model that belong to a part of the state; see `PARTS`."""
    owner = trainer.optimizer if part == "optimizer" else trainer
    variables: list[Any] = getattr(
        owner, "variables" if part == "optimizer" else f"{part}_variables"
    )
    return variables


@final
@jax.tree_util.register_pytree_node_class
class Values:
    """Values of variables; like a tuple, but Keras does not walk through it in every step."""

    __slots__ = ("_values",)

    def __init__(self, values: Any) -> None:
        self._values = tuple(values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self._values, None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "Values":
        new = object.__new__(cls)
        new._values = children
        return new


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
        self._num_replicas = strategy.num_replicas_in_sync
        extended = strategy.extended
        self._mesh = extended.mesh
        layout = extended.variable_layout()
        self._home = extended.home
        self._split = layout.stacked
        self._stored = self._replicated = layout.replicated
        if self._home is not None:
            self._replicated = NamedSharding(self._mesh, P())
        devices = () if self._replicated is None else tuple(self._replicated.device_set)
        self._dispatcher = dispatcher_for(devices)
        self._share = extended.worker_share()
        self._counts = extended.step_counts
        self._loop: Loop | None = None  # over the data, unless the data counts its own
        self._loops_over: Callable[[], Any] = lambda: None
        self._steps = max(1, int(trainer.steps_per_execution))
        # If eager, every step runs on the whole batch, operation by operation, as with one replica.
        # You cannot step through the code of one replica while the others wait.
        self._eager = bool(trainer.run_eagerly)
        self._programs: dict[Any, _Program] = {}
        self._fusible: bool | None = None
        self._uneven_in_a_row = 0
        self._warned = False
        #: Logs and state after the latest step, or None and the state before the first.
        self.latest: tuple[Any, Any] | None = None

    def __call__(self, state: Any, iterator: Any) -> tuple[Any, Any]:
        """Runs `steps_per_execution` steps, or fewer at the end of the data.

        Raises:
            StopIteration: if there is no batch left.
        """
        state = tuple([part if isinstance(part, Values) else Values(part) for part in state])
        if iterator is not self._loops_over():
            is_counted = isinstance(iterator, DatasetBatches)
            self._loop = None if is_counted else Loop(self._counts)
            try:
                self._loops_over = weakref.ref(iterator)
            except TypeError:
                self._loops_over = lambda: iterator
        if self._steps == 1:
            return self._dispatch(state, self._wait(next_own, iterator))
        outputs: list[Any] = []
        batches = take(iterator, self._steps)
        while (several := self._wait(next, batches, None)) is not None:
            stacked, count = several
            if count > 1 and self._fuses(state, stacked):
                out, state = self._dispatch(state, stacked, count)
                outputs.append(out)
            else:
                for i in range(count):
                    batch = jax.tree.map(lambda x, i=i: x[i], stacked)
                    out, state = self._dispatch(state, batch)
                    outputs.append(out)
        if not outputs:
            raise StopIteration
        if self._kind != "predict":
            return outputs[-1], state
        if len(outputs) == 1:
            return outputs[0], state
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs), state

    def _wait(self, get: Callable[..., Any], *args: Any) -> Any:
        """Calls `get` for one or several batches, and counts the time as a wait of the devices."""
        if self._loop is None:
            return get(*args)
        begin = time.perf_counter()
        batch = get(*args)
        self._loop.waiting(time.perf_counter() - begin)
        self._loop.batch_is_there()
        return batch

    def variables(self) -> list[list[Any]]:
        """Returns the variables whose values make up the state, in the order of the state."""
        return [variables_of_part(self._trainer, part) for part in PARTS[self._kind]]

    def _dispatch(self, state: Any, data: Any, count: int = 1) -> tuple[Any, Any]:
        """Runs one step on a batch, or `count` steps on as many stacked batches."""
        if self._num_replicas == 1:
            return self._run(("one", count), state, data)
        axis = 0 if count == 1 else 1
        if isinstance(data, OwnRows):
            self._uneven_in_a_row = 0
            return self._run(("split", count), state, data.rows)
        if self._eager:
            return self._run_eagerly(state, data)
        size = common_size(data, axis)
        if size is not None and size % self._num_replicas == 0:
            self._uneven_in_a_row = 0
            if self._share.num_workers > 1:
                data = own_rows(data, self._share, axis)
            return self._run(("split", count), state, data)
        self._note_uneven(size)
        return self._run(("whole", count), state, data)

    def _run_eagerly(self, state: Any, data: Any) -> tuple[Any, Any]:
        # Operations of a single worker need arrays of its own. All workers compute the same.
        if self._share.num_workers == 1:
            data = jax.device_put(data, self._home or self._stored)
        out, new = self._run(("one", 1), self._for_all(whole_value, state), data)
        self.latest = out, self._for_all(stored_value, new)
        return self.latest

    def _for_all(self, function: Callable[[Any, Any], Any], state: Any) -> Any:
        """Applies `function` to every variable and its value in `state`."""
        parts = zip(self.variables(), state, strict=True)
        return tuple([Values(map(function, variables, values)) for variables, values in parts])

    def _fuses(self, state: Any, stacked: Any) -> bool:
        """Returns whether several steps become one program.

        XLA:CPU runs convolutions many times slower inside a loop than outside, and takes minutes to
        compile an unrolled loop, so steps with convolutions stay separate on CPUs. Steps that fetch
        their variables stay separate, too.
        """
        if self._eager or self._home is not None:
            return False
        if self._fusible is None:
            self._fusible = True
            if self._is_on_cpus:
                batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)
                if isinstance(batch, OwnRows):
                    batch = batch.rows
                aval = lambda variable, value: jax.ShapeDtypeStruct(variable.shape, value.dtype)
                jaxpr = jax.make_jaxpr(self._step)(self._for_all(aval, state), batch)
                self._fusible = not _has_convolution(jaxpr.jaxpr)
        return self._fusible

    @property
    def _is_on_cpus(self) -> bool:
        return bool(self._mesh.devices.flat[0].platform == "cpu")

    def _note_uneven(self, size: int | None) -> None:
        """Warns once if batches other than the last cannot be split."""
        self._uneven_in_a_row += 1
        if self._kind != "train" or self._warned or self._uneven_in_a_row < 2:
            return
        self._warned = True
        warnings.warn(
            f"{self._trainer.name}: batches of {size} examples do not divide by"
            f" {self._num_replicas} replicas, so every replica computes such a batch as a whole:"
            " exact, but without any gain in speed. Choose a batch size that is a multiple of"
            f" {self._num_replicas}; only the last batch of an epoch may then differ.",
            DistributaryWarning,
            stacklevel=user_stacklevel(),
        )

    def _run(self, key: tuple[str, int], state: Any, data: Any) -> tuple[Any, Any]:
        program = self._programs.get(key)
        if program is None:
            kind = ProgramKind(
                f"{self._trainer.name}.{_METHODS[self._kind]}", self._kind == "train"
            )
            stages = None if self._home is None else (self._mesh, self._home, self._stored)
            program = self._programs[key] = _Program(
                self._function(*key),
                self._mesh,
                self._replicated if self._layouts is None else self._layouts,
                self._sharding(*key),
                # The predictions of a single worker may lie wherever XLA puts them.
                None
                if self._kind == "predict" and self._share.num_workers == 1
                else self._replicated,
                # Arrays are stored in parts only in compiled programs.
                self._eager and (key[0] == "one" or self._layouts is None),
                kind,
                stages,
                self._counts,
                self._warn_of_relations if key[0] == "split" else _do_nothing,
            )
        call, data = program.prepare(state, data)
        if self._share.num_workers > 1:
            job_programs.begin(program.event)
        if latest_program.timer is not None:
            latest_program.begin()
        # The call consumes the state, so keep its result before anything is raised.
        with interrupts:
            result: tuple[Any, Any] = self._dispatcher.run(call, _token, state, data)
            self.latest = result
        token = _token(result)
        is_sample = latest_program.timer is not None
        latest_program.end(token, token)
        if is_sample and self._kind == "train":
            progress.note_logs(jax.tree.map(local_copy, result[0]))
        program.runs.num_runs += 1
        num_examples = _num_examples(data, *key, self._share)
        self._counts.num_examples += num_examples
        if progress.is_watched:
            progress.add(key[1], num_examples)
        if self._share.num_workers > 1:
            copies.num_left -= 1
            if copies.num_left <= 0:
                self._compare_copies(result[1])
            out, new_state = result
            return jax.tree.map(local_copy, out), new_state
        return result

    def _compare_copies(self, state: Any) -> None:
        """Compares the state that the workers hold."""
        held = [
            (variable.path, value)
            for variables, values in zip(self.variables(), state, strict=True)
            for variable, value in zip(variables, values, strict=True)
            if shard_dim(variable._layout) is None
        ]
        names, values = zip(*held, strict=True)
        copies.compare(f"after a step of {self._trainer.name}", names, values)

    def _warn_of_relations(self, closed: Any, results: Any) -> None:
        """Warns once per model if its loss relates rows; a replica has only its own rows."""
        if self._kind == "predict" or self._trainer in _warned_of_relations:
            return
        num_data = len(closed.jaxpr.invars) - len(jax.tree.leaves(results[1]))
        num_trained = len(self._trainer.trainable_variables)
        logs = jax.tree.leaves_with_path(results[0])
        losses = [i for i, (path, _) in enumerate(logs) if _is_loss(path)]
        where = relation_of(closed.jaxpr, num_trained, num_data, losses, METRICS)
        if where is not None:
            _warned_of_relations.add(self._trainer)
            warnings.warn(
                relation_warning(self._trainer.name, where, self._num_replicas),
                DistributaryWarning,
                stacklevel=user_stacklevel(),
            )

    def _sharding(self, way: str, count: int) -> Any:
        """Returns the sharding of a batch; None leaves it to JAX."""
        if way == "whole" or (way == "one" and self._home is not None):
            return self._replicated
        if way == "one":
            return None
        return self._split if count == 1 else NamedSharding(self._split.mesh, P(None, REPLICA_AXIS))

    # Functions to compile

    def _function(self, way: str, count: int) -> Callable[..., Any]:
        if way != "one" and self._layouts is not None:
            step = self._divided_step(way, self._layouts)
            return _repeated(step, keep_all=False) if count > 1 else step
        predict = self._kind == "predict"
        if self._home is not None and not self._eager:
            is_split = way == "split"
            step = self._replica_step if is_split else self._shared_step
            return in_stages(step, self._mesh, is_split, is_split and predict)
        step = self._step if way != "split" else self._replica_step
        if way == "split" and self._share.num_workers > 1 and self._is_on_cpus:
            step = with_joined_sums(step)
        if way != "one":
            step = with_exchanged_sums(step, self._mesh)
        if count > 1:
            step = _repeated(step, keep_all=predict)
        if way != "one":
            rows = P(REPLICA_AXIS) if count == 1 else P(None, REPLICA_AXIS)
            batch = rows if way == "split" else P()
            step = jax.shard_map(
                step,
                mesh=self._mesh,
                in_specs=(P(), batch),
                out_specs=(batch if predict and self._share.num_workers == 1 else P(), P()),
                check_vma=False,
                axis_names={REPLICA_AXIS},
            )
        if not (predict and count > 1):
            return step

        def joined(state: Any, data: Any) -> tuple[Any, Any]:
            outs, state = step(state, data)
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outs), state

        return joined

    @functools.cached_property
    def _layouts(self) -> Any:
        """Shardings of the state if devices hold only parts of some of it, else None."""
        layouts = tuple([Values(v._layout for v in part) for part in self.variables()])
        is_divided = any(shard_dim(layout) is not None for part in layouts for layout in part)
        return layouts if is_divided else None

    def _divided_step(self, way: str, layouts: Any) -> Callable[..., Any]:
        """Returns a step in which every device updates its own part of the optimizer's state."""
        rows = P(REPLICA_AXIS) if way == "split" else P()
        parts = jax.tree.map(lambda layout: layout.spec, layouts)
        body = self._replica_step if way == "split" else self._shared_step
        step = sharded_map(body, self._mesh, (P(), rows), (P(), P()), (parts, P()), (P(), parts))

        def divided(state: Any, data: Any) -> tuple[Any, Any]:
            wholes = self._for_all(lambda v, x: whole_shards(x, v.shape, v._layout), state)
            out, new = step(wholes, data)
            return out, self._for_all(lambda v, x: stored_shards(x, v._layout), new)

        return divided

    def _shared_step(self, state: Any, data: Any) -> tuple[Any, Any]:
        """Runs one step on a whole batch, whose gradients every replica computes."""
        with sharing_a_batch(self._strategy):
            return self._call_trainer(state, data)

    def _step(self, state: Any, data: Any) -> tuple[Any, Any]:
        """Runs one step on a whole batch, as the only replica."""
        with sole_replica(self._strategy):
            return self._call_trainer(state, data)

    def _call_trainer(self, state: Any, data: Any) -> tuple[Any, Any]:
        trainer = self._trainer
        lists = tuple([list(part) for part in state])
        if self._kind == "train":
            out, new = trainer.train_step(lists, data)
        elif self._kind == "test":
            out, new = trainer.test_step(lists, data)
        else:
            out, non_trainable = trainer.predict_step(lists, data)
            new = (lists[0], non_trainable)
        return out, tuple([Values(part) for part in new])

    def _replica_step(self, state: Any, data: Any) -> tuple[Any, Any]:
        """Runs one step of one replica on its part of the batch."""
        parts = dict(zip(PARTS[self._kind], state, strict=True))
        with trainer_replica(self._strategy) as context:
            if "metrics" in parts:
                # Metrics that are sums: replica 0 continues with the state, the others start from
                # zero.
                first = context.replica_id_in_sync_group == 0
                metrics = self._trainer.metrics_variables
                own = [
                    jnp.where(first, v, jnp.zeros_like(v)) if is_summed(variable) else v
                    for v, variable in zip(parts["metrics"], metrics, strict=True)
                ]
                parts["metrics"] = Values(own)
            out, new_state = self._call_trainer(tuple(parts.values()), data)
            new = dict(zip(PARTS[self._kind], new_state, strict=True))
            new["non_trainable"] = Values(
                agreed_state(
                    context,
                    self._trainer.non_trainable_variables,
                    list(parts["non_trainable"]),
                    list(new["non_trainable"]),
                )
            )
            if "metrics" in new:
                new["metrics"] = Values(sums().of(list(new["metrics"]), metrics))
                out = logs_of_all(context, out)
            elif any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(out)):
                raise InvalidTypeError(
                    f"{self._trainer.name}.predict_step returned a scalar. Under"
                    f" {self._strategy!r} every replica predicts a part of the batch, and the"
                    " parts are joined along dim 0: return arrays with one entry per example."
                )
            elif self._share.num_workers > 1:
                out = context.all_gather(out, axis=0)
        return out, tuple(new.values())


def logs_of_all(context: Any, logs: Any) -> Any:
    """Turns logs of one replica into those of the whole batch; results of metrics already are."""
    leaves, tree = jax.tree.flatten(logs)
    own = [i for i, leaf in enumerate(leaves) if not sums().is_of_all(leaf)]
    numbers = [jnp.asarray(leaves[i]) for i in own]
    numbers = [x.astype(jnp.float32) if x.dtype == bool else x for x in numbers]
    means = context.all_reduce(ReduceOp.MEAN, numbers) if own else []
    for i, mean in zip(own, means, strict=True):
        leaves[i] = mean
    return jax.tree.unflatten(tree, leaves)


@final
class _Program:
    """A function that is compiled before it is called with new shapes.

    Args:
        function: Function from state and data to logs and new state.
        mesh: Devices on which it runs; None for JAX's default device.
        layouts: Shardings of the state.
        sharding: Sharding of the data; None leaves both to JAX.
        out_sharding: Sharding of the logs; None leaves it to XLA.
        eager: Whether it runs operation by operation.
        kind: Description of the program.
        stages: Mesh of the replicas, sharding of the parameter device and sharding of the state, if
            the state lies there.
        counts: Object that counts its runs.
        look: Called with the result of the trace, a closed jaxpr, and the shapes of its results.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: Any,
        layouts: Any,
        sharding: Any,
        out_sharding: Any,
        eager: bool,
        kind: ProgramKind,
        stages: tuple[Any, Any, Any] | None,
        counts: StepCounts,
        look: Callable[[Any, Any], None],
    ) -> None:
        self._look = look
        self.runs = counts.runs_of(self)
        self._counts = counts
        self._avals: Any = None  # of the first state and data
        self._eager = eager
        self._sharding = sharding
        self._stages = stages
        # Maps state, which it consumes, and data to logs and new state.
        self._call: Any
        if eager or stages is not None:
            self._call = function
        elif sharding is None:
            outs = (_on(mesh, out_sharding), _on(mesh, layouts))
            jitted = jax.jit(
                with_cpu_rewrites(function, mesh), donate_argnums=0, out_shardings=outs
            )
            self._call = for_target(jitted, mesh, kind)
        else:
            # The call itself moves NumPy arrays to the devices, for a third of the cost of
            # device_put.
            jitted = jax.jit(
                with_cpu_rewrites(function, mesh),
                donate_argnums=0,
                in_shardings=(_on(mesh, layouts), _on(mesh, sharding)),
                out_shardings=(_on(mesh, out_sharding), _on(mesh, layouts)),
            )
            self._call = for_target(jitted, mesh, kind)
        self._known: dict[Any, Any] = {}
        self._name = f"a step of {kind.name}"
        #: The event that other workers have to begin, too, for the shapes that were prepared last.
        self.event = JobEvent(self._name)
        self._events: dict[Any, JobEvent] = {}

    def prepare(self, state: Any, data: Any) -> tuple[Any, Any]:
        """Compiles the function for these shapes, unless that was done before.

        Returns:
            The function to call, and the data. Arrays that are already on devices are moved to
            where the function takes them.
        """
        if self._eager:
            return self._call, data
        leaves, tree = jax.tree.flatten(data)
        if self._sharding is not None and not self._sharding.is_fully_addressable:
            leaves = [put_own(leaf, self._sharding) for leaf in leaves]
            data = jax.tree.unflatten(tree, leaves)
        elif self._sharding is not None and any(isinstance(leaf, jax.Array) for leaf in leaves):
            leaves = [
                jax.device_put(leaf, self._sharding) if isinstance(leaf, jax.Array) else leaf
                for leaf in leaves
            ]
            data = jax.tree.unflatten(tree, leaves)
        shapes = tuple([(np.shape(leaf), leaf.dtype) for leaf in leaves])
        call = self._known.get(shapes)
        if call is None:
            call = self._call
            if self._stages is None:
                traced = compile_ahead(call, state, data)
                if traced is not None:
                    self._look(traced.jaxpr, traced.out_info)
                    if job_programs.enter is not None:
                        describe = functools.partial(_described, traced.jaxpr)
                        self._events[shapes] = JobEvent(self._name, describe)
                if self._avals is None and self._sharding is not None:
                    self._avals = jax.tree.map(placed_struct_of, (state, data))
            else:
                call = staged_call(call, state, data, self._sharding, *self._stages, self._look)
            self._counts.num_retraces += bool(self._known)
            self._known[shapes] = call
        self.event = self._events.get(shapes, self.event)
        return call, data

    def collective_bytes(self) -> int:
        """Returns the size of the arrays that one run sends through collectives."""
        if self._avals is None:
            return 0
        from distributary.compilation import collective_bytes

        return collective_bytes(self._call.lower(*self._avals).compile().as_text())


def _described(jaxpr: Any) -> list[tuple[str, str]]:
    return list(describe_jaxpr(jaxpr))


def _do_nothing(closed: Any, results: Any) -> None:
    pass


def _is_loss(path: Any) -> bool:
    """Returns whether a log is a loss; Keras shows this in its path."""
    return bool(path) and str(getattr(path[-1], "key", "")).endswith("loss")


def _on(mesh: Any, shardings: Any) -> Any:
    """Returns shardings on the mesh on which the programs run."""

    def on(sharding: Any) -> Any:
        if isinstance(sharding, NamedSharding):
            return NamedSharding(mesh, sharding.spec)
        return SingleDeviceSharding(mesh.devices.flat[0])

    return jax.tree.map(on, shardings)


def _repeated(step: Callable[..., Any], keep_all: bool) -> Callable[..., Any]:
    """Makes a loop of `step` over the rows of stacked data; it returns all outputs or the last."""

    def several(state: Any, stacked: Any) -> tuple[Any, Any]:
        def body(state: Any, data: Any) -> tuple[Any, Any]:
            out, state = step(state, data)
            return state, out

        state, outs = lax.scan(body, state, stacked)
        return outs if keep_all else jax.tree.map(lambda x: x[-1], outs), state

    return several


def _has_convolution(jaxpr: Any) -> bool:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            return True
        if any(map(_has_convolution, jex_core.jaxprs_in_params(equation.params))):
            return True
    return False


def _token(outputs: Any) -> Any:
    """Returns a small array of a step that no later step consumes: one of the logs."""
    logs, _ = outputs
    leaves = jax.tree.leaves(logs)
    return leaves[0] if leaves else None


def num_rows(data: Any, axis: int = 0) -> int:
    """Returns the size of dim `axis` of the first array of a batch; 0 if unknown or missing."""
    leaves = jax.tree.leaves(data)
    shape = np.shape(leaves[0]) if leaves else ()
    return int(shape[axis] or 0) if len(shape) > axis else 0


def _num_examples(data: Any, way: str, count: int, share: WorkerShare) -> int:
    """Returns the number of examples that this process computes in a run of a program."""
    size = count * num_rows(data, axis=int(count > 1))
    # Split data counts the rows of all workers. Data that is not split is computed by each of them.
    return size // share.num_workers if way == "split" else size


def common_size(batch: Any, axis: int = 0) -> int | None:
    """Returns the size of dim `axis` of all arrays of a batch; None if they differ."""
    sizes = {np.shape(leaf)[axis : axis + 1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or sizes == {()}:
        return None
    ((size,),) = sizes
    return int(size)
