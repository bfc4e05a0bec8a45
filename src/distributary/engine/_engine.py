"""The engine of a strategy: traces a step once, and runs its program from then on."""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from distributary.devices import Nest, num_logical_devices, progress
from distributary.engine._cache import (
    ByIdentity,
    ProgramCache,
    argument_error,
    own_arrays,
    signature_of,
    split_result,
)
from distributary.engine._executable import Executable, VariableGoneError, garbage_kept
from distributary.engine._placement import Placement
from distributary.engine._step import (
    RUN,
    Arguments,
    Step,
    StepKind,
    call_on_replica,
    picked,
    several_steps,
)
from distributary.errors import InvalidTypeError, ReplicaMismatchError, shown
from distributary.jaxprs import walk
from distributary.programs import (
    GlobalProgram,
    ReplicaProgram,
    divisible,
    evaluate_jointly,
    gathers,
    with_gathers,
    with_sparse_gradients,
)
from distributary.tracing import Subject, TraceScope, current_scope, in_role
from distributary.variables import (
    Mirrored,
    PerReplica,
    component_arrays,
    component_of_traced,
    map_leaves,
    stack_components,
)
from distributary.xla_cpu import (
    is_for_cpus,
    rewritten_for_cpus,
    with_exchanged_sums,
    with_partial_sums,
)

# Several steps in one program; they get a list of elements.
_STEPS = StepKind()
_RUN_STEPS = repeat("extended.run_steps")  # for messages
Programs = dict[Any, Executable]
"""The programs of one function, by the key of their arguments."""


@final
class Engine:
    """The path of every step of a strategy: from a function over a program to an executable.

    `Strategy.run`, `fit` and its relatives, updates of variables and the steps that are traced for
    parameter servers all come here.

    Args:
        strategy: The strategy.
        placement: Its devices.
    """

    def __init__(self, strategy: Any, placement: Placement) -> None:
        self._strategy = strategy
        self._placement = placement
        self._num_replicas = placement.num_replicas
        self.cache = ProgramCache("Strategy.run")
        self._fusible: ByIdentity[list[bool]] = ByIdentity(list)

    def run(self, function: Callable[..., Any], arguments: Arguments, kind: StepKind) -> Any:
        """Runs `function` once per replica and merges the results.

        Source: `tf.distribute.Strategy.run`.
        """
        scope = current_scope()
        if scope is not None and scope.kind == "replica":
            return self._run_inside_replica(function, arguments, kind)
        if scope is not None:
            return self._run_inside_function(scope, function, arguments, kind)
        return self.execute(self.cache.programs_of(function), function, arguments, kind)

    def execute(
        self, programs: Programs, function: Callable[..., Any], arguments: Arguments, kind: StepKind
    ) -> Any:
        """Runs the program for these arguments; traces and compiles it if there is none yet.

        Args:
            programs: The programs of `function`, which get the new one.
            function: The step.
            arguments: Its arguments.
            kind: Describes the step.
        """
        # The function behind `jax.tree.flatten`; calling it directly saves two frames.
        leaves, tree = jax.tree_util.default_registry.flatten(arguments)
        try:
            key = (tree, tuple(map(signature_of, leaves, repeat(kind.caller))), kind)
        except InvalidTypeError as error:
            raise argument_error(error, leaves, Subject(function, tree, kind.name)) from None
        if kind.role != "global":  # batches of Keras are copies already
            leaves = own_arrays(leaves, kind.caller)
        executable = programs.get(key)
        if executable is not None:
            picks = executable.picks
            try:
                return executable(leaves if picks is None else picked(leaves, picks))
            except VariableGoneError:
                del programs[key]
        arguments = self._even_out(jax.tree.unflatten(tree, leaves), place=True)
        leaves, tree_after = jax.tree.flatten(arguments)
        if tree_after != tree:
            # Components of equal shape were stacked, so this is now an ordinary call.
            return self.execute(programs, function, arguments, kind)
        with progress.doing("compilation"):
            executable = self._build(function, arguments, kind)
            if kind.role != "update":  # each variable needs a trace of its own
                self._strategy.extended.step_counts.num_retraces += bool(programs)
                if kind.name is None:
                    self.cache.note_trace(function, programs, key)
            programs[key] = executable
            return executable(picked(leaves, executable.picks))

    def run_steps(self, function: Callable[[Nest], Nest], elements: Sequence[Nest]) -> Nest:
        """Runs `function` on each of several elements, in one program if this pays.

        Returns:
            The result of the last step.
        """
        flat = [jax.tree.flatten(element) for element in elements]
        shapes = {(tree, tuple(map(signature_of, leaves, _RUN_STEPS))) for leaves, tree in flat}
        is_alike = len(elements) > 1 and len(shapes) == 1
        fusible = self._fusible[function]
        if is_alike and not fusible:
            fusible.append(self.fuses(function, elements[0]))
        if is_alike and fusible[0]:
            programs = self.cache.programs_of(function)
            steps = several_steps(function)
            stacked = lambda nests: steps(jax.tree.map(lambda *leaves: jnp.stack(leaves), *nests))
            return self.execute(programs, stacked, ((list(elements),), {}), _STEPS)
        result = None
        for element in elements:
            result = self.run(function, ((element,), {}), RUN)
        return result

    def fuses(self, function: Callable[[Nest], Nest], element: Nest, kind: StepKind = RUN) -> bool:
        """Returns whether several steps run faster as one program; may trace the step.

        XLA:CPU runs convolutions many times slower inside a loop than outside, and takes minutes to
        compile an unrolled loop. A program in two stages fetches its variables for every step.
        """
        if self._placement.home is not None:
            return False
        if self._placement.mesh is None or not is_for_cpus(self._placement.mesh):
            return True
        arguments = self._even_out(((element,), {}), place=True)
        step = Step(self._strategy, self._num_replicas, function, arguments, kind)
        eqns = walk(self._program(step, False).jaxpr.eqns)
        return not any(eqn.primitive is lax.conv_general_dilated_p for eqn in eqns)

    def lower(self, function: Callable[..., Any], arguments: Arguments, kind: StepKind) -> Any:
        """Returns the program of a step, lowered but not run."""
        arguments = self._even_out(arguments, place=True)
        executable = self._build(function, arguments, kind)
        return executable.lowered(picked(jax.tree.leaves(arguments), executable.picks))

    def _even_out(self, tree: Nest, place: bool) -> Nest:
        """Replaces `PerReplica` components of equal shape by one stacked array."""

        def even_out(leaf: Any) -> Any:
            if not isinstance(leaf, PerReplica):
                return leaf
            if leaf.num_replicas != self._num_replicas:
                raise ReplicaMismatchError(
                    f"Strategy.run: a PerReplica has {leaf.num_replicas} components, but"
                    f" {shown(self._strategy)} has {self._num_replicas} replicas. Build it with"
                    " strategy.experimental_distribute_values_from_function or take it from this"
                    " strategy's dataset."
                )
            if leaf.form != "components":
                return leaf
            stacked = stack_components(leaf)
            if stacked is not None:
                return self._placement.place_rows(stacked) if place else stacked
            arrays = component_arrays(leaf)
            return PerReplica(list(map(self._placement.place_alone, arrays)) if place else arrays)

        return map_leaves(even_out, tree)

    def _build(
        self, function: Callable[..., Any], arguments: Arguments, kind: StepKind
    ) -> Executable:
        step = Step(self._strategy, self._num_replicas, function, arguments, kind)
        with garbage_kept():
            program = self._program(step, False)
        placement = self._placement
        name = str(getattr(function, "__name__", repr(function)))
        executable = Executable(
            program,
            placement,
            step.merger(program),
            kind.name or name,
            f"the program of {name}" if kind.name is None else f"a step of {kind.name}",
            self._strategy.extended.step_counts,
            step.shardings(placement),
        )
        executable.picks = step.picks
        step.release()
        return executable

    def _program(self, step: Step, is_for_workers: bool) -> ReplicaProgram | GlobalProgram:
        placement, kind = self._placement, step.kind
        workers_mesh = placement.workers_mesh
        mesh = workers_mesh if is_for_workers else placement.mesh
        if kind.role == "global":
            return GlobalProgram(
                step.flat,
                step.avals[0],
                step.dims,
                mesh,
                keeps_rows=kind.results != "shared",
                data=None if placement.home is None else step.data,
                rewrite=self._rewritten_whole,
                subject=step.subject,
            )
        avals = step.avals
        if workers_mesh is not None and not is_for_workers and len(avals) == 1:
            avals = avals * self._num_replicas
        return ReplicaProgram(
            step.flat,
            avals,
            step.varying,
            self._num_replicas,
            mesh,
            results=kind.results,
            data=None if placement.home is None else step.data,
            rewrite=self._rewritten,
            subject=step.subject,
        )

    def _rewritten_whole(
        self, closed: ClosedJaxpr, dims: Sequence[int | None]
    ) -> Callable[..., Any]:
        """Returns a function that evaluates a step of the global view; see `GlobalProgram`."""
        placement, mesh = self._placement, self._placement.mesh
        divided = None if mesh is None or mesh.size == 1 else mesh
        if divided is not None:
            closed = divisible(closed, divided)
        if is_for_cpus(mesh):
            closed = rewritten_for_cpus(closed, is_divided=divided is not None)

        def step(*args: Array) -> list[Array]:
            return evaluate_jointly([closed], [args])[0]

        body = step
        if mesh is None or num_logical_devices(mesh) == 1:  # these are left to XLA
            body = with_sparse_gradients(step, [closed.jaxpr], 1, placement.adds_in_any_order, mesh)
            if divided is not None and is_for_cpus(mesh):
                body = with_partial_sums(body, dims, divided)  # rewrites what each device computes
        return with_gathers(body) if gathers(closed.jaxpr) else body

    def _rewritten(
        self, replica: Callable[..., Any], jaxprs: Sequence[Jaxpr], mesh: Any
    ) -> Callable[..., Any]:
        """Returns the code of a replica in a form that runs faster; see `ReplicaProgram`."""
        # Programs for servers are analyzed later, and logical devices are left to XLA.
        keeps_on_servers = self._strategy.extended.variable_layout().kind is not None
        if not keeps_on_servers and (mesh is None or num_logical_devices(mesh) == 1):
            num_meeting = 1 if mesh is None else self._num_replicas
            in_any_order = self._placement.adds_in_any_order
            replica = with_sparse_gradients(replica, jaxprs, num_meeting, in_any_order)
        if mesh is None:
            return replica
        return with_exchanged_sums(replica, mesh)

    def _run_inside_function(
        self, scope: TraceScope, function: Callable[..., Any], arguments: Arguments, kind: StepKind
    ) -> Any:
        """Inlines the program into the `distributary.function` that is being traced."""
        arguments = self._even_out(arguments, place=False)
        step = Step(self._strategy, self._num_replicas, function, arguments, kind)
        program = self._program(step, scope.is_for_workers)
        scope.strategies.append(self._strategy)
        new, outs = program(
            program.captures,
            [scope.read(handle) for handle in program.written],
            [scope.read(handle) for handle in program.read_only],
            picked(jax.tree.leaves(arguments), step.picks),
        )
        for handle, value in zip(program.written, new, strict=True):
            scope.write(handle, value)
        return step.merger(program)(outs)

    def _run_inside_replica(
        self, function: Callable[..., Any], arguments: Arguments, kind: StepKind
    ) -> Any:
        """Runs the function in place: the trace in progress is already that of one replica."""
        arguments = map_leaves(component_of_traced, arguments)
        with in_role(kind.role):
            result = call_on_replica(self._strategy, function, arguments, kind)
        arrays, rebuild = split_result(result, kind.caller)
        num_replicas = self._strategy.extended.num_replicas
        if num_replicas == 1:
            return result

        def wrap(value: Any) -> Any:
            wrapper = PerReplica.from_local if kind.role == "replica" else Mirrored
            return wrapper(value, num_replicas)

        return rebuild(arrays, wrap)
