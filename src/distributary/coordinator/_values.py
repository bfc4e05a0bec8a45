"""The results of closures."""

import threading
from typing import Any

import jax

__all__ = ["RemoteValue"]


class RemoteValue:
    """The result of a scheduled function, which a worker is yet to compute.

    `ClusterCoordinator.schedule` returns it.

    Source: `tf.distribute.experimental.coordinator.RemoteValue`.
    """

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def get(self) -> Any:
        """Waits for the value, and returns it as a nest of JAX arrays.

        Raises:
            CancelledError: if the closure was cancelled because another one failed.
            Exception: the error that the function raised.
        """
        return jax.tree.map(lambda leaf: jax.numpy.asarray(leaf), self.fetch())

    def fetch(self) -> Any:
        """Waits for the value, and returns it as a nest of NumPy arrays; raises as `get` does."""
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def is_ready(self) -> bool:
        """Returns whether `get` and `fetch` would return or raise without waiting."""
        return self._ready.is_set()

    def _set(self, value: Any) -> None:
        self._value = value
        self._ready.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._ready.set()

    def __repr__(self) -> str:
        state = "waiting" if not self._ready.is_set() else "failed" if self._error else "ready"
        return f"<RemoteValue: {state}>"
