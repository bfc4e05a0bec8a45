"""The modules `tf`, `tf.distribute`, `tf.nn`, ..., and the errors for names that they lack."""

import difflib
import importlib
import sys
from types import ModuleType
from typing import Any

from distributary.compat.tensorflow._equivalents import ANYTHING, EQUIVALENTS, equivalent
from distributary.compat.tensorflow._names import MODULES, Late, names_of
from distributary.tensorflow._operations import Operation

_ROOT = "distributary.compat.tensorflow"


def names_in(module: str) -> list[str]:
    """Returns the names in a module such as `"distribute.experimental"`; `""` is `tf` itself."""
    prefix = f"{module}." if module else ""
    inner = [name.removeprefix(prefix) for name in MODULES if name and name.startswith(prefix)]
    return sorted({*names_of(module), *(name for name in inner if "." not in name)})


def lookup(module: str, name: str) -> Any:
    """Returns a name of a module.

    Raises:
        AttributeError: if it is not supported; the error says what to use instead.
    """
    full = f"{module}.{name}" if module else name
    names = names_of(module) if module in MODULES else {}
    if name in names:
        value = names[name]
        if isinstance(value, Operation):
            return value.function(f"tf.{full}")
        return value.make() if isinstance(value, Late) else value
    if f"{_ROOT}.{full}" in sys.modules:
        # Not from `sys.modules`, where a module is while another thread executes it.
        return importlib.import_module(f"{_ROOT}.{full}")
    message = f"tf.{full} is not among the names that {_ROOT} has."
    if not name.startswith("_") or full in EQUIVALENTS:
        remedy = equivalent(full)
        is_unknown = remedy == ANYTHING and module in MODULES
        close = difflib.get_close_matches(name, names_in(module) if is_unknown else (), 1, 0.85)
        advice = f"Did you mean {close[0]!r}?" if close else f"Use in its place: {remedy}."
        message = f"{message} {advice}"
    raise AttributeError(message, name=name)


class Namespace(ModuleType):
    """A module of TensorFlow."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{_ROOT}.{name}", f"`tf.{name}`, without TensorFlow.")
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module, also those that need a package
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name)
        return vars(self).setdefault(name, lookup(self._name, name))

    def __dir__(self) -> list[str]:
        return names_in(self._name)


def install() -> None:
    """Makes every module importable, as in `from distributary.compat.tensorflow.nn import relu`."""
    for name in filter(None, MODULES):
        sys.modules.setdefault(f"{_ROOT}.{name}", Namespace(name))
