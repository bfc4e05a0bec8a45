"""Values with as many rows as a table that differ from something simple in a few rows only.

The gradient `g` of a table of 1000 rows, of which a step looks up 3, is zero in all others. Then
what an optimizer computes from it is, in all others, what the same equations make of zero. Such a
value is a *patch*: a base, and the rows in which it differs. With the table `t`, the slot `a` of
Adagrad, and `s`, the sum of `g` for each row of `ids`:

                                   base                    rows at `ids`
    b:f32[1000,2] = square g       0                       square(s)
    c:f32[1000,2] = add a b        add(a, 0) = a           add(a[ids], square(s))
    d:f32[1000,2] = sqrt c         sqrt(a)                 sqrt(add(a[ids], square(s)))
    e:f32[1000,2] = div g d        div(0, sqrt(a)) = 0     div(s, sqrt(...))
    f:f32[1000,2] = sub t e        sub(t, 0) = t           sub(t[ids], div(...))

The new values `c` and `f` are the old ones with some rows set, which XLA does in place. Nothing
needs `sqrt(a)`, so it is never computed. With Adam, the base of `f` is not `t` but something that
all rows need. Then the equations are evaluated for the whole table, from a gradient that is put
together.

Operations that are linear in the gradient, such as `t - 0.1 * g`, need no sum for each row: the
result is `t` with the terms of `-0.1 * g` added to it. They may name a row several times.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax.numpy as jnp
from jax import Array, lax
from jax.core import ShapedArray
from jax.sharding import NamedSharding

from distributary.jaxprs import Equation, evaluate_one, shape_of
from distributary.programs._row_wise import bind_rows

# XLA:CPU sorts an id in the time in which it fills as many elements with zeros.
_ELEMENTS_PER_SORTED_ID = 256
# To a narrower float, each addition to a row would lose what a sum for each row keeps.
_MIN_BYTES_OF_SUMS = 4
# Ids are never negative.
_DROP: Any = {"mode": "drop", "wrap_negative_indices": False}


@final
@dataclass(frozen=True, eq=False, slots=True)
class Term:
    """Rows to add to a table.

    Attributes:
        ids: Numbers of the rows, int32 `[n]`; those past the last row of the table do not count.
        rows: The rows, `[n, *row]`.
        is_unique: Whether `ids` names no row twice.
    """

    ids: Array
    rows: Array
    is_unique: bool = False

    def added_to(self, table: Array) -> Array:
        """Returns a table with the rows added."""
        return table.at[self.ids].add(self.rows, unique_indices=self.is_unique, **_DROP)


@final
class RowIds:
    """The distinct rows that some terms name.

    Args:
        terms: The terms.
        num_rows: Number of rows of the table.

    Attributes:
        size: Number of ids of all terms.
        distinct: Every row that is named, once, in any order, int32 `[size]`. There are numbers
            past the last row in place of repeated ones.
    """

    def __init__(self, terms: Sequence[Term], num_rows: int) -> None:
        ids = jnp.concatenate([term.ids for term in terms])
        self.size = ids.shape[0]
        self._num_rows = num_rows
        places = jnp.arange(self.size, dtype=jnp.int32)
        if num_rows <= self.size * _ELEMENTS_PER_SORTED_ID:
            # Each row goes to the last place that names it.
            last = jnp.zeros(num_rows, jnp.int32).at[ids].max(places, **_DROP)
            targets = last.at[ids].get(
                mode="fill", fill_value=self.size, wrap_negative_indices=False
            )
            distinct = jnp.where(targets == places, ids, num_rows)
        else:
            distinct, targets = jnp.unique(
                ids, size=self.size, fill_value=num_rows, return_inverse=True
            )
        # XLA is told that no number comes twice.
        self.distinct = jnp.where(distinct < num_rows, distinct, num_rows + places)
        self._targets: dict[int, Array] = {}
        self._terms = list(terms)  # so that no other array gets the identity of their ids
        start = 0
        for term in terms:
            self._targets[id(term.ids)] = targets[start : start + term.ids.shape[0]]
            start += term.ids.shape[0]
        self._made: dict[int, tuple[object, Array]] = {}

    def have(self, terms: Sequence[Term]) -> bool:
        """Returns whether the terms name no other rows, as far as can be told."""
        return all(id(term.ids) in self._targets for term in terms)

    def sums(self, terms: Sequence[Term]) -> Array:
        """Returns the sum of the terms for each distinct row, `[size, *row]`."""
        total = jnp.zeros((self.size, *terms[0].rows.shape[1:]), terms[0].rows.dtype)
        for term in terms:
            total = Term(self._targets[id(term.ids)], term.rows, term.is_unique).added_to(total)
        return total

    def once(self, value: object, in_rows: Callable[[], Array]) -> Array:
        """Returns a value in the distinct rows, `[size, *row]`, which `in_rows` makes once."""
        if id(value) not in self._made:
            self._made[id(value)] = value, in_rows()
        return self._made[id(value)][1]

    def taken_from(self, table: Array) -> Array:
        """Returns the distinct rows of a table; any rows for numbers past it."""
        return self.once(
            table, lambda: table.at[self.distinct].get(mode="clip", wrap_negative_indices=False)
        )

    def set_in(self, table: Array, rows: Array) -> Array:
        """Returns a table with its distinct rows replaced."""
        return table.at[self.distinct].set(rows, unique_indices=True, **_DROP)

    def only_named(self, rows: Array) -> Array:
        """Returns rows, with zeros in place of those that no id names."""
        is_named = (self.distinct < self._num_rows).reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.where(is_named, rows, jnp.zeros((), rows.dtype))


@final
@dataclass(frozen=True, eq=False, slots=True)
class Zeros:
    """Zeros, of some shape and dtype.

    Attributes:
        aval: Shape and dtype.
        parts: The sharding of all of them, if every device gets a part; None leaves it to XLA.
    """

    aval: ShapedArray
    parts: NamedSharding | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.aval.shape

    @property
    def dense(self) -> Array:
        """All of them."""
        zeros = jnp.zeros(self.aval.shape, self.aval.dtype)
        return zeros if self.parts is None else lax.with_sharding_constraint(zeros, self.parts)

    def in_rows(self, ids: RowIds) -> Array:
        """Returns as many rows of zeros as there are ids."""
        return jnp.zeros((ids.size, *self.aval.shape[1:]), self.aval.dtype)


@final
@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """An array that is there anyway.

    Attributes:
        array: The array.
        is_input: Whether it is an input of the program, such as the value of a variable.
    """

    array: Array
    is_input: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.array.shape

    @property
    def dense(self) -> Array:
        """The array."""
        return self.array

    def in_rows(self, ids: RowIds) -> Array:
        """Takes rows of the array."""
        return ids.taken_from(self.array)


@final
@dataclass(eq=False)
class Computed:
    """A result of an equation that works row by row.

    Args:
        eqn: The equation.
        operands: The operands; those that have rows are bases or patches, the others arrays.
        index: Number of the result.
    """

    _eqn: Equation
    _operands: "Sequence[Base | Patch | Array]"
    _index: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return shape_of(self._eqn.outvars[self._index])

    @functools.cached_property
    def dense(self) -> Array:
        """The whole result of the equation."""
        operands = [x.dense if isinstance(x, WITH_ROWS) else x for x in self._operands]
        return evaluate_one(self._eqn, operands)[self._index]

    def in_rows(self, ids: RowIds) -> Array:
        """Evaluates the equation on rows, once."""

        def evaluated() -> Array:
            operands = [x.in_rows(ids) if isinstance(x, WITH_ROWS) else x for x in self._operands]
            return bind_rows(self._eqn, operands, ids.size)[self._index]

        return ids.once(self, evaluated)


Base: TypeAlias = Zeros | Stored | Computed
"""The value of a patch outside of its rows, computed only as far as it is needed."""


@final
@dataclass(eq=False)
class Added:
    """A base with rows added to it.

    Attributes:
        base: The base.
        terms: The rows.
        source: The equation that computes the value from others; None for terms added to zeros.
    """

    base: Base
    terms: Sequence[Term]
    source: Computed | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.base.shape

    @functools.cached_property
    def dense(self) -> Array:
        """The whole value."""
        if self.source is not None and not _is_changed_in_place(self.base):
            return self.source.dense
        whole = self.base.dense
        if self.source is not None and whole.dtype.itemsize < _MIN_BYTES_OF_SUMS:
            ids = RowIds(self.terms, self.shape[0])
            return ids.set_in(whole, self.in_rows(ids))
        for term in self.terms:
            whole = term.added_to(whole)
        return whole

    def in_rows(self, ids: RowIds) -> Array:
        """Returns the value in distinct rows that include its own, `[size, *row]`."""
        if self.source is not None:
            return self.source.in_rows(ids)
        # The rows are added up once, whatever is computed from their sums.
        return ids.once(self, lambda: ids.sums(self.terms))


@final
@dataclass(eq=False)
class Replaced:
    """A base with rows set in it.

    Attributes:
        base: The base.
        ids: The rows.
        source: The equation that computes the value from others.
    """

    base: Base
    ids: RowIds
    source: Computed

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.base.shape

    @functools.cached_property
    def dense(self) -> Array:
        """The whole value."""
        if _is_changed_in_place(self.base):
            return self.ids.set_in(self.base.dense, self.in_rows(self.ids))
        return self.source.dense

    def in_rows(self, ids: RowIds) -> Array:
        """Returns the value in its own rows, `[size, *row]`."""
        assert ids is self.ids
        return self.source.in_rows(ids)


def _is_changed_in_place(base: Base) -> bool:
    """Returns whether rows of a base are changed where it lies.

    XLA:CPU takes long to change rows of what the program computes itself: a step of Adam with a
    table of 25.6 MB took 44 ms instead of 11. There the equations are evaluated for all rows.
    """
    return isinstance(base, Stored) and base.is_input


Patch: TypeAlias = Added | Replaced

WITH_ROWS = (Zeros, Stored, Computed, Added, Replaced)


def joined_terms(terms: Sequence[Term]) -> list[Term]:
    """Returns terms with those added up that have the same ids."""
    groups: dict[int, list[Term]] = {}
    for term in terms:
        groups.setdefault(id(term.ids), []).append(term)
    return [
        Term(ts[0].ids, functools.reduce(operator.add, [t.rows for t in ts]), ts[0].is_unique)
        for ts in groups.values()
    ]
