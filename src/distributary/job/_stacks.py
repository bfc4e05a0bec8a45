"""The stack of the script, as others are told when they wait for this process."""

import linecache
import os
import sys
import sysconfig
import threading
import traceback

_MAX_FRAMES = 8
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARIES = (
    _OWN_FOLDER,
    "<frozen ",
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib")),
)


def stack_of_script() -> list[str]:
    """Returns the stack of the main thread.

    There is a line per frame, the innermost last: `train.py:40 in load: batch = queue.get()`. If
    there are frames of the script, frames of libraries are left out.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = [(frame.f_code, line) for frame, line in traceback.walk_stack(frame)]
    of_script = [one for one in stack if not one[0].co_filename.startswith(_LIBRARIES)]
    # Not `traceback.extract_stack`, which looks at every file again: a disk that hangs must not
    # silence this process, which is called once a second.
    return [
        f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}:"
        f" {linecache.getline(code.co_filename, line).strip()}"
        for code, line in reversed((of_script or stack)[:_MAX_FRAMES])
    ]
