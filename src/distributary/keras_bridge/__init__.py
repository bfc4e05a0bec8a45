"""Support for Keras 3 models and variables in strategies.

This package imports nothing from Keras before the user does. `connect` runs when a strategy is made
and when its scope is entered, and installs the hooks (see `_hooks`) as soon as Keras is imported.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from distributary._late import Library, late_names, register
from distributary.errors import MissingPackageError, UnsupportedError, pip_install, shown, warn
from distributary.variables import ForeignVariable

__all__ = ["connect", "import_keras", "would_use_jax"]

# Most of these modules import Keras.
__getattr__ = late_names(
    __name__,
    {
        "_custom_loops": "TracedVariables drops_assignments resolve",
        "_data": "UnknownSizes check_given current_call",
        "_hooks": "install",
        "_keras_private": "lazy_tensorflow replace_shape_inference",
        "_models": "infers_shapes strategy_of",
        "_saving": "build_optimizer parts_of waits",
        "_step_function": "ModelStep num_rows",
    },
)

_late: Any = sys.modules[__name__]


def connect() -> bool:
    """Installs the hooks if Keras has been imported; returns whether it has."""
    if "keras" not in sys.modules:
        return False
    _late.install()
    return True


def import_keras() -> Any:
    """Imports the package `keras` on the JAX backend; also works in the scope of a strategy.

    Sets the environment variable `KERAS_BACKEND` to "jax", unless Keras is already imported or the
    variable is set.

    Returns:
        The package.

    Raises:
        MissingPackageError: if Keras is not installed.
        UnsupportedError: if Keras runs on another backend, or would.
    """
    if "keras" in sys.modules:
        where, backend = "runs", sys.modules["keras"].backend.backend()
    else:
        where, backend = "is to run", os.environ.setdefault("KERAS_BACKEND", "jax")
    if backend != "jax":
        raise UnsupportedError(
            f"Keras {where} on the backend {backend!r}, but distributary distributes JAX. Set the"
            " environment variable KERAS_BACKEND=jax, or leave it unset and import keras after"
            " distributary.compat.tensorflow."
        )
    try:
        keras = importlib.import_module("keras")
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        text = f"Keras is not installed. Install it: {pip_install('keras')}"
        raise MissingPackageError(text) from error
    connect()
    return keras


def would_use_jax() -> bool:
    """Returns whether Keras is there and runs on JAX, or would if it were imported."""
    if "keras" in sys.modules:
        return _uses_jax()
    is_backend = os.environ.get("KERAS_BACKEND", "jax") == "jax"
    return is_backend and importlib.util.find_spec("keras") is not None


def _uses_jax() -> bool:
    """Returns whether Keras has been imported, and runs on JAX."""
    return "keras" in sys.modules and bool(sys.modules["keras"].backend.backend() == "jax")


@final
class _Keras(Library):
    def strategy_created(self) -> None:
        connect()  # so that a model outside of its scope is noticed

    def scope_entered(self, strategy: Any) -> tuple[bool, bool]:
        connected = connect()
        other = sys.modules["keras"].distribution.distribution() if connected else None
        if other is not None:
            warn(
                f"keras.distribution.set_distribution was called with {shown(other)}, and"
                f" {shown(strategy)} is there, too: it alone decides where variables and batches of"
                " its models lie. Leave one of the two out; set_distribution(None) ends the other."
            )
        was_on = False
        if connected and strategy.extended.worker_number > 0:  # only the first worker prints
            config = sys.modules["keras"].config
            was_on = bool(config.is_interactive_logging_enabled())
            config.disable_interactive_logging()
        return connected, was_on

    def scope_left(self, strategy: Any, entered: tuple[bool, bool]) -> None:
        connected, was_quieted = entered
        if was_quieted:
            sys.modules["keras"].config.enable_interactive_logging()
        if not connected and "keras" in sys.modules and _late.install():
            warn(
                f"Keras was imported inside the scope of {shown(strategy)}. Models created there"
                " before another scope was entered are not distributed: import keras before `with"
                " strategy.scope():`."
            )

    def around_trace(self) -> AbstractContextManager[object]:
        if not connect() or not _uses_jax():
            return nullcontext()
        return _late.TracedVariables(collect_losses=True)

    def infers_shapes(self) -> bool:
        return connect() and _uses_jax() and _late.infers_shapes()

    def drops_assignments(self) -> bool:
        return _uses_jax() and _late.drops_assignments()

    def variable(self, value: object) -> ForeignVariable | None:
        return _late.resolve(value) if _uses_jax() else None

    def parts(self, value: object) -> Mapping[str, Any] | None:
        return _late.parts_of(value) if _uses_jax() else None

    def is_unbuilt(self, value: object) -> bool:
        return _uses_jax() and _late.waits(value) and connect()

    def build(self, value: object, others: Iterable[Any]) -> bool:
        return _uses_jax() and _late.build_optimizer(value, others)


register(_Keras())
