"""Finds losses that relate rows of the batch to each other.

A replica computes such a loss from its own rows alone, which gives another loss than on one device.
The gradient of a mean over the batch is the mean of the replicas' gradients. That of a softmax over
the other rows of the batch, of a batch's variance or of a product of two means is not.

`relation_of` interprets a traced step abstractly, from the batch to the gradients that replicas
combine and to the loss that is reported. A value is

- independent of the batch,
- made row by row,
- a sum over rows, or something linear in such sums,
- related: computed from several rows in another way, or
- unknown.

In a loss that is the square of a mean, with 4 rows of a batch `x` on each replica:

    { lambda ; x:f32[4] w:f32[]. let       row by row; independent
        a:f32[4] = mul x w                 row by row
        b:f32[] = reduce_sum a             a sum over rows
        c:f32[] = div b 4.0                a sum over rows
        d:f32[] = mul c c                  related, by `mul`
      in (d,) }

The analysis looks at gradients rather than losses, because they need no mark: an equation that JAX
has transposed is in the scope `transpose`, and its results come to a collective. So it does not
matter who differentiates: Keras, a tape or `jax.grad`. A change that a step makes to gradients
before it combines them, such as clipping, is no relation.

Some things it does not know, and never reports: custom kernels (`pallas_call`, FFI), `ragged_dot`;
sums that a loop over the rows carries; parts of the batch that are cut without regard to rows, or
joined with other rows and cut again; a row that is taken by a number from the batch, which counts
as its own row; batches of one row per replica. Divisors, counts and largest or smallest values that
depend on the batch's data alone count as constants: `sum(loss * mask) / sum(mask)` is a mean. Rows
of data may be mixed with random other rows: that is augmentation, and random anyway.
"""

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from distributary.rows._layouts import BATCH, Factor, Rows, plain, tags_of
from distributary.rows._rules import (
    CONSTANT,
    INDEPENDENT,
    RELATED,
    RELATION,
    ROWS,
    SUM,
    UNKNOWN,
    Value,
    either,
    is_independent,
    of_rows,
)
from distributary.rows._scopes import OWN_STATISTICS
from distributary.topology import REPLICA_AXIS, scan_counts
from distributary.tracing import OUTSIDE, Equation, call_of, is_collective, open_jaxpr
from distributary.xla_cpu import EXCHANGED

__all__ = ["relation_of", "relation_of_replica", "relation_warning"]


_log = logging.getLogger(__name__)

_RANDOM = frozenset(
    """
    random_bits random_gamma rng_bit_generator rng_uniform threefry2x32
    """.split()  # noqa: SIM905
)
_IDENTITIES = frozenset(
    """
    copy_p device_put optimization_barrier push pvary reshard sharding_constraint start_of_sum
    """.split()  # noqa: SIM905
)
_MAX_ROUNDS = 4


_GLOBAL = Value(UNKNOWN, hidden=("global",))  # a batch outside of `shard_map`


class _Context(NamedTuple):
    calls: tuple[Equation, ...] = ()
    differentiated: bool = False
    transposed: bool = False
    own_statistics: bool = False
    exchanged: bool = False


def relation_of(
    jaxpr: Any, num_trained: int, num_batch: int, losses: Iterable[int], ignored: str
) -> str | None:
    """Returns where the loss in a program of all replicas relates rows of the batch, if it does.

    Args:
        jaxpr: The program, with a `shard_map` for the part that replicas compute.
        num_trained: Number of trained inputs, which come first.
        num_batch: Number of inputs that are a batch to be split, which come last.
        losses: Numbers of outputs that are losses.
        ignored: Name of a scope whose collectives combine no gradients.

    Returns:
        The operation, the layer and the line, as prose; None if nothing is found.
    """
    analysis = _Analysis(ignored)
    inputs = [CONSTANT] * (len(jaxpr.constvars) + len(jaxpr.invars) - num_batch)
    start = len(jaxpr.constvars)
    inputs[start : start + num_trained] = [CONSTANT._replace(trained=True)] * num_trained
    inputs += [_GLOBAL] * num_batch
    return _look(analysis, jaxpr, inputs, losses)


def relation_of_replica(jaxpr: Any, is_batch: Sequence[bool], num_captures: int) -> str | None:
    """Returns the same as `relation_of`, for the program of one replica with its part of the batch.

    Args:
        jaxpr: The program.
        is_batch: For every input, whether it is data of this replica.
        num_captures: Number of inputs that are constants, which come first.
    """
    if not any(is_batch):
        return None
    analysis = _Analysis("\0")
    sizes = {v.aval.shape[0] for v, batch in zip(jaxpr.invars, is_batch, strict=True)
             if batch and v.aval.ndim and not _is_key(v.aval)}  # fmt: skip
    if len(sizes) != 1 or sizes == {1}:
        return None  # these are no parts of one batch, or have one row
    inputs = []
    for i, (v, batch) in enumerate(zip(jaxpr.invars, is_batch, strict=True)):
        if batch and v.aval.ndim and not _is_key(v.aval):
            inputs.append(_batch(v.aval.shape, 0))
        else:
            inputs.append(CONSTANT if batch or i < num_captures else _input(v.aval))
    return _look(analysis, jaxpr, inputs, ())


def _look(
    analysis: "_Analysis", jaxpr: Any, inputs: list[Value], losses: Iterable[int]
) -> str | None:
    try:
        values = analysis.jaxpr(jaxpr, inputs, _Context())
    except Exception:
        # No result depends on this analysis, so an equation that a newer JAX writes in another way
        # must not end a training.
        _log.warning("Whether the loss relates rows could not be checked.", exc_info=True)
        return None
    return _found(analysis, values, losses)


def relation_warning(name: str, where: str, num_replicas: int) -> str:
    """Returns the warning that a loss of `name` relates rows, at the place `where` describes."""
    return (
        f"{name}: the loss relates rows of the batch to each other, by {where}. Each of the"
        f" {num_replicas} replicas does so with its own rows alone, so this is another loss than on"
        " one device. Compute it on the rows of all replicas: wrap the function that relates them,"
        " distributary.global_batch_loss(function)."
    )


def _found(analysis: "_Analysis", outs: list[Value], losses: Iterable[int]) -> str | None:
    origins = [*[outs[i].origin for i in losses], analysis.origin]
    found = next((origin for origin in origins if origin is not None), None)
    if found is None:
        return None
    # An equation of the loss tells a reader more than one of its gradient.
    is_gradient = any("transpose(" in str(eqn.source_info.name_stack) for eqn in found)
    return _described(analysis.first if is_gradient and analysis.first else found)


def _is_key(aval: Any) -> bool:
    return aval.dtype == jnp.uint32 and aval.shape[-1:] in ((2,), (4,)) and aval.ndim == 1


def _input(aval: Any) -> Value:
    dtype = getattr(aval, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
    return Value(INDEPENDENT, trained=is_float)


def _batch(shape: Sequence[int], dim: int) -> Value:
    dims = list(plain(shape))
    dims[dim] = ((shape[dim], Rows(BATCH)),)
    return Value(ROWS, tuple(dims))


@final
class _Analysis:
    """One abstract interpretation.

    Args:
        ignored: Name of a scope whose collectives combine no gradients.

    Attributes:
        origin: Place of the first relation that reached a gradient which replicas combine.
        first: Place of the first relation in differentiated code, which need not be part of such a
            gradient.
    """

    def __init__(self, ignored: str) -> None:
        self.origin: tuple[Equation, ...] | None = None
        self.first: tuple[Equation, ...] | None = None
        self._ignored = ignored

    # Jaxprs

    def jaxpr(self, jaxpr: Any, inputs: Sequence[Value], context: _Context) -> list[Value]:
        """Returns the values of the outputs."""
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
        for eqn in jaxpr.eqns:
            operands = [
                CONSTANT if isinstance(atom, jex_core.Literal) else env[atom] for atom in eqn.invars
            ]
            env.update(zip(eqn.outvars, self._equation(eqn, operands, context), strict=True))
        return [CONSTANT if isinstance(v, jex_core.Literal) else env[v] for v in jaxpr.outvars]

    def _call(self, jaxpr: Any, operands: Sequence[Value], context: _Context) -> list[Value]:
        inner, consts = open_jaxpr(jaxpr)
        return self.jaxpr(inner, [*[CONSTANT] * len(consts), *operands], context)

    def _equation(self, eqn: Equation, operands: list[Value], context: _Context) -> list[Value]:
        name = eqn.primitive.name
        num_outs = len(eqn.outvars)
        scope = str(eqn.source_info.name_stack)
        if scope:
            context = context._replace(
                differentiated=context.differentiated or "jvp(" in scope or "transpose(" in scope,
                transposed=context.transposed or "transpose(" in scope,
                own_statistics=context.own_statistics or OWN_STATISTICS in scope,
                exchanged=context.exchanged or EXCHANGED in scope,
            )
        if context.own_statistics:
            operands = [
                CONSTANT._replace(trained=True)
                if value.kind == SUM
                else value._replace(mixed=False)
                for value in operands
            ]
        if is_collective(eqn) or context.exchanged:
            return self._collective(operands, scope, num_outs)
        inner = context._replace(calls=(*context.calls, eqn))
        call = call_of(eqn)
        if call is not None:
            return self._call(call, operands, inner)
        if name == "shard_map":
            return self._shard_map(eqn, operands, inner)
        if name == "scan":
            return self._scan(eqn, operands, inner)
        if name == "while":
            return self._while(eqn, operands, inner)
        if name == "cond":
            return self._cond(eqn, operands, inner)
        if name in _IDENTITIES:
            outs = list(operands[:num_outs])
        elif any(value.kind == RELATED for value in operands):
            outs = [self._passed_on(operands)] * num_outs
        elif is_independent(operands):
            outs = [self._independent(eqn, operands)] * num_outs
        elif any(value.kind == UNKNOWN for value in operands):
            outs = [_GLOBAL if operands[0] is _GLOBAL else Value(UNKNOWN)] * num_outs
        else:
            made = of_rows(eqn, operands)
            if made is RELATION:
                outs = [self._relation(eqn, operands, context)] * num_outs
            else:
                outs = self._with_flags(eqn, made, operands)
        if context.own_statistics:
            outs = [
                CONSTANT._replace(trained=True) if value.kind == SUM else value for value in outs
            ]
        if context.transposed:
            outs = [value if value.gradient else value._replace(gradient=True) for value in outs]
        return outs

    def _independent(self, eqn: Equation, operands: list[Value]) -> Value:
        name = eqn.primitive.name
        value = CONSTANT
        for operand in operands:
            if operand is not value and operand is not CONSTANT:
                value = value._replace(
                    trained=value.trained or operand.trained,
                    random=value.random or operand.random,
                    gradient=value.gradient or operand.gradient,
                    origin=value.origin or operand.origin,
                    counts=value.counts or operand.counts,
                )
        if name in _RANDOM:
            value = value._replace(random=True)
        elif name == "iota":
            value = value._replace(counts=True)
        elif name in OUTSIDE or name == "start_of_sum":
            value = Value(UNKNOWN)
        return value

    def _with_flags(self, eqn: Equation, made: Any, operands: list[Value]) -> list[Value]:
        num_outs = len(eqn.outvars)
        values = made if isinstance(made, list) else [made] * num_outs
        trained = any(value.trained for value in operands)
        gradient = any(value.gradient for value in operands)
        random = any(value.random for value in operands)
        hidden = next((v.hidden for v in operands if v.kind == ROWS and v.hidden), ())
        result = []
        for value in values:
            if value.kind == ROWS and not any(map(tags_of, value.dims)) and not hidden:
                value = value._replace(kind=SUM, dims=())  # over some rows
            if value.kind == ROWS:
                value = value._replace(hidden=hidden)
            result.append(value._replace(trained=trained, gradient=gradient, random=random))
        return result

    def _passed_on(self, operands: list[Value]) -> Value:
        related = [value for value in operands if value.kind == RELATED]
        through = any(value.gradient for value in related)
        return related[0]._replace(gradient=through)

    def _relation(self, eqn: Equation, operands: list[Value], context: _Context) -> Value:
        if not context.differentiated and any(value.gradient for value in operands):
            return Value(UNKNOWN, gradient=True)  # the step changes its gradients
        origin = (*context.calls, eqn)
        if self.first is None and context.differentiated and not context.transposed:
            self.first = origin
        return Value(RELATED, origin=origin)

    def _collective(self, operands: list[Value], scope: str, num_outs: int) -> list[Value]:
        if self._ignored not in scope and self.origin is None:
            origins = [v.origin for v in operands if v.kind == RELATED and v.gradient]
            self.origin = next(iter(origins), None)
        if len(operands) == num_outs:
            return [Value(INDEPENDENT, trained=True, origin=v.origin) for v in operands]
        return [Value(INDEPENDENT, trained=True)] * num_outs

    # Control flow

    def _shard_map(self, eqn: Equation, operands: list[Value], context: _Context) -> list[Value]:
        inputs = []
        inner = open_jaxpr(eqn.params["jaxpr"])[0]
        is_single = False
        for v, value, spec in zip(inner.invars, operands, eqn.params["in_specs"], strict=True):
            if value is not _GLOBAL:
                inputs.append(CONSTANT if value.kind == UNKNOWN else value)
                continue
            dim = next((i for i, part in enumerate(spec) if part == REPLICA_AXIS), None)
            inputs.append(CONSTANT if dim is None else _batch(v.aval.shape, dim))
            is_single = is_single or (dim is not None and v.aval.shape[dim] <= 1)
        if is_single:
            return [CONSTANT] * len(eqn.outvars)
        outs = self._call(eqn.params["jaxpr"], inputs, context)
        return [Value(INDEPENDENT, trained=True, origin=value.origin) for value in outs]

    def _scan(self, eqn: Equation, operands: list[Value], context: _Context) -> list[Value]:
        params = eqn.params
        num_consts, num_carry = scan_counts(params)
        consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
        xs, leading = [], []
        for value in operands[num_consts + num_carry :]:
            first: tuple[Factor, ...] = ()
            if value.kind == ROWS:
                first = value.dims[0]
                hidden = value.hidden
                if tags_of(first):
                    hidden = (*hidden, (id(eqn), first))
                value = value._replace(dims=value.dims[1:], hidden=hidden)
            xs.append(value)
            leading.append(first)
        rows = {first for first in leading if tags_of(first)}
        if len(rows) > 1:
            return [self._unless_related(operands)] * len(eqn.outvars)

        def of_body(carry: Sequence[Value]) -> list[Value]:
            return self._call(params["jaxpr"], [*consts, *carry, *xs], context)

        carry, outs = self._fixed_point(carry, of_body, num_carry)
        length = params["length"]
        own = next(iter(rows)) if rows else ()
        key = (id(eqn), own)
        result = []
        for value in carry:
            is_of_one = value.kind == ROWS and key in value.hidden
            result.append(Value(UNKNOWN, gradient=value.gradient) if is_of_one else value)
        for value in outs:
            if value.kind == ROWS:
                is_of_one = key in value.hidden
                dim = own if is_of_one else ((length, None),)
                value = value._replace(
                    dims=(dim, *value.dims), hidden=tuple([h for h in value.hidden if h != key])
                )
            result.append(value)
        return result

    def _while(self, eqn: Equation, operands: list[Value], context: _Context) -> list[Value]:
        params = eqn.params
        num_condition, num_body = params["cond_nconsts"], params["body_nconsts"]
        consts = operands[num_condition : num_condition + num_body]
        carry = operands[num_condition + num_body :]

        def of_body(carry: Sequence[Value]) -> list[Value]:
            return self._call(params["body_jaxpr"], [*consts, *carry], context)

        return self._fixed_point(carry, of_body, len(carry))[0]

    def _fixed_point(
        self,
        carry: list[Value],
        of_body: Callable[[Sequence[Value]], list[Value]],
        num_carry: int,
    ) -> tuple[list[Value], list[Value]]:
        """Returns the carry that a loop keeps, and the other results of its body."""
        for round_ in range(_MAX_ROUNDS + 1):
            # Only relations found with the final carry count.
            known, self.origin = self.origin, self.origin
            outs = of_body(carry)
            after = [either(a, b) for a, b in zip(carry, outs[:num_carry], strict=True)]
            if after == carry or round_ == _MAX_ROUNDS:
                return after, outs[num_carry:]
            self.origin = known
            if round_ == _MAX_ROUNDS - 1:
                after = [a if a == b else Value(UNKNOWN) for a, b in zip(carry, after, strict=True)]
            carry = after
        raise AssertionError

    def _cond(self, eqn: Equation, operands: list[Value], context: _Context) -> list[Value]:
        branches = [self._call(branch, operands[1:], context) for branch in eqn.params["branches"]]
        outs = [functools.reduce(either, values) for values in zip(*branches, strict=True)]
        if operands[0].kind not in (INDEPENDENT, RELATED):
            outs = [v if v.kind == RELATED else Value(UNKNOWN) for v in outs]
        return outs

    def _unless_related(self, operands: list[Value]) -> Value:
        if any(value.kind == RELATED for value in operands):
            return self._passed_on(operands)
        return Value(UNKNOWN)


# Where a relation is


def _described(origin: tuple[Equation, ...]) -> str:
    text = origin[-1].primitive.name
    scopes = [_scope_of(eqn) for eqn in origin]
    layer = "/".join(scope for scope in scopes if scope)
    frame = next((frame for eqn in origin[::-1] if (frame := _frame_of(eqn)) is not None), None)
    if layer:
        text += f" in {layer}"
    if frame is not None:
        text += f" at {frame}"
    return text


def _scope_of(eqn: Equation) -> str:
    names = re.sub(r"\b(?:jvp|transpose|vmap|rematted_computation|checkpoint)\b|[()]", "",
                   str(eqn.source_info.name_stack))  # fmt: skip
    return "/".join(name for name in names.split("/") if name)


def _frame_of(eqn: Equation) -> str | None:
    traceback = eqn.source_info.traceback
    if traceback is None:
        return None
    inside = _directories()
    for frame in traceback.frames:
        name = frame.file_name
        if not name.startswith(inside) and not name.startswith("<"):
            return f"{name}:{frame.line_num} ({frame.function_name})"
    return None


@functools.cache
def _directories() -> tuple[str, ...]:
    """Returns folders whose code is neither the user's nor that of a layer or loss."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found = [own, os.path.dirname(jax.__file__)]
    keras = sys.modules.get("keras")
    if keras is not None and keras.__file__ is not None:
        source = os.path.join(os.path.dirname(keras.__file__), "src")
        found += [os.path.join(source, name) for name in ("ops", "backend", "utils")]
    return tuple([directory + os.sep for directory in found])
