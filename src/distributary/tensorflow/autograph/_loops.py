"""Loops over traced values, as loops of JAX.

    total = 0.0
    for x in xs:             # f32[5,2]
        total += x.sum()

The block is recorded as a jaxpr from the variables that change (`total`, f32[]) and the row of the
turn to their new values, and `jax.lax.scan` runs it. Which variables change is found by recording
the block until nothing new does: a variable that comes out as it went in stays outside of the loop,
and a number of Python that does not change stays one.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax

from distributary.errors import InvalidTypeError, InvalidValueError, UnsupportedError, shown
from distributary.tensorflow.autograph._reached import Contents, Reached
from distributary.tensorflow.autograph._recorded import (
    Recorded,
    Value,
    aval_in,
    aval_of,
    cast,
    containers_in,
    counted,
    flatten,
    is_number,
    is_same,
    is_undefined,
    is_unreturned,
    joined,
    not_to_be_handled,
    note_copies,
    plain,
    shared_in,
    shown_name,
    zeros,
)
from distributary.tracing import script_line

_Values = Sequence[Any]
_Place = tuple[int, int]  # the number of a variable, and that of a leaf of its value


class Variables(NamedTuple):
    """The variables of a statement: functions that return and set their values, and their names."""

    get: Callable[[], _Values]
    set: Callable[[_Values], None]
    names: Sequence[str]


# What turns can append besides numbers and arrays: it is the same in all of them.
_CONSTANTS = (type(None), str, bytes)
_MAX_RECORDS = 20
_MAX_UNROLLED = 256


@final
class Range:
    """The result of `range` in converted code if an argument is traced; a loop can run over it.

    Args:
        start: The first number, int32 `[]`.
        stop: The end, which is not among the numbers.
        step: The distance between two numbers; a number of Python that is not zero, or an array.
    """

    def __init__(self, start: Any, stop: Any, step: Any) -> None:
        self.start, self.stop, self.step = (jnp.asarray(plain(end)) for end in (start, stop, step))
        for end in (self.start, self.stop, self.step):
            if not jnp.issubdtype(end.dtype, jnp.integer) or end.ndim:
                raise InvalidTypeError(
                    f"range: got {shown(end)} at {script_line()}, expected a whole number."
                )

    def length(self) -> Any:
        """Returns how many numbers there are, int32 `[]`."""
        distance = jnp.where(self.step > 0, self.stop - self.start, self.start - self.stop)
        return jnp.maximum(0, -(-distance // jnp.abs(self.step)))

    def item(self, index: Any) -> Any:
        """Returns a number, int32 `[]`."""
        return self.start + index * self.step

    def __iter__(self) -> Any:
        raise InvalidTypeError(
            f"range at {script_line()} has a traced end, so only a `for` loop can run over it."
        )


@final
class _Carry:
    """The variables of a loop, of which some are its carry.

    Args:
        variables: The variables, with their values before the loop.
        reached: What else a turn can change; what it does change becomes a variable, too.
        what: The statement, for messages.
    """

    def __init__(self, variables: Variables, reached: Reached, what: str) -> None:
        self._what = what
        self._reached = reached
        self._variables = variables
        self._num_variables = len(variables.names)
        self._changed: list[int] = []  # the variables after `_num_variables`, as in `reached`
        self._names: list[str] = []
        self._trees: list[Any] = []
        self._leaves: dict[_Place, Any] = {}
        # Of variables that turns give other lists or dicts: those to which others refer, too.
        self._others: dict[int, list[Any]] = {}
        # A turn, the leaves after it, and what it has appended to lists.
        self._recorded: Recorded
        self._last: dict[_Place, Any]
        self._appended: dict[int, list[Any]]
        self._before = [*variables.get()]
        for name, value in zip(variables.names, self._before, strict=True):
            self._add(name, Value(value, reached.shares))
        self.avals = _avals_of(self._leaves)

    def _add(self, name: str, value: Value) -> None:
        self._leaves |= _placed(len(self._names), value.leaves)
        self._names.append(name)
        self._trees.append(value.tree)

    def _put(self, values: list[Any]) -> None:
        for k, value in zip(self._changed, values[self._num_variables :], strict=True):
            keys = self._reached.before[k].keys
            self._reached.put(k, Contents(keys[: len(value)], value))
        self._variables.set(values[: self._num_variables])

    def looks_at_appended(self, body: Callable[..., Any], num_turns: int) -> bool:
        """Returns whether a turn is another one after others have appended to lists.

        It is recorded once more as the last one, with lists that have unknown arrays of the others.
        """
        if not self._appended:
            return False
        values, avals = self._values_after(self._recorded), self._recorded.avals()
        inputs, others_before = self._recorded.inputs, num_turns - 1
        unknown = [leaf for more in self._appended.values() for leaf in flatten(more)[0]]
        unknown = [leaf for leaf in unknown if id(leaf) in avals]

        def again(*arrays: Any) -> _Values:
            by_id = dict(zip(map(id, unknown), arrays[len(inputs) :], strict=True))
            tails = jax.tree.map(lambda leaf: by_id.get(id(leaf), leaf), self._appended)
            tails = {k: more * others_before for k, more in tails.items()}
            return self._turn(body, tails, *arrays[: len(inputs)])

        more_avals = [avals[id(leaf)] for leaf in unknown]
        other = Recorded(again, self._reached, [*map(aval_of, inputs), *more_avals])
        others = self._values_after(other)
        for k, more in self._appended.items():
            first, items = _length(self._trees[k]), others[k].value
            items = items[:first] + items[first + len(more) * others_before :]
            others[k] = Value(items, self._reached.holds)
        return not self._recorded.is_like(other, values, others)

    def values(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the values of all variables, given those of the carry."""
        leaves = self._leaves | dict(zip(self.avals, arrays, strict=True))
        return [
            jax.tree.unflatten(tree, [leaves[k, j] for j in range(tree.num_leaves)])
            for k, tree in enumerate(self._trees)
        ]

    def start(self) -> list[Any]:
        """Returns the carry before the loop."""
        return [
            zeros(aval) if is_unreturned(self._leaves[at]) else cast(self._leaves[at], aval)
            for at, aval in self.avals.items()
        ]

    def _turn(self, body: Callable[..., Any], tails: dict[int, list[Any]], *arrays: Any) -> _Values:
        """Returns the values after a turn.

        Args:
            body: Runs it.
            tails: What lists have beyond the carry.
            *arrays: The carry before the turn, and what the turn gets.
        """
        count = len(self.avals)
        values = self.values(arrays[:count])
        for k, more in tails.items():
            values[k] += more
        self._put(values)
        for k, others in self._others.items():
            note_copies(self._names[k], self._what, values[k], others)
        body(*arrays[count:])
        return self._variables.get()

    def record(self, body: Callable[..., Any], avals: Sequence[Any], stacks: bool) -> None:
        """Records the block until the carry is all that changes.

        Args:
            body: Runs a turn.
            avals: Shapes and dtypes of what the turn gets.
            stacks: Whether lists may grow.
        """
        turn = functools.partial(self._turn, body, {})
        for _ in range(_MAX_RECORDS):
            recorded = Recorded(turn, self._reached, [*self.avals.values(), *avals])
            if recorded.raised is not None:
                raise recorded.raised
            self._take_changes(recorded)
            if self._is_settled(recorded, stacks):
                self._recorded = recorded
                self._last, self._appended = self._after(self._values_after(recorded), stacks)
                return
        raise InvalidTypeError(
            f"The `{self._what}` at {script_line()} changes the dtypes of its variables again and"
            " again. Give them a dtype before the loop, jnp.asarray(value, dtype)."
        )

    def _take_changes(self, recorded: Recorded) -> None:
        """Makes variables of what a turn has changed in place."""
        for k, (contents, _) in recorded.changes.items():
            before = self._reached.before[k]
            grows = self._reached.is_list(k) and len(contents.keys) > len(before.keys)
            if contents.keys != before.keys and not grows:
                raise InvalidTypeError(
                    f"{shown_name(self._reached.names[k])} has {counted(before)} before a turn of"
                    f" the `{self._what}` at {script_line()} and {counted(contents)} after it."
                    " Whether there is another turn is known only when the step runs, so keep the"
                    " same ones."
                )
            if k not in self._changed:
                self._changed.append(k)
                self._add(self._reached.names[k], Value(before.values, self._reached.holds))

    def _values_after(self, recorded: Recorded) -> list[Value]:
        values, shares = list(recorded.values), self._reached.shares
        for k, value in enumerate(values):
            if k not in self._others and any(map(shares, containers_in(value.value))):
                values[k] = Value(value.value, shares)
        for k in self._changed:
            contents = recorded.changes[k][0] if k in recorded.changes else self._reached.before[k]
            values.append(Value(contents.values, self._reached.holds))
        return values

    def after(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the carry after a turn, and what was appended to lists in it.

        Args:
            arrays: The carry before the turn, and what the turn gets.
        """
        outs = self._recorded.run(arrays)
        new = lambda leaf: outs.get(id(leaf), leaf)
        carry = [cast(new(self._last[at]), aval) for at, aval in self.avals.items()]
        appended = [flatten(more)[0] for more in self._appended.values()]
        rows = [[new(v) for v in more if not isinstance(v, _CONSTANTS)] for more in appended]
        return carry, rows

    def finish(self, carry: Sequence[Any], rows: Sequence[Any] = (), num_turns: int = 0) -> None:
        """Gives the variables their values after the loop.

        Args:
            carry: The carry after the last turn.
            rows: The numbers and arrays that were appended, stacked over the turns.
            num_turns: The number of turns, if lists may have grown.
        """
        values = self.values(carry)
        for stacked, (k, more) in zip(rows, self._appended.items(), strict=True):
            leaves, tree = flatten(more)
            for turn in range(num_turns):
                of_turn = (row[turn] for row in stacked)
                items = [v if isinstance(v, _CONSTANTS) else next(of_turn) for v in leaves]
                values[k] += jax.tree.unflatten(tree, items)
        self._put(values)
        for k, others in self._others.items():
            note_copies(self._names[k], self._what, values[k], others)

    def _after(
        self, values: Sequence[Value], stacks: bool
    ) -> tuple[dict[_Place, Any], dict[int, list[Any]]]:
        """Returns the leaves after a turn, and what was appended to each list that grew."""
        carry: dict[_Place, Any] = {}
        appended: dict[int, list[Any]] = {}
        for k, (name, after, tree) in enumerate(zip(self._names, values, self._trees, strict=True)):
            value, leaves, other = after.value, after.leaves, after.tree
            before = self._leaves.get((k, 0))
            is_longer = type(value) is list and other != tree and len(value) > _length(tree)
            if is_longer and other.children()[: _length(tree)] == tree.children():
                if not stacks:
                    raise InvalidTypeError(
                        f"{shown_name(name)} grows in the `{self._what}` at {script_line()}, and"
                        " how many turns there are is known only when the step runs. Loop over an"
                        " array or a range of a fixed number, without `break` and `return`, or set"
                        " items of an array: x = x.at[i].set(value)."
                    )
                appended[k] = value[_length(tree) :]
                leaves = leaves[: tree.num_leaves]
            elif tree.num_leaves == 1 and is_undefined(before) and not is_unreturned(before):
                if len(leaves) != 1 or not is_undefined(leaves[0]):
                    raise InvalidValueError(
                        f"{shown_name(name)} gets its first value in the `{self._what}` at"
                        f" {script_line()} and is used after it. There may be no turn at all, so"
                        " assign it before the loop."
                    )
            elif other != tree:
                raise InvalidTypeError(
                    f"{shown_name(name)} has another structure after a turn of the `{self._what}`"
                    f" at {script_line()} than before. Whether there is another turn is known only"
                    " when the step runs, so keep its structure."
                )
            carry |= _placed(k, leaves)
        return carry, appended

    def _returns_several(self, values: Sequence[Value]) -> bool:
        """Gives the result of the function, which there is not yet, the structure of `values`."""
        for k, (value, tree) in enumerate(zip(values, self._trees, strict=True)):
            if tree.num_leaves == 1 and is_unreturned(self._leaves[k, 0]) and value.tree != tree:
                unreturned = self._leaves.pop((k, 0))
                self._leaves |= _placed(k, [unreturned] * len(value.leaves))
                self._trees[k] = value.tree
                return True
        return False

    def _rebinds(self, recorded: Recorded, values: Sequence[Value]) -> bool:
        """Lets variables that turns give other lists or dicts be copies of these; returns whether.

        The others stay the lists and dicts they are, of which turns change the contents.
        """
        is_new = False
        shares = self._reached.shares
        for k, (before, after) in enumerate(zip(self._before, recorded.values, strict=True)):
            one, two = Value(before, shares), values[k]
            pairs = zip(one.leaves, two.leaves, strict=False)
            is_kept = k not in self._others and one.tree == two.tree
            is_kept &= all(a is b for a, b in pairs if shares(a) or shares(b))
            found = shared_in(before, (), self._reached)
            found += shared_in(after.value, (recorded,), self._reached)
            kept = set(map(id, one.leaves)) if is_kept else set()
            known = {id(other): other for other in self._others.get(k, ())}
            others = known | {id(v): v for v in found if id(v) not in kept}
            if len(others) > len(known):
                self._others[k] = [*others.values()]
                is_new = True
                if not known:  # from now on all that is in it can change
                    whole = Value(before)
                    self._trees[k] = whole.tree
                    for of_all in (self._leaves, self.avals):
                        for at in [at for at in of_all if at[0] == k]:
                            del of_all[at]
                    self._leaves |= _placed(k, whole.leaves)
                    more = _avals_of(_placed(k, whole.leaves))
                    self.avals = dict(sorted((self.avals | more).items()))
        return is_new

    def _is_settled(self, recorded: Recorded, stacks: bool) -> bool:
        values = self._values_after(recorded)
        if self._rebinds(recorded, values) or self._returns_several(values):
            return False
        leaves, _ = self._after(values, stacks)
        avals = recorded.avals()
        inputs = dict(zip(self.avals, recorded.inputs, strict=False))
        changes = False
        for at, before in self._leaves.items():
            after = leaves[at]
            if at in self.avals:
                if after is not inputs[at] and after is not before:
                    changes |= self._widen(at, after, avals)
                elif isinstance(before, jax.Array):
                    del self.avals[at]
                    changes = True
            elif not is_same(before, after) and not (is_unreturned(before) and after is None):
                self._carry_too(at, before, after, avals)
                changes = True
        self.avals = dict(sorted(self.avals.items()))
        return not changes

    def _carry_too(self, at: _Place, before: Any, after: Any, avals: dict[int, Any]) -> None:
        name = self._names[at[0]]
        if is_unreturned(before) and is_number(after):
            self.avals[at] = aval_in(avals, after)
            return
        if not (is_number(before) and is_number(after)):
            raise InvalidTypeError(
                f"{shown_name(name)} is {shown(before)} before the `{self._what}` at"
                f" {script_line()} and {shown(after)} after a turn. Whether there is another turn"
                " is known only when the step runs, so only numbers and arrays can change."
            )
        self.avals[at] = aval_of(plain(before))

    def _widen(self, at: _Place, after: Any, avals: dict[int, Any]) -> bool:
        """Gives an entry of the carry a dtype for the values before and after a turn."""
        name, before = self._names[at[0]], self.avals[at]
        if id(after) not in avals and not is_number(after):
            raise InvalidTypeError(
                f"{shown_name(name)} is an array before the `{self._what}` at {script_line()} and"
                f" {shown(after)} after a turn. Keep it an array."
            )
        aval = aval_in(avals, after)
        if aval.shape != before.shape:
            raise InvalidValueError(
                f"{shown_name(name)} has shape {before.shape} before a turn of the `{self._what}`"
                f" at {script_line()} and {aval.shape} after it. Shapes cannot change in a loop:"
                " begin with an array of the final shape, or set items of one,"
                " x = x.at[i].set(value)."
            )
        wider = joined(before, aval)
        if wider is None:
            raise InvalidTypeError(
                f"{shown_name(name)} has dtype {before.dtype} before a turn of the `{self._what}`"
                f" at {script_line()} and {aval.dtype} after it. Begin with"
                f" jnp.asarray(value, {aval.dtype}), or convert it with x.astype({before.dtype})."
            )
        self.avals[at] = wider
        return bool(wider.dtype != before.dtype)


def _avals_of(leaves: dict[_Place, Any]) -> dict[_Place, Any]:
    return {at: aval_of(leaf) for at, leaf in leaves.items() if isinstance(leaf, jax.Array)}


def _placed(k: int, leaves: Sequence[Any]) -> dict[_Place, Any]:
    return {(k, j): leaf for j, leaf in enumerate(leaves)}


def _length(tree: Any) -> int:
    """Returns the number of items of a list with this structure."""
    return len(tree.children())


@not_to_be_handled
def while_loop(
    body: Callable[[], Any], variables: Variables, reached: Reached, maximum: int | None
) -> None:
    """Runs a `while` loop whose condition is traced.

    Args:
        body: Runs a turn.
        variables: The variables, of which the first is the condition.
        reached: What else a turn can change.
        maximum: The largest number of turns, if there is one.
    """
    carry = _Carry(variables, reached, "while")
    carry.record(body, (), stacks=False)
    next_ = lambda arrays: carry.after(arrays)[0]
    goes_on = lambda arrays: jnp.asarray(carry.values(arrays)[0])
    if maximum is None:
        arrays = lax.while_loop(goes_on, next_, carry.start())
    else:
        guarded = lambda arrays, _: (lax.cond(goes_on(arrays), next_, list, arrays), None)
        arrays, _ = lax.scan(guarded, carry.start(), length=maximum)
    carry.finish(arrays)


@not_to_be_handled
def for_loop(
    iterated: Any,
    body: Callable[[Any], Any],
    guarded: Callable[[Any], Any] | None,
    variables: Variables,
    reached: Reached,
) -> None:
    """Runs a `for` loop over an array or a `Range`.

    Args:
        iterated: The array, whose rows are taken, or the range.
        body: Runs a turn with a row.
        guarded: The same, if the loop has not ended; None if it does not end early.
        variables: The variables.
        reached: What else a turn can change.
    """
    if isinstance(iterated, Range):
        _for_range(iterated, guarded or body, variables, reached)
        return
    rows = plain(iterated)
    if not rows.ndim:
        raise InvalidTypeError(
            f"The `for` at {script_line()} runs over {shown(rows)}, which has no rows. Write"
            " range(n) or tf.range(n) to count to n."
        )
    if not len(rows):
        return
    if any(is_undefined(leaf) and not is_unreturned(leaf) for leaf in flatten(variables.get())[0]):
        # The first turn gives them values.
        body(rows[0])
        rows = rows[1:]
        if not len(rows):
            return
        reached = reached.again()
    carry = _Carry(variables, reached, "for")
    row = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
    turn = guarded or body
    carry.record(turn, [row], stacks=guarded is None)
    if carry.looks_at_appended(turn, len(rows)):
        # A turn sees a list of another length than the one before, so each is code of its own.
        if len(rows) > _MAX_UNROLLED:
            raise UnsupportedError(
                f"The `for` at {script_line()} has {len(rows)} turns, and each looks at a list that"
                f" they append to; at most {_MAX_UNROLLED} turns can. Keep what the next turn needs"
                " in a variable, or set items of an array: x = x.at[i].set(value)."
            )
        for i in range(len(rows)):
            body(rows[i])
        return
    next_ = lambda arrays, row: carry.after([*arrays, row])
    arrays, appended = lax.scan(next_, carry.start(), rows)
    carry.finish(arrays, appended, len(rows))


def _for_range(
    numbers: Range, body: Callable[[Any], Any], variables: Variables, reached: Reached
) -> None:
    carry = _Carry(variables, reached, "for")
    index = jax.ShapeDtypeStruct((), numbers.start.dtype)
    carry.record(body, [index], stacks=False)

    def next_(i: Any, arrays: Sequence[Any]) -> list[Any]:
        number = numbers.item(i).astype(index.dtype)
        return carry.after([*arrays, number])[0]

    arrays = lax.fori_loop(0, numbers.length(), next_, carry.start())
    carry.finish(arrays)


def is_iterated(value: Any) -> bool:
    """Returns whether a `for` loop over a value is a loop of JAX."""
    return isinstance(value, (Range, jax.Array)) or (
        hasattr(value, "__jax_array__") and not isinstance(value, Iterable)
    )
