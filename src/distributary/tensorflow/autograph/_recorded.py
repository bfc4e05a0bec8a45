"""Blocks of converted code, recorded as jaxprs: the values of variables after them, and errors.

Python raises the error of a branch or turn only if the step runs it.
"""

import contextlib
import functools
import logging
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from distributary.errors import InvalidTypeError, InvalidValueError, UnsupportedError, shown
from distributary.jaxprs import jaxpr_of, walk
from distributary.tensorflow.autograph._reached import (
    CONTAINERS,
    Contents,
    Reached,
    contents_of,
    is_of_library,
)
from distributary.tracing import current_scope, describe_jaxpr, script_line

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.raised: Exception | None = None  # by a `raise` of converted code
        self.recording: list[Reached] = []  # what each block can change that is being recorded
        self.copies: list[list[_Copy]] = []  # of each trace, and of each block in it


_state = _ThreadState()


def raised(error: Any) -> Any:
    """Returns the error that a statement raises: in a block, only if the block runs."""
    if isinstance(error, type) and issubclass(error, Exception):
        error = error()
    _state.raised = error
    return error


def was_raised(error: Exception) -> bool:
    """Returns whether the last `raise` of converted code has raised an error."""
    return error is _state.raised


def not_to_be_handled(statement: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks errors of a statement whose blocks are recorded: Python may not run the block at all.

    `check_handler` raises them again, where code of the user handles them.
    """

    @functools.wraps(statement)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return statement(*args, **kwargs)
        except Exception as error:
            error.__dict__["of_recorded"] = True
            raise

    return run


def check_handler(handled: BaseException | None) -> None:
    """Raises an error that code of the user handles, if it is one of a branch or loop."""
    error, seen = handled, set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if handled is not None and "of_recorded" in error.__dict__:
            handled.add_note(
                "A branch or loop has raised this while it was traced. Whether it runs at all is"
                " known only when the step runs, so code around it cannot handle the error."
            )
            raise handled
        error = error.__cause__ or error.__context__


@final
class Context:
    """A context of converted code, in whose place `check_handler` looks at errors.

    Args:
        manager: The user's own context manager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __enter__(self) -> Any:
        return self._manager.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        is_handled = self._manager.__exit__(kind, error, trace)
        if is_handled:
            check_handler(error)
        return is_handled


class _CheckFailedError(Exception):
    """Ends a program; who has called it gets the error that is in this one."""


def _is_unknown(record: logging.LogRecord) -> bool:
    """Returns whether a report of JAX is about an error that nobody else reports."""
    return not (record.exc_info and isinstance(record.exc_info[1], _CheckFailedError))


def check_when_run(
    holds: object, error: Exception | Callable[..., Exception], values: Sequence[Any] = ()
) -> None:
    """Raises an error when the step runs, unless a traced condition holds.

    Args:
        holds: The condition.
        error: The error, or what makes it of values.
        values: These values; the arrays among them are known when the step runs.
    """
    arrays = [value for value in values if isinstance(value, jax.Array)]
    failed: list[Exception] = []
    scope = current_scope()
    if scope is not None:
        scope.checks.append(failed)
        logging.getLogger("jax._src.debugging").addFilter(_is_unknown)

    def check(value: object, *known: Any) -> None:
        if value:
            return
        by_id = dict(zip(map(id, arrays), known, strict=True))
        failure = (
            error if isinstance(error, Exception) else error(*(by_id.get(id(v), v) for v in values))
        )
        failed.append(failure.with_traceback(None))
        raise _CheckFailedError(failure)

    jax.debug.callback(check, holds, *arrays)


_NUMBERS = (bool, int, float, complex, np.generic)


def plain(value: object) -> Any:
    """Returns the array of a variable, and anything else unchanged."""
    if isinstance(value, (jax.Array, np.ndarray)) or not hasattr(value, "__jax_array__"):
        return value
    return value.__jax_array__()


def is_number(value: object) -> bool:
    """Returns whether a value can be an array, as that of a variable can."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufcV"
    return isinstance(value, (jax.Array, *_NUMBERS)) or hasattr(value, "__jax_array__")


class _NotYet:
    """An array that a block is still to make; zeros until it does."""

    def __repr__(self) -> str:
        return "no array yet"


#: Stands in a pytree for an array of which nothing is known before a block runs.
NOT_YET = _NotYet()


def is_undefined(value: object) -> bool:
    """Returns whether a name has no value yet."""
    return value is NOT_YET or type(value).__name__ in ("Undefined", "UndefinedReturnValue")


# Stands for a value after a block that has raised an error.
_NOTHING = object()


def is_unreturned(value: object) -> bool:
    """Returns whether a value is still to be made, or a function has not returned yet."""
    if value is NOT_YET or value is _NOTHING:
        return True
    return type(value).__name__ == "UndefinedReturnValue"


def flatten(
    value: object, is_leaf: Callable[[Any], object] = lambda node: False
) -> tuple[list[Any], Any]:
    """Returns the leaves of a value and its structure. None and what has no value are leaves."""
    is_end = lambda node: node is None or is_undefined(node) or bool(is_leaf(node))
    try:
        return jax.tree.flatten(value, is_end)
    except ValueError as error:  # of dicts only
        raise InvalidTypeError(
            f"{shown(value)} has a dict at {script_line()} whose keys cannot be sorted, and"
            " processes would not agree on their order. Use keys of one type."
        ) from error


def aval_of(value: object) -> Any:
    """Returns the shape and dtype of a number or an array."""
    return _struct_of(jax.typeof(value if isinstance(value, jax.Array) else jnp.asarray(value)))


def _struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def aval_in(avals: dict[int, Any], leaf: object) -> Any:
    """Returns the shape and dtype of what may be an array of a recorded block."""
    return avals[id(leaf)] if id(leaf) in avals else aval_of(plain(leaf))


def joined(first: Any, second: Any) -> Any:
    """Returns the dtype of values that are one thing or the other; None if neither holds both.

    A number of Python takes the dtype of an array, as in arithmetic.
    """
    dtype = jnp.result_type(first, second)
    weak = first.weak_type and second.weak_type
    for aval in (first, second):
        if not aval.weak_type and aval.dtype != dtype:
            return None
    return jax.ShapeDtypeStruct(first.shape, dtype, weak_type=weak)


def cast(value: Any, aval: Any) -> Any:
    """Returns a value as an array of a dtype; one of a weak type if `aval` is."""
    if aval.weak_type:
        value = value.item() if isinstance(value, (np.ndarray, np.generic)) else value
        number = jnp.asarray(value)
        number = number if number.dtype == aval.dtype else number * aval.dtype.type(1).item()
        return jnp.broadcast_to(number, aval.shape)
    return jnp.asarray(plain(value), aval.dtype)


def zeros(aval: Any) -> Any:
    """Returns what stands for a result that there is not yet."""
    return cast(0, aval) if aval.weak_type else jnp.zeros(aval.shape, aval.dtype)


def is_same(first: object, second: object) -> bool:
    """Returns whether two leaves are one value, without a look at arrays."""
    if first is second or (is_undefined(first) and type(first) is type(second)):
        return True
    if type(first) is not type(second) or isinstance(first, (jax.Array, np.ndarray)):
        return False
    try:
        return bool(first == second)
    except Exception:  # an object that cannot be compared
        return False


@final
class _Copy:
    """A list or dict that is a copy of one of several others, and is to stay as these are.

        c = a if x > 0 else b  # a third list
        c.append(x)            # would reach neither of the others

    Args:
        name: The variable of the copy, for messages.
        what: The statement, for messages.
        things: The copy and the others.
    """

    def __init__(self, name: str, what: str, things: Sequence[Any]) -> None:
        self.things = things
        self._before = [*map(contents_of, things)]
        self._what = f"{shown_name(name)} is a copy since the `{what}` at {script_line()}"

    def check(self) -> None:
        if not all(contents_of(t).is_as(b) for t, b in zip(self.things, self._before, strict=True)):
            raise UnsupportedError(
                f"{self._what}: which list or dict it is, is known only when the step runs. Later"
                " code changes the copy or one of them, and the others would stay as they are."
                " Copy them before, list(a) or dict(a), or make new ones in place of the change."
            )


def note_copies(name: str, what: str, value: object, others: Sequence[Any]) -> None:
    """Notes that the lists and dicts in a value stand for others, if there are any.

    Args:
        name: The variable, for messages.
        what: The statement, for messages.
        value: The value.
        others: The other lists and dicts.
    """
    if others and _state.copies:
        _state.copies[-1].append(_Copy(name, what, [*containers_in(value), *others]))


def shared_in(value: object, blocks: Sequence["Recorded"], reached: Reached) -> list[Any]:
    """Returns the lists and dicts of a value of some blocks to which others can refer."""
    of = {id(v): v for v in containers_in(value)}
    for copy in (copy for block in blocks for copy in block.copies):
        if of.keys() & set(map(id, copy.things)):
            of |= {id(v): v for v in copy.things}
    return [v for v in of.values() if reached.shares(v)]


@contextlib.contextmanager
def checked_copies() -> Iterator[list[_Copy]]:
    """Checks at the end of a trace, or of a block of it, that its copies are as they were."""
    copies: list[_Copy] = []
    _state.copies.append(copies)
    try:
        yield copies
        check_copies()
    finally:
        _state.copies.pop()


def check_copies() -> None:
    """Checks that the copies of the innermost block or trace are as they were."""
    for copy in _state.copies[-1] if _state.copies else ():
        copy.check()


def containers_in(value: object) -> list[Any]:
    """Returns the lists and dicts in a value."""
    found: list[Any] = []
    flatten(value, lambda node: found.append(node) if isinstance(node, CONTAINERS) else None)
    return found


def is_recording() -> bool:
    """Returns whether this thread records a block, which may run several times or not at all."""
    return bool(_state.recording)


def check_advances(iterator: Any) -> None:
    """Checks that an iterator of Python may go on here.

    Raises:
        UnsupportedError: if a block is being recorded, and the iterator is from outside of it.
    """
    kind = type(iterator)
    if is_of_library(kind.__module__) or not hasattr(kind, "__next__"):
        return
    if any(reached.refers_to(iterator) for reached in _state.recording):
        raise UnsupportedError(
            f"{script_line()} takes the next item of {shown(iterator)} in a branch or loop that is"
            " decided when the step runs. Python gives one item, once, however often the step runs."
            " Take the items before, for example as an array, and index that."
        )


@final
class Value:
    """The value of a variable after a block, and what it consisted of then.

    Args:
        value: The value, which may be changed in place later.
        is_leaf: Returns whether a part of it is a leaf, apart from those of `flatten`.
    """

    def __init__(self, value: Any, is_leaf: Callable[[Any], bool] = lambda node: False) -> None:
        self.value = value
        self.leaves, self.tree = flatten(value, is_leaf)

    def without_arrays(self) -> "Value":
        """Returns what stands for the value after a block that raises an error."""
        if not any(isinstance(leaf, jax.Array) for leaf in self.leaves):
            return self
        other = Value(None)
        other.tree = self.tree
        other.leaves = [_NOTHING if isinstance(v, jax.Array) else v for v in self.leaves]
        return other


@final
class Recorded:
    """The jaxpr of a block that sets variables.

    Args:
        block: From arrays to the values of the variables after it.
        reached: What else it can change; that is put back as it was before.
        avals: Shapes and dtypes of the arrays.

    Attributes:
        values: The values, one per variable; arrays among them are tracers that have ended.
        changes: What is in the things that the block has changed, by their numbers in `reached`.
        inputs: The tracers that the block got.
        raised: The error that the block raises, if it does nothing else.
        copies: The lists and dicts that stand for others.
    """

    def __init__(
        self, block: Callable[..., Sequence[Any]], reached: Reached, avals: Sequence[Any] = ()
    ) -> None:
        self.values: list[Value] = []
        self.changes: dict[int, tuple[Contents, list[Value]]] = {}
        self.inputs: list[Any] = []
        self.raised: Exception | None = None
        self.copies: list[_Copy] = []
        self._picks: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            self.inputs[:] = arrays
            try:
                with reached.protected(), checked_copies() as self.copies:
                    self.values[:] = [Value(value) for value in block(*arrays)]
                for k, contents in reached.changes().items():
                    values = [Value(value, reached.holds) for value in contents.values]
                    self.changes[k] = contents, values
            except Exception as error:
                if not was_raised(error):
                    raise
                self.raised = error
                self.values, self.changes = [], {}
            finally:
                for k in reached.changes():
                    reached.put(k, reached.before[k])
            changed = [value for _, values in self.changes.values() for value in values]
            leaves = [leaf for value in (*self.values, *changed) for leaf in value.leaves]
            self._picks[:] = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
            return [*self._picks]

        _state.recording.append(reached)
        try:
            self._closed = jax.make_jaxpr(flat)(*avals)
        finally:
            _state.recording.pop()

    def avals(self) -> dict[int, Any]:
        """Returns shapes and dtypes of the arrays among the values, by identity."""
        pairs = zip(self._picks, self._closed.out_avals, strict=True)
        return {id(leaf): _struct_of(aval) for leaf, aval in pairs}

    def is_like(self, other: "Recorded", values: Sequence[Value], others: Sequence[Value]) -> bool:
        """Returns whether two blocks compute the same values from the inputs that this one has.

        Args:
            other: The other block.
            values: Values after this block.
            others: The same after the other one.
        """
        if [value.tree for value in values] != [value.tree for value in others]:
            return False
        leaves = [[v for value in of for v in value.leaves] for of in (values, others)]
        (text, left), (other_text, right) = map(self._described, (self, other), leaves)
        return (
            text == other_text
            and all(map(is_same, left, right))
            and all(map(operator.is_, self._closed.consts, other._closed.consts))
        )

    def _described(self, block: "Recorded", leaves: Sequence[Any]) -> tuple[list[str], list[Any]]:
        """Returns what a block computes of the inputs that this one has, and the other leaves."""
        jaxpr = block._closed.jaxpr
        atoms = dict(zip(map(id, block._picks), jaxpr.outvars, strict=True))
        outs = [atoms[id(leaf)] for leaf in leaves if id(leaf) in atoms]
        inputs = [*jaxpr.constvars, *jaxpr.invars[: len(self.inputs)]]
        program = ClosedJaxpr(jaxpr_of(inputs, outs, jaxpr.eqns), ())
        text = [line for line, _ in describe_jaxpr(program)]
        return text, [NOT_YET if id(leaf) in atoms else leaf for leaf in leaves]

    def is_simple(self) -> bool:
        """Returns whether it costs little, and does nothing, to evaluate the block in vain."""
        loops = ("while", "scan", "cond", "variable_write")
        return not (
            self.changes
            or self.raised
            or any(type(effect).__name__ != "NamedAxisEffect" for effect in self._closed.effects)
            or any(eqn.primitive.name in loops for eqn in walk(self._closed.jaxpr.eqns))
        )

    def end_as(self, other: "Recorded") -> None:
        """Takes over what is after another block, because this one ends with an error."""
        assert self.raised is not None
        if other.raised is not None:
            raise self.raised
        self.values = [value.without_arrays() for value in other.values]
        self.changes = {
            k: (contents, [value.without_arrays() for value in values])
            for k, (contents, values) in other.changes.items()
        }

    def run(self, arrays: Sequence[Any] = ()) -> dict[int, Any]:
        """Evaluates the block where it stands now; returns the arrays by identity, see `avals`."""
        outs = jax.core.eval_jaxpr(self._closed.jaxpr, self._closed.consts, *arrays)
        return {id(leaf): out for leaf, out in zip(self._picks, outs, strict=True)}


@final
class _Merge:
    """Variables after one of two blocks: what is the same, and what `jax.lax.cond` returns.

    Args:
        blocks: The blocks.
        what: The statement, for messages.
        negated: The value of which the condition is the negation, if there is one.
    """

    def __init__(self, blocks: tuple[Recorded, Recorded], what: str, negated: object) -> None:
        self._blocks = blocks
        self._what = what
        self._negated = negated
        self._avals = blocks[0].avals() | blocks[1].avals()
        # What the arrays are after each block, and their aval; by the ids of the first two.
        self._wanted: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
        self._outs: dict[tuple[int, int], Any] = {}

    def add(self, name: str, one: Value, two: Value) -> Callable[[], Any]:
        """Adds a variable with its values after the blocks.

        Returns:
            Function that returns its value after `run`.
        """
        if one.value is two.value:
            return lambda: one.value
        pairs, tree = _aligned(name, one, two, self._what)
        parts = [self._part(name, a, b) for a, b in pairs]
        return lambda: jax.tree.unflatten(tree, [part() for part in parts])

    def _part(self, name: str, a: object, b: object) -> Callable[[], Any]:
        is_flag = a is True and b is not None and b is self._negated  # of malt, for `return`
        if is_same(a, b) or (is_flag and jnp.result_type(b) == jnp.bool_):
            return lambda: a
        if (a is None and is_unreturned(b)) or (is_unreturned(a) and b is None):
            return lambda: None
        if (id(a), id(b)) not in self._wanted:
            self._wanted[id(a), id(b)] = a, b, _common(name, a, b, self._avals, self._what)
        return lambda: self._outs[id(a), id(b)]

    def run(self, pred: jax.Array) -> None:
        """Evaluates the blocks, of which the first runs if `pred` holds."""
        outs = jax.lax.cond(pred, self._branch(0), self._branch(1))
        self._outs = dict(zip(self._wanted, outs, strict=True))

    def _branch(self, which: Literal[0, 1]) -> Callable[[], list[Any]]:
        def run() -> list[Any]:
            block = self._blocks[which]
            if block.raised is not None:
                check_when_run(False, block.raised)
            outs = block.run()
            return [
                zeros(want[2])
                if is_unreturned(want[which])
                else cast(outs.get(id(want[which]), want[which]), want[2])
                for want in self._wanted.values()
            ]

        return run


@not_to_be_handled
def choose(
    pred: jax.Array,
    first: Callable[[], Sequence[Any]],
    second: Callable[[], Sequence[Any]],
    names: Sequence[str],
    reached: Reached,
    what: str = "if",
    negated: object = None,
) -> list[Any]:
    """Returns the values that one of two blocks sets, with `jax.lax.cond`.

    What is the same after both blocks stays as it is: objects, numbers of Python, arrays that
    neither has changed.

    Args:
        pred: Whether the first block runs, bool `[]`.
        first: Returns the values of the variables after the first block.
        second: The same of the second block.
        names: The variables.
        reached: What else the blocks can change; it gets its new contents.
        what: The statement, for messages.
        negated: The value of which `pred` is the negation, if there is one.

    Raises:
        InvalidTypeError: if a variable has an object after one block only, or other dtypes.
        InvalidValueError: if a variable has a value after one block only, or other shapes.
    """
    blocks = Recorded(first, reached), Recorded(second, reached)
    for block, other in (blocks, blocks[::-1]):
        if block.raised is not None:
            block.end_as(other)
    merge = _Merge(blocks, what, negated)
    results = [
        merge.add(name, one, two)
        for name, one, two in zip(names, blocks[0].values, blocks[1].values, strict=True)
    ]
    changes: list[tuple[int, Sequence[Any], list[Callable[[], Any]]]] = []
    for k in sorted({*blocks[0].changes, *blocks[1].changes}):
        before = reached.before[k]
        same = before, [Value(value, reached.holds) for value in before.values]
        (one, ones), (two, twos) = (block.changes.get(k, same) for block in blocks)
        if one.keys != two.keys and reached.is_dead(k):
            continue
        if one.keys != two.keys:
            raise InvalidTypeError(
                f"{shown_name(reached.names[k])} has {counted(one)} after one branch of the"
                f" `{what}` at {script_line()} and {counted(two)} after the other. Which branch"
                " runs is known only when the step runs, so give it the same ones in both, or"
                " change an array with jnp.where."
            )
        named = [reached.name_of(k, key) for key in one.keys]
        values = [merge.add(*each) for each in zip(named, ones, twos, strict=False)]
        changes.append((k, one.keys, values))
    merge.run(pred)
    for k, keys, values in changes:
        reached.put(k, Contents(keys, [value() for value in values]))
    outs = [result() for result in results]
    for name, one, two, out in zip(names, *(block.values for block in blocks), outs, strict=True):
        if one.value is not two.value:
            pair = (one.value, two.value)
            note_copies(name, what, out, [v for of in pair for v in shared_in(of, blocks, reached)])
    return outs


def counted(contents: Contents) -> str:
    """Returns what is in a container, for messages."""
    keys = contents.keys
    if keys == (*range(len(keys)),):
        return f"{len(keys)} items"
    return f"the keys {shown([*keys])}" if keys else "no keys"


def shown_name(name: str) -> str:
    """Returns a name for messages: those of malt for the result of a function are not a user's."""
    return "the result" if name.startswith("retval_") else f"`{name}`"


def _aligned(name: str, one: Value, two: Value, what: str) -> tuple[list[tuple[Any, Any]], Any]:
    """Returns the leaves of two values with one structure, in pairs, and the structure."""
    first, second, tree = one.leaves, two.leaves, two.tree
    if len(first) == 1 and is_unreturned(first[0]):  # it takes the structure of the other
        first = first * len(second)
    elif len(second) == 1 and is_unreturned(second[0]):
        second, tree = second * len(first), one.tree
    elif one.tree != two.tree:
        raise InvalidTypeError(
            f"{shown_name(name)} is {_described(one.value)} after one branch of the `{what}` at"
            f" {script_line()} and {_described(two.value)} after the other. Which branch runs is"
            " known only when the step runs, so give it the same structure in both."
        )
    return list(zip(first, second, strict=True)), tree


def _common(name: str, a: object, b: object, avals: dict[int, Any], what: str) -> Any:
    """Returns shape and dtype of what is one value or another."""
    if is_unreturned(a) or is_unreturned(b):
        leaf = b if is_unreturned(a) else a
        if is_number(leaf):
            return aval_in(avals, leaf)
        a, b = leaf, None
    if is_undefined(a) or is_undefined(b):
        raise InvalidValueError(
            f"{shown_name(name)} has a value after one branch of the `{what}` at {script_line()}"
            " only, and is used later. Which branch runs is known only when the step runs, so"
            " assign it in both, or before."
        )
    if not (is_number(a) and is_number(b)):
        raise InvalidTypeError(
            f"{shown_name(name)} is {_described(a)} after one branch of the `{what}` at"
            f" {script_line()} and {_described(b)} after the other. Which branch runs is known only"
            " when the step runs, so only numbers and arrays can differ."
        )
    one, two = (aval_in(avals, leaf) for leaf in (a, b))
    if one.shape != two.shape:
        raise InvalidValueError(
            f"{shown_name(name)} has shape {one.shape} after one branch of the `{what}` at"
            f" {script_line()} and {two.shape} after the other. Give it one shape, for example with"
            " jnp.broadcast_to or jnp.where."
        )
    aval = joined(one, two)
    if aval is None:
        raise InvalidTypeError(
            f"{shown_name(name)} has dtype {one.dtype} after one branch of the `{what}` at"
            f" {script_line()} and {two.dtype} after the other. Convert one with x.astype(dtype)."
        )
    return aval


def _described(value: object) -> str:
    if is_undefined(value):
        return "without a value"
    return shown(value)
