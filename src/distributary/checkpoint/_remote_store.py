"""Other processes that store variables, as checkpoints see them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeAlias

from distributary.checkpoint._array_files import SavedPart
from distributary.variables import ForeignVariable, ShardedVariable, Variable

SavedVariable: TypeAlias = Variable | ForeignVariable | ShardedVariable


class RemoteStore(Protocol):
    """Other processes that store variables, and save and restore their values themselves."""

    def at_rest(self) -> AbstractContextManager[None]:
        """Returns a context in which nobody changes the variables; raises why training failed."""

    def copy(self, variables: Mapping[str, SavedVariable]) -> "RemoteCopy":
        """Copies the current values of variables, which are given under any names."""

    def load(
        self,
        path: Path,
        variables: Mapping[str, SavedVariable],
        parts: Mapping[str, Sequence[SavedPart]],
    ) -> "RemoteCopy":
        """Loads values for variables from a checkpoint, without assigning them.

        Args:
            path: Path of the checkpoint.
            variables: The variables, by any names.
            parts: All parts that the values consist of, by the same names.
        """


class RemoteCopy(Protocol):
    """A second set of values for variables, kept beside their current values."""

    def save(self, path: Path) -> Mapping[str, Sequence[SavedPart]]:
        """Writes the values to files in a folder, and returns the places of their parts."""

    def adopt(self) -> None:
        """Assigns the values to the variables."""

    def drop(self) -> None:
        """Frees the memory. It is called once, at the end."""
