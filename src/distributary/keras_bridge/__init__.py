"""Lets Keras 3 models and variables take part in strategies.

Nothing of Keras is imported before the user does. `connect` runs when a strategy's scope is entered
and installs the hooks, see `_hooks`, once Keras is there.
"""

import sys
import warnings
from typing import Any

from distributary.context import register_scope_listener
from distributary.errors import DistributaryWarning

__all__ = ["connect"]


def connect() -> bool:
    """Installs the hooks if Keras has been imported; returns whether it has."""
    if "keras" not in sys.modules:
        return False
    from distributary.keras_bridge._hooks import install

    install()
    return True


class _ScopeListener:
    """Watches for Keras being imported when a scope is already open."""

    def entered(self, strategy: Any) -> bool:
        return connect()

    def left(self, strategy: Any, connected: bool) -> None:
        if not connected and "keras" in sys.modules:
            warnings.warn(
                f"Keras was imported inside the scope of {strategy!r}. Models created there before"
                " another scope was entered are not distributed: import keras before `with"
                " strategy.scope():`.",
                DistributaryWarning,
                stacklevel=3,
            )
            connect()


register_scope_listener(_ScopeListener())
