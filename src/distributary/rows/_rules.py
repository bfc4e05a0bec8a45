"""Rules for what an equation makes of the rows of a batch and of sums over them; see `_relations`.

With 8 rows of a batch in dim 0 of `a`:

    b:f32[8] = reduce_sum[axes=(1,)] a     rows in dim 0
    c:f32[5] = reduce_sum[axes=(0,)] a     a sum over rows
    d:f32[5,8] = transpose a               rows in dim 1
    e:f32[8,8] = dot_general a d           RELATION: each row meets all others
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import jax.numpy as jnp

from distributary.rows._layouts import (
    BATCH,
    Dim,
    Dims,
    Rows,
    joined,
    plain,
    plain_dim,
    reshaped,
    size_of,
    tags_of,
)
from distributary.rows._row_wise import ELEMENTWISE, REDUCTIONS
from distributary.tracing import Atom, Equation, aval_of, shape_of

INDEPENDENT, ROWS, SUM, RELATED, UNKNOWN = range(5)

_LINEAR = frozenset(
    """
    add add_any convert_element_type copy imag neg real reduce_precision stop_gradient sub
    """.split()  # noqa: SIM905
)
# Operations whose result of a sum over the batch's data still counts as such a sum in a divisor.
_OF_DIVISORS = frozenset(
    """
    abs ceil clamp floor integer_pow max min round sign
    """.split()  # noqa: SIM905
)
_OF_MATRICES = frozenset(
    """
    cholesky cholesky_update eig eigh geqrf hessenberg householder_product lu
    lu_pivots_to_permutation qr schur svd triangular_solve tridiagonal tridiagonal_solve
    """.split()  # noqa: SIM905
)


class Value(NamedTuple):
    """The facts that are known about an array."""

    kind: int
    dims: Dims = ()
    # Rows that a loop goes through one at a time.
    hidden: tuple[tuple[int, Dim], ...] = ()
    # For rows: whether a sum over rows has been added to each.
    mixed: bool = False
    # Whether it depends on trained values, or on anything else but the batch.
    trained: bool = False
    random: bool = False
    # Whether it has come through a transposed equation; for a related value, since the relation.
    gradient: bool = False
    # For a related value, and the results that replicas combine from it: the equation that relates
    # rows and the calls around it.
    origin: tuple[Equation, ...] | None = None
    # Whether it may hold the numbers of the rows.
    counts: bool = False
    # For a sum over rows: the equation that adds them up and the calls around it.
    summed: tuple[Equation, ...] | None = None
    # For rows and sums over them: whether they have been divided by the number of rows.
    averaged: bool = False
    # For the indices of a `gather`, right after they were joined: the index of each dim.
    columns: tuple["Value", ...] = ()


#: The value of the only result, or of every result.
_Results: TypeAlias = Value | list[Value]

CONSTANT = Value(INDEPENDENT)

#: The result of a rule if rows of the batch meet.
RELATION = Value(RELATED)
_DONT_KNOW = Value(UNKNOWN)


@final
class _Verdict(Exception):  # noqa: N818  (no error)
    """The end of a rule, from inside of it: `RELATION` or `_DONT_KNOW`."""

    def __init__(self, value: Value) -> None:
        self.value = value


def of_rows(eqn: Equation, operands: list[Value]) -> _Results:
    """Returns the value of an equation of rows and sums, or a list with one for every result."""
    try:
        return _rule_of(eqn.primitive.name)(eqn, operands)
    except _Verdict as verdict:
        return verdict.value


def _rule_of(name: str) -> Callable[[Equation, list[Value]], _Results]:
    if name in _RULES:
        return _RULES[name]
    if name in _MOVES:
        return _moved
    if name in ELEMENTWISE:
        return _elementwise
    if name in REDUCTIONS:
        return _reduction
    if name in _OF_MATRICES or name == "fft":
        return _of_matrices
    for start, rule in _FAMILIES.items():
        if name.startswith(start):
            return rule
    return _like_operands


def is_independent(values: Iterable[Value]) -> bool:
    """Returns whether none of the values depends on the batch."""
    return all(value.kind == INDEPENDENT for value in values)


def either(first: Value, second: Value) -> Value:
    """Returns the value of a result that is one or the other."""
    if first == second:
        return first
    if RELATED in (first.kind, second.kind):
        return first if first.kind == RELATED else second
    if first.kind == INDEPENDENT:
        first, second = second, first
    alike = first.kind == second.kind and first[1:3] == second[1:3]
    if second.kind != INDEPENDENT and (not alike or first.kind == UNKNOWN):
        return Value(UNKNOWN, gradient=first.gradient or second.gradient)
    return first._replace(
        mixed=first.mixed or second.mixed,
        counts=first.counts or second.counts,
        **flags_of([first, second]),
    )


def flags_of(values: Sequence[Value]) -> dict[str, Any]:
    """Returns the facts that hold for what is computed from values if they hold for any of them."""
    names = ("trained", "random", "gradient")
    return {name: any(getattr(value, name) for value in values) for name in names}


# Parts of rules


def _dims(value: Value, atom: Atom) -> Dims:
    return value.dims if value.kind == ROWS else plain(shape_of(atom))


def _dims_of_all(eqn: Equation, operands: Iterable[Value]) -> list[Dims]:
    return [_dims(value, atom) for value, atom in zip(operands, eqn.invars, strict=True)]


def _with(dims: Dims, at: int, dim: Dim) -> Dims:
    return (*dims[:at], dim, *dims[at + 1 :])


def _all_tags(dims: Iterable[Dim]) -> list[Rows]:
    return [rows for dim in dims for rows in tags_of(dim)]


def _has_rows(value: Value, dim: int) -> bool:
    return value.kind == ROWS and bool(tags_of(value.dims[dim]))


def _active(operands: Iterable[Value]) -> list[Value]:
    return [value for value in operands if value.kind != INDEPENDENT]


def _rows_among(operands: Iterable[Value]) -> list[Value]:
    return [value for value in operands if value.kind == ROWS]


def _summed(operands: Iterable[Value]) -> bool:
    """Returns whether sums over rows are among the operands."""
    return any(value.kind == SUM or value.mixed for value in operands)


def _are_trained(values: Iterable[Value]) -> bool:
    return any(value.trained for value in values)


def _if_trained(values: Iterable[Value]) -> Value:
    """Returns the value of an operation that relates rows, which data may be."""
    return RELATION if _are_trained(values) else _DONT_KNOW


def _is_exact(atom: Atom) -> bool:
    """Returns whether an array holds integers or booleans."""
    return not jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)


def _in_other_order(dim: Dim, size: int, random: bool) -> Dim:
    """Returns `size` of the rows of a dim, in an order that is not known."""
    return ((size, Rows(("random" if random else "moved", dim))),)


def _nonlinear(eqn: Equation, operands: Sequence[Value], otherwise: Value = _DONT_KNOW) -> Value:
    """Returns `otherwise`, unless sums over rows are among the operands."""
    if not _summed(operands):
        return otherwise
    if not _are_trained(operands):
        if _is_exact(eqn.outvars[0]):
            return CONSTANT
        if eqn.primitive.name in _OF_DIVISORS:
            return Value(SUM)
    return _DONT_KNOW if aval_of(eqn.outvars[0]).dtype == bool else RELATION


def _meeting(operands: Sequence[Value]) -> Value:
    """Returns the value of an elementwise operation that is linear in sums."""
    rows = _rows_among(operands)
    if not rows:
        return Value(SUM)
    dims = joined([value.dims for value in rows])
    if dims is None or len({value.hidden for value in rows}) > 1:
        return rows[0] if _are_shuffled_data(operands) else RELATION
    return Value(ROWS, dims, mixed=_summed(operands))


def _are_shuffled_data(operands: Sequence[Value]) -> bool:
    """Returns whether operands are data alone, and rows in a random order are among them."""
    return not _are_trained(operands) and any(
        isinstance(rows.axis, tuple) and rows.axis[0] == "random"
        for value in _rows_among(operands)
        for rows in _all_tags(value.dims)
    )


def _of_factors(active: Sequence[Value]) -> Value | None:
    """Returns the value of a product if that does not depend on where its factors have rows."""
    if len(active) > 1 and _summed(active):
        return _if_trained(active)
    return Value(SUM) if all(value.kind == SUM for value in active) else None


# Elementwise operations


def _elementwise(eqn: Equation, operands: list[Value]) -> Value:
    made = _of_elements(eqn, operands)
    if made.kind != ROWS:
        return made
    # Dims of size 1 are repeated to fit the others.
    shape = plain(shape_of(eqn.outvars[0]))
    if len(shape) != len(made.dims):  # a sum over a dim, by a collective that has no axis
        return _DONT_KNOW
    fitted = [a if tags_of(a) else b for a, b in zip(made.dims, shape, strict=True)]
    return made._replace(dims=tuple(fitted))


def _of_elements(eqn: Equation, operands: list[Value]) -> Value:
    active = _active(operands)
    match eqn.primitive.name:
        case name if name in _LINEAR:
            return _meeting(active)
        case "mul":
            counts = [v for v in active if v.kind == SUM and not v.trained]
            if len(counts) < len(active) and _are_scalars(eqn, operands, counts):
                active = [value for value in active if value not in counts]
            return _of_factors(active) or _meeting(active)
        case "div":
            numerator, divisor = operands
            if divisor.kind == SUM and not divisor.trained:
                return CONSTANT if numerator.kind == INDEPENDENT else numerator
            if divisor.kind == INDEPENDENT:
                return numerator
            if numerator.kind == INDEPENDENT:
                return _nonlinear(eqn, active, divisor)
            return _of_factors(active) or _meeting(active)
        case "select_n":
            which, cases = operands[0], _active(operands[1:])
            if which.kind == INDEPENDENT:
                return _meeting(cases)
            if which.kind == ROWS and not which.mixed and not which.trained:
                return _meeting(active)
        # What depends on the result of a comparison depends on the sums: in JAX 0.12, gradients of
        # `max` do so. That a number is compared with itself, for `isnan`, has the name `ne`.
        case "eq" | "ge" | "gt" | "le" | "lt" if _are_trained(active):
            return _meeting(active)
    return _nonlinear(eqn, active, _meeting(active))


def _are_scalars(eqn: Equation, operands: list[Value], counts: list[Value]) -> bool:
    """Returns whether each factor in `counts` is one number, as divisors are."""
    return all(
        value not in counts or math.prod(shape_of(atom)) == 1
        for value, atom in zip(operands, eqn.invars, strict=True)
    )


def _like_operands(eqn: Equation, operands: list[Value]) -> Value:
    """Returns rows for an unknown equation if its operands and results have one shape."""
    rows = [(v, atom) for v, atom in zip(operands, eqn.invars, strict=True) if v.kind == ROWS]
    shapes = {shape_of(atom) for atom in (*(atom for _, atom in rows), *eqn.outvars)}
    if _summed(operands) or len(shapes) != 1 or len({v.dims for v, _ in rows}) != 1:
        return _DONT_KNOW
    return rows[0][0]


# Reductions


def _over(value: Value, axes: Sequence[int]) -> tuple[Dims, list[Rows], bool]:
    """Returns the dims without `axes`, the rows in these, and whether they were small groups."""
    removed = _all_tags(value.dims[axis] for axis in axes)
    kept = tuple([dim for i, dim in enumerate(value.dims) if i not in set(axes)])
    left = _left(kept, value)
    # A split of the batch keeps successive rows together, so groups of them stay whole.
    grouped = bool(left) and all(
        rows.axis == BATCH and rows.stride < min(r.stride for r in left) for rows in removed
    )
    return kept, removed, grouped


def _left(dims: Iterable[Dim], value: Value) -> list[Rows]:
    """Returns the rows in some dims and in the loops around."""
    return _all_tags((*dims, *(dim for _, dim in value.hidden)))


def _reduce_sum(eqn: Equation, operands: list[Value]) -> Value:
    value = operands[0]
    if value.kind == SUM:
        return value
    kept, removed, grouped = _over(value, eqn.params["axes"])
    mixed = value.mixed or bool(removed and not grouped)
    return value._replace(dims=kept, mixed=mixed)


def _reduction(eqn: Equation, operands: list[Value]) -> Value:
    value = operands[0]
    if _summed(operands):
        return _nonlinear(eqn, operands)
    kept, removed, grouped = _over(value, eqn.params["axes"])
    if removed and not grouped:
        if not value.trained and not _left(kept, value) and not value.hidden:
            return CONSTANT  # such as the loudest sound of a batch, which bounds all
        return _nonlinear(eqn, [value._replace(mixed=True)])
    return value._replace(dims=kept)


def _cumulative(eqn: Equation, operands: list[Value]) -> Value:
    value = operands[0]
    if _has_rows(value, eqn.params["axis"]):
        return _DONT_KNOW if _is_exact(eqn.outvars[0]) and not value.trained else RELATION
    return value if eqn.primitive.name == "cumsum" else _nonlinear(eqn, operands, value)


def _windows(eqn: Equation, operands: list[Value]) -> Value:
    params = eqn.params
    windows = params["window_dimensions"]
    padding = params.get("padding") or [(0, 0)] * len(windows)
    rows = _rows_among(operands)
    for value in rows:
        for dim, window, pad in zip(value.dims, windows, padding, strict=True):
            if tags_of(dim) and (window != 1 or tuple(pad) != (0, 0)):
                return _if_trained([value])
    if not rows:
        linear = eqn.primitive.name == "reduce_window_sum"
        return Value(SUM) if linear else _nonlinear(eqn, operands)
    if joined([tuple([dim if tags_of(dim) else () for dim in v.dims]) for v in rows]) is None:
        return _DONT_KNOW
    made = plain(shape_of(eqn.outvars[0]))
    dims = [a if tags_of(a) else b for a, b in zip(rows[0].dims, made, strict=True)]
    value = rows[0]._replace(dims=tuple(dims))
    if eqn.primitive.name in ("reduce_window_sum", "select_and_scatter_add"):
        return value
    return _nonlinear(eqn, operands, value)


# Operations that only move elements


def _moved(eqn: Equation, operands: list[Value]) -> Value:
    value = operands[0]
    if not is_independent(operands[1:]):
        # The batch decides where elements go, or what is between them.
        return _DONT_KNOW
    if value.kind == SUM:
        return value
    random = any(v.random for v in operands[1:])
    return value._replace(dims=tuple(_MOVES[eqn.primitive.name](eqn, value.dims, random)))


def _broadcast(eqn: Equation, dims: Dims, random: bool) -> Iterable[Dim]:
    made = list(plain(eqn.params["shape"]))
    places = zip(eqn.params["broadcast_dimensions"], dims, shape_of(eqn.invars[0]), strict=True)
    for at, dim, size in places:
        if size != 1:
            made[at] = dim
    return made


def _reshape(eqn: Equation, dims: Dims, random: bool) -> Iterable[Dim]:
    made = reshaped(dims, shape_of(eqn.outvars[0]))
    if made is None:
        raise _Verdict(_DONT_KNOW)
    return made


def _transpose(eqn: Equation, dims: Dims, random: bool) -> Iterable[Dim]:
    return [dims[i] for i in eqn.params["permutation"]]


def _rev(eqn: Equation, dims: Dims, random: bool) -> Iterable[Dim]:
    made = list(dims)
    for i in eqn.params["dimensions"]:
        if tags_of(dims[i]):
            made[i] = ((size_of(dims[i]), Rows(("reversed", dims[i]))),)
    return made


def _slice(eqn: Equation, dims: Dims, random: bool) -> Iterable[Dim]:
    shape = shape_of(eqn.outvars[0])
    strides = eqn.params["strides"] or (1,) * len(shape)
    return map(_cut, dims, eqn.params["start_indices"], shape, strides)


def _cut(dim: Dim, start: int, size: int, stride: int = 1) -> Dim:
    """Returns the factors of the elements `start`, `start + stride`, ... of a dim."""
    if not tags_of(dim):
        return plain_dim(size)
    if size == size_of(dim) and stride == 1:
        return dim
    rows = dim[0][1]
    if len(dim) == 1 and rows is not None:
        if isinstance(rows.axis, tuple) and rows.axis[0] == "joined" and stride == rows.stride == 1:
            begin = rows.start + start
            for piece in rows.axis[1]:
                if begin == 0 and size_of(piece) == size:
                    return tuple(piece)
                begin -= size_of(piece)
        return ((size, Rows(rows.axis, rows.stride * stride, rows.start + start * rows.stride)),)
    inner = size_of(dim[1:])
    if rows is None and stride == 1 and start % inner == size % inner == 0:
        return (*plain_dim(size // inner), *dim[1:])
    raise _Verdict(_DONT_KNOW)


def _dynamic_slice(eqn: Equation, dims: Dims, random: bool) -> Iterable[Dim]:
    made = []
    sizes = zip(dims, shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), strict=True)
    for dim, before, after in sizes:
        if not tags_of(dim):
            made.append(plain_dim(after))
        elif before == after:
            made.append(dim)
        else:
            made.append(_in_other_order(dim, after, random) if after > 1 else ())
    return made


def _tile(eqn: Equation, dims: Dims, random: bool) -> Iterable[Dim]:
    shape = shape_of(eqn.outvars[0])
    return [
        (*plain_dim(times), *dim) if tags_of(dim) else plain_dim(size)
        for dim, times, size in zip(dims, eqn.params["reps"], shape, strict=True)
    ]


def _pad(eqn: Equation, dims: Dims, random: bool) -> Iterable[Dim]:
    return map(_padded, dims, eqn.params["padding_config"], shape_of(eqn.outvars[0]))


def _padded(dim: Dim, padding: tuple[int, int, int], size: int) -> Dim:
    low, _, inside = padding
    if padding == (0, 0, 0):
        return dim
    if not tags_of(dim):
        return plain_dim(size)
    count = size_of(dim)
    rows = dim[0][1]
    if inside == 0 and low % count == size % count == 0 and rows is not None and not rows.start:
        return ((size // count, None), *dim)
    if len(dim) == 1 and rows is not None and rows.stride == inside + 1 and rows.start == low:
        # The padding puts back the elements that a slice left out.
        return ((size, Rows(rows.axis)),)
    inner = size_of(dim[1:])
    if rows is None and inside == 0 and low % inner == size % inner == 0:
        return ((size // inner, None), *dim[1:])
    raise _Verdict(_DONT_KNOW)


def _unstack(eqn: Equation, dims: Dims, random: bool) -> Iterable[Dim]:
    at = eqn.params["axis"]
    return (*dims[:at], *dims[at + 1 :])


def _split(eqn: Equation, operands: list[Value]) -> _Results:
    value, axis, sizes = operands[0], eqn.params["axis"], eqn.params["sizes"]
    if value.kind == SUM:
        return value
    starts = itertools.accumulate(sizes, initial=0)
    return [_part(value, axis, start, size) for start, size in zip(starts, sizes, strict=False)]


def _part(value: Value, axis: int, start: int, size: int) -> Value:
    try:
        dim = _cut(value.dims[axis], start, size)
    except _Verdict as verdict:
        return verdict.value  # other parts may have whole rows
    return value._replace(dims=_with(value.dims, axis, dim))


# Operations that put several arrays together


def _dynamic_update_slice(eqn: Equation, operands: list[Value]) -> Value:
    value = operands[0]
    if not is_independent(operands[2:]):
        return _DONT_KNOW
    rows = _rows_among(operands)
    if not rows:
        return Value(SUM)
    own, new = _dims_of_all(eqn, operands)[:2]
    sizes = zip(own, new, shape_of(eqn.invars[0]), shape_of(eqn.invars[1]), strict=True)
    if any(a != b and (tags_of(dim) or tags_of(of_new)) for dim, of_new, a, b in sizes):
        return _DONT_KNOW
    made = tuple([b if tags_of(b) else a for a, b in zip(own, new, strict=True)])
    if len(rows) == 2 and made != value.dims:
        return _DONT_KNOW
    return rows[0]._replace(dims=made, mixed=_summed(operands))


def _concatenate(eqn: Equation, operands: list[Value]) -> Value:
    at = eqn.params["dimension"]
    rows = _rows_among(operands)
    if not rows:
        return Value(SUM)
    size = shape_of(eqn.outvars[0])[at]
    dims = joined([_with(value.dims, at, ()) for value in rows])
    if dims is None or len({value.hidden for value in rows}) > 1:
        return _DONT_KNOW if _are_shuffled_data(operands) else RELATION
    mixed = _summed(operands)
    dim = plain_dim(size)
    if any(_has_rows(value, at) for value in rows):
        if mixed:
            return _DONT_KNOW
        dim = _joined_pieces([dims[at] for dims in _dims_of_all(eqn, operands)], size)
    columns = tuple(operands) if len(operands) == size and _is_exact(eqn.outvars[0]) else ()
    return rows[0]._replace(dims=_with(dims, at, dim), mixed=mixed, columns=columns)


def _joined_pieces(pieces: list[Dim], size: int) -> Dim:
    if all(piece == pieces[0] for piece in pieces):
        return (*plain_dim(len(pieces)), *pieces[0])
    tags = [piece[0][1] if len(piece) == 1 else None for piece in pieces]
    first = tags[0]
    if first is not None:
        sizes = [size_of(piece) * first.stride for piece in pieces]
        starts = itertools.accumulate(sizes[:-1], initial=first.start)
        following = [Rows(first.axis, first.stride, start) for start in starts]
        if tags == following:
            return ((size, first),)
    return ((size, Rows(("joined", tuple(pieces)))),)


def _stack(eqn: Equation, operands: list[Value]) -> Value:
    made = _meeting(_active(operands))
    if made.kind != ROWS:
        return made
    at = eqn.params["axis"]
    return made._replace(dims=(*made.dims[:at], plain_dim(len(operands)), *made.dims[at:]))


# Sorting, gathering, scattering


def _sort(eqn: Equation, operands: list[Value]) -> _Results:
    at = eqn.params["dimension"]
    if not any(_has_rows(value, at) for value in operands):
        return _nonlinear(eqn, operands, _meeting(_active(operands)))
    keys = operands[: eqn.params["num_keys"]]
    if not is_independent(keys):
        exact = all(map(_is_exact, eqn.outvars))
        return _DONT_KNOW if exact and not _are_trained(operands) else RELATION
    size = shape_of(eqn.outvars[0])[at]
    random = any(value.random for value in keys)
    return [
        value._replace(dims=_with(value.dims, at, _in_other_order(value.dims[at], size, random)))
        if _has_rows(value, at)
        else value
        for value in operands
    ]


def _top_k(eqn: Equation, operands: list[Value]) -> Value:
    value = operands[0]
    if _summed(operands):
        return RELATION
    at = eqn.params.get("axis", -1) % len(value.dims)
    if tags_of(value.dims[at]):
        return _if_trained([value])
    return value._replace(dims=_with(value.dims, at, plain_dim(shape_of(eqn.outvars[0])[at])))


def _gather(eqn: Equation, operands: list[Value]) -> Value:
    value, index = operands
    if index.kind == SUM or index.mixed:
        return _DONT_KNOW
    if value.kind == SUM:
        if index.kind == INDEPENDENT:
            return value
        if value.trained:
            return RELATION  # not trained: such as weights of classes, counted in the batch
    dims = list(plain(shape_of(eqn.outvars[0])))
    numbered = _numbered_dims(eqn)
    for out, dim in zip(numbered, _dims(index, eqn.invars[1])[:-1], strict=True):
        dims[out] = dim
    if value.kind != ROWS:
        return Value(ROWS, tuple(dims))
    _place_windows(eqn, operands, dims)
    numbers = eqn.params["dimension_numbers"]
    of_index = numbers.start_indices_batching_dims
    for i, k in zip(numbers.operand_batching_dims, of_index, strict=True):
        _place(dims, numbered[k], value.dims[i], RELATION)
    _place_taken_rows(eqn, operands, dims)
    return value._replace(dims=tuple(dims))


def _numbered_dims(eqn: Equation) -> list[int]:
    """Returns the dims of the result of a `gather` that count its indices."""
    offset_dims = eqn.params["dimension_numbers"].offset_dims
    return [i for i in range(len(shape_of(eqn.outvars[0]))) if i not in offset_dims]


def _place_windows(eqn: Equation, operands: list[Value], dims: list[Dim]) -> None:
    """Sets the dims of the result of a `gather` that are parts of dims of its operand."""
    value, index = operands
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(len(sizes)) if i not in gone]
    for out, i in zip(numbers.offset_dims, kept, strict=True):
        dim = value.dims[i]
        if not tags_of(dim):
            continue
        if sizes[i] == shape_of(eqn.invars[0])[i]:
            dims[out] = dim
        elif index.kind == ROWS:
            raise _Verdict(_DONT_KNOW)
        else:
            dims[out] = _in_other_order(dim, sizes[i], index.random) if sizes[i] > 1 else ()


def _place_taken_rows(eqn: Equation, operands: list[Value], dims: list[Dim]) -> None:
    """Sets the dim of the result of a `gather` for rows that it takes by numbers."""
    value, index = operands
    numbers = eqn.params["dimension_numbers"]
    places = [i for i in numbers.collapsed_slice_dims if tags_of(value.dims[i])]
    taken = [value.dims[i] for i in places]
    if not taken:
        return
    if index.kind != INDEPENDENT:
        if value.trained and any(_is_data(_column(eqn, index, i)) for i in places):
            raise _Verdict(RELATION)
        # A row that is taken by another number from the batch counts as its own row.
        return
    numbered = _numbered_dims(eqn)
    if len(taken) > 1 or len(numbered) != 1:
        raise _Verdict(_DONT_KNOW)
    size = shape_of(eqn.outvars[0])[numbered[0]]
    # `x[arange(n), k]` takes the rows in their order.
    in_order = index.counts and not index.random and len(numbers.start_index_map) > 1
    own = taken[0] if in_order else _in_other_order(taken[0], size, index.random)
    dims[numbered[0]] = own if size > 1 else ()


def _column(eqn: Equation, index: Value, dim: int) -> Value:
    """Returns the part of the index of a `gather` that says where in a dim of the operand."""
    targets = eqn.params["dimension_numbers"].start_index_map
    if len(index.columns) != len(targets):
        return index
    return index.columns[targets.index(dim)]


def _is_data(index: Value) -> bool:
    """Returns whether an index is a number that the batch holds, such as the node of an edge."""
    return index.kind == ROWS and not (index.trained or index.counts or index.random)


def _place(dims: list[Dim], at: int, dim: Dim, otherwise: Value) -> None:
    """Sets a dim to one with rows; ends with `otherwise` if it has other rows already."""
    if not tags_of(dim):
        return
    if tags_of(dims[at]) and dims[at] != dim:
        raise _Verdict(otherwise)
    dims[at] = dim


def _scatter(eqn: Equation, operands: list[Value]) -> Value:
    value, index, _ = operands
    is_sum = eqn.primitive.name.endswith("add")
    mixed = _summed(operands)
    if index.kind == SUM or index.mixed or value.kind == SUM:
        return _DONT_KNOW
    if mixed and not is_sum and eqn.primitive.name != "scatter":
        return _DONT_KNOW
    numbers = eqn.params["dimension_numbers"]
    own, of_index, updates = _dims_of_all(eqn, operands)
    dims = list(own)
    shape, sizes = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(len(shape)) if i not in gone]
    for i, k in zip(kept, numbers.update_window_dims, strict=True):
        if tags_of(updates[k]) and shape[i] != sizes[k]:
            return _DONT_KNOW
        _place(dims, i, updates[k], _DONT_KNOW)
    scattered = [dim for k, dim in enumerate(updates) if k not in numbers.update_window_dims]
    rows = [a if tags_of(a) else b for a, b in zip(scattered, of_index[:-1], strict=True)]
    in_batch = numbers.scatter_indices_batching_dims
    for i, k in zip(numbers.operand_batching_dims, in_batch, strict=True):
        _place(dims, i, rows[k], RELATION)
    left = [dim for k, dim in enumerate(rows) if k not in in_batch and tags_of(dim)]
    for dim in left:
        _put_back(eqn, operands, dims, dim)
    if not left or _all_tags(dims):
        return Value(ROWS, tuple(dims), mixed=mixed)
    return Value(SUM) if is_sum else _DONT_KNOW


def _put_back(eqn: Equation, operands: list[Value], dims: list[Dim], dim: Dim) -> None:
    """Sets the dim of the result of a `scatter` to which rows of the updates go back, if any."""
    value, index, _ = operands
    shape = shape_of(eqn.invars[0])
    targets = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    axis = tags_of(dim)[0].axis
    if len(dim) == 1 and isinstance(axis, tuple) and axis[0] in ("random", "moved"):
        # The scatter puts back the rows that a gather took.
        places, before = [i for i in targets if not tags_of(dims[i])], axis[1]
        is_back = len(places) == 1 and size_of(before) == shape[places[0]]
    else:
        # These may be rows that go back to where they came from.
        places, before = [i for i in targets if shape[i] == size_of(dim)], dim
        if not places and not (value.kind == ROWS and _all_tags(value.dims)):
            # Places of rows that lie in one dim with other elements, as in `arange(n) * k + label`.
            if index.kind == ROWS and index.counts:
                raise _Verdict(_DONT_KNOW)
            return
        is_back = len(places) == 1 and len(targets) > 1 and index.counts
    if not is_back:
        raise _Verdict(_DONT_KNOW)
    dims[places[0]] = before


# Products of matrices


def _of_matrices(eqn: Equation, operands: list[Value]) -> _Results:
    is_fft = eqn.primitive.name == "fft"
    rows = _rows_among(operands)
    if _summed(operands) and not is_fft:
        return _nonlinear(eqn, operands)
    if not rows:
        return Value(SUM)
    last = len(eqn.params["fft_lengths"]) if is_fft else 2
    leading = len(rows[0].dims) - last
    if any(_all_tags(value.dims[max(0, len(value.dims) - last) :]) for value in rows):
        return _DONT_KNOW if is_fft else RELATION
    if len({value.dims[:leading] for value in rows}) > 1:
        return _DONT_KNOW
    return [
        rows[0]._replace(dims=(*rows[0].dims[:leading], *plain(shape_of(out)[leading:])))
        for out in eqn.outvars
    ]


def _dot(eqn: Equation, operands: list[Value]) -> Value:
    active = _active(operands)
    known = _of_factors(active)
    if known is not None:
        return known
    contract, batch = eqn.params["dimension_numbers"]
    all_dims = _dims_of_all(eqn, operands)
    contracted, paired = [
        [(all_dims[0][i], all_dims[1][k]) for i, k in zip(*pairs, strict=True)]
        for pairs in (contract, batch)
    ]
    free = [
        [dim for i, dim in enumerate(dims) if i not in (*contract[n], *batch[n])]
        for n, dims in enumerate(all_dims)
    ]
    removed = _all_tags(dim for pair in contracted for dim in pair)
    if len(active) == 2:
        # Rows meet if they are in a dim of both that does not pair them, or in two kinds of dims.
        meet = [a != b for a, b in (*contracted, *paired) if tags_of(a) or tags_of(b)]
        kinds = [removed, *map(_all_tags, free)]
        if any(meet) or sum(map(bool, kinds)) > 1 or active[0].hidden != active[1].hidden:
            return RELATION
    dims = (*(a if tags_of(a) else b for a, b in paired), *free[0], *free[1])
    mixed = _summed(active) or bool(removed and _left(dims, active[0]))
    return active[0]._replace(dims=dims, mixed=mixed)


def _convolution(eqn: Equation, operands: list[Value]) -> Value:
    active = _active(operands)
    known = _of_factors(active)
    if known is not None:
        return known
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    first, second = _dims_of_all(eqn, operands)
    is_grouped = eqn.params["feature_group_count"] * eqn.params["batch_group_count"] != 1
    dims = list(plain(shape_of(eqn.outvars[0])))
    of_batch, of_filters = first[lhs[0]], second[rhs[0]]
    of_image = [*(first[i] for i in lhs[2:]), *(second[i] for i in rhs[2:])]
    is_single = len(active) == 1
    if _all_tags(of_image):
        return _DONT_KNOW
    if tags_of(of_batch) and is_single and eqn.params["batch_group_count"] == 1:
        dims[out[0]] = of_batch
        return active[0]._replace(dims=tuple(dims))
    if is_grouped or tags_of(of_batch):
        return _DONT_KNOW
    if tags_of(of_filters):
        dims[out[1]] = of_filters
        return active[0]._replace(dims=tuple(dims)) if is_single else RELATION
    return Value(SUM) if is_single or first[lhs[1]] == second[rhs[1]] else _DONT_KNOW


_MOVES: dict[str, Callable[[Equation, Dims, bool], Iterable[Dim]]] = {
    "broadcast_in_dim": _broadcast,
    "dynamic_slice": _dynamic_slice,
    "expand_dims": _reshape,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "squeeze": _reshape,
    "tile": _tile,
    "transpose": _transpose,
    "unstack": _unstack,
}
"""The dims of the result, from those of an operand with rows, by name of the operation."""

_RULES: dict[str, Callable[[Equation, list[Value]], _Results]] = {
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "reduce_sum": _reduce_sum,
    "sort": _sort,
    "split": _split,
    "stack": _stack,
    "top_k": _top_k,
}

_FAMILIES: dict[str, Callable[[Equation, list[Value]], _Results]] = {
    "cum": _cumulative,
    "reduce_window": _windows,
    "scatter": _scatter,
    "select_and_": _windows,
}
"""Rules by the beginning of the name."""
