"""The place of a Python thread: its positions in code, and its values.

A thread that comes back to an equal place goes around in circles. Looking only reads. It runs no
code of the program: no property, no `__eq__`, no `__hash__`, no `__len__` that a program has
defined.
"""

import dis
import functools
import gc
import operator
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator
from itertools import islice
from types import CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any, final

_Value = Any  # the value of a variable of the program

_MAX_FRAMES = 200
_MAX_VALUES = 2000  # in one stack
_MAX_ELEMENTS = 8  # in a list or dict
_MAX_ATTRIBUTES = 32
_MAX_LENGTH = 64  # of a text that is compared as a whole
# A number from this range around now counts as a time: loops look at a clock and compute deadlines.
_PAST_SECONDS, _FUTURE_SECONDS = 60.0, 3600.0
_MIN_NANOSECONDS, _MAX_NANOSECONDS = 10**10, 10**19  # of clocks

# Variables in these modules are deadlines and remaining times, so only the position counts.
_LIBRARY = re.escape(os.path.dirname(threading.__file__)) + r"[/\\]"
_WAITING = re.compile(
    _LIBRARY
    + r"(threading|queue|selectors|subprocess|socket|(asyncio|concurrent|multiprocessing)\W)"
)
_EVENT_LOOPS = re.compile(_LIBRARY + r"asyncio[/\\](base_events|runners)\.py$")

_OURS = "distributary.job"  # its counters change even if nothing moves
_OPTIMIZED = 1  # flag of code of functions, whose variables are not in a dict
_HEAP_TYPE = 1 << 9  # flag of types that a program or an extension defines
_SIMPLE = frozenset({int, float, bool, complex, str, bytes, type(None)})
_SIZED = (list, tuple, dict, set, frozenset, deque, bytearray)
_ITERABLES: list[Any] = [[], (), range(1), range(1 << 70), {}, {}.items(), set(), "a"]
_ITERATORS = frozenset(type(iter(value)) for value in _ITERABLES)
# Before Python 3.13, reading `f_locals` fills the dict that these names hand out to the program.
_HANDING_OUT_LOCALS = frozenset({"dir", "eval", "exec", "f_locals", "locals", "vars"})
# Modules that trace in Python. A tracer copies that dict back to the variables, so it must stay
# full.
_TRACERS = frozenset({"bdb", "coverage.pytracer", "pydevd", "pysnooper", "trace"})
_ENTERING = frozenset({"BEFORE_WITH", "LOAD_SPECIAL"})
_LOADING = ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")
_BETWEEN_CALLS = ("JUMP_", "RESUME", "POP_JUMP_", "NOP")


def stack_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and its callers, at most 200."""
    number = 0
    while frame is not None and number < _MAX_FRAMES:
        yield frame
        frame, number = frame.f_back, number + 1


@final
class Places:
    """A comparison of the places of threads.

    It keeps the facts it has learned about their code.
    """

    def __init__(self) -> None:
        # By id, because code compares by content. The entry keeps the code alive, and so its id.
        self._assigned: dict[int, tuple[CodeType, tuple[str, ...], tuple[str, ...]]] = {}

    def of(self, frame: FrameType) -> int:
        """Returns a number for the place of a thread: the positions and variables in its stack."""
        marks: list[Hashable] = []
        for each in (*stack_of(frame), *_coroutines(frame)):
            marks.append((id(each.f_code), each.f_lasti))
            if len(marks) < _MAX_VALUES:
                marks += map(_mark, self._values(each))
        return hash(tuple(marks))

    def _values(self, frame: FrameType) -> list[_Value]:
        code = frame.f_code
        if is_waiting(frame):
            return []
        if id(code) not in self._assigned:
            self._assigned[id(code)] = code, *_names_assigned(code)
        _, local_names, global_names = self._assigned[id(code)]
        values = [frame.f_globals.get(name) for name in global_names]
        if not code.co_flags & _OPTIMIZED:
            variables = frame.f_locals
            values += [variables.get(name) for name in local_names]
        elif sys.version_info >= (3, 13):
            values += frame.f_locals.values()
        elif frame.f_trace is None and _HANDING_OUT_LOCALS.isdisjoint(code.co_names):
            copies = frame.f_locals
            values += copies.values()
            # The copies would keep arrays alive until the function ends. With three references,
            # which are those of this function, the frame and `getrefcount`, nobody else has the
            # dict.
            if sys.getrefcount(copies) == 3 and _TRACERS.isdisjoint(sys.modules):
                copies.clear()
        return values


def _names_assigned(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of its namespace, and the globals, that a piece of code sets."""
    found: dict[str, set[str]] = {"STORE_NAME": set(), "STORE_GLOBAL": set()}
    for instruction in dis.get_instructions(code):
        if instruction.opname in found:
            found[instruction.opname].add(instruction.argval)
    return tuple(found["STORE_NAME"]), tuple(found["STORE_GLOBAL"])


def is_waiting(frame: FrameType) -> bool:
    """Returns whether a frame is in a module whose purpose is to wait."""
    return bool(_WAITING.match(frame.f_code.co_filename))


def is_between_calls(frame: FrameType) -> bool:
    """Returns whether the frame is at an instruction that cannot take long."""
    return call_at(frame).startswith(_BETWEEN_CALLS)


def call_at(frame: FrameType) -> str:
    """Returns the name of the C function that a frame calls; `with` for entering a context.

    Otherwise returns the name of the instruction.
    """
    return _call_at(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)  # code is equal only if its instructions are
def _call_at(code: CodeType, position: int) -> str:
    before = [each for each in dis.get_instructions(code) if each.offset <= position]
    if not before:
        return ""
    here = before.pop()
    if here.opname in _ENTERING:
        return "with"
    # Python 3.11 calls known C functions in `PRECALL`, the first half of a call.
    if here.opname.startswith(("CALL", "PRECALL")):
        # The function's name begins where the call begins; the arguments come after it.
        for each in reversed(before):
            if each.opname.startswith(_LOADING) and _begin(each) == _begin(here):
                return str(each.argval)
    return here.opname


def _begin(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    positions = instruction.positions
    return (positions.lineno, positions.col_offset) if positions else (None, None)


def _coroutines(frame: FrameType) -> Iterator[FrameType]:
    """Yields the frames of the coroutines that wait in the event loop of a thread."""
    for each in stack_of(frame):
        if _EVENT_LOOPS.search(each.f_code.co_filename):
            runner = each.f_locals.get("self")
            loop = getattr(runner, "_loop", runner)
            for task in sorted(sys.modules["asyncio"].all_tasks(loop), key=id):
                coroutine: Any = task.get_coro()
                while isinstance(coroutine, CoroutineType) and coroutine.cr_frame is not None:
                    yield coroutine.cr_frame
                    coroutine = coroutine.cr_await
            return


# Values


def _mark(value: _Value) -> Hashable:
    """Returns a mark that changes with a value: itself, its size, its elements or attributes."""
    kind = type(value)
    if kind in _SIMPLE or kind in _SIZED:
        return (_outer_mark(value), *map(_outer_mark, _elements(value, kind)))
    if kind in _ITERATORS:
        return operator.length_hint(value)
    if kind is GeneratorType:
        frame = value.gi_frame
        return -1 if frame is None else frame.f_lasti
    base = next((each for each in _SIZED if issubclass(kind, each)), None)
    if base is not None:
        return base.__len__(value)
    if kind.__module__.startswith(_OURS):
        return kind.__name__
    if kind.__flags__ & _HEAP_TYPE:
        return tuple(_attribute_marks(value))
    return id(value)


def _outer_mark(value: _Value) -> Hashable:
    kind = type(value)
    if kind is str or kind is bytes:
        length = len(value)
        if length <= _MAX_LENGTH:
            return kind.__name__, value
        return length, value[: _MAX_LENGTH // 2], value[-_MAX_LENGTH // 2 :]
    if kind is float or kind is int:
        return "clock" if _is_clock(value) else (kind.__name__, value)
    if kind in _SIMPLE:
        return value
    return (kind.__name__, len(value)) if kind in _SIZED else kind.__name__


def _elements(value: _Value, kind: type) -> list[_Value]:
    if kind is list or kind is tuple:
        if len(value) <= _MAX_ELEMENTS:
            return list(value)
        return [*value[: _MAX_ELEMENTS // 2], *value[-_MAX_ELEMENTS // 2 :]]
    if kind is dict:
        return list(islice(value.values(), _MAX_ELEMENTS))
    if kind is deque and value:
        return [value[0], value[-1]]
    return []


def _attribute_marks(value: _Value) -> Iterator[Hashable]:
    # Unlike `vars`, this runs no code of the program. The referents are the attributes, or a
    # dict of them.
    for attribute in gc.get_referents(value)[:_MAX_ATTRIBUTES]:
        yield _outer_mark(attribute)
        if type(attribute) is dict:
            yield from map(_outer_mark, islice(attribute.values(), _MAX_ATTRIBUTES))


def _is_clock(value: float) -> bool:
    """Returns whether a value is a time not far from now."""
    if type(value) is int:
        if not _MIN_NANOSECONDS < value < _MAX_NANOSECONDS:
            return False
        value = value / 1e9
    return any(
        -_FUTURE_SECONDS < now - value < _PAST_SECONDS
        for now in (time.time(), time.monotonic(), time.perf_counter())
    )
