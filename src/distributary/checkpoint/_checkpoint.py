"""State under names, saved and restored."""

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
from distributary.errors import CheckpointError, ContextError, DistributaryError, InvalidValueError
from distributary.topology import latest_program
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
    """What is to be saved, copied to the host.

    Args:
        entries: By name.
        counters: Numbers that belong to the checkpoint itself.
        arrays: NumPy arrays by name; none on workers that do not write.
        kept: Copies of variables that are kept elsewhere.
    """

    entries: Mapping[str, Entry]
    counters: Mapping[str, int]
    arrays: Mapping[str, np.ndarray]
    kept: Sequence[KeptCopy]


@final
class Checkpoint:
    """Objects whose state is saved and restored together.

    The objects are attributes: `checkpoint.epoch += 1` changes a number that is saved, and after
    `restore` it is the restored one. Names of what is saved are paths, `model/dense/kernel`; they
    do not depend on the number of replicas or workers, so a checkpoint can be restored onto others.

    With several workers all of them call `save` and `restore`, in the same order, and the folder is
    one that all of them see. The chief writes.

    With a `ParameterServerStrategy` only the coordinator calls them. They wait until all scheduled
    steps have ended and raise their error, as `ClusterCoordinator.join`. Every server writes and
    reads its variables itself, so the folder is one that all tasks see.

    Args:
        **objects: Variables; Keras models, optimizers and metrics; iterators over datasets (all
            objects with `get_state` and `set_state`); arrays, numbers and strings; NumPy's and
            Python's generators of random numbers, and keys of JAX; dicts, lists, tuples and
            dataclasses of these.

    A variable with a value per replica (ON_READ) comes back exactly onto as many replicas. Onto
    another number its aggregated value is kept: of SUM replica 0 holds all of it.

    Raises:
        InvalidTypeError: for other objects.
        InvalidValueError: if a name is taken by a method.

    Source: `tf.train.Checkpoint`.
    """

    save_counter: int

    def __init__(self, **objects: Any) -> None:
        object.__setattr__(self, "_objects", {})
        #: Saved with the checkpoint, but not part of what must fit.
        object.__setattr__(self, "_counters", {"save_counter": 0})
        for name, value in objects.items():
            setattr(self, name, value)
        # What is not built yet may be when it is saved.
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
        """Writes to `{file_prefix}-{number}`, with a number that rises by one at each call.

        Returns:
            The path.

        Raises:
            CheckpointError: as for `write`.

        Source: `tf.train.Checkpoint.save`.
        """
        self._counters["save_counter"] += 1
        return self._save(f"{os.fspath(file_prefix)}-{self.save_counter}", is_series=True)

    def write(self, path: str | os.PathLike[str]) -> str:
        """Writes to exactly this path, a folder, in the place of the checkpoint that is there.

        Returns once everything is on disk. The folder is there completely or not at all.

        Raises:
            CheckpointError: if it cannot be written, something else than a checkpoint is there,
                another job saves there, or the workers do not come together.
            PSUnavailableError: if a parameter server is lost before it has copied its variables.
            InvalidTypeError: if an object cannot be saved.
            ContextError: inside a traced function.

        Source: `tf.train.Checkpoint.write`.
        """
        return self._save(path, is_series=False)

    def restore(
        self, save_path: str | os.PathLike[str] | None, partial: bool = False
    ) -> "RestoreStatus":
        """Takes over the state of a checkpoint.

        Everything is read and compared first: if something does not fit, nothing has changed.

        Args:
            save_path: What `save` or `latest_checkpoint` returned. None does nothing, so that
                `restore(manager.latest_checkpoint)` starts a new training.
            partial: Whether names that are only here or only in the checkpoint are left alone
                instead of being an error.

        Returns:
            What was left alone. Everything else is restored already; nothing needs to be asked of
            it.

        Raises:
            InvalidValueError: naming what is missing, unexpected or of another shape, dtype or
                type.
            CheckpointError: if the checkpoint cannot be read here, on another worker or a server.
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
            # Iterators may still refuse what belongs to another dataset.
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

    # The rest is for the manager.

    def _snapshot(self, path: Path, is_series: bool, meeting: Round) -> Snapshot:
        """The state, copied to the host; steps may go on afterwards.

        All workers have to call it. Waits for the steps that have been started. If it fails, the
        round is over.

        Args:
            path: Where it will be saved.
            is_series: Whether those of other numbers belong to this job, too.
            meeting: Round in which the workers come together.
        """
        problem = None
        try:
            if meeting.is_chief:
                try:
                    claim(path, is_series)
                except OSError as error:
                    problem = _not_written(path, error)
            else:
                # Programs for tf.distribute remove it after saving.
                with contextlib.suppress(OSError):
                    path.parent.mkdir(parents=True, exist_ok=True)
            # Also with a problem, because other workers may need values of this one.
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
            # Otherwise another thread's step could take the arrays away.
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
        """Reads everything that will be needed, and compares it.

        Args:
            path: Of the checkpoint.
            partial: See `restore`.
            stack: Left when the restoring has ended; no steps run until then.
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
        # Values of replicas are combined here.
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
    """What `Checkpoint.restore` has done; all methods return this object.

    Args:
        path: The checkpoint; None if there was none.
        missing: Names that are only here.
        unexpected: Names that are only in the checkpoint.

    Source: what `tf.train.Checkpoint.restore` returns.
    """

    def __init__(
        self, path: Path | None, missing: Sequence[str] = (), unexpected: Sequence[str] = ()
    ) -> None:
        self._path = path
        self._missing = list(missing)
        self._unexpected = list(unexpected)

    def assert_consumed(self) -> Self:
        """Checks that everything here was restored, and everything that was saved.

        Raises:
            InvalidValueError: if something was left alone, or there was no checkpoint.
        """
        return self._check(self._missing, self._unexpected)

    def assert_existing_objects_matched(self) -> Self:
        """Checks that everything here was restored.

        Raises:
            InvalidValueError: if something was left alone, or there was no checkpoint.
        """
        return self._check(self._missing, [])

    def expect_partial(self) -> Self:
        """Does nothing: what is left alone is an error of `restore` without `partial=True`."""
        return self

    def _check(self, missing: list[str], unexpected: list[str]) -> Self:
        if self._path is None:
            raise InvalidValueError("Checkpoint.restore(None) has restored nothing.")
        if missing or unexpected:
            found = "\n".join(_differences(missing, unexpected, []))
            raise InvalidValueError(f"The checkpoint {self._path} was restored in part.\n{found}")
        return self


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Path of the checkpoint of a directory that was saved last, None if there is none.

    For processes that are not part of the training, such as an evaluator; others ask their
    `CheckpointManager`.

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
    """Writes a snapshot, and closes the round; called on all workers, of which the chief writes.

    Args:
        snapshot: What is saved.
        path: Where.
        is_series: As for `_snapshot`.
        meeting: Round in which the workers come together.
        afterwards: What the chief does before the others go on.

    Returns:
        The path.

    Raises:
        CheckpointError: if it cannot be written.
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
    except (OSError, DistributaryError) as error:  # their sentence says it all
        raise _not_written(path, error) from None
    except Exception as error:
        raise _not_written(path, error) from error
    finally:
        for copy in snapshot.kept:
            copy.drop()


def _not_written(path: Path, error: BaseException) -> CheckpointError:
    """What is raised on every worker when a checkpoint could not be written."""
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
    """The arrays in host memory of their own, copied by several threads."""
    # NumPy's view would be kept by the variable's array, which a step could then not donate.
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
    """Whether NumPy sees the memory of the device itself."""
    return next(iter(array.devices())).platform == "cpu"


def _by_keeper(leaves: Mapping[str, Leaf]) -> dict[Keeper, dict[str, VariableLeaf]]:
    """The variables that are kept elsewhere."""
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
    """An entry as it is saved: states of iterators may differ between workers."""
    if entry["kind"] != "state" or len(set(states)) == 1:
        return entry
    return {"kind": "state", "states": states}


def _of_worker(entry: Entry, worker: int, num_workers: int) -> Entry:
    """The entry as one worker restores it."""
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
    """A line for each kind of differences between what is here and a checkpoint."""
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
        leaves: What is restored, by name.
        rebuild: From the restored leaves to the objects.
        entries: What is saved, by name.
        arrays: The arrays of `leaves` that have one.
        kept: Values of variables that are kept elsewhere.
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
        """Puts back iterators and generators of random numbers."""
        for name, leaf in self._states.items():
            self._before.append((leaf, leaf.entry()))
            leaf.restore(self._entries[name], None)

    def reset_states(self) -> None:
        """Undoes `set_states`, also in the middle of it."""
        for leaf, entry in reversed(self._before):
            leaf.restore(entry, None)

    def carry_out(self) -> dict[str, Any]:
        """Puts back the rest; returns the objects, of which those that cannot change are new."""
        for copy in self._kept:
            copy.adopt()
        with latest_program.lock:
            restored = {
                name: leaf.restore(self._entries[name], self._arrays.get(name))
                for name, leaf in self._others.items()
            }
        return dict(self._rebuild(restored))
