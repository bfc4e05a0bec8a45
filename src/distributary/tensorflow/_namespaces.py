"""The modules `tf`, `tf.distribute`, `tf.nn`, ..., which are made from the tables."""

import importlib
import sys
from types import ModuleType
from typing import Any

from distributary.tensorflow._equivalents import equivalent
from distributary.tensorflow._operations import resolve
from distributary.tensorflow._tables import CONSTANTS, OPERATIONS, TARGETS

_ROOT = "distributary.compat.tensorflow"


def names_in(space: str) -> list[str]:
    """Returns the names in a module such as `"distribute.experimental"`; `""` is `tf` itself."""
    prefix = f"{space}." if space else ""
    known = (*TARGETS, *OPERATIONS, *CONSTANTS)
    found = (name.removeprefix(prefix) for name in known if name.startswith(prefix))
    return sorted({name.partition(".")[0] for name in found})


def lookup(name: str) -> Any:
    """Returns the object `tf.{name}`.

    Raises:
        AttributeError: if it is not supported; the error says what to use instead.
    """
    if name in CONSTANTS:
        return CONSTANTS[name]
    if name in OPERATIONS:
        return OPERATIONS[name].function(f"tf.{name}")
    if name in TARGETS:
        return resolve(TARGETS[name])
    if f"{_ROOT}.{name}" in sys.modules:
        # Not from `sys.modules`, where a module is while another thread executes it.
        return importlib.import_module(f"{_ROOT}.{name}")
    message = f"tf.{name} is not among the names that {_ROOT} has."
    if not name.rpartition(".")[2].startswith("_"):
        message = f"{message} Use in its place: {equivalent(name)}."
    raise AttributeError(message, name=name.rpartition(".")[2])


class Namespace(ModuleType):
    """A module with those names of the tables that begin with the module's own name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{_ROOT}.{name}", f"`tf.{name}`, without TensorFlow.")
        self._space = name

    def __getattr__(self, name: str) -> Any:
        return vars(self).setdefault(name, lookup(f"{self._space}.{name}"))

    def __dir__(self) -> list[str]:
        return names_in(self._space)


def install() -> None:
    """Makes every module importable, as in `from distributary.compat.tensorflow.nn import relu`."""
    for name in (*TARGETS, *OPERATIONS, *CONSTANTS):
        space = name.rpartition(".")[0]
        # `keras.py` makes its own, when Keras is imported.
        while (
            space and space.partition(".")[0] != "keras" and f"{_ROOT}.{space}" not in sys.modules
        ):
            sys.modules[f"{_ROOT}.{space}"] = Namespace(space)
            space = space.rpartition(".")[0]
