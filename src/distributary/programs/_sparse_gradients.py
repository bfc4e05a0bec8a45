"""Sums gradients of tables over the replicas, and applies them, by rows.

The gradient of a table is a scatter into zeros. If a step looks up few of its rows, nearly all of
what the replicas add up, and of what the optimizer then changes, is zeros. Two replicas that look
up 3 rows each of a table `t` of 1000 rows, with SGD:

    { lambda ; t:f32[1000,2] ids:i32[3,1] r:f32[3,2]. let
        a:f32[1000,2] = broadcast_in_dim 0.0
        b:f32[1000,2] = scatter-add a ids r
        c:f32[1000,2] = psum[axes=('replica',)] b
        d:f32[1000,2] = mul c 0.1
        e:f32[1000,2] = sub t d
      in (e,) }

becomes

    { lambda ; t:f32[1000,2] ids:i32[3,1] r:f32[3,2]. let
        f:i32[6] = all_gather[axis_name=('replica',)] ids
        g:f32[6,2] = all_gather[axis_name=('replica',)] r
        h:f32[6,2] = mul g 0.1
        i:f32[6,2] = neg h
        e:f32[1000,2] = scatter-add t f i
      in (e,) }

The program is evaluated once more. A gradient, and what is computed from it row by row, is then a
`Patch` (`_patches`): a base, and the rows in which the value differs from it. An operation has a
rule for patches, or takes the whole value, which a patch makes when it is asked. So no form of the
update has to be recognized, and what reads the gradient in another way, such as a product of
matrices, gets what it got before.

- An all-reduce of a patch gathers its ids and rows. In a program of the whole batch, which XLA
  divides, every device gets them all.
- Linear operations work on the rows to add (`_linear`).
- Other operations that work row by row need the sum for each row (`_row_by_row`).
- A sum over all rows of a patch of zeros, for the norm of a gradient, is that of its rows.
- Arrays that travel in one vector are taken apart, so that patches do not (`_of_vectors`).

The order of additions is not that of the dense program, so results differ by rounding. On GPUs,
where a scatter adds in any order, replicas would even differ from each other. There each replica
sums its own rows first, so that no term names a row twice, and all add the terms in one order.

A table stays dense if a step looks up more than a fraction of its rows, or if it is small.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.lax import GatherScatterMode
from jax.sharding import Mesh, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, Nest
from distributary.jaxprs import (
    CONTROL_FLOW,
    Equation,
    aval_of,
    evaluate_one,
    interpret_with,
    open_jaxpr,
    plain_call_of,
    shape_of,
    walk,
    with_bodies,
    with_pass,
)
from distributary.programs._patches import (
    WITH_ROWS,
    Added,
    Base,
    Computed,
    Patch,
    Replaced,
    RowIds,
    Stored,
    Term,
    Zeros,
    joined_terms,
)
from distributary.programs._program import laid_out
from distributary.programs._row_wise import (
    adds_rows,
    are_few_rows,
    bind_rows,
    known_result,
    number_of,
    real_number,
    row_operands,
)
from distributary.tracing import is_sum_of_replicas, scatter_p
from distributary.variables import all_reduce_of_vectors

_SUMS = frozenset({"add", "add_any", "sub"})


@final
@dataclass(frozen=True, eq=False, slots=True)
class _Flat:
    """A patch of zeros in the form of a vector."""

    patch: Patch

    @property
    def dense(self) -> Array:
        """The whole vector."""
        return self.patch.dense.reshape(-1)


@final
@dataclass(frozen=True, eq=False, slots=True)
class _Vector:
    """Vectors that were put into a vector of zeros, one after the other.

    Attributes:
        aval: Shape and dtype of the whole.
        parts: Start, end and content of each part, in order.
    """

    aval: ShapedArray
    parts: "Sequence[tuple[int, int, _Value]]"

    @property
    def dense(self) -> Array:
        """The whole vector."""
        vector = jnp.zeros(self.aval.shape, self.aval.dtype)
        for start, _, part in self.parts:
            vector = lax.dynamic_update_slice(vector, _dense(part), (start,))
        return vector


_Lazy: TypeAlias = Zeros | Added | Replaced | _Flat | _Vector
_LAZY = (Zeros, Added, Replaced, _Flat, _Vector)
_PATCHES = (Added, Replaced)
_Value: TypeAlias = Array | _Lazy
_Results: TypeAlias = Sequence[_Value] | None
_Operand: TypeAlias = Base | Patch | Array


def with_sparse_gradients(
    function: Callable[..., Nest],
    jaxprs: Iterable[Jaxpr],
    num_replicas: int,
    is_in_any_order: bool,
    mesh: Mesh | None = None,
) -> Callable[..., Nest]:
    """Returns `function` with gradients of tables as rows, where this is less work.

    Args:
        function: From nests of arrays to nests of arrays: the step of one replica, or a program in
            which no replicas meet.
        jaxprs: What it evaluates.
        num_replicas: Number of replicas that meet in sums over the axis `"replica"`.
        is_in_any_order: Whether a scatter adds rows that have the same id in any order.
        mesh: The devices over which XLA divides a program of the global view, each of which then
            gets the ids and rows of all; None for other programs.
    """
    rewriting = lambda: _Rewriting(num_replicas, is_in_any_order, mesh)  # holds values of a trace
    first = rewriting()
    if not any(map(first.concerns, jaxprs)):
        return function
    return with_pass(function, lambda closed, args: rewriting().run(closed, args))


def with_terms(
    closed: ClosedJaxpr, sums: Collection[int], num_replicas: int
) -> tuple[ClosedJaxpr, dict[int, int]]:
    """Returns the program of a replica with ids and rows in the place of gradients of tables.

    Args:
        closed: The program.
        sums: Numbers of the outputs of which others make sums over the replicas.
        num_replicas: Number of replicas.

    Returns:
        The program, and for each output of `sums` that is few rows now, how often it has ids
        followed by rows.
    """
    rewriting = _Rewriting(num_replicas, True, None)
    num_terms: dict[int, int] = {}
    if not rewriting.concerns(closed.jaxpr):
        return closed, num_terms

    def outputs(*args: Array) -> list[Array]:
        outs: list[Array] = []
        for i, value in enumerate(rewriting.values(closed, args)):
            terms = rewriting.few_terms(value) if i in sums else ()
            if terms:
                num_terms[i] = len(terms)
            outs += [x for term in terms for x in (term.ids, term.rows)] or [_dense(value)]
        return outs

    axes = [(REPLICA_AXIS, num_replicas)]
    return jax.make_jaxpr(outputs, axis_env=axes)(*closed.in_avals), num_terms


def _dense(value: _Value) -> Array:
    """Returns a value as an array."""
    return value.dense if isinstance(value, _LAZY) else value


@final
class _Rewriting:
    """The evaluation of one program; see `with_sparse_gradients` for the arguments."""

    def __init__(self, num_replicas: int, is_in_any_order: bool, mesh: Mesh | None) -> None:
        self._num_replicas = num_replicas
        self._mesh = None if mesh is None or mesh.size == 1 else mesh
        self._is_in_any_order = is_in_any_order and (num_replicas > 1 or self._mesh is not None)
        # By the identity of what they are made from, which is kept so that it stays unique.
        self._ids: dict[tuple[int, int, bool], tuple[Array, Array]] = {}
        self._parts_of_all: dict[int, tuple[Array, list[Array]]] = {}
        self._row_ids: dict[tuple[int, ...], RowIds] = {}
        self._inputs: dict[int, Array] = {}
        # Scalars that are known, by their identity.
        self._numbers: dict[int, tuple[Array, float]] = {}
        self._rules: list[Callable[[Equation, Sequence[_Value]], _Results]] = [
            self._scattered,
            self._linear,
            _of_vectors,
            self._row_by_row,
            self._sum_of_rows,
        ]

    def concerns(self, jaxpr: Jaxpr) -> bool:
        """Returns whether a program has gradients of tables."""
        return any(map(self._is_gradient, walk(jaxpr.eqns)))

    def run(self, closed: ClosedJaxpr, args: Sequence[Array]) -> list[Array]:
        """Returns the outputs of a program."""
        return list(map(_dense, self.values(closed, args)))

    def values(self, closed: ClosedJaxpr, args: Sequence[Array]) -> list[_Value]:
        """Returns the outputs of a program, some as patches."""
        self._inputs = {id(x): x for x in args}
        return self._evaluated(closed.jaxpr, [*closed.consts, *args])

    def few_terms(self, value: _Value) -> Sequence[Term]:
        """Returns a value as few rows to add to zeros; none if it is something else."""
        if not isinstance(value, _PATCHES):
            return ()
        terms = _terms_over_zeros(value)
        num_ids = sum(term.ids.shape[0] for term in terms)
        return terms if self._is_few(num_ids, value.shape) else ()

    def _evaluated(self, jaxpr: Jaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        return interpret_with(jaxpr, inputs, self._value_of, self._results)[0]

    def _value_of(self, constant: Array) -> Array:
        self._numbers[id(constant)] = constant, real_number(constant)
        return constant

    def _is_gradient(self, eqn: Equation) -> bool:
        """Returns whether an equation adds few rows to a table."""
        return adds_rows(eqn) and self._is_few(
            math.prod(shape_of(eqn.invars[1])[:-1]), shape_of(eqn.outvars[0])
        )

    def _is_few(self, num_ids: int, shape: Sequence[int]) -> bool:
        return are_few_rows(num_ids * self._num_replicas, shape)

    # Operations

    def _results(self, eqn: Equation, operands: list[_Value]) -> Sequence[_Value]:
        """Returns the results of an equation."""
        if _makes_zeros(eqn):
            return [Zeros(aval_of(eqn.outvars[0]))]
        patched = any(isinstance(x, _PATCHES) for x in operands)
        called = plain_call_of(eqn)
        if called is not None and (patched or self.concerns(open_jaxpr(called)[0])):
            jaxpr, consts = open_jaxpr(called)
            return self._evaluated(jaxpr, [*consts, *operands])
        if eqn.primitive.name in CONTROL_FLOW:
            eqn = with_bodies(eqn, self.concerns, self._run_body)
        elif any(isinstance(x, _LAZY) for x in operands):
            rules = [self._all_reduced] if eqn.effects else self._rules
            for rule in rules:
                outputs = rule(eqn, operands)
                if outputs is not None:
                    return outputs
        results = evaluate_one(eqn, list(map(_dense, operands)))
        is_converted = (
            eqn.primitive is lax.convert_element_type_p and id(operands[0]) in self._numbers
        )
        if is_converted and jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.inexact):
            # `jnp.clip` converts its limits.
            self._numbers[id(results[0])] = results[0], self._numbers[id(operands[0])][1]
        return results

    def _run_body(self, body: ClosedJaxpr, args: Sequence[Array]) -> list[Array]:
        # Its arrays are others than those outside.
        return _Rewriting(self._num_replicas, self._is_in_any_order, self._mesh).run(body, args)

    def _scattered(self, eqn: Equation, operands: Sequence[_Value]) -> _Results:
        """Returns the result of a scatter that adds rows to zeros."""
        zeros = operands[0]
        if not (isinstance(zeros, Zeros) and self._is_gradient(eqn)):
            return None
        ids, rows = map(_dense, operands[1:])
        window = eqn.params["dimension_numbers"].update_window_dims
        others = [d for d in range(rows.ndim) if d not in window]
        shape = shape_of(eqn.outvars[0])
        rows = rows.transpose([*others, *window]).reshape(-1, *shape[1:])
        is_clipped = eqn.params["mode"] is GatherScatterMode.CLIP
        key = id(ids), shape[0], is_clipped
        rows = self._whole(rows)
        if key not in self._ids:
            # Gathered before it is clipped, or XLA would gather what `where` compares, too.
            flat = self._whole(ids.reshape(-1).astype(jnp.promote_types(ids.dtype, jnp.int32)))
            known = jnp.clip(flat, 0, shape[0] - 1)
            if not is_clipped:
                known = jnp.where(known == flat, flat, shape[0])
            self._ids[key] = ids, known.astype(jnp.int32)
        term = Term(self._ids[key][1], rows)
        if self._mesh is not None and self._is_in_any_order:
            # Every device adds the rows for itself, so that the copies would differ. Here each sum
            # is made by one device, which has some of the columns.
            of_rows = self._row_ids_of([term], shape[0])
            sums = laid_out(of_rows.sums([term]), self._mesh, P(None, REPLICA_AXIS))
            term = Term(of_rows.distinct, self._whole(sums), is_unique=True)
        return [Added(zeros, [term])]

    def _whole(self, array: Array) -> Array:
        return laid_out(array, self._mesh, P())

    def _all_reduced(self, eqn: Equation, operands: Sequence[_Value]) -> _Results:
        """Returns the sum over the replicas of a patch, or of a vector that has patches."""
        total = self._gathered(operands[0]) if is_sum_of_replicas(eqn) else None
        return None if total is None else [total]

    def _gathered(self, value: _Value) -> _Value | None:
        """Returns the sum of a value over the replicas; None if it is not made of rows."""
        if isinstance(value, _PATCHES):
            return self._gathered_patch(value)
        if isinstance(value, _Flat):
            patch = self._gathered_patch(value.patch)
            return None if patch is None else _Flat(patch)
        return self._gathered_vector(value) if isinstance(value, _Vector) else None

    def _gathered_vector(self, vector: _Vector) -> _Vector | None:
        """Returns the sum of a vector over the replicas; None if it has no rows."""
        gathered = [self._gathered(part) for *_, part in vector.parts]
        pairs = list(zip(vector.parts, gathered, strict=True))
        others = [_dense(part) for (*_, part), total in pairs if total is None]
        if len(others) == len(pairs):
            return None
        totals = iter(all_reduce_of_vectors(others))
        parts = [(start, end, next(totals) if x is None else x) for (start, end, _), x in pairs]
        return _Vector(vector.aval, parts)

    def _gathered_patch(self, patch: Patch) -> Added | None:
        """Returns the sum of a patch over the replicas; None if it cannot or need not be rows."""
        terms = self.few_terms(patch)
        if not terms:
            return None
        num_rows = patch.shape[0]
        gathered = [self._gathered_term(term, num_rows) for term in terms]
        return Added(patch.base, list(itertools.chain(*gathered)))

    def _gathered_term(self, term: Term, num_rows: int) -> list[Term]:
        """Returns the terms of all replicas."""
        if self._is_in_any_order and not term.is_unique:
            ids = self._row_ids_of([term], num_rows)
            term = Term(ids.distinct, ids.sums([term]), is_unique=True)
        if id(term.ids) not in self._parts_of_all:
            self._parts_of_all[id(term.ids)] = term.ids, self._gathered_parts(term.ids)
        all_ids, all_rows = self._parts_of_all[id(term.ids)][1], self._gathered_parts(term.rows)
        return [
            Term(ids, rows, self._is_in_any_order)
            for ids, rows in zip(all_ids, all_rows, strict=True)
        ]

    def _gathered_parts(self, array: Array) -> list[Array]:
        """Returns the arrays of all replicas: joined, unless they are to be added in order."""
        if self._is_in_any_order:
            return list(lax.all_gather(array, REPLICA_AXIS))
        return [lax.all_gather(array, REPLICA_AXIS, tiled=True)]

    def _row_ids_of(self, terms: Sequence[Term], num_rows: int) -> RowIds:
        """Returns the distinct rows of terms."""
        distinct_terms = list({id(term.ids): term for term in terms}.values())
        key = tuple([id(term.ids) for term in distinct_terms])
        if key not in self._row_ids:
            self._row_ids[key] = RowIds(distinct_terms, num_rows)
        return self._row_ids[key]

    def _linear(self, eqn: Equation, operands: Sequence[_Value]) -> _Results:
        """Returns the result of an operation that is linear in patches with terms."""
        sums = [(i, x) for i, x in enumerate(operands) if isinstance(x, Added)]
        if eqn.primitive is scatter_p and sums and isinstance(sums[0][1].base, Zeros):
            zeros = replace(sums[0][1].base, parts=eqn.params["parts"])
            return [Added(zeros, sums[0][1].terms)]
        if not sums or any(isinstance(x, Replaced) for x in operands):
            return None
        terms: list[Term] = []
        if eqn.primitive.name in _SUMS:
            for i, x in sums:
                is_negative = i == 1 and eqn.primitive.name == "sub"
                terms += [replace(t, rows=-t.rows) for t in x.terms] if is_negative else x.terms
        elif _is_multiple(eqn, sums[0][0]):
            ((place, patch),) = sums
            for term in patch.terms:
                arrays = [term.rows if i == place else _dense(x) for i, x in enumerate(operands)]
                (rows,) = bind_rows(eqn, arrays, term.rows.shape[0])
                terms.append(replace(term, rows=rows))
        else:
            return None
        inputs = self._operands(eqn, operands)
        base = self._base(eqn, inputs)
        is_sum_of_terms = isinstance(base, Zeros) and eqn.primitive.name in _SUMS
        source = None if is_sum_of_terms else Computed(eqn, inputs)
        return [Added(base, joined_terms(terms), source)]

    def _row_by_row(self, eqn: Equation, operands: Sequence[_Value]) -> _Results:
        """Returns the results of an operation that works row by row on patches."""
        patches = [x for x in operands if isinstance(x, _PATCHES)]
        if not patches or row_operands(eqn) is None:
            return None
        terms = [term for x in patches if isinstance(x, Added) for term in x.terms]
        known = [x.ids for x in patches if isinstance(x, Replaced)]
        num_rows = shape_of(eqn.outvars[0])[0]
        ids = known[0] if known else self._row_ids_of(terms, num_rows)
        if any(other is not ids for other in known) or not ids.have(terms):
            return None
        inputs = self._operands(eqn, operands)
        return [
            Replaced(self._base(eqn, inputs, i), ids, Computed(eqn, inputs, i))
            for i in range(len(eqn.outvars))
        ]

    def _operands(self, eqn: Equation, values: Sequence[_Value]) -> list[_Operand]:
        """Returns values as operands of a `Computed` value."""
        operands: list[_Operand] = []
        for x, atom in zip(values, eqn.invars, strict=True):
            if isinstance(x, WITH_ROWS):
                operands.append(x)
                continue
            array = _dense(x)
            is_input = id(array) in self._inputs
            operands.append(Stored(array, is_input) if shape_of(atom) else array)
        return operands

    def _base(self, eqn: Equation, inputs: Sequence[_Operand], index: int = 0) -> Base:
        """Returns a result of an equation that works row by row, outside of the rows of patches."""
        operands = [x.base if isinstance(x, _PATCHES) else x for x in inputs]
        if len(eqn.outvars) > 1:
            return Computed(eqn, operands, index)
        arrays = [x.array if isinstance(x, Stored) else x for x in operands]
        keys = ["zeros" if isinstance(x, Zeros) else id(x) for x in arrays]
        numbers = [self._numbers.get(id(x), (x, math.nan))[1] for x in operands]
        zeros = [isinstance(x, Zeros) or n == 0 for x, n in zip(operands, numbers, strict=True)]
        place = known_result(eqn, keys, numbers, zeros)
        if place == "zero":
            return Zeros(aval_of(eqn.outvars[0]))
        if isinstance(place, int):
            same = operands[place]
            old, new = aval_of(eqn.invars[place]), aval_of(eqn.outvars[0])
            if isinstance(same, WITH_ROWS) and (old.shape, old.dtype) == (new.shape, new.dtype):
                return same
        return Computed(eqn, operands)

    def _sum_of_rows(self, eqn: Equation, operands: Sequence[_Value]) -> _Results:
        """Returns the sum over all rows of a patch of zeros."""
        patch = operands[0]
        if not (
            eqn.primitive.name == "reduce_sum"
            and 0 in eqn.params["axes"]
            and isinstance(patch, _PATCHES)
            and isinstance(patch.base, Zeros)
        ):
            return None
        if isinstance(patch, Replaced):
            ids = patch.ids
        else:
            ids = self._row_ids_of(patch.terms, shape_of(eqn.invars[0])[0])
        # Not `evaluate_one`: the equation is of the whole table.
        return [eqn.primitive.bind(ids.only_named(patch.in_rows(ids)), **eqn.params)]


def _makes_zeros(eqn: Equation) -> bool:
    """Returns whether an equation makes an array of zeros."""
    if eqn.primitive.name != "broadcast_in_dim" or not isinstance(eqn.invars[0], Literal):
        return False
    value = np.asarray(eqn.invars[0].val)
    return jnp.issubdtype(value.dtype, jnp.number) and not value.any()


def _is_multiple(eqn: Equation, place: int) -> bool:
    """Returns whether a result is a scalar times the operand at `place`, but for rounding."""
    others = [atom for i, atom in enumerate(eqn.invars) if i != place]
    if any(map(shape_of, others)):
        return False
    match eqn.primitive.name:
        case "neg" | "mul" | "copy":
            return True
        case "div":
            return place == 0
        case "convert_element_type":
            old, new = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
            return jnp.promote_types(old, new) == new
    return False


def _terms_over_zeros(patch: Patch) -> Sequence[Term]:
    """Returns a patch of zeros as terms to add; none for other patches."""
    if not isinstance(patch.base, Zeros):
        return ()
    if isinstance(patch, Added):
        return patch.terms
    return [Term(patch.ids.distinct, patch.in_rows(patch.ids), is_unique=True)]


def _of_vectors(eqn: Equation, operands: Sequence[_Value]) -> _Results:
    """Returns the result of an operation that makes or parts a vector of several arrays."""
    value = operands[0]
    params, shape = eqn.params, shape_of(eqn.outvars[0])
    match eqn.primitive.name:
        case "reshape" if isinstance(value, _Flat) and value.patch.shape == shape:
            return [value.patch]
        case "reshape" if isinstance(value, _PATCHES) and isinstance(value.base, Zeros):
            return [_Flat(value)] if len(shape) == 1 else None
        case "slice" if isinstance(value, _Vector) and params["strides"] in (None, (1,)):
            wanted = *params["start_indices"], *params["limit_indices"]
            return [x for start, end, x in value.parts if (start, end) == wanted] or None
        case "dynamic_update_slice" if isinstance(value, (Zeros, _Vector)) and len(shape) == 1:
            before = () if isinstance(value, Zeros) else value.parts
            start = number_of(eqn.invars[2])
            if start >= (before[-1][1] if before else 0):  # known, and behind the others
                end = int(start) + shape_of(eqn.invars[1])[0]
                return [_Vector(value.aval, [*before, (int(start), end, operands[1])])]
    return None
