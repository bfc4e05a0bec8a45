"""A base class for objects that are closed at the end of a `with` block."""

from typing import Self


class Closing:
    """A context manager that calls `close()` at the end of its block."""

    def close(self) -> None:
        """Closes it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
