"""Takes sums over the rows of a batch per device, and adds up all that are ready together.

A step of the whole batch, divided over the devices of a mesh, leaves it to XLA to divide the
program. On CPUs XLA adds up every sum over rows by itself, for which gloo pays each time, and it
cannot divide the forms of `_rules`, which are fast on one device. So the gradients of a layer,

    { lambda ; x:f32[8,3] g:f32[8,5]. let
        a:f32[3,5] = dot_general[dimension_numbers=(([0], [0]), ([], []))] x g
        b:f32[5] = reduce_sum[axes=(0,)] g
        c:f32[5] = mul b 0.5
        d:f32[3,5] = exp a
      in (d, c) }

become

    { lambda ; x:f32[8,3] g:f32[8,5]. let
        a:f32[3,5] c:f32[5] = shard_map[
          in_specs=(P("replica"), P("replica")) out_specs=(P(), P())
          jaxpr={ lambda ; x:f32[4,3] g:f32[4,5]. let
              e:f32[3,5] = dot_general[dimension_numbers=(([0], [0]), ([], []))] x g
              f:f32[5] = reduce_sum[axes=(0,)] g
              h:f32[5] = mul f 0.5
              a:f32[3,5] c:f32[5] = psum[axes=("replica",)] e h
            in (a, c) }
        ] x g
        d:f32[3,5] = exp a
      in (d, c) }

The program is evaluated once more. `_batch_dims` tells where the rows are, and which equations sum
over them or are linear. Their results stay parts of a sum, and are not computed yet, until nothing
else is left that can be computed. Then the parts that are needed are added up in one `shard_map`,
as one vector between processes. A loop may carry parts: its sums are added up after it.

Results are those of one device but for the order of additions.
"""

import collections
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, Nest, num_logical_devices
from distributary.jaxprs import (
    CONTROL_FLOW,
    AnyJaxpr,
    Atom,
    Equation,
    aval_of,
    evaluate_control_flow,
    evaluate_one,
    interpret_with,
    parts_of_scan,
    shape_of,
    value_of,
    variables_of,
    with_pass,
)
from distributary.tracing import is_sum_of_replicas
from distributary.variables import all_reduce_of_vectors
from distributary.xla_cpu._batch_dims import (
    Dim,
    Plan,
    Plans,
    Share,
    State,
    dims_in,
    dims_of,
    dims_of_windows,
    is_part,
    is_wide,
    may_be_linear,
    shares_of,
    state_of,
)
from distributary.xla_cpu._rewrites import rewritten_for_cpus, with_cpu_rewrites

# With more than two replicas each sends the whole array several times; in a ring it sends it less
# than twice. On loopback 4 MB take as long either way; networks are slower.
_MAX_BYTES_OF_MANY = 1 << 19


def with_exchanged_sums(
    of_replica: Callable[..., Nest], mesh: Mesh | AbstractMesh | None
) -> Callable[..., Nest]:
    """Returns `of_replica` with its sums over all replicas as exchanges, if these are faster.

    With two replicas,

        b:f32[3] = psum[axes=('replica',)] a

    becomes

        b:f32[3] = ppermute[axis_name=('replica',) perm=((0, 1), (1, 0))] a
        c:f32[3] = add a b

    gloo, which carries collectives between such processes, reduces in a ring: with two
    processes it sends four messages, each after the one before it has been added, and the
    vector in pieces. Here replica `i` and replica `i ^ 1` swap their whole arrays and each adds
    both, then `i` and `i ^ 2` do, and so on. Measured on loopback, 2 cores: 400 kB with 2
    workers 0.6 ms instead of 1.2, 1 MB 1.0 instead of 2.9, 40 MB 32 instead of 42; 4 kB with 4
    workers 0.8 ms instead of 6.7. The two replicas of a pair add the same two numbers, so all
    replicas have the same bits.

    Sums inside control flow do not change.

    Args:
        of_replica: From trees of arrays to trees of arrays, in the program of one replica, inside
            `jax.shard_map`. No later pass may need to tell which values are the same on all
            replicas.
        mesh: The mesh of the program.
    """
    if not _is_over_gloo(mesh):
        return of_replica
    num_replicas = mesh.size

    def results(eqn: Equation, operands: Sequence[Array]) -> list[Array]:
        if not _is_exchanged(eqn, num_replicas):
            return evaluate_one(eqn, operands)
        with jax.named_scope("sum_by_exchanges"):
            return [_exchanged_sum(operands[0], num_replicas)]

    def run(closed: ClosedJaxpr, args: Sequence[Array]) -> list[Array]:
        return interpret_with(closed, args, lambda constant: constant, results)[0]

    return with_pass(of_replica, run)


def _is_over_gloo(mesh: Mesh | AbstractMesh | None) -> TypeGuard[Mesh]:
    return (
        isinstance(mesh, Mesh)
        and mesh.is_multi_process
        and mesh.devices.flat[0].platform == "cpu"
        and num_logical_devices(mesh) == 1
    )


def _is_exchanged(eqn: Equation, num_replicas: int) -> bool:
    if not is_sum_of_replicas(eqn) or isinstance(eqn.invars[0], Literal):
        return False
    aval = aval_of(eqn.invars[0])
    is_small = aval.size * aval.dtype.itemsize <= _MAX_BYTES_OF_MANY
    return jnp.issubdtype(aval.dtype, jnp.number) and (num_replicas == 2 or is_small)


def _exchanged_sum(value: Array, num_replicas: int) -> Array:
    """Returns the sum over all replicas.

    As many replicas as the largest power of two swap their values; the others send theirs to one of
    these and receive the sum from it.
    """
    num_swapping = 1 << (num_replicas.bit_length() - 1)
    others = [(num_swapping + i, i) for i in range(num_replicas - num_swapping)]
    total = _rounded(value)
    # A replica that receives nothing gets zeros.
    if others:
        total = total + lax.ppermute(total, REPLICA_AXIS, others)
    distance = 1
    while distance < num_swapping:
        pairs = [(i, i ^ distance) for i in range(num_swapping)]
        total = total + lax.ppermute(total, REPLICA_AXIS, pairs)
        distance *= 2
    if others:
        back = [(i, other) for other, i in others]
        is_other = lax.axis_index(REPLICA_AXIS) >= num_swapping
        total = jnp.where(is_other, lax.ppermute(total, REPLICA_AXIS, back), total)
    return total


def _rounded(value: Array) -> Array:
    """Returns a value that LLVM does not fuse with the addition after it.

    If the value is a product, one instruction would multiply and add, and round only once. What is
    sent is rounded, so the replicas of a pair would add different numbers, and their copies of a
    variable would drift apart. XLA:CPU drops barriers before it fuses. So the bits go through an
    exclusive or with the lowest bit of `n * (n - 1)`: it is 0, and compilers do not know that.
    """
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    bits = lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
    one = jnp.ones((), bits.dtype)
    return lax.bitcast_convert_type(bits ^ (bits * (bits - one) & one), value.dtype)


def with_partial_sums(
    step: Callable[..., Nest], dims: Sequence[Dim], mesh: Mesh | AbstractMesh
) -> Callable[..., Nest]:
    """Returns `step` with sums over the batch taken per device and added up together.

    The parts that each device computes by itself have the forms of `with_cpu_rewrites`, which must
    not see the rest.

    Args:
        step: From arrays to a nest of arrays; called inside `jax.jit`.
        dims: For every input the dim of the rows, which are divided over the devices; None for
            inputs that are the same on all devices.
        mesh: CPU devices of one or several processes, along the axis `"replica"`; an abstract mesh
            is of one process.
    """

    def run(closed: ClosedJaxpr, args: Sequence[Array]) -> list[Array]:
        plans = Plans()
        results = [None] * len(closed.jaxpr.outvars)
        return _Evaluation(mesh, plans).outputs(plans.body(closed), args, dims, results)

    return with_pass(step, run)


@final
@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """An array of which every device has, or can compute, a part; the array is their sum.

    Attributes:
        operands: Arrays, other parts and literals.
        shares: How a device gets each; see `_batch_dims`.
        shape: The shape of the array.
        number: Larger than those of the parts among the operands.
        eqn: The equation that makes the part; None if the only operand is a stack of the parts:
            those of the devices one after the other, along the dim in `shares`.
    """

    operands: "Sequence[Array | _Part]"
    shares: Sequence[Share]
    shape: tuple[int, ...]
    number: int
    eqn: Equation | None = None


_Value: TypeAlias = Array | _Part


@final
class _Agenda:
    """The equations that are left to evaluate.

    One is ready when its operands are there, and again when some of them have been added up. The
    first of the program goes first, and those with effects stay in order.

    Args:
        eqns: The equations of a program.
        env: The values that are known, which the caller adds to.

    Attributes:
        left: The equations that are left, by their place in the program.
    """

    def __init__(self, eqns: Sequence[Equation], env: Mapping[Atom, _Value]) -> None:
        self.left = dict(enumerate(eqns))
        self._env = env
        self._users: dict[Atom, list[int]] = collections.defaultdict(list)
        self._num_missing: list[int] = []
        for number, eqn in self.left.items():
            operands = set(variables_of(eqn.invars))
            self._num_missing.append(len(operands - env.keys()))
            for v in operands:
                self._users[v].append(number)
        self._effects = [number for number, eqn in self.left.items() if eqn.effects]
        self._with_parts: set[int] = set()  # some of which may be evaluated by now
        for known in env:
            self._note_users(known)
        self._heap = [number for number, missing in enumerate(self._num_missing) if not missing]

    def ready(self) -> Iterator[tuple[int, Equation]]:
        """Yields the equations that are ready, in order, and those that become ready meanwhile."""
        while self._heap:
            number = heapq.heappop(self._heap)
            eqn = self.left.get(number)
            if eqn is not None and not (eqn.effects and number != self._effects[0]):
                yield number, eqn

    def remove(self, number: int) -> None:
        """Removes an equation whose results are in `env` now."""
        eqn = self.left.pop(number)
        for v in eqn.outvars:
            self._note_users(v)
            for user in self._users[v]:
                self._num_missing[user] -= 1
                self._push(user)
        if eqn.effects:
            self._effects.pop(0)
            for following in self._effects[:1]:
                self._push(following)

    def retry(self, changed: Iterable[Atom]) -> None:
        """Makes the equations ready again whose operands have changed."""
        for user in {user for v in changed for user in self._users[v]}:
            self._push(user)

    def with_parts(self) -> list[Equation]:
        """Returns the equations that are left and have had a part among their operands."""
        self._with_parts &= self.left.keys()
        return [self.left[number] for number in sorted(self._with_parts)]

    def _note_users(self, v: Atom) -> None:
        if isinstance(self._env[v], _Part):
            self._with_parts.update(self._users[v])

    def _push(self, number: int) -> None:
        if not self._num_missing[number]:
            heapq.heappush(self._heap, number)


@final
class _Evaluation:
    """The evaluation of one program; see `with_partial_sums` for the arguments."""

    def __init__(self, mesh: Mesh | AbstractMesh, plans: Plans) -> None:
        self._mesh = mesh
        self._numbers = itertools.count()
        self._plans = plans

    def outputs(
        self,
        body: ClosedJaxpr,
        inputs: Sequence[Array],
        states: Sequence[State],
        results: Sequence[State],
    ) -> list[Array]:
        """Returns the outputs of a body.

        Args:
            body: The body, without calls.
            inputs: Its inputs; stacks of parts for those that are parts.
            states: The state of each.
            results: The state of each output: those that are parts become stacks of them.
        """
        jaxpr = body.jaxpr
        env: dict[Atom, _Value] = dict(zip(jaxpr.constvars, body.consts, strict=True))
        # The dims of the rows, unless the value is a part.
        dims: dict[Atom, State] = dict(zip(jaxpr.invars, dims_in(states), strict=True))
        for v, value, state in zip(jaxpr.invars, inputs, states, strict=True):
            env[v] = self._part(value, v) if is_part(state) else value
        are_parts = list(map(is_part, results))
        whole = [v for v, part in zip(jaxpr.outvars, are_parts, strict=True) if not part]
        agenda = _Agenda(jaxpr.eqns, env)
        while True:
            for number, eqn in agenda.ready():
                if self._evaluated(eqn, env, dims):
                    agenda.remove(number)
            if not agenda.left:
                break
            later = agenda.with_parts()
            wanted = [v for eqn in later for v in _wanted(eqn, env)]
            # Parts that an equation waits for are added up, so that it is evaluated next.
            assert wanted, "no equation can be evaluated"
            # What is computed from the same parts later must not compute them again.
            used = [v for eqn in later for v in eqn.invars if _is_pending(v, env)]
            self._add_up([*wanted, *whole], used, env)
            agenda.retry([*wanted, *variables_of(whole)])
        stacks = self._add_up(
            whole, [v for v, part in zip(jaxpr.outvars, are_parts, strict=True) if part], env
        )
        outs: list[Any] = []
        for v, part in zip(jaxpr.outvars, are_parts, strict=True):
            if part and not isinstance(v, Literal) and v in stacks:
                outs.append(stacks[v])
            else:
                outs.append(self._stack(value_of(env, v)) if part else value_of(env, v))
        return outs

    def _evaluated(self, eqn: Equation, env: dict[Atom, _Value], dims: dict[Atom, State]) -> bool:
        """Adds the results of an equation to `env` and `dims` if it can be evaluated."""
        operands: list[Any] = [value_of(env, atom) for atom in eqn.invars]
        states: list[State] = [
            "partial" if isinstance(value, _Part) else state_of(atom, dims)
            for atom, value in zip(eqn.invars, operands, strict=True)
        ]
        shares = shares_of(eqn, states)
        if shares is not None:
            (result,) = eqn.outvars
            env[result] = _Part(operands, shares, shape_of(result), next(self._numbers), eqn)
            return True
        plan = self._plans.plan(eqn, states) if eqn.primitive.name in CONTROL_FLOW else None
        needed = dims_in(states) if plan is None else plan.operands
        if any(is_part(x) and not is_part(y) for x, y in zip(states, needed, strict=True)):
            return False
        values: Sequence[_Value]
        if plan is None:
            results = dims_of(eqn, dims_in(states))
            local = self._local(eqn, operands, dims_in(states), results)
            values = evaluate_one(eqn, operands) if local is None else local
        else:
            results = dims_in(plan.results)
            values = self._controlled(eqn, operands, plan, env)
        env.update(zip(eqn.outvars, values, strict=True))
        dims.update(zip(eqn.outvars, results, strict=True))
        return True

    # Sums

    def _add_up(
        self, whole: Iterable[Atom], kept: Iterable[Atom], env: dict[Atom, _Value]
    ) -> dict[Atom, Array]:
        """Adds up the parts among some values; computes those of others, and returns the stacks."""
        targets: dict[Atom, _Part] = {}
        sums = variables_of(whole)
        for v in (*sums, *variables_of(kept)):
            value = env.get(v)
            if isinstance(value, _Part):
                targets[v] = value
        if not targets:
            return {}
        summed_up = set(sums)
        is_sum = [v in summed_up for v in targets]
        parts = _needed(targets.values())
        leaves: dict[tuple[int, Share], tuple[Array, Share]] = {}
        for part in parts:
            for operand, share in zip(part.operands, part.shares, strict=True):
                if not isinstance(operand, (_Part, np.generic)):  # np.generic: a literal
                    leaves[id(operand), share] = operand, share

        def local(*arrays: Array) -> list[Array]:
            inputs = dict(zip(leaves, arrays, strict=True))
            results: dict[int, Array] = {}
            for part in parts:
                operands: list[Any] = [
                    results[x.number] if isinstance(x, _Part) else inputs.get((id(x), share), x)
                    for x, share in zip(part.operands, part.shares, strict=True)
                ]
                results[part.number] = _part_of(part, operands)
            outputs = [results[part.number] for part in targets.values()]
            one_process = isinstance(self._mesh, AbstractMesh) or not self._mesh.is_multi_process
            together = _all_reduced if one_process else all_reduce_of_vectors
            totals = iter(together(list(itertools.compress(outputs, is_sum))))
            return [
                next(totals).astype(aval_of(v).dtype) if summed else _in_stack(x)
                for v, x, summed in zip(targets, outputs, is_sum, strict=True)
            ]

        specs = [P() if summed else P(REPLICA_AXIS) for summed in is_sum]
        run = with_cpu_rewrites(with_exchanged_sums(local, self._mesh), self._mesh)
        values = self._on_devices(run, list(leaves.values()), specs)
        stacks: dict[Atom, Array] = {}
        for atom, value, summed in zip(targets, values, is_sum, strict=True):
            if not summed:
                stacks[atom] = value
            env[atom] = value if summed else self._part(value, atom)
        return stacks

    def _part(self, stack: Array, v: Atom, axis: int = 0) -> _Part:
        return _Part([stack], [axis], shape_of(v), next(self._numbers))

    def _stack(self, value: Any) -> Array:
        """Returns parts of a value: the first device has all of it."""
        return self._on_devices(_in_stack, [(_wide(value), "first")], P(REPLICA_AXIS))

    def _local(
        self, eqn: Equation, operands: Sequence[Array], dims: list[Dim], results: list[Dim]
    ) -> list[Array] | None:
        """Returns the results of an equation that is rewritten, for the rows of each device.

        Args:
            eqn: The equation.
            operands: The operands.
            dims: The dim of the rows in each.
            results: That in each result.
        """
        dims, dim = dims_of_windows(eqn, dims), next(iter(results), None)
        if dim is None or not dims:
            return None
        shapes = [
            [-(-n // self._mesh.size) if i == row_dim else n for i, n in enumerate(shape_of(atom))]
            for atom, row_dim in zip(eqn.invars, dims, strict=True)
        ]
        avals = [aval_of(v).update(shape=tuple(n)) for v, n in zip(eqn.invars, shapes, strict=True)]
        function = functools.partial(_bound, eqn)
        closed = jax.make_jaxpr(function)(*avals)
        if rewritten_for_cpus(closed) is closed:
            return None
        spec = P(*[None] * dim, REPLICA_AXIS)
        rewritten = with_cpu_rewrites(function, self._mesh)
        result = self._on_devices(rewritten, list(zip(operands, dims, strict=True)), spec)
        return [lax.slice_in_dim(result, 0, shape_of(eqn.outvars[0])[dim], axis=dim)]

    def _on_devices(
        self,
        function: Callable[..., Any],
        operands: Sequence[tuple[Array, Share]],
        out_specs: Any,
    ) -> Any:
        """Returns the results of a function of what each device has of the operands."""

        def of_first(x: Array) -> Array:
            return jnp.where(lax.axis_index(REPLICA_AXIS) == 0, x, jnp.zeros_like(x))

        def local(*arrays: Array) -> Any:
            shared = [
                of_first(x) if share == "first" else x
                for x, (_, share) in zip(arrays, operands, strict=True)
            ]
            return function(*shared)

        specs, padded = [], []
        for x, share in operands:
            specs.append(P(*[None] * share, REPLICA_AXIS) if isinstance(share, int) else P())
            if isinstance(share, int) and x.shape[share] % self._mesh.size:
                missing = -x.shape[share] % self._mesh.size
                config = [(0, missing if i == share else 0, 0) for i in range(x.ndim)]
                x = lax.pad(x, np.zeros((), x.dtype), config)
            padded.append(x)
        mapped = jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=tuple(specs),
            out_specs=out_specs,
            check_vma=False,
        )
        return mapped(*padded)

    def _controlled(
        self, eqn: Equation, operands: Sequence[Any], plan: Plan, env: dict[Atom, _Value]
    ) -> list[_Value]:
        """Returns the results of a loop or branch."""
        stacks = self._add_up([], eqn.invars, env)
        arrays = [
            x if not is_part(state) else stacks[v] if isinstance(x, _Part) else self._stack(x)
            for v, x, state in zip(eqn.invars, operands, plan.operands, strict=True)
        ]

        def evaluate(jaxprs: Sequence[AnyJaxpr], inputs: Any, further: None) -> Any:
            states, results = plan.bodies[id(jaxprs[0])]
            body = self._plans.body(jaxprs[0])
            return [self.outputs(body, inputs[0], states, results)], further

        (outputs,), _ = evaluate_control_flow([eqn], [arrays], None, evaluate)
        is_scan = eqn.primitive.name == "scan"
        num_carried = len(parts_of_scan(eqn, arrays)[1]) if is_scan else len(outputs)
        return [
            self._part(x, v, int(i >= num_carried)) if is_part(state) else x
            for i, (x, v, state) in enumerate(zip(outputs, eqn.outvars, plan.results, strict=True))
        ]


def _wanted(eqn: Equation, env: Mapping[Atom, _Value]) -> list[Var]:
    """Returns the parts among the operands of an equation that cannot be evaluated with them."""
    operands = variables_of(eqn.invars)
    if may_be_linear(eqn) and any(v not in env for v in operands):
        return []
    return [v for v in operands if isinstance(env.get(v), _Part)]


def _is_pending(atom: Atom, env: Mapping[Atom, _Value]) -> bool:
    """Returns whether an array is a part that is not computed yet."""
    value = None if isinstance(atom, Literal) else env.get(atom)
    return isinstance(value, _Part) and value.eqn is not None


def _needed(parts: Iterable[Any]) -> list[_Part]:
    """Returns parts and all that they are computed from, in order."""
    by_number: dict[int, _Part] = {}
    left = list(parts)
    while left:
        part = left.pop()
        if part.number not in by_number:
            by_number[part.number] = part
            left.extend([operand for operand in part.operands if isinstance(operand, _Part)])
    return [by_number[number] for number in sorted(by_number)]


def _part_of(part: _Part, operands: Sequence[Array]) -> Array:
    """Computes a part from what the device has of the operands."""
    if part.eqn is None:
        return operands[0].reshape(part.shape)
    params: dict[str, Any] = {}
    if "unique_indices" in part.eqn.params:  # rows of zeros that fill up the others have index 0
        params = {"unique_indices": False, "indices_are_sorted": False}
    if not is_wide(aval_of(part.eqn.outvars[0]).dtype):
        # The sum is rounded once.
        if "preferred_element_type" in part.eqn.params:
            params["preferred_element_type"] = np.dtype(np.float32)
        else:
            operands = list(map(_wide, operands))
        if part.eqn.primitive is lax.scatter_add_p:  # its parameters hold a sum of 16 bits
            array, indices, updates = operands
            kept: Any = {name: part.eqn.params[name] for name in ("dimension_numbers", "mode")}
            return lax.scatter_add(array, indices, updates, **kept, **params)
    return _bound(part.eqn, *operands, **params)


def _in_stack(x: Array) -> Array:
    return x if x.ndim else x[None]


def _wide(x: Array) -> Array:
    return x if is_wide(x.dtype) else x.astype(np.float32)


def _bound(eqn: Equation, *operands: Array, **changed: Any) -> Array:
    """Returns the result of an equation, with some parameters changed, on one device."""
    params = {name: None if "sharding" in name else x for name, x in eqn.params.items()}
    result: Array = eqn.primitive.bind(*operands, **{**params, **changed})
    return result


def _all_reduced(arrays: list[Array]) -> list[Array]:
    return list(lax.psum(arrays, REPLICA_AXIS))
