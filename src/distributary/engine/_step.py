"""Steps: a function for the replicas, with its arguments laid out for them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary._late import converted
from distributary.context import Mode, ReplicaContext, entered
from distributary.devices import Nest, local_copy, local_devices, local_replicas, put_rows
from distributary.engine._cache import (
    changes_refused,
    check_static,
    is_dynamic,
    split_result,
    struct_of,
)
from distributary.engine._placement import Placement
from distributary.errors import InvalidTypeError, ReplicaMismatchError, shown
from distributary.programs import GlobalProgram, ReplicaProgram, Results
from distributary.tracing import Subject, current_scope
from distributary.variables import Mirrored, PerReplica, in_order, key_order

# Batches of the global view, whose rows are sharded over the replicas.


@final
@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["num_rows", "dim"]
)
@dataclass(frozen=True, eq=False, slots=True)
class GlobalBatch:
    """A batch of all replicas as a step gets it: one array per leaf, its rows sharded over them.

    Attributes:
        arrays: Nest of arrays `[num_rows, ...]`, or `[step, num_rows, ...]`, padded to a multiple
            of the number of replicas.
        num_rows: For every array, the number of rows without padding; None for an array without
            rows, which every device has as a whole.
        dim: The dim that counts rows.
    """

    arrays: Nest
    num_rows: tuple[int | None, ...]
    dim: int


def global_batch(batch: Nest, placement: Placement, dim: int, is_own: bool) -> GlobalBatch:
    """Lays a batch out for a step of the global view; its program drops the padding again.

    Args:
        batch: Nest of arrays. Arrays may differ in their number of rows.
        placement: The devices.
        dim: The dim that counts rows.
        is_own: Whether the arrays have only the rows of this process's replicas, equally many for
            each; else every process has the whole batch.
    """
    num_replicas, stacked = placement.num_replicas, placement.stacked
    assert stacked is not None
    own = local_replicas(stacked) if placement.is_of_job else range(num_replicas)
    leaves, tree = jax.tree.flatten(batch)
    num_rows: list[int | None] = []
    for i, leaf in enumerate(leaves):
        if np.ndim(leaf) <= dim:
            num_rows.append(None)
            leaves[i] = placement.place_alone(leaf)
            continue
        size = leaf.shape[dim]
        if is_own:
            num_rows.append(size // len(own) * num_replicas)
        else:
            num_rows.append(size)
            missing = -size % num_replicas
            if missing:
                pad = jnp.pad if isinstance(leaf, jax.Array) else np.pad
                leaf = pad(leaf, [(0, missing if k == dim else 0) for k in range(leaf.ndim)])
            if len(own) < num_replicas:
                each = leaf.shape[dim] // num_replicas
                rows = slice(own.start * each, own.stop * each)
                leaf = np.asarray(local_copy(leaf))[(*[slice(None)] * dim, rows)]
        leaves[i] = _placed(leaf, placement, dim)
    return GlobalBatch(jax.tree.unflatten(tree, leaves), tuple(num_rows), dim)


def _placed(rows: Any, placement: Placement, dim: int) -> Any:
    """Puts the rows of this process's replicas on their devices, unless the program does it."""
    sharding = placement.of_rows(dim)
    if isinstance(rows, jax.Array):
        if sharding.is_fully_addressable:
            return jax.device_put(rows, sharding)
        rows = np.asarray(local_copy(rows))
    if placement.takes_host_arrays:
        return rows
    return put_rows(rows, sharding, local_devices(sharding), dim)


# Steps

# Positional and keyword arguments.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@final
@dataclass(frozen=True, eq=False, slots=True)
class StepKind:
    """Describes how a function runs on the replicas.

    Attributes:
        role: "replica" for the code of one replica, "update" for code that runs once per copy of a
            variable, and "global" for code that sees the rows of all replicas.
        results: Form of the results, see `ReplicaProgram`. Of the role "global", they are arrays:
            "shared" makes them whole on every device, else they stay sharded by rows.
        name: Name of the step, for people; None for that of the function.
        caller: Name of what runs it, in messages.
        autograph: Whether Python control flow is converted, see `Subject`.
    """

    role: Literal["replica", "update", "global"] = "replica"
    results: Results = "per replica"
    name: str | None = None
    caller: str = "Strategy.run"
    autograph: bool | None = None


RUN = StepKind()
RUNS: dict[bool | None, StepKind] = {
    None: RUN,
    False: StepKind(autograph=False),
    True: StepKind(autograph=True),
}
UPDATE = StepKind("update", "shared")


@final
@dataclass(slots=True)
class _Slot:
    """One argument of a step, in the form in which the replicas receive it."""

    kind: Literal["static", "whole", "split", "uneven", "rows"]
    content: Any = None  # the value of a static argument, else the tree of its arrays
    count: int = 0  # number of arrays that a replica receives
    num_rows: Sequence[int | None] = ()  # for every array of a `GlobalBatch`
    dim: int = 0  # along which these rows are


def call_on_replica(
    strategy: Any, function: Callable[..., Any], arguments: Arguments, kind: StepKind
) -> Any:
    """Calls `function` as the code of the replica that is being traced."""
    mode = mode_of(strategy, kind.role)
    converts = kind.autograph
    if converts is None:
        scope = current_scope()
        converts = scope is not None and scope.converts and kind.name is None
    if converts:
        function = converted(function)
    args, kwargs = arguments
    with entered(mode):
        return function(*args, **kwargs)


def mode_of(strategy: Any, role: Literal["replica", "update", "global"]) -> Mode:
    """Returns the mode of code that a strategy runs."""
    if role == "update":
        return Mode(strategy, "update")
    is_global = role == "global"
    # In the global view there is one replica, whose number Python code may look at.
    context = ReplicaContext(strategy, np.int32(0) if is_global else traced_replica_id)
    return Mode(strategy, "replica", context, is_global)


def traced_replica_id() -> Any:
    """Returns the number of the replica that is traced, int32 `[]`."""
    scope = current_scope()
    assert scope is not None
    return scope.replica_id()


@final
class Step:
    """A step function with its arguments laid out for tracing.

    Attributes:
        function: The function.
        avals: Shapes and dtypes of the arrays that one replica receives: one list, or one per
            replica on an uneven batch.
        varying: Whether replicas may receive different values, for every such array.
        data: Whether the replicas compute everything that depends on it, for every such array.
            Among values that all replicas share, this is true for arrays with dims, and false for
            scalars.
        dims: The dim along which its rows are sharded, for every such array of a `GlobalBatch`.
        picks: Position among the flattened arguments, or one position per replica, for every such
            array. None if the arrays are the flattened arguments themselves.
    """

    def __init__(
        self,
        strategy: Any,
        num_replicas: int,
        function: Callable[..., Any],
        arguments: Arguments,
        kind: StepKind,
    ) -> None:
        self.kind = kind
        self._strategy = strategy
        self._num_replicas = num_replicas
        self.function = function
        self._rebuild: Callable[..., Any] | None = None
        self._constants: dict[int, list[Any]] = {}  # by replica, if each is traced
        outer, self._tree = jax.tree.flatten(
            arguments, is_leaf=lambda x: isinstance(x, _CONTAINERS)
        )
        subject = Subject(function, self._tree, kind.name)
        #: Name of the step in messages.
        self.title = kind.caller if kind.name else f"{kind.caller}({subject})"
        for i, leaf in enumerate(outer):
            if not isinstance(leaf, _CONTAINERS) and not is_dynamic(leaf):
                check_static(leaf, self.title, subject.arguments(len(outer))[i])
        self._slots: list[_Slot] = []
        self.varying: list[bool] = []
        self.dims: list[int | None] = []
        leaves = jax.tree.leaves(arguments)
        picks: list[Any] = []
        columns: list[list[Any]] = []  # for every array, its shape on one or all replicas
        position = 0
        for leaf in outer:
            flat, inner_tree = jax.tree.flatten(leaf)
            slot = _slot_of(leaf, len(flat), inner_tree, num_replicas)
            self._slots.append(slot)
            for i in range(slot.count):
                num_rows = slot.num_rows[i] if slot.kind == "rows" else None
                dim = None if num_rows is None else slot.dim
                places = [position + i]
                if slot.kind == "uneven":
                    places = [position + r * slot.count + i for r in range(num_replicas)]
                picks.append(places if slot.kind == "uneven" else position + i)
                self.varying.append(slot.kind in ("split", "uneven"))
                self.dims.append(dim)
                is_stacked = slot.kind == "split"
                columns.append([_aval_of(leaves[k], is_stacked, dim, num_rows) for k in places])
            position += len(flat)
        # The program moves the NumPy arrays among these to the replicas' devices.
        self._on_host = [
            isinstance(pick, int) and isinstance(leaves[pick], np.ndarray) for pick in picks
        ]
        self.picks = None if picks == list(range(len(leaves))) else picks
        uneven = any(slot.kind == "uneven" for slot in self._slots)
        self.avals: list[list[Any]] = [
            [column[replica % len(column)] for column in columns]
            for replica in range(num_replicas if uneven else 1)
        ]
        self.data = [
            varies or (kind.role != "update" and len(aval.shape) > 0)
            for varies, aval in zip(self.varying, self.avals[0], strict=True)
        ]

    @property
    def subject(self) -> Subject:
        """The step as its user knows it, for messages."""
        parts = [
            None if slot.kind == "static" else jax.tree.unflatten(slot.content, [0] * slot.count)
            for slot in self._slots
        ]
        tree = jax.tree.structure(jax.tree.unflatten(self._tree, parts))
        return Subject(self.function, tree, self.kind.name, self.kind.autograph)

    def flat(self, *arrays: Any) -> list[Any]:
        """Runs the step of one replica on its arrays; returns a flat list."""
        remaining = iter(arrays)
        parts = []
        for slot in self._slots:
            if slot.kind == "static":
                parts.append(slot.content)
            else:
                leaves = [next(remaining) for _ in range(slot.count)]
                parts.append(jax.tree.unflatten(slot.content, leaves))
        arguments = jax.tree.unflatten(self._tree, parts)
        with changes_refused(arguments, self.title):
            result = call_on_replica(self._strategy, self.function, arguments, self.kind)
        scope = current_scope()
        if scope is not None and scope.replica is not None and self._num_replicas > 1:
            # Replicas that Python code tells apart can return other numbers.
            numbers = (bool, int, float, complex)
            array = lambda leaf: jnp.asarray(leaf) if isinstance(leaf, numbers) else leaf
            order = key_order(result)
            result = in_order(jax.tree.map(array, result), order)
        outs, self._rebuild = split_result(result, self.title)
        self._note_constants(result)
        return outs

    def _note_constants(self, result: object) -> None:
        """Notes the Python values of one of the replicas that are traced one by one.

        Strings may differ. Numbers may not: where they are those of all replicas, they are one.
        """
        scope = current_scope()
        if scope is None or scope.uneven is None:
            return
        kinds = (bool, int, float, complex, str, bytes)
        constants = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, kinds)]
        self._constants[scope.uneven.replica] = constants
        # A replica that waits in a collective ends after others.
        first = next(iter(self._constants.values()))
        if [_or_text(value) for value in constants] != [_or_text(value) for value in first]:
            raise ReplicaMismatchError(
                f"{self.title}: the function returned the Python values {first} on one replica and"
                f" {constants} on another. Return arrays, jnp.asarray(value), for what differs"
                " between replicas."
            )

    def shardings(self, placement: Placement) -> list[Any] | None:
        """Returns the sharding of every NumPy array that the program moves to the devices.

        Other arrays have None; there is no list if there are only others.
        """
        if not placement.takes_host_arrays:
            return None
        # Values of replicas are `[replica, *shape]`.
        dims = [0 if varies else d for varies, d in zip(self.varying, self.dims, strict=True)]
        shardings = [
            placement.of_rows(dim) if is_on_host and dim is not None else None
            for is_on_host, dim in zip(self._on_host, dims, strict=True)
        ]
        return shardings if any(shardings) else None

    def release(self) -> None:
        """Drops the function and its arguments, so that a cached program keeps neither alive."""
        del self.function, self._slots

    def merger(self, program: ReplicaProgram | GlobalProgram) -> Callable[[Sequence[Any]], Any]:
        """Returns a function from the outputs of the program to the result of the run."""
        rebuild, num_replicas = self._rebuild, self._num_replicas
        assert rebuild is not None
        if isinstance(program, GlobalProgram) or num_replicas == 1:
            return rebuild
        columns = [*zip(*(self._constants[i] for i in sorted(self._constants)), strict=True)]
        if columns:
            rebuild = functools.partial(rebuild, constants=[*map(_joined, columns)])
        if program.uneven or not all(program.split_outs):
            return lambda outs: self._merge(rebuild, program, outs)
        wrap = functools.partial(PerReplica.from_stacked, num_replicas=num_replicas)
        return functools.partial(rebuild, wrap=wrap)

    def _merge(
        self, rebuild: Callable[..., Any], program: ReplicaProgram, outs: Sequence[Any]
    ) -> Any:
        num_replicas = self._num_replicas
        whole = {id(out) for out, split in zip(outs, program.split_outs, strict=True) if not split}

        def wrap(tree: object) -> Any:
            leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, list))
            if any(isinstance(leaf, list) for leaf in leaves):
                parts = [[leaf[i] for leaf in leaves] for i in range(num_replicas)]
                return PerReplica([jax.tree.unflatten(structure, part) for part in parts])
            if leaves and all(id(leaf) in whole for leaf in leaves):
                return Mirrored(tree, num_replicas)
            return PerReplica.from_stacked(tree, num_replicas)

        return rebuild(outs, wrap)


_CONTAINERS = (PerReplica, Mirrored, GlobalBatch)


def _or_text(value: object) -> object:
    """Returns a Python value; the class of text, which can be another on each replica."""
    return type(value) if isinstance(value, (str, bytes)) else value


def _joined(values: Sequence[Any]) -> Any:
    """Returns the Python value of all replicas, as one if it is the same."""
    return values[0] if all(value == values[0] for value in values) else PerReplica(values)


def _slot_of(leaf: object, num_leaves: int, tree: object, num_replicas: int) -> _Slot:
    if isinstance(leaf, PerReplica):
        if leaf.form == "stacked":
            return _Slot("split", jax.tree.structure(leaf.payload), num_leaves)
        component = jax.tree.structure(leaf.payload[0])
        return _Slot("uneven", component, num_leaves // num_replicas)
    if isinstance(leaf, GlobalBatch):
        tree = jax.tree.structure(leaf.arrays)
        return _Slot("rows", tree, num_leaves, leaf.num_rows, leaf.dim)
    if isinstance(leaf, Mirrored):
        return _Slot("whole", jax.tree.structure(leaf.value()), num_leaves)
    if is_dynamic(leaf):
        return _Slot("whole", tree, 1)
    if isinstance(leaf, jax.core.Tracer):
        raise InvalidTypeError(
            f"Strategy.run: argument {shown(leaf)} is a tracer of another trace."
        )
    return _Slot("static", leaf, 0)


def _aval_of(value: Any, is_stacked: bool, dim: int | None, num_rows: int | None) -> Any:
    aval = struct_of(value)
    shape = aval.shape[1:] if is_stacked else aval.shape
    if dim is not None:
        shape = (*shape[:dim], num_rows, *shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


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
        _, results = jax.lax.scan(lambda _, batch: (None, step(batch)), None, batches)
        if keep_all:
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)
        return jax.tree.map(lambda x: x[-1], results)

    return steps


def picked(leaves: list[Any], picks: list[Any] | None) -> list[Any]:
    """Picks the program's arguments from the flattened arguments of the call."""
    if picks is None:
        return leaves
    return [leaves[pick] if isinstance(pick, int) else [leaves[i] for i in pick] for pick in picks]
