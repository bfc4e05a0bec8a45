"""State of a checkpoint for objects that are not built yet: it arrives when they are."""

import logging
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from distributary.checkpoint._leaves import Entry, enumerated, find_leaves, is_unbuilt
from distributary.errors import DistributaryError, InvalidValueError

_log = logging.getLogger(__name__)

_lock = threading.RLock()
_all: "list[Deferred]" = []


@final
class Deferred:
    """State that waits until objects are built.

    Args:
        path: Path of the checkpoint.
        objects: Objects that are not built yet, by name. They are not kept alive.
        entries: Descriptions of the leaves that wait, by name.
        arrays: Their arrays.
        known: Names of all leaves of the checkpoint, and of those that were here.
        partial: See `Checkpoint.restore`.
    """

    def __init__(
        self,
        path: Path,
        objects: Mapping[str, Any],
        entries: Mapping[str, Entry],
        arrays: Mapping[str, np.ndarray],
        known: Iterable[str],
        partial: bool,
    ) -> None:
        self.partial = partial
        #: Names of leaves that have been restored.
        self.arrived: set[str] = set()
        #: Names of leaves that are here, and not in the checkpoint.
        self.missing: list[str] = []
        self._path = path
        self._objects = {name: weakref.ref(value) for name, value in objects.items()}
        self._entries = dict(entries)
        self._arrays = dict(arrays)
        self._known = set(known)
        self._noted: set[str] = set()
        self._error: DistributaryError | None = None
        with _lock:
            _all.append(self)

    def is_open(self) -> bool:
        """Returns whether something waits, or objects may turn out not to fit."""
        return bool(self.unbuilt()) or any(map(self._left, self._tops()))

    def unbuilt(self) -> list[str]:
        """Returns the names of the objects that are not built yet, without those inside them."""
        return [name for name in self._tops() if is_unbuilt(self._objects[name]())]

    def _tops(self) -> list[str]:
        there = [name for name, reference in self._objects.items() if reference() is not None]
        return [name for name in there if not name.startswith(tuple(f"{n}/" for n in there))]

    def _left(self, name: str) -> list[str]:
        return [leaf for leaf in self._entries if leaf.startswith(f"{name}/")]

    def drop(self, ids: set[int]) -> None:
        """Forgets some objects."""
        kept = {n: r for n, r in self._objects.items() if id(r()) not in ids}
        self._objects = {n: r for n, r in kept.items() if r() is not None}

    def settle(self, value: object, num_variables: int | None) -> None:
        """Restores what has come into being; `value` has, among others.

        Raises:
            InvalidValueError: if it does not fit, or the checkpoint lacks it.
        """
        roots = {name: r() for name, r in self._objects.items() if r() is value}
        for name, root in (roots or self._around(value)).items():
            if num_variables is not None and num_variables < len(self._left(name)):
                continue  # the last of its variables settles it
            # Keras goes on after the error of a build in a first, symbolic call.
            if self._error is not None:
                raise self._error
            try:
                self._settle(name, root)
            except DistributaryError as error:
                self._error = error
                raise
            if root is value and num_variables is None:
                self._note_rest(name)

    def _around(self, value: object) -> dict[str, Any]:
        """Returns the objects that have variables of another one, which they made themselves."""
        tops = {name: self._objects[name]() for name in self._tops()}
        return {name: root for name, root in tops.items() if _variables(value) & _variables(root)}

    def _note_rest(self, name: str) -> None:
        later = tuple(f"{n}/" for n, r in self._objects.items() if n != name and is_unbuilt(r()))
        left = [leaf for leaf in self._left(name) if not leaf.startswith(later)]
        if left and name not in self._noted and not self.partial:
            self._noted.add(name)
            _log.warning(
                "%s: %r is built, and these values have no place in it: %s.",
                self._path,
                name,
                enumerated(left),
            )

    def _settle(self, name: str, root: object) -> None:
        found = find_leaves({name: root})
        leaves, problems = found.leaves, found.problems(self._entries)
        missing = [n for n in leaves if n not in self._known]
        if problems or (missing and not self.partial):
            shown = differences([] if self.partial else missing, [], problems)
            raise InvalidValueError(
                "\n".join((f"The checkpoint {self._path} does not fit {name!r}.", *shown))
            )
        self._known.update(missing)
        self.missing += missing
        for leaf_name in leaves.keys() & self._entries.keys():
            entry, array = self._entries.pop(leaf_name), self._arrays.pop(leaf_name, None)
            read = lambda box, array=array: array if box is None else array[box]
            leaves[leaf_name].restore(entry, read)
            self.arrived.add(leaf_name)


def _variables(value: object) -> set[int]:
    return {id(variable) for variable in getattr(value, "variables", ())}


def forget(objects: Iterable[Any]) -> None:
    """Forgets what waits for some objects, as they are restored from another checkpoint."""
    ids = {id(value) for value in objects}
    with _lock:
        for deferred in _all:
            deferred.drop(ids)
        _all[:] = [deferred for deferred in _all if deferred.is_open()]


def settle(value: object, num_variables: int | None = None) -> None:
    """Restores state that an object of another library has only now.

    Args:
        value: The object.
        num_variables: Number of variables that it has so far; None if it is complete.

    Raises:
        InvalidValueError: if it does not fit, or the checkpoint lacks it.
    """
    if not _all:
        return
    with _lock:
        for deferred in [*_all]:
            deferred.settle(value, num_variables)
        _all[:] = [deferred for deferred in _all if deferred.is_open()]


def differences(missing: list[str], unexpected: list[str], problems: list[str]) -> list[str]:
    """Returns a line for each kind of difference between the state here and a checkpoint."""
    kinds = {
        "Not in the checkpoint": missing,
        "Only in the checkpoint": unexpected,
        "Otherwise in the checkpoint": problems,
    }
    return [f"{title}: {enumerated(names)}." for title, names in kinds.items() if names]
