"""Programs whose variables are on one device and whose replicas compute on others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary.devices import REPLICA_AXIS
from distributary.engine._cache import struct_of
from distributary.engine._placement import Placement
from distributary.jaxprs import Array, Equation, aval_of, evaluate_all, value_of, variables_of
from distributary.programs import FunctionProgram, ReplicaProgram, TracedProgram, cut_around_mesh
from distributary.xla_cpu import with_cpu_rewrites

# Updates of state that is kept in the host memory of the device that computes them.

# This much state may come to the device before the results of earlier state have gone back.
_PART_BYTES = 1 << 26


@final
@dataclass(slots=True)
class _Part:
    """The equations that run between one transfer to the device and one back.

    Attributes:
        reads: State that these equations are the first to need.
        eqns: The equations.
        stores: New state that they make.
        num_bytes: Size of `reads`.
    """

    reads: list[Any] = field(default_factory=list)
    eqns: list[Any] = field(default_factory=list)
    stores: list[Any] = field(default_factory=list)
    num_bytes: int = 0


def update_in_parts(
    closed: Any, stored_inputs: Sequence[bool], stored_outputs: Sequence[bool]
) -> Callable[..., list[Array]]:
    """Makes a program that fetches state from host memory in parts, each put back before the next.

    Without this order, XLA fetches as much as there is room for. libtpu 0.0.42.1 fetches even more,
    and then fails because the device is out of memory.

    Args:
        closed: Closed jaxpr without side effects.
        stored_inputs: Whether each input is in host memory.
        stored_outputs: Whether each output is wanted there.

    Returns:
        A function from the inputs to the outputs, for `jax.jit`.
    """
    jaxpr = closed.jaxpr
    state = {v for v, stored in zip(jaxpr.invars, stored_inputs, strict=True) if stored}
    new = set(variables_of(v for v, s in zip(jaxpr.outvars, stored_outputs, strict=True) if s))
    parts = _parts(_in_order_of_outputs(jaxpr), state, new)

    def run(*values: Array) -> list[Array]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *values], strict=True))
        kept: dict[Any, Array] = {}
        gone: list[Array] = []
        for part in parts:
            arriving = [known[v] for v in part.reads]
            if gone and arriving:
                arriving, _ = jax.lax.optimization_barrier((arriving, gone))
            known.update(
                zip(part.reads, jax.device_put(arriving, jax.memory.Space.Device), strict=True)
            )
            evaluate_all(part.eqns, known)
            gone = jax.device_put([known[v] for v in part.stores], jax.memory.Space.Host)
            kept.update(zip(part.stores, gone, strict=True))

        def output(atom: Any, stored: bool) -> Array:
            if stored and variables_of([atom]) and atom in kept:
                return kept[atom]
            space = jax.memory.Space.Host if stored else jax.memory.Space.Device
            return jax.device_put(value_of(known, atom), space)

        return list(map(output, jaxpr.outvars, stored_outputs))

    return run


def _parts(eqns: Sequence[Any], state: set[Any], new: set[Any]) -> list[_Part]:
    parts = [_Part()]
    seen: set[Any] = set()
    for eqn in eqns:
        reads = [v for v in dict.fromkeys(variables_of(eqn.invars)) if v in state and v not in seen]
        part = parts[-1]
        if reads and part.stores and part.num_bytes >= _PART_BYTES:
            part = _Part()
            parts.append(part)
        seen.update(reads)
        part.reads += reads
        part.num_bytes += sum(v.size * v.dtype.itemsize for v in map(aval_of, reads))
        part.eqns.append(eqn)
        part.stores += [v for v in eqn.outvars if v in new]
    return parts


def _in_order_of_outputs(jaxpr: Jaxpr) -> list[Equation]:
    """Returns the equations that the outputs need, those of the first output first."""
    made_by = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    order: dict[int, None] = {}
    for output in jaxpr.outvars:
        positions: set[int] = set()
        needed = variables_of([output])
        while needed:
            i = made_by.get(needed.pop())
            if i is not None and i not in order and i not in positions:
                positions.add(i)
                needed += variables_of(jaxpr.eqns[i].invars)
        order.update(dict.fromkeys(sorted(positions)))
    return [jaxpr.eqns[i] for i in order]


# Staged programs


class Place(NamedTuple):
    """The place of an input of a program, or the place where an output is wanted.

    Attributes:
        sharding: The place; None for an input that may lie anywhere, and for an output that stays
            where it is made.
        is_data: Whether the replicas' devices compute everything that depends on this input.
        replaces: Number of the input whose buffer an output may take.
    """

    sharding: Any = None
    is_data: bool = False
    replaces: int | None = None


@final
class Staged:
    """A program in two stages: first on the replicas' devices, then on the parameter device.

    The first stage runs on the mesh. It gets copies of the variables that it reads, for as long as
    it runs. The second stage is the rest of the program; it runs once, with one copy of the values
    that the replicas share.

    Args:
        closed: The program, a closed jaxpr.
        inputs: Places of the inputs.
        outputs: Places where the outputs are wanted.
        placement: The mesh of the replicas, and where the variables lie.
        is_rewritten: Whether the first stage has the forms that its devices run fast.
    """

    def __init__(
        self,
        closed: Any,
        inputs: Sequence[Place],
        outputs: Sequence[Place],
        placement: Placement,
        is_rewritten: bool = False,
    ) -> None:
        mesh, home, storage = placement.mesh, placement.home, placement.storage
        assert mesh is not None
        assert home is not None
        assert storage is not None
        self._home = home
        self._storage = storage
        self._replicated = NamedSharding(mesh, P())
        self._num_consts = len(closed.consts)
        self._inputs = [*(Place() for _ in closed.consts), *inputs]
        self._outputs = list(outputs)
        self._stages = cut_around_mesh(closed, [place.is_data for place in inputs])
        first, second = self._stages.replica_inputs, self._stages.update_inputs
        self._fetched = [i for i in first if self._inputs[i].sharding is storage]
        self._sent = [
            i for i in second if i >= self._num_consts and self._inputs[i].sharding is not storage
        ]
        self._on_mesh = self._consts(closed, first, self._replicated)
        self._at_home = self._consts(closed, second, home)
        places = enumerate(self._stages.replica_outputs)
        self._returned = [k for k, i in places if self._outputs[i].sharding is storage]
        self._first = self._compiled_first(mesh, is_rewritten)
        self._second = self._compiled_second()

    def _consts(self, closed: Any, inputs: list[int], sharding: Any) -> dict[int, Array]:
        used = [i for i in inputs if i < self._num_consts]
        placed = jax.device_put([closed.consts[i] for i in used], sharding)
        return dict(zip(used, placed, strict=True))

    def _compiled_first(self, mesh: Any, is_rewritten: bool) -> Any:
        stages, stage = self._stages, self._stages.replica
        if not stage.jaxpr.outvars and not stage.eqns:
            return None
        token = NamedSharding(mesh, P(REPLICA_AXIS))

        def run(*values: Array) -> list[Array]:
            outs = jex_core.jaxpr_as_fun(stage)(*values)
            return [*outs, jnp.zeros(mesh.size, jnp.int8)]

        wanted = [self._outputs[i].sharding for i in stages.replica_outputs]
        places = [self._inputs[i].sharding for i in stages.replica_inputs]
        once = set(stages.replica_inputs).difference(stages.update_inputs, self._fetched)
        return jax.jit(
            run if is_rewritten else with_cpu_rewrites(run, mesh),
            in_shardings=[self._replicated if s is self._storage else s for s in places],
            out_shardings=[
                *[None if s is self._storage else s for s in wanted],
                *[None] * stages.num_cut,
                token,
            ],
            donate_argnums=self._replaced(stages.replica_inputs, stages.replica_outputs, once),
        )

    def _compiled_second(self) -> Any:
        stages = self._stages
        if not stages.update_outputs:
            return None
        kept = set(stages.update_inputs).difference(self._sent)
        is_stored = [self._outputs[i].sharding is self._storage for i in stages.update_outputs]
        update: Any = jex_core.jaxpr_as_fun(stages.update)
        if self._storage is not self._home:
            from_storage = [self._inputs[i].sharding is self._storage for i in stages.update_inputs]
            update = update_in_parts(
                stages.update, [*from_storage, *[False] * stages.num_cut], is_stored
            )
        return jax.jit(
            update,
            out_shardings=[self._storage if stored else self._home for stored in is_stored],
            donate_argnums=self._replaced(stages.update_inputs, stages.update_outputs, kept),
        )

    def _replaced(self, inputs: list[int], outputs: list[int], among: set[int]) -> tuple[int, ...]:
        """Returns the inputs of a stage that it may consume and that its outputs replace."""
        replaced = {self._outputs[i].replaces for i in outputs}
        first = self._num_consts
        return tuple(
            k for k, i in enumerate(inputs) if i in among and i >= first and i - first in replaced
        )

    def __call__(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """Runs the program.

        Returns:
            The outputs, and a small array that has a shard on every device of the mesh; None in its
            place if nothing runs there.
        """
        results, shared, token = [], [], None
        if self._first is not None:
            *results, token = self._first(*self._fetch(values))
            num_made = len(self._stages.replica_outputs)
            results, shared = results[:num_made], results[num_made:]
        sent = [values[i - self._num_consts] for i in self._sent]
        moved = [*(results[k] for k in self._returned), *sent, *shared]
        if moved:
            moved = jax.device_put([_one_copy(value) for value in moved], self._home)
        num_returned = len(self._returned)
        moved[:num_returned] = jax.device_put(moved[:num_returned], self._storage)
        for k, value in zip(self._returned, moved[:num_returned], strict=True):
            results[k] = value
        outputs: list[Any] = [None] * len(self._outputs)
        for i, value in zip(self._stages.replica_outputs, results, strict=True):
            outputs[i] = value
        if self._second is not None:
            known = dict(zip(self._sent, moved[num_returned:], strict=False)) | self._at_home
            inputs = self._inputs_of(self._stages.update_inputs, known, values)
            updated = self._second(*inputs, *moved[num_returned + len(sent) :])
            for i, value in zip(self._stages.update_outputs, updated, strict=True):
                wanted = self._outputs[i].sharding
                away = wanted is not None and wanted is not self._storage
                outputs[i] = jax.device_put(value, wanted) if away else value
        return outputs, token

    def lower(self, values: Sequence[Any]) -> Any:
        """Lowers the first stage, or the second one if nothing runs on the mesh."""
        if self._first is not None:
            return self._first.lower(*self._fetch(values))
        inputs = self._inputs_of(self._stages.update_inputs, self._at_home, values)
        return self._second.lower(*inputs)

    def _fetch(self, values: Sequence[Any]) -> list[Any]:
        """Returns the inputs of the first stage."""
        stored = [values[i - self._num_consts] for i in self._fetched]
        # From host memory to its own device first, and from there to the other devices.
        fetched = jax.device_put(jax.device_put(stored, self._home), self._replicated)
        known = dict(zip(self._fetched, fetched, strict=True))
        return self._inputs_of(self._stages.replica_inputs, known | self._on_mesh, values)

    def _inputs_of(
        self, inputs: list[int], known: dict[int, Array], values: Sequence[Any]
    ) -> list[Any]:
        first = self._num_consts
        return [known[i] if i in known else values[i - first] for i in inputs]


def _one_copy(value: Any) -> Any:
    """Returns the first copy of an array that has one on every device."""
    whole = isinstance(value, jax.Array) and value.is_fully_replicated
    return value.addressable_data(0) if whole else value


@final
@dataclass(eq=False)
class StagedProgram:
    """The program of an `Executable` in two stages, for arguments of one signature.

    Args:
        program: The program.
        placement: The mesh of the replicas, and where the variables lie.
        shardings: For every argument, its sharding if it comes as a NumPy array, else None.
    """

    _program: TracedProgram
    _placement: Placement
    _shardings: Sequence[NamedSharding | None] | None
    _staged: Staged | None = field(default=None, init=False)
    _tree: Any = field(default=None, init=False)

    def __call__(
        self, captures: Sequence[Sequence[Array]], *values: Sequence[Any]
    ) -> tuple[list[Array], list[Any], Any]:
        """Runs the program; returns new state, results and a token, see `Staged`.

        Args:
            captures: As for a `TracedProgram`.
            *values: The written and the other variables, and the arguments.
        """
        staged = self._staged or self._build(captures, *values)
        outs, token = staged(jax.tree.leaves(values))
        new, results = jax.tree.unflatten(self._tree, outs)
        return new, results, token

    def lower(self, captures: Sequence[Sequence[Array]], *values: Sequence[Any]) -> Any:
        """Lowers the stage on the replicas' devices; takes the arguments of a call."""
        staged = self._staged or self._build(captures, *values)
        return staged.lower(jax.tree.leaves(values))

    def _build(self, captures: Sequence[Sequence[Array]], *values: Sequence[Any]) -> Staged:
        program = self._program
        stacked, storage = self._placement.stacked, self._placement.storage
        closed, shapes = jax.make_jaxpr(
            lambda *values: program(captures, *values), return_shape=True
        )(*jax.tree.map(struct_of, values))
        is_function = isinstance(program, FunctionProgram)
        leaves = jax.tree.leaves(values[2])
        inputs = [
            Place(stacked, is_data=True) if handle.per_replica else Place(storage)
            for handle in (*program.written, *program.read_only)
        ]
        inputs += [
            Place(sharding, is_data=is_function and jnp.ndim(x) > 0)
            for x, sharding in zip(leaves, self._shardings or [None] * len(leaves), strict=True)
        ]
        outputs = [
            Place(stacked if handle.per_replica else storage, replaces=i)
            for i, handle in enumerate(program.written)
        ]
        num_replicas = 1 if stacked is None else stacked.num_devices
        for k, result in enumerate(shapes[1]):
            is_split = isinstance(program, ReplicaProgram) and program.split_outs[k]
            is_whole = not is_split or isinstance(result, list)
            # Rows of an uneven batch that do not divide lie where XLA puts them.
            is_whole = is_whole or (result.ndim and result.shape[0] % num_replicas)
            outputs += [Place(None if is_whole else stacked) for _ in jax.tree.leaves(result)]
        self._tree = jax.tree.structure(shapes)
        self._staged = Staged(closed, inputs, outputs, self._placement, program.is_rewritten)
        return self._staged
