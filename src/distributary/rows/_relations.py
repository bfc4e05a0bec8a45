"""Finds losses that relate rows of the batch to each other, and sums over rows that stay parts.

A replica computes such a loss from its own rows alone, which gives another loss than on one device.
The gradient of a mean over the batch is the mean of the replicas' gradients. That of a softmax over
the other rows of the batch, of a batch's variance or of a product of two means is not.

`relation_of_replica` interprets a traced step abstractly, from the batch to the gradients that
replicas combine and to the loss that is reported. A value is

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
joined with other rows and cut again; a row that is taken by a number that is computed from weights,
or from positions in the batch, which counts as its own row; batches of one row per replica.
Divisors, counts and largest or smallest values that depend on the batch's data alone count as
constants: `sum(loss * mask) / sum(mask)` is a mean. Rows of data may be mixed with random other
rows: that is augmentation, and random anyway.
"""

import functools
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal as JaxprLiteral, Var

from distributary.rows._layouts import BATCH, Dim, Rows, plain, tags_of
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
    flags_of,
    is_independent,
    of_rows,
)
from distributary.rows._scopes import MEANS, OWN_STATISTICS, STATE
from distributary.tracing import (
    OUTSIDE,
    AnyJaxpr,
    Equation,
    aval_of,
    call_of,
    interpret_with,
    is_collective,
    parts_of_scan,
    parts_of_while,
    shape_of,
    user_frame,
)
from distributary.xla_cpu import EXCHANGED, JOINABLE

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
# Operations that add up rows, and those that keep a row what it is but for a factor.
_ADDS = frozenset(
    """
    conv_general_dilated dot_general reduce_sum scatter-add scatter_add
    """.split()  # noqa: SIM905
)
_SCALES = frozenset(
    """
    broadcast_in_dim convert_element_type div expand_dims mul reshape squeeze transpose
    """.split()  # noqa: SIM905
)
# Operations that make numbers of rows from others, with `iota` among them.
_OF_INDICES = frozenset(
    """
    add broadcast_in_dim concatenate convert_element_type expand_dims mul reshape select_n squeeze
    sub transpose
    """.split()  # noqa: SIM905
)
_MAX_ROUNDS = 4


_TRAINED = CONSTANT._replace(trained=True)


class _Context(NamedTuple):
    """The calls around an equation, and the facts that their scopes tell."""

    calls: tuple[Equation, ...] = ()
    differentiated: bool = False
    transposed: bool = False
    own_statistics: bool = False
    exchanged: bool = False

    def at(self, eqn: Equation) -> "_Context":
        """Returns the context in which an equation is, with what its own scope tells."""
        scope = str(eqn.source_info.name_stack)
        transposed = self.transposed or "transpose(" in scope
        return self._replace(
            transposed=transposed,
            differentiated=self.differentiated or transposed or "jvp(" in scope,
            own_statistics=self.own_statistics or OWN_STATISTICS in scope,
            exchanged=self.exchanged or EXCHANGED in scope,
        )


FindingKind: TypeAlias = Literal["relation", "sum in loss", "kept sum"]


class Finding(NamedTuple):
    """A value that one replica computes from its own rows, and one device from those of the batch.

    Attributes:
        kind: What it is: a loss that relates rows, one that is a sum over rows, or such a sum
            that a layer keeps.
        where: The operation, its layer and its line.
    """

    kind: FindingKind
    where: str


def findings_of_replica(
    jaxpr: Jaxpr,
    is_batch: Sequence[bool],
    num_captures: int,
    num_replicas: int,
    losses: Iterable[int] = (),
    dim: int = 0,
) -> list[Finding]:
    """Returns where a replica's program needs the rows of all replicas, and has only its own.

    Args:
        jaxpr: The program.
        is_batch: For every input, whether it is data of this replica.
        num_captures: Number of inputs that are constants, which come first.
        num_replicas: Number of replicas.
        losses: Numbers of outputs that are losses, besides what is differentiated.
        dim: Dim of the data that counts the rows of a batch.
    """
    inputs = []
    sizes = set()
    for i, (v, batch) in enumerate(zip(jaxpr.invars, is_batch, strict=True)):
        shape = shape_of(v)
        if batch and len(shape) > dim and not _is_key(aval_of(v)):
            sizes.add(shape[dim])
            inputs.append(_batch(shape, dim))
        else:
            inputs.append(CONSTANT if batch or i < num_captures else _input(v))
    if len(sizes) != 1 or sizes == {1}:
        return []  # these are no parts of one batch, or have one row
    analysis = _Analysis(sizes.pop(), num_replicas)
    try:
        outs = analysis.jaxpr(jaxpr, inputs, _Context())
    except Exception:
        # No result depends on this analysis, so an equation that a newer JAX writes in another way
        # must not end a training.
        _log.warning("Whether the loss relates rows could not be checked.", exc_info=True)
        return []
    origins = [*[outs[i].origin for i in losses], analysis.origin]
    found = next((origin for origin in origins if origin is not None), None)
    # An equation of the loss tells a reader more than one of its gradient.
    if found and any("transpose(" in str(eqn.source_info.name_stack) for eqn in found):
        found = analysis.first or found
    places: dict[FindingKind, tuple[Equation, ...] | None] = {
        "relation": found,
        "sum in loss": analysis.sums.get(MEANS),
        "kept sum": analysis.sums.get(STATE),
    }
    return [Finding(kind, _described(place)) for kind, place in places.items() if place is not None]


def warning_of(finding: Finding, name: str, num_replicas: int) -> str:
    """Returns the warning of what is found in a step of `name`."""
    if finding.kind == "sum in loss":
        return (
            f"{name}: a loss is a sum over rows of the batch, by {finding.where}. Each of the"
            f" {num_replicas} replicas adds up its own rows alone, and a step takes the mean over"
            f" the replicas, so this is about 1/{num_replicas} of the sum on one device. Divide it"
            " by the number of rows, or wrap the function that adds them up,"
            " distributary.global_batch_loss(function)."
        )
    if finding.kind == "kept sum":
        return (
            f"{name}: a layer keeps a sum over rows of the batch, by {finding.where}. Each of the"
            f" {num_replicas} replicas adds up its own rows alone, so the layer keeps about"
            f" 1/{num_replicas} of the sum on one device. Add up the replicas before you assign it,"
            " distributary.get_replica_context().all_reduce('SUM', value), or divide it by the"
            " number of rows."
        )
    return (
        f"{name}: the loss relates rows of the batch to each other, by {finding.where}. Each of the"
        f" {num_replicas} replicas does so with its own rows alone, so this is another loss than on"
        " one device. Compute it on the rows of all replicas: wrap the function that relates them,"
        " distributary.global_batch_loss(function)."
    )


def _is_key(aval: jax.core.ShapedArray) -> bool:
    return aval.dtype == jnp.uint32 and aval.shape in ((2,), (4,))


def _input(v: Var) -> Value:
    dtype = getattr(v.aval, "dtype", None)
    return _TRAINED if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) else CONSTANT


def _batch(shape: Sequence[int], dim: int) -> Value:
    dims = list(plain(shape))
    dims[dim] = ((shape[dim], Rows(BATCH)),)
    return Value(ROWS, tuple(dims))


@final
class _Analysis:
    """One abstract interpretation.

    Attributes:
        origin: Place of the first relation that reached a gradient which replicas combine.
        first: Place of the first relation in differentiated code, which need not be part of such a
            gradient.
        sums: Place of the first sum over rows that reached each scope that takes means.

    Args:
        num_rows: Number of rows of this replica's batch.
        num_replicas: Number of replicas.
    """

    def __init__(self, num_rows: int, num_replicas: int) -> None:
        self.origin: tuple[Equation, ...] | None = None
        self.first: tuple[Equation, ...] | None = None
        self.sums: dict[str, tuple[Equation, ...]] = {}
        self._num_rows = num_rows
        self._num_replicas = num_replicas
        self._control_flow = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
        }

    # Jaxprs

    def jaxpr(self, jaxpr: AnyJaxpr, inputs: Sequence[Value], context: _Context) -> list[Value]:
        """Returns the values of the outputs."""
        rule = functools.partial(self._equation, context)
        return interpret_with(jaxpr, inputs, lambda constant: CONSTANT, rule)[0]

    def _equation(self, context: _Context, eqn: Equation, operands: list[Value]) -> list[Value]:
        context = context.at(eqn)
        for scope in (MEANS, STATE):
            if scope not in self.sums and scope in str(eqn.source_info.name_stack):
                sums = [v for v in operands if v.kind == SUM and not (v.averaged or v.gradient)]
                if sums and sums[0].summed is not None:
                    self.sums[scope] = sums[0].summed
        if context.own_statistics:
            operands = [
                _TRAINED if value.kind == SUM else value._replace(mixed=False) for value in operands
            ]
        if is_collective(eqn) or context.exchanged:
            return self._collective(eqn, operands)
        inner = context._replace(calls=(*context.calls, eqn))
        call = call_of(eqn)
        if call is not None:
            return self.jaxpr(call, operands, inner)
        control_flow = self._control_flow.get(eqn.primitive.name)
        if control_flow is not None:
            return control_flow(eqn, operands, inner)
        outs = self._results(eqn, operands, context)
        if context.own_statistics:
            outs = [_TRAINED if value.kind == SUM else value for value in outs]
        if context.transposed:
            outs = [value if value.gradient else value._replace(gradient=True) for value in outs]
        return outs

    def _results(self, eqn: Equation, operands: list[Value], context: _Context) -> list[Value]:
        """Returns the values of the results of an equation that carries no others."""
        num_outs = len(eqn.outvars)
        if eqn.primitive.name in _IDENTITIES:
            return operands[:num_outs]
        if any(value.kind == RELATED for value in operands):
            return [self._passed_on(operands)] * num_outs
        if is_independent(operands):
            return [self._independent(eqn, operands)] * num_outs
        if any(value.kind == UNKNOWN for value in operands):
            return [Value(UNKNOWN)] * num_outs
        made = of_rows(eqn, operands)
        if made is RELATION:
            return [self._relation(eqn, operands, context)] * num_outs
        values = made if isinstance(made, list) else [made] * num_outs
        values = self._with_flags(eqn.primitive.name, values, operands)
        if eqn.primitive.name != "concatenate":
            values = [value._replace(columns=()) for value in values]
        return [self._with_sums(eqn, operands, value, context) for value in values]

    def _independent(self, eqn: Equation, operands: list[Value]) -> Value:
        name = eqn.primitive.name
        origins = (operand.origin for operand in operands if operand.origin is not None)
        counts = any(operand.counts for operand in operands)
        value = CONSTANT._replace(origin=next(origins, None), counts=counts, **flags_of(operands))
        if name in _RANDOM:
            value = value._replace(random=True)
        elif name == "iota":
            value = value._replace(counts=True)
        elif name in OUTSIDE or name == "start_of_sum":
            value = Value(UNKNOWN)
        return value

    def _with_flags(self, name: str, values: list[Value], operands: list[Value]) -> list[Value]:
        flags = flags_of(operands)
        counts = name in _OF_INDICES and any(operand.counts for operand in operands)
        hidden = next((v.hidden for v in operands if v.kind == ROWS and v.hidden), ())
        result = []
        for value in values:
            if value.kind == ROWS and not any(map(tags_of, value.dims)) and not hidden:
                value = value._replace(kind=SUM, dims=())  # over some rows
            if value.kind == ROWS:
                value = value._replace(hidden=hidden, counts=counts)
            result.append(value._replace(**flags))
        return result

    def _with_sums(
        self, eqn: Equation, operands: list[Value], value: Value, context: _Context
    ) -> Value:
        """Returns the value with where its rows are added up, and whether it is a mean of them."""
        name = eqn.primitive.name
        of_sums = [operand for operand in operands if operand.kind == SUM]
        is_mean = any(operand.averaged for operand in of_sums)
        if name in _SCALES or name in _ADDS:
            is_mean = is_mean or any(operand.averaged for operand in operands)
        is_mean = is_mean or self._divides(eqn, operands, of_sums)
        if value.kind == ROWS:
            return value._replace(summed=None, averaged=is_mean and not of_sums)
        if value.kind != SUM:
            return value
        summed = next((operand.summed for operand in of_sums if operand.summed), None)
        if summed is None and not of_sums and name in _ADDS:
            summed = (*context.calls, eqn)
        return value._replace(summed=summed, averaged=is_mean)

    def _divides(self, eqn: Equation, operands: list[Value], of_sums: list[Value]) -> bool:
        """Returns whether an equation divides by the number of rows, or of the elements in them.

        A sum that is multiplied by the number of replicas is as good as a mean: the mean of the
        replicas' is right.
        """
        if eqn.primitive.name == "div" and of_sums and operands[1].kind == INDEPENDENT:
            is_number = isinstance(eqn.invars[1], JaxprLiteral)
            if not is_number and not operands[1].trained and not operands[1].random:
                return True  # a divisor that the program computes counts rows
        scale = next((atom for atom in eqn.invars if isinstance(atom, JaxprLiteral)), None)
        if scale is None or jnp.ndim(scale.val) or eqn.primitive.name not in ("div", "mul"):
            return False
        number = float(abs(scale.val))  # of FFTs, it may be complex
        if eqn.primitive.name == "mul":
            if of_sums and number == self._num_replicas:
                return True
            # Other small factors, such as one minus a momentum, may be inverses of such numbers.
            sizes = {self._num_rows, *map(_num_summed, of_sums)}
            return any(abs(number * size - 1) < 1e-6 for size in sizes)
        if not of_sums:  # each row is divided, as before a sum
            return number == self._num_rows
        # The estimate of a variance divides by one less.
        return number > 1 and 0 in (number % self._num_rows, (number + 1) % self._num_rows)

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

    def _collective(self, eqn: Equation, operands: list[Value]) -> list[Value]:
        # Joinable sums are those of metrics, which combine no gradients.
        if self.origin is None and JOINABLE not in str(eqn.source_info.name_stack):
            origins = [v.origin for v in operands if v.kind == RELATED and v.gradient]
            self.origin = next(iter(origins), None)
        if len(operands) == len(eqn.outvars):
            return [_TRAINED._replace(origin=v.origin) for v in operands]
        return [_TRAINED] * len(eqn.outvars)

    # Control flow

    def _scan(self, eqn: Equation, operands: list[Value], context: _Context) -> list[Value]:
        params = eqn.params
        consts, carry, xs = parts_of_scan(eqn, operands)
        leading: list[Dim] = [value.dims[0] if value.kind == ROWS else () for value in xs]
        of_one = []
        for value, first in zip(xs, leading, strict=True):
            if value.kind == ROWS:
                hidden = (*value.hidden, (id(eqn), first)) if tags_of(first) else value.hidden
                value = value._replace(dims=value.dims[1:], hidden=hidden)
            of_one.append(value)
        rows = {first for first in leading if tags_of(first)}
        if len(rows) > 1:
            are_related = any(value.kind == RELATED for value in operands)
            passed_on = self._passed_on(operands) if are_related else Value(UNKNOWN)
            return [passed_on] * len(eqn.outvars)

        def of_body(carry: Sequence[Value]) -> list[Value]:
            return self.jaxpr(params["jaxpr"], [*consts, *carry, *of_one], context)

        carry, outs = self._fixed_point(carry, of_body)
        own = next(iter(rows)) if rows else ()
        key = (id(eqn), own)
        result = []
        for value in carry:
            is_of_one = value.kind == ROWS and key in value.hidden
            result.append(Value(UNKNOWN, gradient=value.gradient) if is_of_one else value)
        for value in outs:
            if value.kind == ROWS:
                is_of_one = key in value.hidden
                dim = own if is_of_one else ((params["length"], None),)
                value = value._replace(
                    dims=(dim, *value.dims), hidden=tuple([h for h in value.hidden if h != key])
                )
            result.append(value)
        return result

    def _while(self, eqn: Equation, operands: list[Value], context: _Context) -> list[Value]:
        _, consts, carry = parts_of_while(eqn, operands)

        def of_body(carry: Sequence[Value]) -> list[Value]:
            return self.jaxpr(eqn.params["body_jaxpr"], [*consts, *carry], context)

        return self._fixed_point(carry, of_body)[0]

    def _fixed_point(
        self, carry: list[Value], of_body: Callable[[Sequence[Value]], list[Value]]
    ) -> tuple[list[Value], list[Value]]:
        """Returns the carry that a loop keeps, and the other results of its body."""
        for round_ in range(_MAX_ROUNDS + 1):
            # Only relations found with the final carry count.
            known = self.origin
            outs = of_body(carry)
            after = list(map(either, carry, outs))
            if after == carry or round_ == _MAX_ROUNDS:
                return after, outs[len(carry) :]
            self.origin = known
            if round_ == _MAX_ROUNDS - 1:
                after = [a if a == b else Value(UNKNOWN) for a, b in zip(carry, after, strict=True)]
            carry = after
        raise AssertionError

    def _cond(self, eqn: Equation, operands: list[Value], context: _Context) -> list[Value]:
        branches = [self.jaxpr(branch, operands[1:], context) for branch in eqn.params["branches"]]
        outs = [functools.reduce(either, values) for values in zip(*branches, strict=True)]
        if operands[0].kind not in (INDEPENDENT, RELATED):
            outs = [v if v.kind == RELATED else Value(UNKNOWN) for v in outs]
        return outs


# Where a relation is


def _num_summed(value: Value) -> int:
    """Returns how many elements each element of a sum adds up."""
    if value.summed is None:
        return 1
    eqn = value.summed[-1]
    sizes = [math.prod(shape_of(atom)) for atom in (eqn.invars[0], eqn.outvars[0])]
    return max(1, sizes[0] // max(1, sizes[1]))


def _described(origin: tuple[Equation, ...]) -> str:
    text = origin[-1].primitive.name
    scopes = [_scope_of(eqn) for eqn in origin]
    layer = "/".join(scope for scope in scopes if scope)
    frames = (user_frame(eqn, _directories()) for eqn in origin[::-1])
    frame = next((frame for frame in frames if frame is not None), None)
    if layer:
        text += f" in {layer}"
    if frame is not None:
        text += f" at {frame.file_name}:{frame.line_num} ({frame.function_name})"
    return text


def _scope_of(eqn: Equation) -> str:
    names = re.sub(r"\b(?:jvp|transpose|vmap|rematted_computation|checkpoint)\b|[()]", "",
                   str(eqn.source_info.name_stack))  # fmt: skip
    return "/".join(name for name in names.split("/") if name)


@functools.cache
def _directories() -> tuple[str, ...]:
    """Returns the beginnings of files whose code is neither the user's nor a layer's or loss's."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found = [own, os.path.dirname(jax.__file__)]
    keras = sys.modules.get("keras")
    if keras is not None and keras.__file__ is not None:
        source = os.path.join(os.path.dirname(keras.__file__), "src")
        found += [os.path.join(source, name) for name in ("ops", "backend", "utils")]
    return ("<", *(directory + os.sep for directory in found))
