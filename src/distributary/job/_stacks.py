"""The stacks of this process's threads, as others are told when they wait for it."""

import linecache
import os
import sys
import sysconfig
import threading
from types import CodeType, FrameType

_MAX_FRAMES = 8
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARIES = (
    _OWN_FOLDER,
    "<frozen ",
    *(
        os.path.join(sysconfig.get_path(name), "")
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ),
)


def stacks() -> list[str]:
    """Returns the stack of the main thread, and the places of other threads of the script.

    There is a line per frame, the innermost last: `train.py:40 in load: batch = queue.get()`.
    If there are frames of the script, frames of libraries are left out, except the innermost one if
    it is not ours.
    """
    frames = sys._current_frames()
    stack = _stack_of(frames.pop(threading.main_thread().ident or 0, None))
    own = [frame for frame in stack[1:] if _is_of_script(frame.f_code)]
    innermost = [] if own and stack[0].f_code.co_filename.startswith(_OWN_FOLDER) else stack[:1]
    shown = [*innermost, *(own or stack[1:])][:_MAX_FRAMES]
    lines = [_line_of(frame) for frame in reversed(shown)]
    for ident, frame in frames.items():
        place = next((f for f in _stack_of(frame) if _is_of_script(f.f_code)), None)
        if place is not None:
            # `threading.enumerate` waits for a lock, which the script may hold forever.
            thread = threading._active.get(ident)  # type: ignore[attr-defined]
            lines.append(f"thread {ident if thread is None else thread.name}: {_line_of(place)}")
    return lines


def _stack_of(frame: FrameType | None) -> list[FrameType]:
    """Returns a frame and its callers."""
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack


def _is_of_script(code: CodeType) -> bool:
    return not code.co_filename.startswith(_LIBRARIES)


def _line_of(frame: FrameType) -> str:
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    place = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_qualname}"
    return f"{place}: {text}" if text else place
