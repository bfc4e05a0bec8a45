"""Blocks of converted code, recorded as jaxprs, and the values of variables after them."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary.errors import InvalidTypeError, InvalidValueError, shown
from distributary.tracing import script_line

_NUMBERS = (bool, int, float, complex, np.ndarray, np.generic)


def plain(value: Any) -> Any:
    """Returns the array of a variable, and other values as they are."""
    return jnp.asarray(value) if hasattr(value, "__jax_array__") else value


def is_number(value: Any) -> bool:
    """Returns whether a value can be an array."""
    return isinstance(value, (jax.Array, *_NUMBERS)) and not (
        isinstance(value, np.ndarray) and value.dtype.kind not in "biufcV"
    )


class _NotYet:
    """An array that a block is still to make; zeros until it does."""

    def __repr__(self) -> str:
        return "no array yet"


#: Stands in a pytree for an array of which nothing is known before a block runs.
NOT_YET = _NotYet()


def is_undefined(value: Any) -> bool:
    """Returns whether a name has no value yet."""
    return value is NOT_YET or type(value).__name__ in ("Undefined", "UndefinedReturnValue")


def is_unreturned(value: Any) -> bool:
    """Returns whether this is `NOT_YET`, or the result of a function that has not returned yet."""
    return value is NOT_YET or type(value).__name__ == "UndefinedReturnValue"


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of a value and its structure. None and what has no value are leaves."""
    return jax.tree.flatten(value, is_leaf=lambda node: node is None or is_undefined(node))


def aval_of(value: Any) -> Any:
    """Returns the shape and dtype of a number or an array."""
    made = jax.typeof(value if isinstance(value, jax.Array) else jnp.asarray(value))
    return jax.ShapeDtypeStruct(made.shape, made.dtype, weak_type=getattr(made, "weak_type", False))


def aval_in(avals: dict[int, Any], leaf: Any) -> Any:
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


def is_same(first: Any, second: Any) -> bool:
    """Returns whether two leaves are one value, without a look at arrays."""
    if first is second or (is_undefined(first) and type(first) is type(second)):
        return True
    if type(first) is not type(second) or isinstance(first, (jax.Array, np.ndarray)):
        return False
    try:
        return bool(first == second)
    except Exception:  # an object that cannot be compared
        return False


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.depth = 0  # of blocks that are being recorded


_state = _ThreadState()


def is_recording() -> bool:
    """Returns whether this thread records a block, which may run several times or not at all."""
    return _state.depth > 0


@final
class Recorded:
    """The jaxpr of a block that sets variables.

    Args:
        block: From arrays to the values of the variables after it.
        avals: Shapes and dtypes of the arrays.

    Attributes:
        values: The values, one per variable; arrays among them are tracers that have ended.
        inputs: The tracers that the block got.
    """

    def __init__(self, block: Callable[..., Sequence[Any]], avals: Sequence[Any] = ()) -> None:
        self.values: list[Any] = []
        self.inputs: list[Any] = []
        self._picks: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            self.inputs[:] = arrays
            self.values[:] = block(*arrays)
            leaves = [leaf for value in self.values for leaf in flatten(value)[0]]
            self._picks[:] = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
            return [*self._picks]

        _state.depth += 1
        try:
            self._closed = jax.make_jaxpr(flat)(*avals)
        finally:
            _state.depth -= 1

    def avals(self) -> dict[int, Any]:
        """Returns shapes and dtypes of the arrays among the values, by identity."""
        found = {}
        for leaf, aval in zip(self._picks, self._closed.out_avals, strict=True):
            found[id(leaf)] = jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)
            )
        return found

    def run(self, arrays: Sequence[Any] = ()) -> dict[int, Any]:
        """Evaluates the block where it stands now; returns the arrays by identity, see `avals`."""
        outs = jax.core.eval_jaxpr(self._closed.jaxpr, self._closed.consts, *arrays)
        return {id(leaf): out for leaf, out in zip(self._picks, outs, strict=True)}


def choose(
    pred: jax.Array,
    first: Callable[[], Sequence[Any]],
    second: Callable[[], Sequence[Any]],
    names: Sequence[str],
    what: str = "if",
    negated: Any = None,
) -> list[Any]:
    """Returns the values that one of two blocks sets, with `jax.lax.cond`.

    What is the same after both blocks stays as it is: objects, numbers of Python, arrays that
    neither has changed.

    Args:
        pred: Whether the first block runs, bool `[]`.
        first: Returns the values of the variables after the first block.
        second: The same of the second block.
        names: The variables.
        what: The statement, for messages.
        negated: The value of which `pred` is the negation, if there is one.

    Raises:
        InvalidTypeError: if a variable has an object after one block only, or other dtypes.
        InvalidValueError: if a variable has a value after one block only, or other shapes.
    """
    blocks = Recorded(first), Recorded(second)
    avals = blocks[0].avals() | blocks[1].avals()
    wanted: list[tuple[Any, Any, Any]] = []  # what the arrays are after each block, and their aval
    # Of every variable, what is the same after both blocks or a number in `wanted`.
    merged: list[tuple[list[tuple[Literal["same", "made"], Any]], Any]] = []
    for name, one, two in zip(names, blocks[0].values, blocks[1].values, strict=True):
        pairs, tree = _aligned(name, one, two, what)
        parts: list[tuple[Literal["same", "made"], Any]] = []
        for a, b in pairs:
            if is_same(a, b) or (a is True and b is negated):
                parts.append(("same", a))
            elif (a is None and is_unreturned(b)) or (is_unreturned(a) and b is None):
                parts.append(("same", None))
            else:
                parts.append(("made", len(wanted)))
                wanted.append((a, b, _common(name, a, b, avals, what)))
        merged.append((parts, tree))

    def branch(block: Recorded, which: int) -> Callable[[], list[Any]]:
        def run() -> list[Any]:
            outs = block.run()
            return [
                zeros(want[2])
                if is_unreturned(want[which])
                else cast(outs.get(id(want[which]), want[which]), want[2])
                for want in wanted
            ]

        return run

    outs = jax.lax.cond(pred, branch(blocks[0], 0), branch(blocks[1], 1))
    return [
        jax.tree.unflatten(tree, [outs[of] if kind == "made" else of for kind, of in parts])
        for parts, tree in merged
    ]


def shown_name(name: str) -> str:
    """Returns a name for messages: those of malt for the result of a function are not a user's."""
    return "the result" if name.startswith("retval_") else f"`{name}`"


def _aligned(name: str, one: Any, two: Any, what: str) -> tuple[list[tuple[Any, Any]], Any]:
    """Returns the leaves of two values with one structure, in pairs, and the structure."""
    (first, tree), (second, other) = flatten(one), flatten(two)
    for unreturned, value, structure in ((first, second, other), (second, first, tree)):
        if len(unreturned) == 1 and is_unreturned(unreturned[0]):
            pairs = [(unreturned[0], leaf) for leaf in value]
            return (pairs if unreturned is first else [(b, a) for a, b in pairs]), structure
    if tree != other:
        raise InvalidTypeError(
            f"{shown_name(name)} is {_described(one)} after one branch of the `{what}` at"
            f" {script_line()} and {_described(two)} after the other. Which branch runs is known"
            " only when the step runs, so give it the same structure in both."
        )
    return list(zip(first, second, strict=True)), tree


def _common(name: str, a: Any, b: Any, avals: dict[int, Any], what: str) -> Any:
    """Returns shape and dtype of what is one value or another."""
    if is_unreturned(a) or is_unreturned(b):
        leaf = b if is_unreturned(a) else a
        if is_number(leaf) or hasattr(leaf, "__jax_array__"):
            return aval_in(avals, leaf)
        a, b = leaf, None
    if is_undefined(a) or is_undefined(b):
        raise InvalidValueError(
            f"{shown_name(name)} has a value after one branch of the `{what}` at {script_line()}"
            " only, and is used later. Which branch runs is known only when the step runs, so"
            " assign it in both, or before."
        )
    numbers = [is_number(leaf) or hasattr(leaf, "__jax_array__") for leaf in (a, b)]
    if not all(numbers):
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


def _described(value: Any) -> str:
    if is_undefined(value):
        return "without a value"
    return shown(value)
