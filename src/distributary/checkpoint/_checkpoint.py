"""Checkpoints, which save and restore named state."""

import contextlib
import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import jax
import numpy as np

from distributary.checkpoint._files import (
    Saved,
    claim,
    located,
    numbered,
    read,
    read_arrays,
    rows_of,
    siblings,
    write,
)
from distributary.checkpoint._leaves import (
    ArrayLeaf,
    Entry,
    Leaf,
    Rebuild,
    VariableLeaf,
    find_leaves,
)
from distributary.checkpoint._workers import Round, agree, this_worker
from distributary.dispatch import latest_program
from distributary.errors import CheckpointError, ContextError, DistributaryError, InvalidValueError
from distributary.tracing import current_scope
from distributary.variables import Keeper, KeptCopy, stored_arrays

_log = logging.getLogger(__name__)

_SECONDS = 600.0
_PIECE_BYTES = 16 << 20
_MAX_COPY_THREADS = 4
_MAX_NAMES_SHOWN = 10


@final
@dataclass(frozen=True)
class Snapshot:
    """A copy, in host memory, of the state to save.

    Args:
        entries: The entry of each leaf, by name.
        counters: Numbers that belong to the checkpoint itself.
        arrays: NumPy arrays, by name. Empty on workers that do not write.
        kept: Copies of variables that are kept elsewhere.
    """

    entries: Mapping[str, Entry]
    counters: Mapping[str, int]
    arrays: Mapping[str, np.ndarray]
    kept: Sequence[KeptCopy]


@final
class Checkpoint:
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
        **objects: Variables; Keras models, optimizers and metrics; iterators over datasets (or any
            other objects with `get_state` and `set_state`); arrays, numbers and strings; random
            number generators of NumPy and Python, and JAX random keys; dicts, lists, tuples and
            dataclasses of these.

    A variable with a value per replica (ON_READ) is restored exactly on the same number of
    replicas. On another number of replicas, it keeps its aggregated value; with the aggregation
    SUM, replica 0 then holds all of it.

    Raises:
        InvalidTypeError: for objects of any other type.
        InvalidValueError: if a name is already the name of a method.

    Source: `tf.train.Checkpoint`.
    """

    save_counter: int

    def __init__(self, **objects: Any) -> None:
        object.__setattr__(self, "_objects", {})
        #: Saved with the checkpoint, but not compared when it is restored.
        object.__setattr__(self, "_counters", {"save_counter": 0})
        for name, value in objects.items():
            setattr(self, name, value)
        # An object that is not built yet may be built by the time it is saved.
        with contextlib.suppress(InvalidValueError):
            find_leaves(self._objects)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name) or name == "save_counter":
            raise InvalidValueError(
                f"Checkpoint: {name!r} is a name of Checkpoint itself; choose another one."
            )
        self._objects[name] = value

    def __getattr__(self, name: str) -> Any:
        if name == "save_counter":
            return self._counters["save_counter"]
        try:
            return self.__dict__["_objects"][name]
        except KeyError:
            known = ", ".join(self.__dict__.get("_objects", ())) or "nothing"
            raise AttributeError(f"Checkpoint has no {name!r}; it holds {known}.") from None

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Writes a checkpoint to `{file_prefix}-{number}`; the number rises by one at each call.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: for the same reasons as in `write`.

        Source: `tf.train.Checkpoint.save`.
        """
        self._counters["save_counter"] += 1
        return self._save(f"{os.fspath(file_prefix)}-{self.save_counter}", is_series=True)

    def write(self, path: str | os.PathLike[str]) -> str:
        """Writes a checkpoint to a folder of exactly this path, and replaces any checkpoint there.

        Returns once everything is on disk. The folder appears as a whole or not at all.

        Raises:
            CheckpointError: if the checkpoint cannot be written, something other than a checkpoint
                is there, another job saves there, or not all workers take part.
            PSUnavailableError: if a parameter server is lost before it has copied its variables.
            InvalidTypeError: if an object cannot be saved.
            ContextError: inside a traced function.

        Source: `tf.train.Checkpoint.write`.
        """
        return self._save(path, is_series=False)

    def restore(
        self, save_path: str | os.PathLike[str] | None, partial: bool = False
    ) -> "RestoreStatus":
        """Restores the state of a checkpoint.

        Everything is read and compared first: if something does not fit, nothing changes.

        Args:
            save_path: The path that `save` or `latest_checkpoint` returned. None does nothing, so
                `restore(manager.latest_checkpoint)` also works at the start of a new training.
            partial: True to leave names alone that are only here or only in the checkpoint. False
                makes them an error.

        Returns:
            A status that knows which names were left alone. Everything else is already restored,
            so you do not have to call any of its methods.

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
        _check_outside("restore")
        plans: list[_Plan] = []

        def own() -> Any:
            plans.append(self._plan(path, partial, stack))
            # Before the workers agree, as an iterator may refuse the state of another dataset.
            plans[0].set_states()
            return [path.name, plans[0].saved.saved_at]

        with contextlib.ExitStack() as stack:
            try:
                found = agree(f"Restoring {path}", _SECONDS, own)
                for worker, of_worker in enumerate(found):
                    if of_worker != found[0]:
                        raise InvalidValueError(
                            f"Restoring {path}: worker {worker} would restore {of_worker}, and"
                            f" worker 0 {found[0]} (name and time of saving). All workers must"
                            " restore the same checkpoint, from a folder that all of them see."
                        )
            except BaseException:
                for plan in plans:
                    plan.reset_states()
                raise
            self._objects.update(plans[0].carry_out())
            self._counters.update(plans[0].saved.counters)
            return RestoreStatus(path, plans[0].missing, plans[0].unexpected)

    def _save(self, path: str | os.PathLike[str], is_series: bool) -> str:
        path = Path(path).absolute()
        meeting = Round(f"Checkpoint {path}", _SECONDS)
        return commit(self._snapshot(path, is_series, meeting), path, is_series, meeting)

    # The manager uses the methods below.

    def _snapshot(self, path: Path, is_series: bool, meeting: Round) -> Snapshot:
        """Copies the state to the host. Training can go on afterwards.

        All workers have to call it. It waits for steps that have been started. If it fails, the
        round is over.

        Args:
            path: Path where the state will be saved.
            is_series: Whether checkpoints with other numbers belong to this job, too.
            meeting: Round in which the workers take part.
        """
        problem = None
        try:
            if meeting.is_chief:
                try:
                    claim(path, is_series)
                except OSError as error:
                    problem = _not_written(path, error)
            else:
                # Programs written for tf.distribute remove this folder after saving.
                with contextlib.suppress(OSError):
                    path.parent.mkdir(parents=True, exist_ok=True)
            # Even with a problem, because other workers may need values of this one.
            snapshot = self._copy_state(meeting.is_chief and problem is None)
            if problem is not None:
                for copy in snapshot.kept:
                    copy.drop()
                raise problem
            return snapshot
        except BaseException as error:
            meeting.fail(error)
            raise

    def _copy_state(self, with_arrays: bool) -> Snapshot:
        _check_outside("save")
        leaves, _ = find_leaves(self._objects)
        kept = _by_keeper(leaves)
        with _at_rest(kept):
            # Under the lock, as a step in another thread could donate the arrays.
            with latest_program.lock:
                entries = {name: leaf.entry() for name, leaf in leaves.items()}
                of_variables = {
                    name: leaf
                    for name, leaf in leaves.items()
                    if isinstance(leaf, VariableLeaf) and leaf.keeper is None
                }
                arrays = dict(
                    zip(
                        of_variables,
                        stored_arrays([leaf.variable for leaf in of_variables.values()]),
                        strict=True,
                    )
                )
                for name, leaf in leaves.items():
                    if isinstance(leaf, ArrayLeaf):
                        arrays[name] = leaf.array()
                copies = copied(arrays) if with_arrays else {}
            kept_copies = [
                keeper.copy({name: leaf.variable for name, leaf in own.items()})
                for keeper, own in kept.items()
            ]
        return Snapshot(entries, dict(self._counters), copies, kept_copies)

    def _plan(self, path: Path, partial: bool, stack: contextlib.ExitStack) -> "_Plan":
        """Reads everything that a restore needs, and compares it with the objects.

        Args:
            path: Path of the checkpoint.
            partial: See `restore`.
            stack: Stack to leave after restoring. No steps run until then.
        """
        saved = read(path)
        leaves, rebuild = find_leaves(self._objects)
        entries = {name: _of_worker(entry, *this_worker()) for name, entry in saved.entries.items()}
        missing = [name for name in leaves if name not in entries]
        unexpected = [name for name in entries if name not in leaves]
        problems = [
            f"{name} {problem}"
            for name, leaf in leaves.items()
            if name in entries and (problem := leaf.problem(entries[name])) is not None
        ]
        if problems or ((missing or unexpected) and not partial):
            raise InvalidValueError(_refusal(path, missing, unexpected, problems, partial))
        if missing or unexpected:
            _log.info("%s: left alone: %s", path, ", ".join(missing + unexpected))
        present = {name: leaf for name, leaf in leaves.items() if name in entries}
        # Variables with a value per replica are not loaded by keepers: they are combined here.
        kept = _by_keeper({n: leaf for n, leaf in present.items() if "rows" not in entries[n]})
        far = {name for own in kept.values() for name in own}
        near = [n for n in present if entries[n]["kind"] == "array" and n not in far]
        arrays = read_arrays(path, near, saved)
        copies: list[KeptCopy] = []
        for keeper, own in kept.items():
            copies.append(
                keeper.load(
                    located(path),
                    {name: leaf.variable for name, leaf in own.items()},
                    {name: rows_of(name, saved) for name in own},
                )
            )
            stack.callback(copies[-1].drop)
        stack.enter_context(_at_rest(_by_keeper(present)))
        present = {name: leaf for name, leaf in present.items() if name not in far}
        return _Plan(present, rebuild, entries, arrays, copies, saved, missing, unexpected)


@final
class RestoreStatus:
    """The result of `Checkpoint.restore`. All methods return this object.

    Args:
        path: Path of the checkpoint; None if there was none.
        missing: Names that are only here.
        unexpected: Names that are only in the checkpoint.

    Source: the result of `tf.train.Checkpoint.restore`.
    """

    def __init__(
        self, path: Path | None, missing: Sequence[str] = (), unexpected: Sequence[str] = ()
    ) -> None:
        self._path = path
        self._missing = list(missing)
        self._unexpected = list(unexpected)

    def assert_consumed(self) -> Self:
        """Checks that all state here was restored, and that all state in the checkpoint was used.

        Raises:
            InvalidValueError: if something was left alone, or there was no checkpoint.
        """
        return self._check(self._missing, self._unexpected)

    def assert_existing_objects_matched(self) -> Self:
        """Checks that all state here was restored.

        Raises:
            InvalidValueError: if something was left alone, or there was no checkpoint.
        """
        return self._check(self._missing, [])

    def expect_partial(self) -> Self:
        """Does nothing: `restore` leaves names alone only if you pass `partial=True`."""
        return self

    def _check(self, missing: list[str], unexpected: list[str]) -> Self:
        if self._path is None:
            raise InvalidValueError("Checkpoint.restore(None) has restored nothing.")
        if missing or unexpected:
            found = "\n".join(_differences(missing, unexpected, []))
            raise InvalidValueError(f"The checkpoint {self._path} was restored in part.\n{found}")
        return self


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Returns the path of the checkpoint in a directory that was saved last, or None.

    Use it in processes that are not part of the training, such as an evaluator. In the training
    itself, use `CheckpointManager.latest_checkpoint`.

    Source: `tf.train.latest_checkpoint`.
    """
    found = numbered(Path(checkpoint_dir).absolute())
    return str(found[-1][0]) if found else None


def commit(
    snapshot: Snapshot,
    path: Path,
    is_series: bool,
    meeting: Round,
    afterwards: Callable[[], None] = lambda: None,
) -> str:
    """Writes a snapshot, and closes the round. All workers call it; the chief writes.

    Args:
        snapshot: The snapshot to save.
        path: Path to save it at.
        is_series: See `Checkpoint._snapshot`.
        meeting: Round in which the workers take part.
        afterwards: Called on the chief before the other workers go on.

    Returns:
        The path.

    Raises:
        CheckpointError: if the checkpoint cannot be written.
    """

    def own() -> Any:
        states = {n: e["state"] for n, e in snapshot.entries.items() if e["kind"] == "state"}
        others = {n: e for n, e in snapshot.entries.items() if e["kind"] == "array"}
        digest = hashlib.sha256(json.dumps([sorted(snapshot.entries), others]).encode())
        return [path.name, digest.hexdigest(), states]

    try:
        told = meeting.meet(own)
        for worker, (name, digest, _) in enumerate(told):
            if [name, digest] != told[0][:2]:
                raise InvalidValueError(
                    f"worker {worker} saves other names, shapes or dtypes than worker 0, or under"
                    f" another number ({name})"
                )
        states = [of_worker[2] for of_worker in told]

        def act() -> str:
            entries = {
                name: _of_all(entry, [of_worker.get(name) for of_worker in states])
                for name, entry in snapshot.entries.items()
            }
            write(path, entries, snapshot.counters, snapshot.arrays, snapshot.kept, is_series)
            afterwards()
            return str(path)

        return meeting.conclude(act)
    except (OSError, DistributaryError) as error:  # the message says it all, without a traceback
        raise _not_written(path, error) from None
    except Exception as error:
        raise _not_written(path, error) from error
    finally:
        for copy in snapshot.kept:
            copy.drop()


def _not_written(path: Path, error: BaseException) -> CheckpointError:
    """Returns the error to raise on every worker when a checkpoint could not be written."""
    kept = []
    with contextlib.suppress(OSError):
        kept = siblings(path)
    what_is_left = f"The latest complete one is {kept[-1][0]}" if kept else "There is no other one"
    reason = str(error).rstrip(".")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason = f"the disk of {path.parent} is full ({error.strerror})"
    problem = CheckpointError(f"The checkpoint {path} was not written: {reason}. {what_is_left}.")
    problem.errno = getattr(error, "errno", None)
    return problem


def copied(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns copies of arrays in host memory, made by several threads."""
    # From the data of one device: the variable's own array would keep NumPy's view of it, and then
    # no step could donate that array.
    sources = {
        name: array.addressable_data(0)
        if isinstance(array, jax.Array) and array.is_fully_replicated
        else array
        for name, array in arrays.items()
    }
    for array in sources.values():
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    copies, pieces = {}, []
    for name, array in sources.items():
        source = np.ascontiguousarray(array).reshape(array.shape)
        if isinstance(array, jax.Array) and not _shares_memory(array):
            copies[name] = source
            continue
        copies[name] = np.empty_like(source)
        step = max(1, _PIECE_BYTES // max(1, source.itemsize))
        flat, flat_copy = source.reshape(-1), copies[name].reshape(-1)
        pieces += [(flat_copy[i : i + step], flat[i : i + step]) for i in range(0, flat.size, step)]
    if sum(source.nbytes for _, source in pieces) <= _PIECE_BYTES:
        for piece in pieces:
            np.copyto(*piece)
    else:
        with ThreadPoolExecutor(_MAX_COPY_THREADS) as threads:
            list(threads.map(lambda piece: np.copyto(*piece), pieces))
    return copies


def _shares_memory(array: jax.Array) -> bool:
    """Returns whether NumPy's view of an array shares the memory of its device."""
    return next(iter(array.devices())).platform == "cpu"


def _by_keeper(leaves: Mapping[str, Leaf]) -> dict[Keeper, dict[str, VariableLeaf]]:
    """Returns the variables that are kept elsewhere, by their keeper."""
    found: dict[Keeper, dict[str, VariableLeaf]] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, VariableLeaf) and leaf.keeper is not None:
            found.setdefault(leaf.keeper, {})[name] = leaf
    return found


@contextlib.contextmanager
def _at_rest(keepers: Iterable[Keeper]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for keeper in keepers:
            stack.enter_context(keeper.at_rest())
        yield


def _of_all(entry: Entry, states: list[str | None]) -> Entry:
    """Returns an entry as it is saved. States of iterators may differ between workers."""
    if entry["kind"] != "state" or len(set(states)) == 1:
        return entry
    return {"kind": "state", "states": states}


def _of_worker(entry: Entry, worker: int, num_workers: int) -> Entry:
    """Returns an entry as one worker restores it."""
    if "states" not in entry:
        return entry
    states = entry["states"]
    if len(states) != num_workers:
        problem = f"was saved by {len(states)} workers, each at a place of its own, and here are"
        return {"kind": "state", "problem": f"{problem} {num_workers}"}
    return {"kind": "state", "state": states[worker]}


def _check_outside(what: str) -> None:
    if current_scope() is not None:
        raise ContextError(
            f"Checkpoint.{what} was called inside Strategy.run or distributary.function, where"
            " variables have no values yet. Call it between steps."
        )


def _refusal(
    path: Path, missing: list[str], unexpected: list[str], problems: list[str], partial: bool
) -> str:
    lines = [
        f"The checkpoint {path} does not fit; nothing was restored.",
        *_differences(*(([], []) if partial else (missing, unexpected)), problems),
    ]
    if missing or unexpected:
        lines.append(
            "Build the same objects with all their variables first (a Keras optimizer with"
            " optimizer.build(model.trainable_variables)), or pass partial=True to restore what is"
            " in both."
        )
    return "\n".join(lines)


def _differences(missing: list[str], unexpected: list[str], problems: list[str]) -> list[str]:
    """Returns a line for each kind of difference between the state here and a checkpoint."""
    lines = []
    for title, names in (
        ("Not in the checkpoint", missing),
        ("Only in the checkpoint", unexpected),
        ("Otherwise in the checkpoint", problems),
    ):
        if names:
            more = len(names) - _MAX_NAMES_SHOWN
            shown = ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
            lines.append(f"{title}: {shown}.")
    return lines


@final
class _Plan:
    """Everything that a restore needs, read and compared.

    Args:
        leaves: The leaves to restore, by name.
        rebuild: Turns the restored leaves into the objects.
        entries: The saved entries, by name.
        arrays: The arrays of those `leaves` that have one.
        kept: Loaded values of variables that are kept elsewhere.
        saved: The checkpoint.
        missing: Names that are only here.
        unexpected: Names that are only in the checkpoint.
    """

    def __init__(
        self,
        leaves: Mapping[str, Leaf],
        rebuild: Rebuild,
        entries: Mapping[str, Entry],
        arrays: Mapping[str, Any],
        kept: Sequence[KeptCopy],
        saved: Saved,
        missing: Sequence[str],
        unexpected: Sequence[str],
    ) -> None:
        self.saved = saved
        self.missing = missing
        self.unexpected = unexpected
        self._kept = kept
        self._rebuild = rebuild
        self._entries = entries
        self._arrays = arrays
        self._states = {n: leaf for n, leaf in leaves.items() if entries[n]["kind"] == "state"}
        self._others = {n: leaf for n, leaf in leaves.items() if n not in self._states}
        self._before: list[tuple[Leaf, Entry]] = []

    def set_states(self) -> None:
        """Restores the states of iterators and random number generators."""
        for name, leaf in self._states.items():
            self._before.append((leaf, leaf.entry()))
            leaf.restore(self._entries[name], None)

    def reset_states(self) -> None:
        """Undoes `set_states`, even if that has failed halfway."""
        for leaf, entry in reversed(self._before):
            leaf.restore(entry, None)

    def carry_out(self) -> dict[str, Any]:
        """Restores the rest; returns the objects, with new ones in place of immutable ones."""
        for copy in self._kept:
            copy.adopt()
        with latest_program.lock:
            restored = {
                name: leaf.restore(self._entries[name], self._arrays.get(name))
                for name, leaf in self._others.items()
            }
        return dict(self._rebuild(restored))
