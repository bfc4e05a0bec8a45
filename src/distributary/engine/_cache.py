"""Compiled programs by function and arguments; functions are not kept alive."""

import contextlib
import contextvars
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, final

import jax
import numpy as np

from distributary._threads import bound
from distributary.errors import warn

_TRACES_BEFORE_WARNING = 8


@final
class ProgramCache:
    """The programs of one strategy or of one `distributary.function`.

    An entry is removed when its function is collected. A bound method is identified by its function
    and its object. If a `distributary.function` defines a function anew in every call, all of these
    count as one, see `Inner`.

    Args:
        what: Name of the caller in warnings.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._functions: ByIdentity[dict[Any, Any]] = ByIdentity(dict)
        self._methods: ByIdentity[ByIdentity[dict[Any, Any]]] = ByIdentity(lambda: ByIdentity(dict))
        self._functions_per_code: dict[Any, int] = {}
        self._warned: set[Any] = set()

    def __len__(self) -> int:
        of_functions = [*self._functions.values()]
        of_methods = [programs for owners in self._methods.values() for programs in owners.values()]
        return sum(map(len, of_functions + of_methods))

    def programs_of(self, function: Callable[..., Any]) -> dict[Any, Any]:
        """Returns the programs of a function, by key; the caller adds new ones."""
        owner = getattr(function, "__self__", None)
        if owner is not None and hasattr(function, "__func__"):
            return self._methods[function.__func__][owner]
        inner = _inner.get()
        return self._functions[function if inner is None else inner.same(function)]

    def note_trace(
        self, function: Callable[..., Any], programs: dict[Any, Any], key: object
    ) -> None:
        """Warns once if a function is traced again and again, and names the cause."""
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code in self._warned:
            return
        if len(programs) >= _TRACES_BEFORE_WARNING:
            self._warn(code, function, _difference(next(reversed(programs)), key))
        elif not programs and code is not None:
            self._functions_per_code[code] = self._functions_per_code.get(code, 0) + 1
            if self._functions_per_code[code] > _TRACES_BEFORE_WARNING:
                self._warn(
                    code,
                    function,
                    "each call brings a new function object. Define it once, outside of the loop",
                )

    def _warn(self, code: object, function: object, cause: str) -> None:
        self._warned.add(code)
        warn(
            f"{self._what}: {getattr(function, '__qualname__', function)!r} has been traced and"
            f" compiled {_TRACES_BEFORE_WARNING} times, which is slow: {cause}."
        )


_inner: "contextvars.ContextVar[Inner | None]" = contextvars.ContextVar("_inner", default=None)


@final
class Inner:
    """The functions that are defined in a function whose Python code runs in every call.

    Two of them are the same if they have the same code and capture the same objects.
    """

    def __init__(self) -> None:
        self._stand_ins: dict[Any, object] = {}

    def active(self) -> AbstractContextManager[None]:
        """Makes this object known to every `ProgramCache` while the block runs."""
        return bound(_inner, self)

    def same(self, function: Callable[..., Any]) -> object:
        """Returns an object that stands for all functions that are the same as this one."""
        try:
            key = _captured(function, [])
        except (TypeError, ValueError):  # ValueError: a captured variable has no value yet
            return function
        stand_in = self._stand_ins.get(key)
        if stand_in is None:
            self._stand_ins = {k: v for k, v in self._stand_ins.items() if _is_alive(k)}
            stand_in = self._stand_ins[key] = _StandIn()
        return stand_in


class _StandIn:
    """An object that can be referenced weakly."""


def _captured(value: object, outer: list[Any]) -> Any:
    """Returns a key for a value that a function captures, without keeping the value alive.

    Raises:
        TypeError: for arrays, which differ in every call, and for objects without weak references.
    """
    if isinstance(value, types.FunctionType):
        if any(value is function for function in outer):  # it calls itself
            return "recursion"
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        inside = [_captured(part, [*outer, value]) for part in (*cells, *defaults)]
        return value.__code__, id(value.__globals__), tuple(inside)
    if isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (tuple, list)):
        return tuple(_captured(part, outer) for part in value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), repr(value)  # tells 0.0 from -0.0
    return WeakIdentity(value)


def _is_alive(key: object) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_alive, key))
    return not isinstance(key, WeakIdentity) or key() is not None


_V = TypeVar("_V")


@final
class ByIdentity(Generic[_V]):
    """A value for each object, made on first use and dropped when the object is collected.

    Objects that cannot be referenced weakly get a new value each time.

    Args:
        make: Makes a value.
    """

    def __init__(self, make: Callable[[], _V]) -> None:
        self._make = make
        self._entries: dict[int, tuple[weakref.ref[Any], _V]] = {}

    def __getitem__(self, owner: object) -> _V:
        entry = self._entries.get(id(owner))
        if entry is not None and entry[0]() is owner:
            return entry[1]
        return self._add(owner)

    def _add(self, owner: object) -> _V:
        entries, number, value = self._entries, id(owner), self._make()

        def forget(reference: object) -> None:
            if entries.get(number, (None,))[0] is reference:
                del entries[number]

        with contextlib.suppress(TypeError):
            entries[number] = weakref.ref(owner, forget), value
        return value

    def values(self) -> list[_V]:
        """Returns the values of the objects that are alive."""
        return [value for _, value in list(self._entries.values())]


@final
class WeakIdentity:
    """A key for an object by identity; the object need not be hashable and is not kept alive.

    Args:
        value: The object.

    Raises:
        TypeError: if the object cannot be referenced weakly.
    """

    __slots__ = ("_hash", "_reference")

    def __init__(self, value: object) -> None:
        self._hash = id(value)
        self._reference = weakref.ref(value)

    def __call__(self) -> Any:
        """Returns the object, or None if it was collected."""
        return self._reference()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, WeakIdentity):
            return False
        value = self()
        return value is not None and value is other()


def _difference(before: Any, after: Any) -> str:
    tree_before, signature_before = before[:2]
    tree_after, signature_after = after[:2]
    if tree_before != tree_after:
        return f"the structure of its arguments changes, from {tree_before} to {tree_after}"
    for i, (old, new) in enumerate(zip(signature_before, signature_after, strict=False)):
        if old != new:
            return (
                f"its argument number {i} (counting the leaves of all arguments) changes from"
                f" {_describe(old)} to {_describe(new)}. Keep shapes and dtypes the same, for"
                " example with drop_remainder, and pass changing numbers as arrays"
            )
    return "its arguments change"


def _describe(part: object) -> str:
    if isinstance(part, (weakref.ref, WeakIdentity)):
        return f"the object {part()!r}"
    if isinstance(part, tuple) and part and isinstance(part[0], tuple):
        return f"{part[1]}{list(part[0])}"
    return repr(part)
