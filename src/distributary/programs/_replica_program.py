"""Turns the pure jaxpr of a Python function into a program over global arrays.

`ReplicaProgram` puts the jaxpr of one replica on a mesh. For a step
`w.assign_add(all_reduce("SUM", x))` on two replicas, from `trace` and as a function of global
arrays:

    { lambda ; w:f32[2] x:f32[2]. let       { lambda ; w:f32[2] x:f32[2,2]. let
        a:f32[2] = psum[replica] x              c:f32[2] = shard_map[in_specs=(P(), P("replica"))
        b:f32[2] = add w a             ->         jaxpr={ ... } out_specs=(P(),)] w x
      in (b,) }                               in (c,) }

`FunctionProgram` does the same for the body of `distributary.function`, which needs no mesh.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, num_logical_devices, shard_dim, stored_shards
from distributary.errors import (
    ContextError,
    ReplicaDivergenceError,
    ReplicaMismatchError,
    TracedValueError,
)
from distributary.jaxprs import Array, Equation, opened
from distributary.programs._gathers import with_gathers
from distributary.programs._program import (
    TracedProgram,
    check_on_cores,
    eval_on_replica,
    laid_out,
    whole_on_cores,
)
from distributary.programs._sharded import Taken, complete_in_parts, without_scattered_sums
from distributary.programs._stages import Stages, cut, evaluate_jointly, uncut
from distributary.tracing import (
    Feeds,
    Handle,
    Numbering,
    Pure,
    SizesMissing,
    Subject,
    TraceScope,
    UnevenSizes,
    current_feeding,
    fed_by,
    refuse_collectives,
    start_of_sum,
    trace,
    varying_outputs,
)

# The form of a program's outputs, see `ReplicaProgram`.
Results = Literal["per replica", "shared"]
# See `ReplicaProgram`.
Rewrite: TypeAlias = Callable[[Callable[..., Any], Sequence[Jaxpr], Any], Callable[..., Any]]


def _check_calls(scopes: Sequence[TraceScope]) -> None:
    """Checks what joining the programs of replicas does not show."""
    first = scopes[0]
    for replica, scope in enumerate(scopes):
        if scope.merge_calls != first.merge_calls:
            raise ReplicaMismatchError(
                f"merge_call: replica 0 calls it {first.merge_calls} times in a step, but replica"
                f" {replica} {scope.merge_calls} times; all replicas must call it together. Do not"
                " let Python branches on the replica id or on the size of an uneven batch decide"
                " whether it runs."
            )
        # Their numbers are compared where they are joined.
        for op, other in zip(first.reduced_by, scope.reduced_by, strict=False):
            if op != other:
                raise ReplicaMismatchError(
                    f"all_reduce: replica 0 asks for {op}, but replica {replica} for {other}. All"
                    " replicas must ask for the same."
                )


def _check_divergence(pures: list[Pure], varying_args: Sequence[bool], num_replicas: int) -> None:
    for pure in pures:
        varying_inputs = [
            *[False] * len(pure.captures),
            *[handle.may_vary for handle in pure.handles],
            *varying_args,
        ]
        pure.varying = varying_outputs(pure.jaxpr, varying_inputs, num_replicas)
    if len(pures) > 1:
        _note_different_programs(pures, varying_args)
    for pure in pures:
        for handle, varying in zip(pure.written, pure.varying[pure.num_outs :], strict=True):
            if varying and not handle.may_vary:
                raise ReplicaDivergenceError(
                    f"Variable {handle.name!r} is mirrored, but the value assigned to it at"
                    f" {pure.where[handle]} can differ between replicas: its copies would drift"
                    " apart. Combine the replicas first, value ="
                    ' dist.get_replica_context().all_reduce("SUM" or "MEAN", value), or create the'
                    " variable with an aggregation=dist.VariableAggregation.MEAN, or with"
                    " synchronization=dist.VariableSynchronization.ON_READ for a value per replica."
                )


def _note_different_programs(pures: list[Pure], varying_args: Sequence[bool]) -> None:
    """Marks outputs as varying that the replicas of an uneven batch compute differently."""
    numbering = Numbering()
    seen: dict[Any, set[int]] = {}
    decisions: list[tuple[Equation, int]] = []
    for i, pure in enumerate(pures):
        inputs = [
            *[numbering.constant(capture) for capture in pure.captures],
            *[(handle, i if handle.may_vary else None) for handle in pure.handles],
            *[(k, i if varies else None) for k, varies in enumerate(varying_args)],
        ]
        numbers = numbering.outputs(pure.jaxpr, inputs)
        for output, number in zip(_outputs(pure), numbers, strict=True):
            seen.setdefault(output, set()).add(number)
        for (eqn, number), (_, first) in zip(numbering.decisions, decisions, strict=False):
            if number != first:
                refuse_collectives(eqn)
        decisions = decisions or numbering.decisions
    for pure in pures:
        for k, output in enumerate(_outputs(pure)):
            pure.varying[k] = pure.varying[k] or len(seen[output]) > 1


def _outputs(pure: Pure) -> list[Any]:
    return [*range(pure.num_outs), *pure.written]


@final
@dataclass(frozen=True, slots=True)
class _Form:
    """The form of an input or output of the program of all replicas.

    Attributes:
        is_split: Whether it has a part for every replica, `[replica, *shape]`.
        parts: Its sharding; `P()` if it is whole.
        is_summed: Whether it is the sum of what the replicas have.
    """

    is_split: bool = False
    parts: P = P()
    is_summed: bool = False


def _form_of(handle: Handle) -> _Form:
    return _Form(handle.per_replica, handle.parts, handle.summed)


@final
class ReplicaProgram(TracedProgram):
    """The program of all replicas, as a function of global arrays.

    Args:
        function: From the arguments of one replica to a flat list of arrays.
        avals: One list per replica of the shapes and dtypes of its arguments; a single list if
            all replicas have the same.
        varying: For every argument, whether replicas may receive different values.
        num_replicas: Number of replicas.
        mesh: Mesh with the axis `"replica"`; one replica on one device needs it only with
            `data`.
        results: The form of the outputs. "per replica" stacks the values of the replicas, and
            "shared" is "per replica" only for outputs that can differ.
        data: For every argument, whether the replicas compute everything that depends on it. What
            depends only on other arguments, on variables and on collectives then comes after the
            replicas, once; see `cut_around_mesh`. None leaves everything to the replicas.
        subject: What its user knows the function as; None for the function itself.
        rewrite: Called with the code of one replica, a function of arrays, the jaxprs that it
            evaluates, and the mesh; returns what to run in its place. Without a mesh, no replicas
            meet: there is one, or all of them run side by side.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Array]],
        avals: Sequence[Sequence[Any]],
        varying: Sequence[bool],
        num_replicas: int,
        mesh: Mesh | jax.sharding.AbstractMesh | None,
        results: Results = "per replica",
        data: Sequence[bool] | None = None,
        rewrite: Rewrite = lambda body, jaxprs, mesh: body,
        subject: Subject | None = None,
    ) -> None:
        self._subject = subject or Subject(function)
        self._varying_args = list(varying)
        self._rewrite = rewrite
        self._num_replicas = num_replicas
        self._mesh: Any = mesh
        self.uneven = len(avals) > 1
        super().__init__(self._trace(function, avals))
        del self._subject  # a program does not keep its function alive
        # For every output, whether it has a part for every replica.
        self.split_outs = [
            results != "shared" or any(pure.varying[k] for pure in self.pures if pure.varying)
            for k in range(self.num_outs)
        ]
        first = self.pures[0]
        self._in_forms = self._forms_of_inputs(first)
        # A result of the only replica is the array itself.
        of_results = [_Form(is_split and num_replicas > 1) for is_split in self.split_outs]
        self._out_forms = [*of_results, *map(_form_of, first.written)]
        self._out_parts = [form.parts for form in self._out_forms]
        self._staged = data is not None
        self._on_mesh = num_replicas > 1 and not self.uneven
        # Whether every device updates a part of the state, as `_sharded` describes.
        self._divides = self._on_mesh and any(
            shard_dim(handle.parts) is not None for handle in self.written
        )
        if self._divides and data is None:
            data = [False] * len(self._varying_args)
        self._stages = [
            uncut(pure.jaxpr) if data is None else self._cut(pure, data) for pure in self.pures
        ]
        self._taken = [Taken(P())] * self._stages[0].num_cut
        if self._divides:
            self._stages[0], self._taken = without_scattered_sums(
                self._stages[0], self._out_parts, num_replicas
            )

    @property
    def has_first_output_everywhere(self) -> bool:
        """True if every device computes its own first result."""
        return not self.uneven and (self.split_outs[0] or self.makes_first_output)

    def _forms_of_inputs(self, pure: Pure) -> list[_Form]:
        captures = [_Form()] * len(pure.captures)
        return [*captures, *map(_form_of, pure.handles), *map(_Form, self._varying_args)]

    def _cut(self, pure: Pure, data: Sequence[bool]) -> Stages:
        varying = [
            *[False] * len(pure.captures),
            *[handle.may_vary or handle.cell is None for handle in pure.handles],
            *[a or b for a, b in zip(data, self._varying_args, strict=True)],
        ]
        of_replicas = [
            *[self.uneven and pure.varying[k] for k in range(self.num_outs)],
            *[handle.may_vary for handle in pure.written],
        ]
        required = [i for i, is_required in enumerate(of_replicas) if is_required]
        # With one replica, too, its own values must count as different from shared ones.
        return cut(pure.jaxpr, varying, max(2, self._num_replicas), required)

    def _trace(
        self, function: Callable[..., Sequence[Array]], avals: Sequence[Sequence[Any]]
    ) -> list[Pure]:
        num_replicas = self._num_replicas
        try:
            pures = self._trace_any(function, avals)
        except Exception as error:
            is_known = isinstance(error, (ReplicaDivergenceError, ReplicaMismatchError))
            if num_replicas == 1 or is_known or not getattr(error, "reads_replica_id", False):
                raise
            try:
                pures = self._trace_each(function, [*avals] * (num_replicas // len(avals)), True)
            except (ContextError, ReplicaMismatchError, TracedValueError):
                raise  # the numbers do not help, or are why the replicas do not fit together
            except Exception:
                raise error from None
            self.uneven = True
        self._check_fit(pures)
        return pures

    def _check_fit(self, pures: list[Pure]) -> None:
        """Checks that the replicas do the same, where they must."""
        for i, pure in enumerate(pures):
            if pure.num_outs != pures[0].num_outs:
                raise ReplicaMismatchError(
                    f"The function returns {pure.num_outs} arrays on replica {i} and"
                    f" {pures[0].num_outs} on replica 0. Do not let Python branches on the replica"
                    " id or on the size of an uneven batch decide what it returns."
                )
            for handle in set(pure.written) ^ set(pures[0].written):
                raise ReplicaMismatchError(
                    f"Variable {handle.name!r} is assigned on some replicas and not on others. Do"
                    " not let Python branches on the replica id or on the size of an uneven batch"
                    " decide whether it is assigned; assign it on every replica."
                )
        if self._num_replicas > 1:
            _check_divergence(pures, self._varying_args, self._num_replicas)

    def _trace_any(
        self, function: Callable[..., Sequence[Array]], avals: Sequence[Sequence[Any]]
    ) -> list[Pure]:
        """Traces one replica for all, if that is enough."""
        if self._num_replicas == 1 or self.uneven:
            return self._trace_each(function, avals, self._num_replicas == 1)
        pure, _ = trace(function, avals[0], "replica", self._subject, self._num_replicas)
        check_on_cores(pure.jaxpr, self._mesh)
        return [pure]

    def _trace_each(
        self,
        function: Callable[..., Sequence[Array]],
        avals: Sequence[Sequence[Any]],
        shows_number: bool,
    ) -> list[Pure]:
        """Traces every replica: of an uneven batch, or whose Python looks at its number."""
        uneven = UnevenSizes(len(avals))
        feeding = current_feeding()
        position = 0 if feeding is None else feeding.position
        while True:
            pures = []
            scopes = []
            stopped = False
            for replica, replica_avals in enumerate(avals):
                if feeding is not None:
                    feeding.position = position
                try:
                    pure, scope = trace(
                        function,
                        replica_avals,
                        "replica",
                        self._subject,
                        self._num_replicas,
                        uneven,
                        replica=replica,
                        shows_replica=shows_number,
                    )
                except SizesMissing:
                    stopped = True
                    continue
                scopes.append(scope)
                pures.append(pure)
            if not stopped:
                _check_calls(scopes)
                return pures
            if not uneven.settle():
                raise ReplicaMismatchError(
                    "The replicas do not call all_gather equally often. Do not let Python branches"
                    " on the replica id or on the size of an uneven batch decide whether it runs,"
                    " and do not call one jax.jit function with all_gather in it on several arrays."
                )

    def _run(
        self, captures: Sequence[Sequence[Array]], state: dict[Handle, Array], args: Sequence[Any]
    ) -> tuple[list[Array], list[Any]]:
        """Runs all replicas.

        An argument that varies is `[replica, *shape]`, or on an uneven batch a list with one array
        per replica. The results have the form that `results` names. On an uneven batch one is a
        list of arrays if their shapes differ; with one replica it is the array itself.
        """
        stages, handles = self._stages[0], self.pures[0].handles
        values = [*captures[0], *(state[h] for h in handles), *args]
        on_mesh = self._on_mesh
        outputs = self._run_on_mesh(values) if on_mesh else self._run_jointly(captures, state, args)
        if self._divides:
            results = complete_in_parts(
                stages,
                values,
                outputs,
                self._taken,
                [form.parts for form in self._in_forms],
                self._out_parts,
                self._mesh,
                lambda run, jaxprs: self._rewrite(run, jaxprs, None),
            )
        else:
            results = stages.complete(values, outputs)
        if self._num_replicas > 1:
            for k in stages.update_outputs:
                if k < self.num_outs and self.split_outs[k]:
                    results[k] = _parts_joined([results[k]] * self._num_replicas)
                    if self._divides:
                        results[k] = laid_out(results[k], self._mesh, P(REPLICA_AXIS))
        new = [results[self.num_outs + i] for i in range(len(self.written))]
        return new, [results[k] for k in range(self.num_outs)]

    def _run_on_mesh(self, values: Sequence[Array]) -> list[Array]:
        """Returns the outputs of the first stage, with the replicas in a `shard_map`."""
        stages, split, whole = self._stages[0], P(REPLICA_AXIS), P()
        inputs, in_specs = [], []
        parts: dict[int, tuple[int, int]] = {}
        for k, i in enumerate(stages.replica_inputs):
            value, spec = values[i], split if self._in_forms[i].is_split else whole
            sharding = self._in_forms[i].parts
            dim = shard_dim(sharding)
            if dim is not None and num_logical_devices(self._mesh) == 1:
                parts[k], spec = (dim, value.shape[dim]), sharding
                value = stored_shards(value, NamedSharding(self._mesh, sharding))
            inputs.append(value)
            in_specs.append(spec)
        out_specs = [
            *(split if self._out_forms[i].is_split else whole for i in stages.replica_outputs),
            *(taken.spec for taken in self._taken),
        ]
        body: Callable[..., list[Array]] = self._run_replica
        if not self._divides:
            body = self._rewrite(body, [stages.replica.jaxpr], self._mesh)
        if parts:
            body = with_gathers(body, parts)
        return jax.shard_map(
            body,
            mesh=self._mesh,
            in_specs=tuple(in_specs),
            out_specs=out_specs,
            check_vma=False,
            # Logical devices are left to XLA.
            axis_names={REPLICA_AXIS},
        )(*inputs)

    def _run_replica(self, *inputs: Array) -> list[Array]:
        """Runs the first stage of one replica, inside `shard_map`, on its parts of the inputs."""
        stages = self._stages[0]
        replica_id = lax.axis_index(REPLICA_AXIS)
        values = [*stages.replica.consts]
        for i, value in zip(stages.replica_inputs, inputs, strict=True):
            if self._in_forms[i].is_split:
                values.append(value[0])
            elif self._in_forms[i].is_summed:
                values.append(self._start_of_sum(value, replica_id))
            else:
                values.append(value)
        outs = eval_on_replica(opened(stages.replica), replica_id, values)
        outputs = stages.replica_outputs
        num_results = sum(i < self.num_outs for i in outputs)
        outs[:num_results] = whole_on_cores(outs[:num_results], self._mesh)
        self._sum_states(outs)
        for k, i in enumerate(outputs):
            if self._out_forms[i].is_split:
                # `asarray`, because some constants of JAX are no arrays.
                outs[k] = jnp.asarray(outs[k])[None]
        pairs = zip(outs[len(outputs) :], self._taken, strict=True)
        outs[len(outputs) :] = [taken.of_replica(x, self._num_replicas) for x, taken in pairs]
        return outs

    def _start_of_sum(self, value: Array, replica_id: Array) -> Array:
        """Returns what a replica adds to: the state on replica 0, zeros on the others."""
        if isinstance(self._mesh, jax.sharding.AbstractMesh):  # split over servers
            return start_of_sum(value)
        return jnp.where(replica_id == 0, value, jnp.zeros_like(value))

    def _sum_states(self, outs: list[Array]) -> None:
        """Sums the new states of which every replica has a part, in place."""
        outputs = self._stages[0].replica_outputs
        summed = [k for k, i in enumerate(outputs) if self._out_forms[i].is_summed]
        totals = lax.psum([outs[k] for k in summed], REPLICA_AXIS) if summed else []
        for k, total in zip(summed, totals, strict=True):
            outs[k] = total

    def _run_jointly(
        self,
        captures: Sequence[Sequence[Array]],
        state: dict[Handle, Array],
        args: Sequence[Any],
    ) -> list[Any]:
        """Returns the outputs of the first stage, with all replicas side by side."""
        inputs = []
        for replica, (pure, stages) in enumerate(zip(self.pures, self._stages, strict=True)):
            # Every replica has captures of its own, in the order of its own trace.
            values = [*captures[replica], *(state[h] for h in pure.handles), *args]
            forms = self._forms_of_inputs(pure)
            inputs.append([_own(replica, values[k], forms[k]) for k in stages.replica_inputs])

        def body(inputs: list[list[Array]]) -> list[Any]:
            outs = evaluate_jointly([stages.replica for stages in self._stages], inputs)
            outputs: list[dict[Any, Array]] = []
            for pure, stages, out in zip(self.pures, self._stages, outs, strict=True):
                keys = _outputs(pure)
                # After them come the values of the cut.
                outputs.append(
                    {keys[k]: x for k, x in zip(stages.replica_outputs, out, strict=False)}
                )
            numbers = self._stages[0].replica_outputs
            # An output that only replica 0 has is the same on all of them.
            joined = [
                _joined([one.get(key, first) for one in outputs], self._out_forms[k])
                for k, (key, first) in zip(numbers, outputs[0].items(), strict=True)
            ]
            if self._mesh is not None and self._mesh.size > 1 and not self._staged:
                # XLA would divide what is computed from parts of a variable. This also tells JAX on
                # which devices the program runs.
                whole = lambda value: laid_out(value, self._mesh, P())
                joined = [
                    jax.tree.map(whole, value) if k < self.num_outs else value
                    for k, value in zip(numbers, joined, strict=True)
                ]
            return [*joined, *outs[0][len(joined) :]]

        if not self._staged:
            jaxprs = [stages.replica.jaxpr for stages in self._stages]
            results: list[Any] = self._rewrite(body, jaxprs, None)(inputs)
            return results
        # A `shard_map`, because `cut_around_mesh` looks for one; all devices compute the same.
        run_on_all = jax.shard_map(
            body, mesh=self._mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        return run_on_all(inputs)


def _own(replica: int, value: Any, form: _Form) -> Array:
    """Returns the part of an input for one replica."""
    if form.is_split:
        return value[replica]
    return jnp.zeros_like(value) if form.is_summed and replica > 0 else value


def _joined(values: Sequence[Array], form: _Form) -> Any:
    """Joins an output of all replicas; a list if their parts cannot be one array."""
    if form.is_summed:
        return sum(values[1:], values[0])
    return _parts_joined(values) if form.is_split else values[0]


def _parts_joined(values: Sequence[Array]) -> Any:
    """Joins the parts of replicas; a list if they cannot be one array."""
    equal = len({(value.shape, value.dtype) for value in values}) == 1
    return jnp.stack(values) if equal else list(values)


@final
class FunctionProgram(TracedProgram):
    """The body of a `distributary.function`, as a function of global arrays.

    Args:
        function: From the arguments to a flat list of arrays.
        avals: Shapes and dtypes of the arguments.
        feeds: The data it takes from iterators; pass their values after the arguments.
        subject: What its user knows the function as.

    Attributes:
        strategies: The strategies whose replicas run in the function.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Array]],
        avals: Sequence[Any],
        feeds: Feeds,
        subject: Subject,
    ) -> None:
        with fed_by(feeds):
            pure, scope = trace(function, avals, "function", subject)
        feeds.put_back(feeds.position)
        super().__init__([pure])
        self.strategies = scope.strategies
        self._fed = feeds.handles
        fed = set(self._fed)
        self.handles = [handle for handle in self.handles if handle not in fed]
        self.read_only = [handle for handle in self.read_only if handle not in fed]

    def _run(
        self, captures: Sequence[Sequence[Array]], state: dict[Handle, Array], args: Sequence[Any]
    ) -> tuple[list[Array], list[Any]]:
        """Runs the body."""
        (pure,), num_args = self.pures, len(args) - len(self._fed)
        state.update(zip(self._fed, args[num_args:], strict=True))
        args = args[:num_args]
        outs = jax.core.eval_jaxpr(
            pure.jaxpr, (), *captures[0], *(state[h] for h in pure.handles), *args
        )
        return outs[pure.num_outs :], outs[: pure.num_outs]
