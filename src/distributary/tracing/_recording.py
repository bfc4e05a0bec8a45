"""Runs a Python function once and records a jaxpr with markers; removes the markers."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax

from distributary._late import libraries
from distributary.devices import REPLICA_AXIS, job_programs, without_high_primitives
from distributary.errors import ContextError, TracedValueError, UnsupportedError
from distributary.jaxprs import Array, Equation, opened, walk, without_meshes
from distributary.tracing._description import Line, describe_jaxpr
from distributary.tracing._divergence import check_collectives
from distributary.tracing._feeds import current_feeding
from distributary.tracing._interpreter import gradient_kinds, interpret, reads_of_tapes
from distributary.tracing._markers import (
    REPLICA_ID,
    Handle,
    grad_p,
    handles_read,
    handles_written,
    write_p,
)
from distributary.tracing._mistakes import OuterNames, Subject, explained
from distributary.tracing._scope import (
    Known,
    ScopeKind,
    TraceScope,
    UnevenSizes,
    activate,
    current_scope,
    location_of,
)

_MAX_TRACES = 10
_traces = itertools.count(1)


@final
@dataclass(slots=True)
class Pure:
    """A traced function without markers.

    Inputs of `jaxpr`: the captured arrays, the state of `handles`, the arguments. Outputs: the
    results, then the new state of `written`.
    """

    jaxpr: Any
    captures: list[Array]
    handles: list[Handle]
    written: list[Handle]
    num_outs: int
    where: dict[Handle, str]  # the last assignment to each of `written`
    varying: list[bool]  # for every output; empty if nothing can vary
    checks: list[list[Exception]]  # see `TraceScope`
    describe: Callable[[], Iterable[Line]]  # no lines if no other process compares them

    @property
    def has_effects(self) -> bool:
        """True if it does more than computing its outputs, such as calling the host."""
        # A named axis counts as an effect, too.
        return any(type(effect).__name__ != "NamedAxisEffect" for effect in self.jaxpr.effects)


def trace(
    function: Callable[..., Sequence[Array]],
    avals: Sequence[Any],
    kind: ScopeKind,
    subject: Subject,
    num_replicas: int = 1,
    uneven: UnevenSizes | None = None,
    is_for_workers: bool = False,
    replica: int | None = None,
    shows_replica: bool = False,
) -> tuple[Pure, TraceScope]:
    """Runs `function` on tracers; returns it without markers, and the scope of the trace.

    The function runs once. It runs again if it created variables, if a guess about the result of a
    tape turned out wrong, or if its Python control flow needs the value of an array: then with this
    control flow converted.

    Args:
        function: From arrays to a flat list of arrays.
        avals: Shape and dtype of the arguments.
        kind: Kind of the scope.
        subject: What its user knows the function as.
        num_replicas: Number of replicas whose program is traced.
        uneven: Sizes that the replicas of an uneven batch agreed on, else None.
        is_for_workers: Whether the program runs on devices of other processes.
        replica: Number of the replica the program is for; None if it is for all of them.
        shows_replica: Whether Python code of the function may look at that number.

    Raises:
        TracedValueError: if Python code of the function needs the value of an array.
        UnsupportedError: for collectives whose results are not known to agree or to differ.
    """
    args, kwargs = subject.nested(avals)
    known = Known()
    feeding = current_feeding()
    position = 0 if feeding is None else feeding.position
    axis_env = [(REPLICA_AXIS, num_replicas)] if kind == "replica" else []
    outer = current_scope()
    converts = bool(subject.autograph or (outer is not None and outer.converts))
    names_outside = OuterNames(subject.function)

    for _ in range(_MAX_TRACES):
        # A cached jaxpr of a nested jit must not be used in another trace: it would hide its
        # assignments and tapes from this record, and the strategy it depends on. JAX keeps these
        # jaxprs apart by the names of the axes.
        names = [*axis_env, (f"trace {next(_traces)}", 1)]
        number = replica if shows_replica else None
        scope = TraceScope(kind, known, uneven, is_for_workers, num_replicas, number, converts)
        if feeding is not None:
            feeding.position = position
        if uneven is not None and replica is not None:
            uneven.start(replica)

        try:
            closed = _traced_once(function, subject, scope, names, args, kwargs)
        except TracedValueError as failure:
            if converts or subject.autograph is False or subject.name is not None:
                for name, reason in scope.unconverted.items():
                    failure.add_note(f"AutoGraph has not converted {name}: {reason}")
                raise
            converts = True
            continue
        _check_no_write_lost(closed.jaxpr.eqns, scope)
        learned = _learned(closed.jaxpr.eqns, scope)
        names_outside.check(str(subject), scope.numbers)
        if learned is None:
            if outer is not None:
                outer.checks += scope.checks
            closed = without_meshes(closed)
            if kind == "replica":
                check_collectives(closed.jaxpr)
            return _pure(closed, scope, avals, axis_env, replica), scope
        known = learned
    raise ContextError(
        f"The function was traced {_MAX_TRACES} times and its gradients came out of another form"
        " each time. Its Python control flow must not depend on earlier traces."
    )


def _traced_once(
    function: Callable[..., Sequence[Array]],
    subject: Subject,
    scope: TraceScope,
    axis_env: Sequence[tuple[str, int]],
    args: Any,
    kwargs: Any,
) -> Any:
    """Returns the jaxpr of one trace; errors speak of the user's function.

    JAX caches traces by the identity of the function, so it gets a fresh one. That has the name and
    the arguments of the user's function, because JAX names them in messages of its own.
    """
    failures: list[Exception] = []
    subjects = [subject]

    @functools.wraps(subject.function, updated=())
    def begun(*args: Any, **kwargs: Any) -> Sequence[Array]:
        scope.begin()
        leaves = jax.tree.leaves((args, kwargs))
        try:
            return functions[0](*leaves)
        except Exception as error:
            # Here, because JAX drops the frames that show what the error is about.
            failures.append(explained(error, subjects[0], scope.kind, leaves))
            raise

    functions = [function]
    with ExitStack() as stack:
        for library in libraries():
            stack.enter_context(library.around_trace())
        stack.enter_context(activate(scope))
        try:
            return jax.make_jaxpr(begun, axis_env=axis_env)(*args, **kwargs)
        except Exception as error:
            failure = (failures or [error])[0]
            failure.__dict__["reads_replica_id"] = scope.reads_replica_id
            raise failure from None
        finally:  # JAX keeps `begun`, but a program must not keep its function
            begun.__dict__.clear()
            subjects.clear()
            functions.clear()


def _learned(eqns: Sequence[Equation], scope: TraceScope) -> Known | None:
    """Returns what another trace has to know; None if this one knew all of it."""
    used = {
        (eqn.params["tape"], eqn.params["call"]): eqn.params["kinds"]
        for eqn in walk(eqns)
        if eqn.primitive is grad_p
    }
    decisions = gradient_kinds(eqns)
    order = scope.tapes
    if scope.uneven is not None:
        decisions = scope.uneven.with_gradients(decisions, order)
    reads = reads_of_tapes(eqns) if scope.asked else {}
    # A tape that was asked what it watches knew it, unless JAX had kept the code that reads it.
    knew_reads = all(
        handle in watched for number, watched in scope.asked for handle in reads.get(number, ())
    )
    if decisions == used and knew_reads and not (scope.created and scope.may_create):
        return None
    all_known = all(tape in order for tape, _ in decisions)
    return Known(
        {(order[t], c): kinds for (t, c), kinds in decisions.items()} if all_known else {},
        {order[t]: handles for t, handles in reads.items() if t in order},
        scope.may_create and not scope.created,
    )


def _check_no_write_lost(eqns: Sequence[Equation], scope: TraceScope) -> None:
    present = {eqn.params["serial"] for eqn in walk(eqns) if eqn.primitive is write_p}
    # JAX may trace the body of a loop twice and keep one of the traces.
    kept = {scope.writes[serial] for serial in present if serial in scope.writes}
    for serial, write in scope.writes.items():
        if serial not in present and write not in kept:
            handle, calls = write
            raise UnsupportedError(
                f"The assignment to variable {handle.name!r} at {location_of(calls)} is inside a"
                " function that JAX transformed (jax.grad of a scan, jax.custom_vjp, ...) and would"
                " be lost. Return the value from that function and assign it afterwards."
            )


def _pure(
    closed: Any,
    scope: TraceScope,
    avals: Sequence[Any],
    axis_env: Sequence[tuple[str, int]],
    replica: int | None,
) -> Pure:
    """Removes the markers of a traced function; see `trace`."""
    handles = [h for h in handles_read(closed.jaxpr.eqns) if h is not REPLICA_ID]
    written = handles_written(closed.jaxpr.eqns)
    consts = list(closed.consts)

    def interpreted(consts: list[Array], values: list[Array], args: list[Array]) -> Any:
        state = dict(zip(handles, values, strict=True))
        if scope.kind == "replica":
            number = lax.axis_index(REPLICA_AXIS) if replica is None else jnp.int32(replica)
            state[REPLICA_ID] = number
        outs = interpret(closed.jaxpr, consts, args, state)
        return outs, [state[handle] for handle in written]

    traced = jax.make_jaxpr(interpreted, axis_env=axis_env or None)(
        [_struct(jax.typeof(const)) for const in consts],
        [_struct(handle.aval(scope.kind == "replica")) for handle in handles],
        list(avals),
    )
    jaxpr = without_high_primitives(traced)
    num_outs = len(closed.jaxpr.outvars)
    where = {
        eqn.params["handle"]: eqn.params["where"]
        for eqn in walk(closed.jaxpr.eqns)
        if eqn.primitive is write_p
    }
    # Constants the interpreter introduced become captures as well.
    captures = [*jaxpr.consts, *consts]
    compares = job_programs.enter is not None
    describe = functools.partial(describe_jaxpr, closed) if compares else list
    checks = scope.checks
    return Pure(opened(jaxpr), captures, handles, written, num_outs, where, [], checks, describe)


def _struct(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
