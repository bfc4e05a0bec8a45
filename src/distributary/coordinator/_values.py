"""What closures return."""

import threading
from typing import Any

import jax

__all__ = ["RemoteValue"]


class RemoteValue:
    """A value that a worker will have computed; made by `ClusterCoordinator.schedule`.

    Source: `tf.distribute.experimental.coordinator.RemoteValue`.
    """

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def get(self) -> Any:
        """The value, a nest of JAX arrays; waits for it.

        Raises:
            CancelledError: if the closure was cancelled because of another one's error.
            Exception: the error of the function.
        """
        return jax.tree.map(lambda leaf: jax.numpy.asarray(leaf), self.fetch())

    def fetch(self) -> Any:
        """The value, a nest of NumPy arrays; waits for it. Errors as for `get`."""
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def is_ready(self) -> bool:
        """Whether `get` and `fetch` return or raise at once."""
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
