"""Checkpoints, which save and restore named state."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from distributary._late import libraries
from distributary.checkpoint._commit import (
    located,
    numbered,
    parts_of,
    read,
    read_array,
    read_arrays,
    whole_box,
)
from distributary.checkpoint._files import ArrayReader, Box
from distributary.checkpoint._leaves import (
    Deferred,
    Entry,
    Group,
    RemoteCopy,
    by_store,
    differences,
    find_leaves,
    forget,
)
from distributary.checkpoint._save_locks import agree, this_worker, wait_for_writers
from distributary.checkpoint._saving import Save, check_outside
from distributary.devices import latest_program, progress
from distributary.errors import InvalidValueError

_log = logging.getLogger(__name__)

_SECONDS = 600.0


@final
class Checkpoint(Group):
    """A group of objects whose state is saved and restored together.

    The objects become attributes. For example, `checkpoint.epoch += 1` changes a number that is
    saved, and after `restore` it has the restored value. State is saved under names that are paths,
    such as `model/dense/kernel`. They do not depend on the number of replicas or workers, so you
    can restore a checkpoint on any other number of them.

    With several workers, all of them call `save` and `restore`, in the same order, with a folder
    that all of them see. The chief writes.

    With a `ParameterServerStrategy`, only the coordinator calls them. They wait until all scheduled
    steps have ended and raise their error, as `ClusterCoordinator.join` does. Every server writes
    and reads its own variables, so the folder must be one that all tasks see.

    Args:
        root: An object, saved under the name `root`.
        **objects: Variables; Keras models, optimizers and metrics; iterators over datasets (or any
            other objects with `get_state` and `set_state`); arrays, numbers and strings; random
            number generators of NumPy and Python, and JAX random keys; dicts, lists, tuples,
            dataclasses and checkpoints of these.

    A variable with a value per replica (ON_READ) is restored exactly on the same number of
    replicas. On another number of replicas, it keeps its aggregated value; with the aggregation
    SUM, replica 0 then holds all of it.

    Raises:
        InvalidTypeError: for objects of any other type.
        InvalidValueError: if a name is already the name of a method.

    Source: `tf.train.Checkpoint`.
    """

    def __init__(self, root: object = None, **objects: Any) -> None:
        if root is not None:
            objects = {"root": root, **objects}
        # The counters are saved with the checkpoint, but not compared when it is restored.
        vars(self).update(_objects={}, _counters={"save_counter": 0})
        for name, value in objects.items():
            setattr(self, name, value)
        find_leaves(self._objects)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            raise InvalidValueError(
                f"Checkpoint: {name!r} is a name of Checkpoint itself; choose another one."
            )
        self._objects[name] = value

    @property
    def save_counter(self) -> int:
        """Number of checkpoints that `save` has written."""
        return self._counters["save_counter"]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_objects"][name]
        except KeyError:
            known = ", ".join(self.__dict__.get("_objects", ())) or "nothing"
            raise AttributeError(f"Checkpoint has no {name!r}; it holds {known}.") from None

    def save(self, file_prefix: str | os.PathLike[str], options: object = None) -> str:
        """Writes a checkpoint to `{file_prefix}-{number}`; the number rises by one at each call.

        Args:
            file_prefix: Beginning of the path.
            options: No effect.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: for the same reasons as in `write`.

        Source: `tf.train.Checkpoint.save`.
        """
        self._counters["save_counter"] += 1
        return self._save(f"{os.fspath(file_prefix)}-{self.save_counter}", is_series=True)

    def write(self, file_prefix: str | os.PathLike[str], options: object = None) -> str:
        """Writes a checkpoint to a folder of exactly this path, and replaces any checkpoint there.

        Returns once everything is on disk. The folder appears as a whole or not at all.

        Args:
            file_prefix: The path.
            options: No effect.

        Raises:
            CheckpointError: if the checkpoint cannot be written, something other than a checkpoint
                is there, another job saves there, or not all workers take part.
            PSUnavailableError: if a parameter server is lost before it has copied its variables.
            InvalidTypeError: if an object cannot be saved.
            ContextError: inside a traced function.

        Source: `tf.train.Checkpoint.write`.
        """
        return self._save(file_prefix, is_series=False)

    def read(self, save_path: str | os.PathLike[str], options: object = None) -> "RestoreStatus":
        """Restores what `write` has written; the same as `restore`."""
        return self.restore(save_path)

    def sync(self) -> None:
        """Has no effect: `save` and `write` return once everything is on disk."""

    def restore(
        self,
        save_path: str | os.PathLike[str] | None,
        options: object = None,
        *,
        partial: bool = False,
    ) -> "RestoreStatus":
        """Restores the state of a checkpoint.

        Everything is read and compared first: if something does not fit, nothing changes.

        The state of Keras models, layers and optimizers that are not built yet waits in memory, and
        each variable gets its value when it is created. What does not fit then raises an error in
        the call that builds them. What still waits when you `save` is saved again.

        Args:
            save_path: The path that `save` or `latest_checkpoint` returned. None does nothing, so
                `restore(manager.latest_checkpoint)` also works at the start of a new training.
            options: No effect.
            partial: True to leave names alone that are only here or only in the checkpoint. False
                makes them an error. Objects of which this `Checkpoint` has nothing are always left
                alone; without True, the log says so.

        Returns:
            A status that knows which names were left alone or wait. Everything else is already
            restored, so you do not have to call any of its methods.

        Raises:
            InvalidValueError: if something is missing, unexpected, or has another shape, dtype or
                type; the error names it.
            CheckpointError: if the checkpoint cannot be read here, on another worker or on a
                server.
            PSUnavailableError: if a parameter server is lost.

        Source: `tf.train.Checkpoint.restore`, which restores partially unless asked.
        """
        if save_path is None:
            return RestoreStatus(None)
        path = Path(save_path).absolute()
        check_outside("restore")
        wait_for_writers(path.parent)
        plans: list[_Plan] = []

        def report() -> Any:
            plan = _Plan(self._objects, path, partial, stack)
            # Before the workers agree, as an iterator may refuse the state of another dataset.
            plan.set_states(undo)
            plans.append(plan)
            return [path.name, plan.saved.saved_at]

        with contextlib.ExitStack() as stack:
            with contextlib.ExitStack() as undo:
                reports = agree(f"Restoring {path}", _SECONDS, report)
                for worker, of_worker in enumerate(reports):
                    if of_worker != reports[0]:
                        raise InvalidValueError(
                            f"Restoring {path}: worker {worker} would restore {of_worker}, and"
                            f" worker 0 {reports[0]} (name and time of saving). All workers must"
                            " restore the same checkpoint, from a folder that all of them see."
                        )
                undo.pop_all()
            (plan,) = plans
            self._objects.update(plan.carry_out())
            self._counters.update(plan.saved.counters)
            return RestoreStatus(path, plan.missing, plan.unexpected, plan.defer())

    @progress.doing("saving")
    def _save(self, path: str | os.PathLike[str], is_series: bool) -> str:
        path = Path(path).absolute()
        return Save(self._objects, self._counters, path, is_series, _SECONDS).write()


@final
@dataclass(eq=False, repr=False)
class RestoreStatus:
    """The result of `Checkpoint.restore`. All methods return this object.

    Args:
        path: Path of the checkpoint; None if there was none.
        missing: Names that are only here.
        unexpected: Names that are only in the checkpoint.
        deferred: State that waits for objects that are not built yet.

    Source: the result of `tf.train.Checkpoint.restore`.
    """

    _path: Path | None
    _missing: Sequence[str] = ()
    _unexpected: Sequence[str] = ()
    _deferred: Deferred | None = None

    def assert_consumed(self) -> Self:
        """Checks that all state here was restored, and that all state in the checkpoint was used.

        Raises:
            InvalidValueError: if something was left alone or waits for an object that is not built
                yet, or there was no checkpoint.
        """
        waited = set() if self._deferred is None else self._deferred.arrived
        return self._check([name for name in self._unexpected if name not in waited])

    def assert_existing_objects_matched(self) -> Self:
        """Checks that all state here was restored.

        Raises:
            InvalidValueError: if something was left alone, or there was no checkpoint.
        """
        return self._check([])

    def expect_partial(self) -> Self:
        """Lets objects that are not built yet have state that the checkpoint has not.

        `restore` leaves names of other objects alone only if you pass `partial=True`.
        """
        if self._deferred is not None:
            self._deferred.partial = True
        return self

    def _check(self, unexpected: list[str]) -> Self:
        if self._path is None:
            raise InvalidValueError("Checkpoint.restore(None) has restored nothing.")
        missing = [*self._missing, *(self._deferred.missing if self._deferred is not None else ())]
        if missing or unexpected:
            text = "\n".join(differences(missing, unexpected, []))
            unbuilt = [] if self._deferred is None else self._deferred.unbuilt()
            if unexpected and unbuilt:
                text += f"\nNot built yet: {', '.join(unbuilt)}."
            raise InvalidValueError(f"The checkpoint {self._path} was restored in part.\n{text}")
        return self


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike[str], latest_filename: str | None = None
) -> str | None:
    """Returns the path of the checkpoint in a directory that was saved last, or None.

    It waits for what threads of this process write there.

    `latest_filename` has no effect, because there is no file that names the last one.

    Use it in processes that are not part of the training, such as an evaluator. In the training
    itself, use `CheckpointManager.latest_checkpoint`.

    Source: `tf.train.latest_checkpoint`.
    """
    directory = Path(checkpoint_dir).absolute()
    wait_for_writers(directory)
    checkpoints = numbered(directory)
    return str(checkpoints[-1][0]) if checkpoints else None


def list_variables(ckpt_dir_or_file: str | os.PathLike[str]) -> list[tuple[str, list[int]]]:
    """Returns the names and shapes of the arrays in a checkpoint, or in the latest of a directory.

    Raises:
        CheckpointError: if there is no checkpoint, or it is damaged.

    Source: `tf.train.list_variables`.
    """
    entries = read(_path_of(ckpt_dir_or_file)).entries
    return [(name, entry["shape"]) for name, entry in entries.items() if "shape" in entry]


def load_variable(ckpt_dir_or_file: str | os.PathLike[str], name: str) -> Any:
    """Returns an array of a checkpoint, or of the latest in a directory.

    Raises:
        CheckpointError: if there is no checkpoint, or it is damaged.
        InvalidValueError: if it has no array of this name.

    Source: `tf.train.load_variable`.
    """
    path = _path_of(ckpt_dir_or_file)
    saved = read(path)
    if "shape" not in saved.entries.get(name, {}):
        raise InvalidValueError(
            f"load_variable: the checkpoint {path} has no array {name!r}. list_variables gives the"
            " names."
        )
    return read_arrays(path, [name], saved)[name]


def _path_of(ckpt_dir_or_file: str | os.PathLike[str]) -> Path:
    path = Path(latest_checkpoint(ckpt_dir_or_file) or ckpt_dir_or_file).absolute()
    wait_for_writers(path.parent)
    return path


@final
class _Plan:
    """Everything that a restore needs, read and compared with the objects.

    Args:
        objects: The objects to restore, by name.
        path: Path of the checkpoint.
        partial: See `Checkpoint.restore`.
        stack: Stack to leave after restoring. No steps run until then.
    """

    def __init__(
        self, objects: Mapping[str, Any], path: Path, partial: bool, stack: contextlib.ExitStack
    ) -> None:
        self._path = path
        self.saved = saved = read(path)
        entries = {name: _of_worker(entry, *this_worker()) for name, entry in saved.entries.items()}
        self._entries = entries
        self._contents = contents = find_leaves(objects)
        waiting = {name.partition("/")[0] for name in entries if name not in contents.leaves}
        unbuilt = [objects[name] for name in waiting if name in objects]
        others = objects.values()
        built = [library.build(value, others) for value in unbuilt for library in libraries()]
        if any(built):
            self._contents = contents = find_leaves(objects)
        leaves = contents.leaves
        self.missing = [name for name in leaves if name not in entries]
        self.unexpected = [name for name in entries if name not in leaves]
        #: Objects of which nothing is here.
        self.others = {name.partition("/")[0] for name in self.unexpected} - objects.keys()
        self._deferred = [name for name in self.unexpected if contents.waits_for(name)]
        self._partial = partial
        present = {name: leaf for name, leaf in leaves.items() if name in entries}
        self._check()
        # Variables with a value per replica are combined here, not loaded by remote stores.
        kept = by_store({n: leaf for n, leaf in present.items() if "rows" not in entries[n]})
        far = {name for group in kept.values() for name in group}
        self._leaves = {name: leaf for name, leaf in present.items() if name not in far}
        self._reader = stack.enter_context(ArrayReader(located(path)))
        # Read twice: variables get their values one by one, after everything was found to be whole.
        self._reader.check(
            (leaf.box(entries[name]) or whole_box(entries[name]), parts_of(name, saved))
            for name, leaf in self._leaves.items()
            if entries[name]["kind"] == "array"
        )
        self._waiting = {
            name: read_array(self._reader, name, saved)
            for name in self._deferred
            if entries[name]["kind"] == "array"
        }
        self._kept: list[RemoteCopy] = []
        for store, variables in kept.items():
            parts = {name: parts_of(name, saved) for name in variables}
            self._kept.append(store.load(located(path), variables, parts))
            stack.callback(self._kept[-1].drop)
        for store in by_store(present):
            stack.enter_context(store.at_rest())

    def _check(self) -> None:
        path, partial = self._path, self._partial
        problems = self._contents.problems(self._entries)
        deferred = {*self._deferred}
        unexpected = [
            name
            for name in self.unexpected
            if name not in deferred and name.partition("/")[0] not in self.others
        ]
        differ = bool(self.missing or unexpected)
        if problems or (differ and not partial):
            left_alone = ([], []) if partial else (self.missing, self.unexpected)
            lines = [
                f"The checkpoint {path} does not fit; nothing was restored.",
                *differences(*left_alone, problems),
            ]
            if differ:
                lines.append(
                    "Build the same objects with all their variables first, or pass partial=True to"
                    " restore what is in both."
                )
            raise InvalidValueError("\n".join(lines))
        if differ:
            _log.info("%s: left alone: %s", path, ", ".join(self.missing + self.unexpected))
        if self.others and not partial:
            names = ", ".join(sorted(self.others))
            _log.warning("%s also holds %s, which this Checkpoint does not have.", path, names)

    def set_states(self, undo: contextlib.ExitStack) -> None:
        """Restores the states of iterators and generators; leaving `undo` takes this back."""
        for name, leaf in self._leaves.items():
            if self._entries[name]["kind"] == "state":
                undo.callback(leaf.restore, leaf.entry(), self._read_of(name))
                leaf.restore(self._entries[name], self._read_of(name))

    def carry_out(self) -> dict[str, Any]:
        """Restores the rest; returns the objects, with new ones in place of immutable ones."""
        for copy in self._kept:
            copy.adopt()
        with latest_program.lock:
            restored = {
                name: leaf.restore(self._entries[name], self._read_of(name))
                for name, leaf in self._leaves.items()
                if self._entries[name]["kind"] != "state"
            }
        return dict(self._contents.rebuild(restored))

    def _read_of(self, name: str) -> Callable[[Box | None], Any]:
        return functools.partial(read_array, self._reader, name, self.saved)

    def defer(self) -> Deferred | None:
        """Returns the state for objects that are not built yet, which gets there when they are."""
        forget(self._contents.waiting.values())
        if not self._deferred:
            return None
        entries = {name: self._entries[name] for name in self._deferred}
        known = {*self._entries, *self._contents.leaves}
        objects, arrays = self._contents.waiting, self._waiting
        return Deferred(self._path, objects, entries, arrays, known, self._partial)


def _of_worker(entry: Entry, worker: int, num_workers: int) -> Entry:
    """Returns an entry as one worker restores it."""
    if "states" not in entry:
        return entry
    states = entry["states"]
    if len(states) != num_workers:
        problem = (
            f"was saved by {len(states)} workers, each at its own position, and here the number of"
            f" workers is {num_workers}"
        )
        return {"kind": "state", "problem": problem}
    return {"kind": "state", "state": states[worker]}
