"""Carries out `Strategy.run`: traces, caches and calls the program of the replicas."""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, final

import jax
import numpy as np

from distributary.context import Mode, ReplicaContext, pop, push
from distributary.dispatch import Dispatcher
from distributary.engine._cache import ProgramCache
from distributary.engine._compiled import (
    Compiled,
    VariableGoneError,
    is_dynamic,
    signature_of,
    split_result,
)
from distributary.errors import DistributaryWarning, InvalidTypeError, ReplicaMismatchError
from distributary.topology import put_replicated, put_stacked
from distributary.tracing import (
    FunctionProgram,
    ReplicaProgram,
    TraceScope,
    current_scope,
    in_role,
    refused_if_consumed,
    user_stacklevel,
)
from distributary.values import (
    Mirrored,
    PerReplica,
    component_arrays,
    map_leaves,
    same_structure,
    stack_components,
)
from distributary.xla_cpu import with_exchanged_sums

Role = Literal["replica", "update"]
_WHAT = repeat("Strategy.run")  # for messages


@final
@dataclass(slots=True)
class _Slot:
    """One argument of a step, in the form in which the replicas receive it."""

    kind: Literal["static", "whole", "split", "uneven"]
    content: Any = None  # the value of a static argument, else the tree of its arrays
    count: int = 0  # number of arrays that a replica receives


@final
class ReplicaRunner:
    """A runner of functions on the replicas of one strategy.

    Args:
        strategy: The strategy.
        num_replicas: Number of replicas.
        mesh: Mesh with the axis `"replica"`, on which programs run; None for JAX's default device.
        replicated: Sharding of values that all replicas share.
        stacked: Sharding of `[replica, *shape]`; None on one device.
        dispatcher: Limits the number of programs in flight.
        first_replica: Number of the first replica of this process.
        home: Sharding of the device of the variables; None if they lie where the replicas compute.
        storage: Sharding of the variables there.
        workers_mesh: Mesh of functions that are traced for other processes. Other functions run all
            replicas side by side on the device of `mesh`.
    """

    def __init__(
        self,
        strategy: Any,
        num_replicas: int,
        mesh: Any,
        replicated: Any,
        stacked: Any,
        dispatcher: Dispatcher,
        first_replica: int = 0,
        home: Any = None,
        storage: Any = None,
        workers_mesh: Any = None,
    ) -> None:
        self._workers_mesh = workers_mesh
        self._home = home
        self._storage = storage
        self._first_replica = first_replica
        self._strategy = strategy
        self._num_replicas = num_replicas
        self._mesh = mesh
        self._replicated = replicated
        self._stacked = stacked
        self._dispatcher = dispatcher
        self.cache = ProgramCache("Strategy.run")
        self._warned_of: set[str] = set()  # relations of rows

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, role: Role
    ) -> Any:
        """Runs `function` once per replica and merges the results."""
        scope = current_scope()
        if scope is not None and scope.kind == "replica":
            return self._run_inside_replica(function, args, kwargs, role)
        # The function behind `jax.tree.flatten`; calling it directly saves two frames.
        leaves, tree = jax.tree_util.default_registry.flatten((args, kwargs))
        programs = self.cache.programs_of(function)
        if scope is None:
            key = (tree, tuple(map(signature_of, leaves, _WHAT)), role)
            entry = programs.get(key)
            if entry is not None:
                picks = entry.picks
                try:
                    return entry.compiled(leaves if picks is None else _pick(leaves, picks))
                except VariableGoneError:
                    del programs[key]
        args, kwargs = self._even_out((args, kwargs), scope is None)
        leaves, tree_after = jax.tree.flatten((args, kwargs))
        if scope is not None:
            return self._run_inside_function(scope, function, args, kwargs, role)
        if not same_structure(tree_after, tree):
            # Components of equal shape were stacked, so this is now an ordinary call.
            return self.run(function, args, kwargs, role)
        entry = self._build(function, args, kwargs, role)
        if role == "replica":  # updates do not count: each variable needs a trace of its own
            self._strategy.extended.step_counts.num_retraces += bool(programs)
            self.cache.note_trace(function, programs, key)
        programs[key] = entry
        return entry.compiled(_pick(leaves, entry.picks))

    def lower(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, role: Role
    ) -> Any:
        """Returns the program of a step, lowered but not run."""
        args, kwargs = self._even_out((args, kwargs), True)
        entry = self._build(function, args, kwargs, role)
        return entry.compiled.lowered(_pick(jax.tree.leaves((args, kwargs)), entry.picks))

    def place_rows(self, value: PerReplica) -> PerReplica:
        """Puts every row of a stacked `PerReplica` on the device of its replica."""
        if self._stacked is None:
            return value
        rows = jax.tree.map(
            lambda leaf: put_stacked(leaf, self._stacked, self._first_replica), value.payload
        )
        return PerReplica.from_stacked(rows, self._num_replicas)

    def place_components(self, values: Sequence[Any]) -> PerReplica:
        """Makes a `PerReplica` of components that differ in shape, each on every device."""
        if self._replicated is not None:
            return PerReplica(tuple(put_replicated(v, self._replicated) for v in values))
        return PerReplica(tuple(values))

    def place_alone(self, value: Any) -> Any:
        """Puts the nest of a batch on the device of the only replica."""
        return value if self._replicated is None else put_replicated(value, self._replicated)

    def _even_out(self, tree: Any, place: bool) -> Any:
        """Replaces `PerReplica` components of equal shape by one stacked array."""

        def even_out(leaf: Any) -> Any:
            if not isinstance(leaf, PerReplica):
                return leaf
            if leaf.num_replicas != self._num_replicas:
                raise ReplicaMismatchError(
                    f"Strategy.run: a PerReplica has {leaf.num_replicas} components, but"
                    f" {self._strategy!r} has {self._num_replicas} replicas. Build it with"
                    " strategy.experimental_distribute_values_from_function or take it from this"
                    " strategy's dataset."
                )
            if leaf.form != "components":
                return leaf
            stacked = stack_components(leaf)
            if stacked is not None:
                return self.place_rows(stacked) if place else stacked
            arrays = component_arrays(leaf)
            return self.place_components(arrays) if place else PerReplica(arrays)

        return map_leaves(even_out, tree)

    def _build(self, function: Callable[..., Any], args: Any, kwargs: Any, role: Role) -> "_Entry":
        step = _Step(self._strategy, self._num_replicas, function, args, kwargs, role)
        program = self._program(step)
        name = getattr(function, "__name__", repr(function))
        compiled = self.compiled(program, step.merger(program), name)
        step.release()
        return _Entry(compiled, step.picks)

    def compiled(
        self,
        program: ReplicaProgram | FunctionProgram,
        rebuild: Callable[[Sequence[Any]], Any],
        name: str,
    ) -> Compiled:
        """Puts a program on the devices of the strategy; `name` is the name of its function."""
        return Compiled(
            program,
            self._replicated,
            self._stacked,
            self._mesh,
            self._dispatcher,
            rebuild,
            name,
            self._strategy.extended.step_counts,
            self._home,
            self._storage,
        )

    def _program(self, step: "_Step", is_for_workers: bool = False) -> ReplicaProgram:
        program = self._replica_program(step, is_for_workers)
        if self._num_replicas > 1:
            self._warn_of_relation(program)
        return program

    def _warn_of_relation(self, program: ReplicaProgram) -> None:
        """Warns once if a loss relates rows of the batch; a replica has only its own rows."""
        from distributary.rows import relation_of_replica, relation_warning

        first = program.pures[0]
        relation = relation_of_replica(first.jaxpr, program.is_batch, len(first.captures))
        if relation is not None and relation not in self._warned_of:
            self._warned_of.add(relation)
            warnings.warn(
                relation_warning("Strategy.run", relation, self._num_replicas),
                DistributaryWarning,
                stacklevel=user_stacklevel(),
            )

    def _replica_program(self, step: "_Step", is_for_workers: bool) -> ReplicaProgram:
        avals = step.avals
        if self._workers_mesh is not None and not is_for_workers and len(avals) == 1:
            avals = avals * self._num_replicas
        with refused_if_consumed(step.function, step.static, "Strategy.run"):
            return ReplicaProgram(
                step.flat,
                avals,
                step.varying,
                self._num_replicas,
                self._workers_mesh if is_for_workers else self._mesh,
                split_outputs=step.role == "replica",
                data=None if self._home is None else step.data,
                rewrite=with_exchanged_sums,
            )

    def _run_inside_function(
        self,
        scope: TraceScope,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        role: Role,
    ) -> Any:
        """Inlines the program into the `distributary.function` that is being traced."""
        step = _Step(self._strategy, self._num_replicas, function, args, kwargs, role)
        program = self._program(step, scope.is_for_workers)
        scope.strategies.append(self._strategy)
        leaves = jax.tree.leaves((args, kwargs))
        new, outs = program(
            program.captures,
            [scope.read(handle) for handle in program.written],
            [scope.read(handle) for handle in program.read_only],
            _pick(leaves, step.picks),
        )
        for handle, value in zip(program.written, new, strict=True):
            scope.write(handle, value)
        return step.merger(program)(outs)

    def _run_inside_replica(
        self, function: Callable[..., Any], args: Any, kwargs: Any, role: Role
    ) -> Any:
        """Runs the function in place: the trace in progress is already that of one replica."""
        args, kwargs = map_leaves(_component_of_traced, (args, kwargs))
        with in_role(role):
            result = call_on_replica(self._strategy, function, args, kwargs, role)
        arrays, rebuild = split_result(result, "Strategy.run")
        if self._num_replicas == 1:
            return result

        def wrap(value: Any) -> Any:
            kind = PerReplica.from_local if role == "replica" else Mirrored
            return kind(value, self._num_replicas)

        return rebuild(arrays, wrap)


@final
@dataclass(slots=True)
class _Entry:
    compiled: Compiled
    picks: list[Any] | None


def _pick(leaves: list[Any], picks: list[Any] | None) -> list[Any]:
    """Picks the program's arguments from the flattened arguments of the call."""
    if picks is None:
        return leaves
    return [leaves[pick] if isinstance(pick, int) else [leaves[i] for i in pick] for pick in picks]


def _component_of_traced(leaf: Any) -> Any:
    if isinstance(leaf, PerReplica) and leaf.form == "local":
        return leaf.payload
    if isinstance(leaf, Mirrored):
        return leaf.value()
    return leaf


def call_on_replica(
    strategy: Any, function: Callable[..., Any], args: Any, kwargs: Any, role: Role
) -> Any:
    """Calls `function` as the code of the replica that is being traced."""
    context = ReplicaContext(strategy, _traced_replica_id) if role == "replica" else None
    mode = Mode(strategy, role, context)
    push(mode)
    try:
        return function(*args, **kwargs)
    finally:
        pop(mode)


def _traced_replica_id() -> Any:
    scope = current_scope()
    assert scope is not None
    return scope.replica_id()


@final
class _Step:
    """A step function with its arguments laid out for tracing.

    Attributes:
        function: The function.
        avals: Shapes and dtypes of the arrays that one replica receives: one list, or one per
            replica on an uneven batch.
        varying: Whether replicas may receive different values, for every such array.
        data: Whether the replicas compute everything that depends on it, for every such array.
            Among values that all replicas share, this is true for arrays with dims, and false for
            scalars.
        picks: Position among the flattened arguments, or one position per replica, for every such
            array. None if the arrays are the flattened arguments themselves.
    """

    def __init__(
        self,
        strategy: Any,
        num_replicas: int,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        role: Role,
    ) -> None:
        self.role: Role = role
        self._strategy = strategy
        self._num_replicas = num_replicas
        self.function = function
        self._rebuild: Callable[..., Any] | None = None
        self._constants: list[Any] | None = None
        outer, self._tree = jax.tree.flatten(
            (args, kwargs), is_leaf=lambda x: isinstance(x, (PerReplica, Mirrored))
        )
        self._slots: list[_Slot] = []
        self.varying: list[bool] = []
        self.avals: list[list[Any]] = []
        picks: list[Any] = []
        position = 0
        for leaf in outer:
            flat, inner_tree = jax.tree.flatten(leaf)
            slot = _slot_of(leaf, len(flat), inner_tree, num_replicas)
            self._slots.append(slot)
            for i in range(slot.count):
                if slot.kind == "uneven":
                    picks.append([position + r * slot.count + i for r in range(num_replicas)])
                else:
                    picks.append(position + i)
                self.varying.append(slot.kind in ("split", "uneven"))
            position += len(flat)
        flat_leaves = jax.tree.leaves((args, kwargs))
        identity = picks == list(range(len(flat_leaves)))
        self.picks = None if identity else picks
        uneven = any(slot.kind == "uneven" for slot in self._slots)
        for replica in range(num_replicas if uneven else 1):
            self.avals.append(
                [
                    _aval_of(flat_leaves, pick, replica, varies)
                    for pick, varies in zip(picks, self.varying, strict=True)
                ]
            )

        self.data = [
            varies or (role == "replica" and len(aval.shape) > 0)
            for varies, aval in zip(self.varying, self.avals[0], strict=True)
        ]

    def flat(self, *arrays: Any) -> list[Any]:
        """Runs the step of one replica on its arrays; returns a flat list."""
        remaining = iter(arrays)
        parts = []
        for slot in self._slots:
            if slot.kind == "static":
                parts.append(slot.content)
            else:
                own = [next(remaining) for _ in range(slot.count)]
                parts.append(jax.tree.unflatten(slot.content, own))
        args, kwargs = jax.tree.unflatten(self._tree, parts)
        result = call_on_replica(self._strategy, self.function, args, kwargs, self.role)
        outs, self._rebuild = split_result(result, "Strategy.run")
        self._check_constants(result)
        return outs

    def _check_constants(self, result: Any) -> None:
        """Refuses Python values that differ between the replicas of an uneven batch."""
        if len(self.avals) == 1:
            return
        kinds = (bool, int, float, complex, str, bytes)
        constants = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, kinds)]
        if self._constants is None:
            self._constants = constants
        elif self._constants != constants:
            raise ReplicaMismatchError(
                f"Strategy.run: the function returned the Python values {self._constants} on one"
                f" replica of an uneven batch and {constants} on another. Return arrays,"
                " jnp.asarray(value), for what differs between replicas."
            )

    @property
    def static(self) -> list[Any]:
        """Arguments that are not data."""
        return [slot.content for slot in self._slots if slot.kind == "static"]

    def release(self) -> None:
        """Drops the function and its arguments, so that a cached program keeps neither alive."""
        self.function = _released
        self._slots = []

    def merger(self, program: ReplicaProgram) -> Callable[[Sequence[Any]], Any]:
        """Returns a function from the outputs of the program to the result of the run."""
        rebuild, num_replicas = self._rebuild, self._num_replicas
        assert rebuild is not None
        if num_replicas == 1:
            return rebuild
        if program.uneven or not all(program.split_outs):
            return lambda outs: self._merge(rebuild, program, outs)
        wrap = functools.partial(PerReplica.from_stacked, num_replicas=num_replicas)
        return functools.partial(rebuild, wrap=wrap)

    def _merge(
        self, rebuild: Callable[..., Any], program: ReplicaProgram, outs: Sequence[Any]
    ) -> Any:
        num_replicas = self._num_replicas
        whole = {id(out) for out, split in zip(outs, program.split_outs, strict=True) if not split}

        def wrap(tree: Any) -> Any:
            leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, list))
            if any(isinstance(leaf, list) for leaf in leaves):
                columns = [
                    leaf if isinstance(leaf, list) else [leaf[i] for i in range(num_replicas)]
                    for leaf in leaves
                ]
                structure = jax.tree.structure(tree, is_leaf=lambda x: isinstance(x, list))
                return PerReplica(
                    [
                        jax.tree.unflatten(structure, [column[i] for column in columns])
                        for i in range(num_replicas)
                    ]
                )
            if leaves and all(id(leaf) in whole for leaf in leaves):
                return Mirrored(tree, num_replicas)
            return PerReplica.from_stacked(tree, num_replicas)

        return rebuild(outs, wrap)


def _released(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a released step was traced")


def _slot_of(leaf: Any, num_leaves: int, tree: Any, num_replicas: int) -> _Slot:
    if isinstance(leaf, PerReplica):
        if leaf.form == "stacked":
            return _Slot("split", jax.tree.structure(leaf.payload), num_leaves)
        component = jax.tree.structure(leaf.payload[0])
        return _Slot("uneven", component, num_leaves // num_replicas)
    if isinstance(leaf, Mirrored):
        return _Slot("whole", jax.tree.structure(leaf.value()), num_leaves)
    if is_dynamic(leaf):
        return _Slot("whole", tree, 1)
    if isinstance(leaf, jax.core.Tracer):
        raise InvalidTypeError(f"Strategy.run: argument {leaf!r} is a tracer of another trace.")
    return _Slot("static", leaf, 0)


def _aval_of(leaves: list[Any], pick: Any, replica: int, varies: bool) -> Any:
    value = leaves[pick] if isinstance(pick, int) else leaves[pick[replica]]
    stacked = varies and isinstance(pick, int)
    if isinstance(value, (np.ndarray, np.generic)):
        value = jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))
    aval = value if isinstance(value, jax.ShapeDtypeStruct) else jax.typeof(value)
    shape = aval.shape[1:] if stacked else aval.shape
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak)
