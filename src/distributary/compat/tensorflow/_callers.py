"""Whose code is running: the program's, or that of an installed package."""

import functools
import os
import sysconfig
from types import FrameType, ModuleType

_ROOT = "distributary.compat.tensorflow"
_FOLDERS = tuple(
    f"{os.path.realpath(folder)}{os.sep}"
    for folder in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
    )
)


def is_program(frame: FrameType) -> bool:
    """Returns whether a frame is one of the program.

    Code of an installed package belongs to the program if its module uses this package, as the
    model gardens that are installed do.
    """
    if not _is_installed(frame.f_code.co_filename):
        return True
    modules = (value for value in frame.f_globals.values() if isinstance(value, ModuleType))
    own = frame.f_globals.get("__name__", "").startswith("distributary.")
    return not own and any(module.__name__.startswith(_ROOT) for module in modules)


@functools.lru_cache(maxsize=4096)
def _is_installed(filename: str) -> bool:
    return filename.startswith("<frozen") or os.path.realpath(filename).startswith(_FOLDERS)
