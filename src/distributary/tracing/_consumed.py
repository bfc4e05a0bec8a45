"""Refuses Python iterators that a traced function takes elements from.

    numbers = iter(range(3))

    @dist.function
    def step(x):
        return x + next(numbers)  # every call would add 0, which the first trace took

A program would keep the element that the iterator gave while it was traced. So the iterators that
the function can reach are found before the trace, and it is an error if one of them has moved
after it.
"""

import functools
import inspect
import io
import itertools
import operator
import sys
import sysconfig
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

from distributary.errors import InvalidValueError
from distributary.tracing._feeds import current_feeding

# Functions of libraries are not searched for iterators.
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
# The `__reduce__` of iterators from these modules tells their position and the iterators they take
# from.
_BUILTIN = ("builtins", "collections", "itertools")
_COUNTERS = ("line_num", "iterindex", "index")  # csv.reader, np.nditer, np.flatiter
_MAX_VISITED = 2000


@contextmanager
def refused_if_consumed(
    function: Callable[..., Any], arguments: Iterable[Any], what: str
) -> Iterator[None]:
    """Runs the block, which traces `function`, and refuses iterators that it takes elements from.

    Looks among the arguments, in the values that the function and those it calls capture, and in
    the attributes of these. Iterators over a `Dataset` are fine: they are fed to programs.

    Args:
        function: The function.
        arguments: The leaves of its arguments.
        what: Name of the caller in messages.

    Raises:
        InvalidValueError: if the block has taken an element.
    """
    found = _Found()
    for number, leaf in enumerate(arguments):
        found.visit(leaf, f"its argument number {number}")
    found.visit(function, "the function")
    if not found.iterators:
        yield
        return
    watch = _Watch(found.iterators)
    before = [_place_of(iterator) for iterator, _ in found.iterators]
    with watch:
        yield
    for (iterator, name), place in zip(found.iterators, before, strict=True):
        if id(iterator) in watch.consumed or _place_of(iterator) != place:
            raise InvalidValueError(
                f"{what}: {getattr(function, '__qualname__', function)!r} takes from the iterator"
                f" {iterator!r} ({name}) while it is traced, so every later call would compute with"
                " what it took now. Take the element outside, and pass it as an argument; or pass"
                " iter(dataset) of a distributary.data.Dataset, of which each call takes the next"
                " element."
            )


@final
class _Found:
    """The iterators that a function can reach.

    Attributes:
        iterators: Each with a description for messages.
    """

    def __init__(self) -> None:
        self.iterators: list[tuple[Any, str]] = []
        self._seen: dict[int, Any] = {}  # keeps them alive, so that no other object gets their id

    def visit(self, value: object, name: str, is_inside: bool = False) -> None:
        """Looks at a value and its parts; with `is_inside`, at the value only."""
        if id(value) in self._seen or len(self._seen) >= _MAX_VISITED or value is None:
            return
        kind = type(value)
        if kind in weakref.ProxyTypes:  # may be dead
            return
        if isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self.visit(value.__func__, name)
            self.visit(value.__self__, name)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(part, name)
        elif isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
            return
        elif callable(value) and (wrapped := inspect.getattr_static(value, "__wrapped__", None)):
            self.visit(wrapped, name)
        elif hasattr(kind, "__next__"):
            self._add(value, name)
        elif not is_inside:
            self._visit_parts(value, name)

    def _visit_function(self, function: types.FunctionType) -> None:
        code = function.__code__
        if any(part in code.co_filename for part in _LIBRARIES):
            return
        self._seen[id(function)] = function
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.visit(cell.cell_contents, f"the captured variable {name!r}")
            except ValueError:  # it has no value yet
                continue
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(default, "a default argument")
        for name in _global_names(code):
            if name in function.__globals__:
                self.visit(function.__globals__[name], f"the global variable {name!r}")

    def _visit_parts(self, value: object, name: str) -> None:
        """Looks at the items of a container, or the attributes of an object."""
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            items = value.values() if isinstance(value, dict) else value
            parts = [(part, f"in {name}") for part in itertools.islice(items, _MAX_VISITED)]
        elif type(value).__module__.partition(".")[0] in (
            "builtins",
            "distributary",
            "jax",
            "numpy",
        ):
            return
        else:
            attributes = getattr(value, "__dict__", None)
            if not isinstance(attributes, dict):
                return
            parts = [(part, f"{key!r} of {name}") for key, part in attributes.items()]
            if callable(value):
                self.visit(type(value).__call__, name)
        self._seen[id(value)] = value
        for part, part_name in parts:
            self.visit(part, part_name, is_inside=True)

    def _add(self, iterator: Any, name: str) -> None:
        if type(iterator).__module__.partition(".")[0] == "distributary":
            return
        self._seen[id(iterator)] = iterator
        self.iterators.append((iterator, name))
        for part in _reduced(iterator):
            if hasattr(type(part), "__next__") and id(part) not in self._seen:
                self._add(part, name)


def _global_names(code: types.CodeType) -> list[str]:
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return [*code.co_names, *(name for part in inner for name in _global_names(part))]


def _reduced(iterator: Any) -> list[Any]:
    """Returns the parts of an iterator of the standard library: its position, other iterators."""
    if type(iterator).__module__ not in _BUILTIN or isinstance(iterator, types.GeneratorType):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of itertools in Python 3.12
            reduced = iterator.__reduce__()
    except TypeError:
        return []
    parts = [part for part in reduced[1:] if part is not None]
    return [item for part in parts for item in (part if isinstance(part, tuple) else (part,))]


def _place_of(iterator: Any) -> Any:
    """Returns the position of an iterator if it tells without being asked for an element."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else frame.f_lasti
    if isinstance(iterator, io.IOBase):
        try:
            return iterator.tell()
        except (OSError, ValueError):  # a text file during iteration, or a closed file
            return None
    if _code_of_next(iterator) is not None:
        return None  # it is watched; asking it could run any code
    counters = [getattr(iterator, name, None) for name in _COUNTERS]
    return (
        operator.length_hint(iterator, -1),
        [part for part in _reduced(iterator) if isinstance(part, (int, float))],
        [counter for counter in counters if isinstance(counter, int)],
    )


def _code_of_next(iterator: Any) -> types.CodeType | None:
    code: types.CodeType | None = getattr(type(iterator).__next__, "__code__", None)
    return code


@final
class _Watch:
    """A profiler that notices which iterators written in Python are asked for elements.

    An element that comes from a `Dataset`'s iterator is fed to the program, and does not count.

    Args:
        iterators: The iterators.

    Attributes:
        consumed: Identities of the iterators that gave elements of their own.
    """

    def __init__(self, iterators: Iterable[tuple[Any, str]]) -> None:
        self.consumed: set[int] = set()
        self._objects: dict[Any, list[Any]] = {}  # keys: the code that makes an element
        self._running: list[tuple[Any, int, int]] = []
        self._before: Any = None
        for iterator, _ in iterators:
            is_generator = isinstance(iterator, types.GeneratorType)
            code = iterator.gi_code if is_generator else _code_of_next(iterator)
            if code is not None:
                self._objects.setdefault(code, []).append(iterator)

    def __enter__(self) -> None:
        before: Any = sys.getprofile()
        self._before = before
        # A profiler written in C cannot be called from here, so it is left in place.
        if self._objects and (before is None or isinstance(before, _Watch)):
            sys.setprofile(self)

    def __exit__(self, *exc_info: object) -> None:
        current: Any = sys.getprofile()
        if current is self:
            sys.setprofile(self._before)

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        if self._before is not None:
            self._before(frame, event, argument)
        if frame.f_code not in self._objects or event not in ("call", "return"):
            return
        if event == "call":
            iterator = self._of_frame(frame)
            if iterator is not None:
                self._running.append((frame, id(iterator), _num_fed()))
        elif self._running and self._running[-1][0] is frame:
            _, number, fed_before = self._running.pop()
            if _num_fed() == fed_before:
                self.consumed.add(number)

    def _of_frame(self, frame: Any) -> Any:
        code = frame.f_code
        own = None if not code.co_argcount else frame.f_locals.get(code.co_varnames[0])
        for iterator in self._objects[code]:
            if isinstance(iterator, types.GeneratorType):
                if iterator.gi_frame is frame:
                    return iterator
            elif iterator is own:
                return iterator
        return None


def _num_fed() -> int:
    feeding = current_feeding()
    return 0 if feeding is None else feeding.position
