"""Rules for what an equation makes of the rows of a batch and of sums over them; see `_relations`.

With 8 rows of a batch in dim 0 of `a`:

    b:f32[8] = reduce_sum[axes=(1,)] a     rows in dim 0
    c:f32[5] = reduce_sum[axes=(0,)] a     a sum over rows
    d:f32[5,8] = transpose a               rows in dim 1
    e:f32[8,8] = dot_general a d           RELATION: each row meets all others
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from distributary.rows._layouts import BATCH, Dims, Factor, Rows, joined, plain, reshaped, tags_of
from distributary.rows._row_wise import ELEMENTWISE
from distributary.tracing import Equation

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
_REDUCTIONS = frozenset(
    """
    argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_xor
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
    hidden: tuple[Any, ...] = ()
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


CONSTANT = Value(INDEPENDENT)

#: The result of a rule if rows of the batch meet.
RELATION = Value(RELATED)
_DONT_KNOW = Value(UNKNOWN)


def of_rows(eqn: Equation, operands: list[Value]) -> Any:
    """Returns the value of an equation of rows and sums, or a list with one for every result."""
    name = eqn.primitive.name
    rule = _RULES.get(name)
    if rule is not None:
        return rule(eqn, operands)
    if name in ELEMENTWISE:
        made = _elementwise(eqn, operands)
        if made.kind != ROWS:
            return made
        # Dims of size 1 are repeated to fit the others.
        shape = plain(eqn.outvars[0].aval.shape)
        if len(shape) != len(made.dims):  # a sum over a dim, by a collective that has no axis
            return _DONT_KNOW
        fitted = [a if tags_of(a) else b for a, b in zip(made.dims, shape, strict=True)]
        return made._replace(dims=tuple(fitted))
    if name in _REDUCTIONS:
        return _reduction(eqn, operands)
    if name in _OF_MATRICES or name == "fft":
        return _of_matrices(eqn, operands)
    if name.startswith(("reduce_window", "select_and_")):
        return _windows(eqn, operands)
    if name.startswith("cum"):
        return _cumulative(eqn, operands)
    if name.startswith("scatter"):
        return _scatter(eqn, operands)
    return _like_operands(eqn, operands)


def is_independent(values: Sequence[Value]) -> bool:
    """Returns whether none of the values depends on the batch."""
    return all(value.kind == INDEPENDENT for value in values)


def either(first: Value, second: Value) -> Value:
    """Returns the value of a result that is one or the other."""
    if first == second:
        return first
    flags: dict[str, Any] = {
        "trained": first.trained or second.trained,
        "random": first.random or second.random,
        "gradient": first.gradient or second.gradient,
        "counts": first.counts or second.counts,
    }
    if first.kind == RELATED or second.kind == RELATED:
        return first if first.kind == RELATED else second
    if first.kind == INDEPENDENT:
        return second._replace(**flags)
    if second.kind == INDEPENDENT:
        return first._replace(**flags)
    if first.kind == second.kind == ROWS and first.hidden == second.hidden:
        if first.dims == second.dims:
            return first._replace(mixed=first.mixed or second.mixed, **flags)
    elif first.kind == second.kind == SUM:
        return first._replace(**flags)
    return Value(UNKNOWN, gradient=flags["gradient"])


def _dims(value: Value, atom: Any) -> Dims:
    return value.dims if value.kind == ROWS else plain(atom.aval.shape)


def _has_rows(value: Value, dim: int) -> bool:
    return value.kind == ROWS and bool(tags_of(value.dims[dim]))


def _is_exact(aval: Any) -> bool:
    """Returns whether an array holds integers or booleans."""
    return not jnp.issubdtype(aval.dtype, jnp.inexact)


def _summed(operands: Sequence[Value]) -> list[Value]:
    return [value for value in operands if value.kind == SUM or value.mixed]


def _nonlinear(eqn: Equation, operands: Sequence[Value], otherwise: Any) -> Any:
    """Returns `otherwise`, unless sums over rows are among the operands."""
    if not _summed(operands):
        return otherwise
    aval = eqn.outvars[0].aval
    if not any(value.trained for value in operands):
        if _is_exact(aval):
            return CONSTANT
        if eqn.primitive.name in _OF_DIVISORS:
            return Value(SUM)
    return _DONT_KNOW if aval.dtype == bool else RELATION


def _meeting(operands: Sequence[Value]) -> Any:
    """Returns the value of an elementwise operation that is linear in sums."""
    rows = [value for value in operands if value.kind == ROWS]
    if not rows:
        return Value(SUM)
    dims = joined([value.dims for value in rows])
    if dims is None or len({value.hidden for value in rows}) > 1:
        if not any(value.trained for value in operands) and _are_shuffled(rows):
            return rows[0]
        return RELATION
    return Value(ROWS, dims, mixed=bool(_summed(operands)))


def _are_shuffled(rows: Sequence[Value]) -> bool:
    """Returns whether rows in a random order are among them."""
    return any(
        isinstance(rows.axis, tuple) and rows.axis[0] == "random"
        for value in rows
        for dim in value.dims
        for rows in tags_of(dim)
    )


def _elementwise(eqn: Equation, operands: list[Value]) -> Any:
    name = eqn.primitive.name
    active = [value for value in operands if value.kind != INDEPENDENT]
    if name in _LINEAR:
        return _meeting(active)
    if name == "mul":
        counts = [v for v in active if v.kind == SUM and not v.trained]
        if len(active) > 1 and len(counts) < len(active) and _are_scalars(eqn, operands, counts):
            active = [value for value in active if value not in counts]
        return _meeting(active) if len(active) == 1 else _product(active)
    if name == "div":
        numerator, divisor = operands
        if divisor.kind == SUM and not divisor.trained:
            return CONSTANT if numerator.kind == INDEPENDENT else numerator
        if divisor.kind == INDEPENDENT:
            return numerator
        return (
            _product(active) if numerator.kind != INDEPENDENT else _nonlinear(eqn, active, divisor)
        )
    if name == "select_n":
        which, cases = operands[0], [v for v in operands[1:] if v.kind != INDEPENDENT]
        if which.kind == INDEPENDENT:
            return _meeting(cases)
        if which.kind == ROWS and not which.mixed and not which.trained:
            return _meeting(active)
    return _nonlinear(eqn, active, _meeting(active))


def _are_scalars(eqn: Equation, operands: list[Value], counts: list[Value]) -> bool:
    """Returns whether each factor in `counts` is one number, as divisors are."""
    return bool(counts) and all(
        value not in counts or not atom.aval.shape or math.prod(atom.aval.shape) == 1
        for value, atom in zip(operands, eqn.invars, strict=True)
    )


def _product(active: Sequence[Value]) -> Any:
    if _summed(active):
        return RELATION if any(value.trained for value in active) else _DONT_KNOW
    return _meeting(active)


def _like_operands(eqn: Equation, operands: list[Value]) -> Any:
    """Returns rows for an unknown equation if its operands and results have one shape."""
    rows = [(v, a) for v, a in zip(operands, eqn.invars, strict=True) if v.kind == ROWS]
    shapes = {tuple(getattr(a.aval, "shape", ())) for _, a in rows}
    shapes |= {tuple(getattr(v.aval, "shape", ())) for v in eqn.outvars}
    if _summed(operands) or len(shapes) != 1 or len({v.dims for v, _ in rows}) != 1:
        return _DONT_KNOW
    return rows[0][0]


def _over(value: Value, axes: Sequence[int]) -> tuple[Dims, list[Rows], bool]:
    """Returns the dims without `axes`, the rows in these, and whether they were small groups."""
    removed = [rows for axis in axes for rows in tags_of(value.dims[axis])]
    kept = tuple([dim for i, dim in enumerate(value.dims) if i not in set(axes)])
    left = [rows for dim in kept for rows in tags_of(dim)]
    left += [rows for _, factors in value.hidden for rows in tags_of(factors)]
    # A split of the batch keeps successive rows together, so groups of them stay whole.
    grouped = bool(left) and all(
        rows.axis == BATCH and rows.stride < min(r.stride for r in left) for rows in removed
    )
    return kept, removed, grouped


def _reduce_sum(eqn: Equation, operands: list[Value]) -> Any:
    value = operands[0]
    if value.kind == SUM:
        return value
    kept, removed, grouped = _over(value, eqn.params["axes"])
    mixed = value.mixed or bool(removed and not grouped)
    return value._replace(dims=kept, mixed=mixed)


def _reduction(eqn: Equation, operands: list[Value]) -> Any:
    value = operands[0]
    if value.kind == SUM or value.mixed:
        return _nonlinear(eqn, operands, None)
    kept, removed, grouped = _over(value, eqn.params["axes"])
    if removed and not grouped:
        if not value.trained and not any(map(tags_of, kept)) and not value.hidden:
            return CONSTANT  # such as the loudest sound of a batch, which bounds all
        return _nonlinear(eqn, [value._replace(mixed=True)], None)
    return value._replace(dims=kept)


def _cumulative(eqn: Equation, operands: list[Value]) -> Any:
    value = operands[0]
    if _has_rows(value, eqn.params["axis"]):
        return _DONT_KNOW if _is_exact(eqn.outvars[0].aval) and not value.trained else RELATION
    return value if eqn.primitive.name == "cumsum" else _nonlinear(eqn, operands, value)


def _broadcast(eqn: Equation, operands: list[Value]) -> Any:
    value = operands[0]
    if value.kind == SUM:
        return value
    dims = list(plain(eqn.params["shape"]))
    shape = eqn.invars[0].aval.shape
    for i, dim in enumerate(eqn.params["broadcast_dimensions"]):
        if shape[i] != 1:
            dims[dim] = value.dims[i]
    return value._replace(dims=tuple(dims))


def _reshape(eqn: Equation, operands: list[Value]) -> Any:
    value = operands[0]
    if value.kind == SUM:
        return value
    dims = reshaped(value.dims, eqn.outvars[0].aval.shape)
    return _DONT_KNOW if dims is None else value._replace(dims=dims)


def _transpose(eqn: Equation, operands: list[Value]) -> Any:
    value = operands[0]
    if value.kind == SUM:
        return value
    return value._replace(dims=tuple([value.dims[i] for i in eqn.params["permutation"]]))


def _rev(eqn: Equation, operands: list[Value]) -> Any:
    value = operands[0]
    if value.kind == SUM:
        return value
    dims = list(value.dims)
    for i in eqn.params["dimensions"]:
        if tags_of(dims[i]):
            dims[i] = ((eqn.invars[0].aval.shape[i], Rows(("reversed", dims[i]))),)
    return value._replace(dims=tuple(dims))


def _cut(dim: Sequence[Factor], start: int, size: int, stride: int) -> tuple[Factor, ...] | None:
    """Returns the factors of elements `start`, `start + stride`, ... of a dim that counts rows."""
    total = math.prod([count for count, _ in dim])
    if size == total and stride == 1:
        return tuple(dim)
    if len(dim) == 1 and dim[0][1] is not None:
        rows = dim[0][1]
        if isinstance(rows.axis, tuple) and rows.axis[0] == "joined" and stride == rows.stride == 1:
            begin = rows.start + start
            for piece in rows.axis[1]:
                count = math.prod([count for count, _ in piece])
                if begin == 0 and count == size:
                    return tuple(piece)
                begin -= count
        moved = Rows(rows.axis, rows.stride * stride, rows.start + start * rows.stride)
        return ((size, moved),)
    if dim[0][1] is None and stride == 1:
        inner = total // dim[0][0]
        if start % inner == size % inner == 0:
            count = size // inner
            return (*([(count, None)] if count > 1 else []), *dim[1:])
    return None


def _slice(eqn: Equation, operands: list[Value]) -> Any:
    value, params = operands[0], eqn.params
    if value.kind == SUM:
        return value
    shape = eqn.outvars[0].aval.shape
    strides = params["strides"] or (1,) * len(shape)
    return _sliced(value, params["start_indices"], shape, strides)


def _sliced(
    value: Value, starts: Sequence[int], shape: Sequence[int], strides: Sequence[int]
) -> Value:
    dims: list[tuple[Factor, ...]] = []
    for dim, start, size, stride in zip(value.dims, starts, shape, strides, strict=True):
        if not tags_of(dim):
            dims.append(((size, None),) if size != 1 else ())
            continue
        cut = _cut(dim, start, size, stride)
        if cut is None:
            return _DONT_KNOW
        dims.append(cut)
    return value._replace(dims=tuple(dims))


def _split(eqn: Equation, operands: list[Value]) -> Any:
    value, axis = operands[0], eqn.params["axis"]
    if value.kind == SUM:
        return value
    values, start = [], 0
    for out, size in zip(eqn.outvars, eqn.params["sizes"], strict=True):
        starts = [start if i == axis else 0 for i in range(len(value.dims))]
        values.append(_sliced(value, starts, out.aval.shape, [1] * len(value.dims)))
        start += size
    return values


def _dynamic_slice(eqn: Equation, operands: list[Value]) -> Any:
    value = operands[0]
    if not is_independent(operands[1:]):
        # The batch decides where the slice begins.
        return _DONT_KNOW
    if value.kind == SUM:
        return value
    dims: list[tuple[Factor, ...]] = []
    shapes = zip(value.dims, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, strict=True)
    random = any(v.random for v in operands[1:])
    for dim, before, after in shapes:
        if not tags_of(dim):
            dims.append(((after, None),) if after != 1 else ())
        elif before == after:
            dims.append(dim)
        else:
            kind = "random" if random else "moved"
            dims.append(((after, Rows((kind, dim))),) if after > 1 else ())
    return value._replace(dims=tuple(dims))


def _dynamic_update_slice(eqn: Equation, operands: list[Value]) -> Any:
    value, update = operands[:2]
    if not is_independent(operands[2:]):
        return _DONT_KNOW
    if value.kind != ROWS and update.kind != ROWS:
        return Value(SUM)
    for v in (value, update):
        for i, (a, b) in enumerate(
            zip(eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)
        ):
            if _has_rows(v, i) and a != b:
                return _DONT_KNOW
    own = _dims(value, eqn.invars[0])
    new = [b if tags_of(b) else a for a, b in zip(own, _dims(update, eqn.invars[1]), strict=True)]
    rows = [v for v in (value, update) if v.kind == ROWS]
    if len(rows) == 2 and tuple(new) != value.dims:
        return _DONT_KNOW
    return rows[0]._replace(dims=tuple(new), mixed=bool(_summed(operands[:2])))


def _concatenate(eqn: Equation, operands: list[Value]) -> Any:
    at = eqn.params["dimension"]
    rows = [value for value in operands if value.kind == ROWS]
    if not rows:
        return Value(SUM)
    shape = eqn.outvars[0].aval.shape
    others = [(*value.dims[:at], (), *value.dims[at + 1 :]) for value in rows]
    dims = joined(others)
    if dims is None or len({value.hidden for value in rows}) > 1:
        shuffled = not any(value.trained for value in operands) and _are_shuffled(rows)
        return _DONT_KNOW if shuffled else RELATION
    mixed = bool(_summed(operands))
    if not any(_has_rows(value, at) for value in rows):
        dim: tuple[Factor, ...] = ((shape[at], None),) if shape[at] != 1 else ()
    else:
        pieces = [_dims(v, atom)[at] for v, atom in zip(operands, eqn.invars, strict=True)]
        if mixed:
            return _DONT_KNOW
        dim = _joined_pieces(pieces, shape[at])
    return rows[0]._replace(dims=(*dims[:at], dim, *dims[at + 1 :]), mixed=mixed)


def _stack(eqn: Equation, operands: list[Value]) -> Any:
    made = _meeting([value for value in operands if value.kind != INDEPENDENT])
    if made.kind != ROWS:
        return made
    at = eqn.params["axis"]
    dim = plain([len(operands)])[0]
    return made._replace(dims=(*made.dims[:at], dim, *made.dims[at:]))


def _unstack(eqn: Equation, operands: list[Value]) -> Any:
    value, at = operands[0], eqn.params["axis"]
    if value.kind == SUM:
        return value
    return value._replace(dims=(*value.dims[:at], *value.dims[at + 1 :]))


def _tile(eqn: Equation, operands: list[Value]) -> Any:
    value = operands[0]
    if value.kind == SUM:
        return value
    made = list(plain(eqn.outvars[0].aval.shape))
    for i, (dim, times) in enumerate(zip(value.dims, eqn.params["reps"], strict=True)):
        if tags_of(dim):
            made[i] = (*(((times, None),) if times > 1 else ()), *dim)
    return value._replace(dims=tuple(made))


def _joined_pieces(pieces: list[tuple[Factor, ...]], size: int) -> tuple[Factor, ...]:
    if all(piece == pieces[0] for piece in pieces):
        return ((len(pieces), None), *pieces[0]) if len(pieces) > 1 else pieces[0]
    tags = [piece[0][1] if len(piece) == 1 else None for piece in pieces]
    first = tags[0]
    if first is not None:
        end = first.start
        for piece, rows in zip(pieces, tags, strict=True):
            if rows is None or rows != Rows(first.axis, first.stride, end):
                break
            end += piece[0][0] * first.stride
        else:
            return ((size, first),)
    return ((size, Rows(("joined", tuple(pieces)))),)


def _pad(eqn: Equation, operands: list[Value]) -> Any:
    value = operands[0]
    if operands[1].kind != INDEPENDENT:
        return _DONT_KNOW
    if value.kind == SUM:
        return value
    dims: list[tuple[Factor, ...]] = []
    shape = eqn.outvars[0].aval.shape
    for dim, padding, size in zip(value.dims, eqn.params["padding_config"], shape, strict=True):
        low, _, inside = padding
        if padding == (0, 0, 0):
            dims.append(dim)
            continue
        if not tags_of(dim):
            dims.append(((size, None),) if size != 1 else ())
            continue
        count = math.prod([n for n, _ in dim])
        rows = dim[0][1]
        if inside == 0 and low % count == size % count == 0 and rows is not None and not rows.start:
            dims.append(((size // count, None), *dim))
        elif len(dim) == 1 and rows is not None and rows.stride == inside + 1 and rows.start == low:
            # The padding puts back the elements that a slice left out.
            dims.append(((size, Rows(rows.axis)),))
        elif dim[0][1] is None and inside == 0:
            inner = count // dim[0][0]
            if low % inner or size % inner:
                return _DONT_KNOW
            dims.append(((size // inner, None), *dim[1:]))
        else:
            return _DONT_KNOW
    return value._replace(dims=tuple(dims))


def _sort(eqn: Equation, operands: list[Value]) -> Any:
    at = eqn.params["dimension"]
    if not any(_has_rows(value, at) for value in operands):
        made = _meeting([value for value in operands if value.kind != INDEPENDENT])
        return _nonlinear(eqn, operands, made)
    keys = operands[: eqn.params["num_keys"]]
    if not is_independent(keys):
        exact = all(_is_exact(v.aval) for v in eqn.outvars)
        return _DONT_KNOW if exact and not any(v.trained for v in operands) else RELATION
    kind = "random" if any(value.random for value in keys) else "moved"
    values = []
    for value in operands:
        if value.kind == ROWS and tags_of(value.dims[at]):
            dim = ((eqn.outvars[0].aval.shape[at], Rows((kind, value.dims[at]))),)
            value = value._replace(dims=(*value.dims[:at], dim, *value.dims[at + 1 :]))
        values.append(value)
    return values


def _top_k(eqn: Equation, operands: list[Value]) -> Any:
    value = operands[0]
    if value.kind == SUM or value.mixed:
        return RELATION
    at = eqn.params.get("axis", -1) % len(value.dims)
    if tags_of(value.dims[at]):
        return RELATION if value.trained else _DONT_KNOW
    k = eqn.outvars[0].aval.shape[at]
    dim: tuple[Factor, ...] = ((k, None),) if k != 1 else ()
    return value._replace(dims=(*value.dims[:at], dim, *value.dims[at + 1 :]))


def _gather(eqn: Equation, operands: list[Value]) -> Any:
    value, index = operands
    if value.kind == SUM and index.kind != ROWS:
        return value if index.kind == INDEPENDENT else _DONT_KNOW
    if index.kind == SUM or index.mixed:
        return _DONT_KNOW
    if value.kind == SUM and value.trained:
        return RELATION  # not trained: such as weights of classes, counted in the batch
    numbers = eqn.params["dimension_numbers"]
    sizes, shape = eqn.params["slice_sizes"], eqn.outvars[0].aval.shape
    dims: list[tuple[Factor, ...]] = list(plain(shape))
    inner_index = _dims(index, eqn.invars[1])[:-1]
    batch_dims = [i for i in range(len(shape)) if i not in numbers.offset_dims]
    for out, dim in zip(batch_dims, inner_index, strict=True):
        dims[out] = dim
    if value.kind != ROWS:
        return Value(ROWS, tuple(dims))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(len(sizes)) if i not in gone]
    for out, i in zip(numbers.offset_dims, kept, strict=True):
        if not tags_of(value.dims[i]):
            continue
        if sizes[i] == eqn.invars[0].aval.shape[i]:
            dims[out] = value.dims[i]
        elif index.kind == ROWS:
            return _DONT_KNOW
        else:
            kind = "random" if index.random else "moved"
            dims[out] = ((sizes[i], Rows((kind, value.dims[i]))),) if sizes[i] > 1 else ()
    for i, of_index in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        if tags_of(value.dims[i]):
            out = batch_dims[of_index]
            if tags_of(dims[out]) and dims[out] != value.dims[i]:
                return RELATION
            dims[out] = value.dims[i]
    taken = [i for i in numbers.collapsed_slice_dims if tags_of(value.dims[i])]
    if taken and index.kind == INDEPENDENT:
        if len(taken) > 1 or len(batch_dims) != 1:
            return _DONT_KNOW
        dim = value.dims[taken[0]]
        size = shape[batch_dims[0]]
        # `x[arange(n), k]` takes the rows in their order.
        kept_order = index.counts and not index.random and len(numbers.start_index_map) > 1
        kind = "random" if index.random else "moved"
        own = dim if kept_order else ((size, Rows((kind, dim))),)
        dims[batch_dims[0]] = own if size > 1 else ()
    # A row that is taken by a number from the batch counts as its own row.
    return value._replace(dims=tuple(dims))


def _scatter(eqn: Equation, operands: list[Value]) -> Any:
    value, index, update = operands
    if index.kind == SUM or index.mixed or value.kind == SUM:
        return _DONT_KNOW
    if eqn.primitive.name not in ("scatter-add", "scatter_add", "scatter") and _summed(operands):
        return _DONT_KNOW
    numbers = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    sizes = eqn.invars[2].aval.shape
    dims = list(_dims(value, eqn.invars[0]))
    update_dims = _dims(update, eqn.invars[2])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(len(shape)) if i not in gone]
    for i, of_update in zip(kept, numbers.update_window_dims, strict=True):
        dim = update_dims[of_update]
        if not tags_of(dim):
            continue
        if shape[i] != sizes[of_update] or (tags_of(dims[i]) and dims[i] != dim):
            return _DONT_KNOW
        dims[i] = dim
    scattered = [i for i in range(len(sizes)) if i not in numbers.update_window_dims]
    index_dims = _dims(index, eqn.invars[1])[:-1]
    moved = set()
    for i, of_index in zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    ):
        moved.add(scattered[of_index])
        dim = update_dims[scattered[of_index]] or ()
        if not tags_of(dim):
            dim = index_dims[of_index]
        if tags_of(dim):
            if tags_of(dims[i]) and dims[i] != dim:
                return RELATION
            dims[i] = dim
    left = [
        dim
        for i, (out, dim) in enumerate(zip(scattered, index_dims, strict=True))
        for dim in ([update_dims[out]] if tags_of(update_dims[out]) else [index_dims[i]])
        if out not in moved and tags_of(dim)
    ]
    targets = [shape[i] for i in numbers.scatter_dims_to_operand_dims]
    if not left:
        return Value(ROWS, tuple(dims), mixed=bool(_summed(operands)))
    for dim in left:
        size = math.prod([count for count, _ in dim])
        tags = tags_of(dim)
        if (
            len(dim) == 1
            and isinstance(tags[0].axis, tuple)
            and tags[0].axis[0]
            in (
                "random",
                "moved",
            )
        ):
            # The scatter puts back the rows that a gather took.
            places = [i for i in numbers.scatter_dims_to_operand_dims if not tags_of(dims[i])]
            before = tags[0].axis[1]
            if len(places) == 1 and math.prod([n for n, _ in before]) == shape[places[0]]:
                dims[places[0]] = before
                continue
            return _DONT_KNOW
        # These may be rows that go back to where they came from.
        if size in targets or any(_has_rows(value, i) for i in range(len(shape))):
            places = [i for i in numbers.scatter_dims_to_operand_dims if shape[i] == size]
            if len(places) == 1 and len(targets) > 1 and index.counts:
                dims[places[0]] = dim
                continue
            return _DONT_KNOW
    if any(tags_of(dim) for dim in dims):
        return Value(ROWS, tuple(dims), mixed=bool(_summed(operands)))
    return Value(SUM) if eqn.primitive.name.endswith("add") else _DONT_KNOW


def _windows(eqn: Equation, operands: list[Value]) -> Any:
    params = eqn.params
    windows = params["window_dimensions"]
    padding = params.get("padding") or [(0, 0)] * len(windows)
    rows = [value for value in operands if value.kind == ROWS]
    for value in rows:
        for dim, window, pad in zip(value.dims, windows, padding, strict=True):
            if tags_of(dim) and (window != 1 or tuple(pad) != (0, 0)):
                return RELATION if value.trained else _DONT_KNOW
    if not rows:
        linear = eqn.primitive.name == "reduce_window_sum"
        return Value(SUM) if linear else _nonlinear(eqn, operands, None)
    made = [
        dim if tags_of(dim) else (((size, None),) if size != 1 else ())
        for dim, size in zip(rows[0].dims, eqn.outvars[0].aval.shape, strict=True)
    ]
    if len(rows) > 1 and joined([_only_rows(v.dims) for v in rows]) is None:
        return _DONT_KNOW
    value = rows[0]._replace(dims=tuple(made))
    if eqn.primitive.name in ("reduce_window_sum", "select_and_scatter_add"):
        return value
    return _nonlinear(eqn, operands, value)


def _only_rows(dims: Dims) -> Dims:
    return tuple([dim if tags_of(dim) else () for dim in dims])


def _of_matrices(eqn: Equation, operands: list[Value]) -> Any:
    is_fft = eqn.primitive.name == "fft"
    rows = [value for value in operands if value.kind == ROWS]
    if _summed(operands) and not is_fft:
        return _nonlinear(eqn, operands, None)
    if not rows:
        return Value(SUM)
    last = len(eqn.params["fft_lengths"]) if is_fft else 2
    leading = len(rows[0].dims) - last
    if any(tags_of(dim) for value in rows for dim in value.dims[max(0, len(value.dims) - last) :]):
        return _DONT_KNOW if is_fft else RELATION
    if len({value.dims[:leading] for value in rows}) > 1:
        return _DONT_KNOW
    return [
        rows[0]._replace(dims=(*rows[0].dims[:leading], *plain(out.aval.shape[leading:])))
        for out in eqn.outvars
    ]


def _dot(eqn: Equation, operands: list[Value]) -> Any:
    (contract, batch) = eqn.params["dimension_numbers"]
    return _contracted(eqn, operands, contract, batch)


def _contracted(
    eqn: Equation,
    operands: list[Value],
    contract: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]],
) -> Any:
    """Returns the value of a product that sums over some dims of both operands and pairs others."""
    active = [value for value in operands if value.kind != INDEPENDENT]
    if len(active) > 1 and _summed(active):
        return RELATION if any(v.trained for v in active) else _DONT_KNOW
    if all(value.kind == SUM for value in active):
        return Value(SUM)
    first, second = [_dims(v, atom) for v, atom in zip(operands, eqn.invars, strict=True)]
    both = len(active) == 2
    if both and operands[0].hidden != operands[1].hidden:
        return RELATION
    pairs = [*zip(*contract, strict=True), *zip(*batch, strict=True)]
    for i, k in pairs:
        if both and (tags_of(first[i]) or tags_of(second[k])) and first[i] != second[k]:
            return RELATION
    removed = [r for i in contract[0] for r in tags_of(first[i])]
    removed += [] if both else [r for k in contract[1] for r in tags_of(second[k])]
    paired = [
        a if tags_of(a) else b
        for a, b in ((first[i], second[k]) for i, k in zip(*batch, strict=True))
    ]
    free = [dim for i, dim in enumerate(first) if i not in (*contract[0], *batch[0])]
    of_second = [dim for k, dim in enumerate(second) if k not in (*contract[1], *batch[1])]
    rows_free = [r for dim in free for r in tags_of(dim)]
    if any(tags_of(dim) for dim in of_second) and (rows_free or (both and removed)):
        return RELATION
    if both and removed and rows_free:
        return RELATION
    dims = (*paired, *free, *of_second)
    value = active[0]._replace(mixed=bool(_summed(active)))
    left = [rows for dim in dims for rows in tags_of(dim)]
    left += [rows for _, factors in value.hidden for rows in tags_of(factors)]
    mixed = value.mixed or bool(removed and left)
    return value._replace(dims=dims, mixed=mixed)


def _convolution(eqn: Equation, operands: list[Value]) -> Any:
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    active = [value for value in operands if value.kind != INDEPENDENT]
    if len(active) > 1 and _summed(active):
        return RELATION if any(v.trained for v in active) else _DONT_KNOW
    if all(value.kind == SUM for value in active):
        return Value(SUM)
    first, second = [_dims(v, atom) for v, atom in zip(operands, eqn.invars, strict=True)]
    is_grouped = eqn.params["feature_group_count"] * eqn.params["batch_group_count"] != 1
    dims = list(plain(eqn.outvars[0].aval.shape))
    of_batch, of_sum = first[lhs[0]], (first[lhs[1]], second[rhs[1]])
    if any(tags_of(first[i]) for i in lhs[2:]) or any(tags_of(second[i]) for i in rhs[2:]):
        return _DONT_KNOW
    if tags_of(of_batch) and len(active) == 1 and eqn.params["batch_group_count"] == 1:
        dims[out[0]] = of_batch
        return active[0]._replace(dims=tuple(dims))
    if is_grouped or tags_of(of_batch):
        return _DONT_KNOW
    if tags_of(second[rhs[0]]):
        dims[out[1]] = second[rhs[0]]
        return active[0]._replace(dims=tuple(dims)) if len(active) == 1 else RELATION
    if len(active) == 2 and of_sum[0] != of_sum[1]:
        return _DONT_KNOW
    return Value(SUM)


_RULES: dict[str, Callable[[Equation, list[Value]], Any]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "expand_dims": _reshape,
    "gather": _gather,
    "pad": _pad,
    "reduce_sum": _reduce_sum,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "sort": _sort,
    "split": _split,
    "squeeze": _reshape,
    "stack": _stack,
    "tile": _tile,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
}
