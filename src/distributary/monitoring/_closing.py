"""What is closed at the end of a `with` block."""

from typing import Self

__all__ = ["Closing"]


class Closing:
    """A context manager that calls `close()`."""

    def close(self) -> None:
        """Ends it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
