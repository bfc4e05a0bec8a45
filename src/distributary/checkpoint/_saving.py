"""Saving: the state is copied to the host, and then written while training goes on."""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, final

import jax
import numpy as np

from distributary.checkpoint._commit import (
    Snapshot,
    check_replaceable,
    commit,
    discard,
    make_folder,
    siblings,
    stored_shape,
    write_parts,
)
from distributary.checkpoint._files import in_threads
from distributary.checkpoint._leaves import (
    ArrayLeaf,
    Entry,
    SavedVariable,
    VariableLeaf,
    by_store,
    find_leaves,
    restored_state,
)
from distributary.checkpoint._save_locks import SaveLock, this_worker
from distributary.devices import fetch_whole, latest_program
from distributary.errors import CheckpointError, ContextError, DistributaryError, InvalidValueError
from distributary.job import copies
from distributary.tracing import current_scope
from distributary.variables import ShardedVariable


@final
class Save:
    """One checkpoint that is being saved: a copy of the state, which `write` writes.

    All workers create it and call `write`, in the same order. Creating it waits for steps that have
    been started; afterwards, training can go on.

    Args:
        objects: The objects to save, by name.
        counters: Numbers that belong to the checkpoint itself.
        path: Path to save at.
        is_series: Whether checkpoints with other numbers belong to this job, too.
        timeout_seconds: Seconds that workers wait for each other.

    Raises:
        CheckpointError: if the place is taken.
        InvalidTypeError: if an object cannot be saved.
        ContextError: inside a traced function.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        counters: Mapping[str, int],
        path: Path,
        is_series: bool,
        timeout_seconds: float,
    ) -> None:
        self._path = path
        self._is_series = is_series
        self._lock = SaveLock(path, is_series, timeout_seconds)
        problem: BaseException | None = None
        try:
            if self._lock.is_chief:
                try:
                    self._lock.acquire()
                    check_replaceable(path)
                except BaseException as error:
                    is_of_files = isinstance(error, OSError)
                    problem = self._not_written(error) if is_of_files else error
            else:
                # Programs written for tf.distribute remove this folder after saving.
                with contextlib.suppress(OSError):
                    path.parent.mkdir(parents=True, exist_ok=True)
            # Even with a problem, because other workers may need values of this one.
            with_arrays = self._lock.is_chief and problem is None
            self._snapshot = _snapshot(objects, counters, with_arrays)
            if problem is not None:
                self.drop()
                raise problem
        except BaseException as error:
            self._lock.release()
            raised = error

            def fail() -> NoReturn:
                raise raised

            self._lock.agree(fail)  # tells the other workers, and raises the error here

    def write(self, afterwards: Callable[[], None] = lambda: None) -> str:
        """Writes the checkpoint on the chief, and returns its path. It may run in another thread.

        Args:
            afterwards: Called on the chief before the other workers go on.

        Raises:
            CheckpointError: if the checkpoint cannot be written.
        """
        folder: Path | None = None
        try:
            states = self._states_of_workers()
            make = lambda: str(make_folder(self._path, self._is_series))
            folder = Path(self._lock.run_on_chief("the place", make))
            worker, _ = this_worker()
            write = functools.partial(write_parts, folder, self._snapshot, worker)
            written = self._lock.agree(write)

            def act() -> str:
                entries = {
                    name: _of_all(entry, [of_worker.get(name) for of_worker in states])
                    for name, entry in self._snapshot.entries.items()
                }
                snapshot = dataclasses.replace(self._snapshot, entries=entries)
                commit(self._path, folder, snapshot, written, self._is_series)
                afterwards()
                return str(self._path)

            return self._lock.run_on_chief("the end", act)
        except BaseException as error:
            if folder is not None and self._lock.is_chief:
                discard(folder)
            if isinstance(error, (OSError, DistributaryError)):
                raise self._not_written(error) from None  # the message says it all, no traceback
            if isinstance(error, Exception):
                raise self._not_written(error) from error
            raise
        finally:
            self.drop()

    def drop(self) -> None:
        """Frees the copy, and lets others write."""
        self._lock.release()
        for copy in self._snapshot.kept:
            copy.drop()

    def _states_of_workers(self) -> list[dict[str, str]]:
        """Returns each worker's states of iterators, and checks that all save the same."""

        def report() -> Any:
            entries = self._snapshot.entries
            states = {n: e["state"] for n, e in entries.items() if e["kind"] == "state"}
            others = {n: e for n, e in entries.items() if e["kind"] == "array"}
            digest = hashlib.sha256(json.dumps([sorted(entries), others]).encode())
            return [self._path.name, digest.hexdigest(), states]

        reports = self._lock.agree(report)
        for worker, (name, digest, _) in enumerate(reports):
            if [name, digest] != reports[0][:2]:
                raise InvalidValueError(
                    f"worker {worker} saves other names, shapes or dtypes than worker 0, or under"
                    f" another number ({name})"
                )
        return [states for _, _, states in reports]

    def _not_written(self, error: BaseException) -> CheckpointError:
        """Returns the error to raise on every worker when a checkpoint could not be written."""
        path, kept = self._path, []
        with contextlib.suppress(OSError):
            kept = siblings(path)
        others = f"The latest complete one is {kept[-1][0]}" if kept else "There is no other one"
        reason = str(error).rstrip(".")
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"the disk of {path.parent} is full ({error.strerror})"
        problem = CheckpointError(f"The checkpoint {path} was not written: {reason}. {others}.")
        problem.errno = getattr(error, "errno", None)
        return problem


def _snapshot(
    objects: Mapping[str, Any], counters: Mapping[str, int], with_arrays: bool
) -> Snapshot:
    """Returns a copy of the state in host memory; without arrays on workers that do not write."""
    check_outside("save")
    contents = find_leaves(objects)
    restored = restored_state(contents)
    contents.check_built(restored)
    leaves = contents.leaves
    kept = by_store(leaves)
    with contextlib.ExitStack() as at_rest:
        for store in kept:
            at_rest.enter_context(store.at_rest())
        # Under the lock, as a step in another thread could donate the arrays.
        with latest_program.lock:
            entries = {name: leaf.entry() for name, leaf in leaves.items()}
            variables = {
                name: leaf.variable
                for name, leaf in leaves.items()
                if isinstance(leaf, VariableLeaf) and leaf.remote_store is None
            }
            arrays, parts = _stored(variables)
            for name, leaf in leaves.items():
                if isinstance(leaf, ArrayLeaf):
                    arrays[name] = leaf.array()
            entries |= {name: entry for name, (entry, _) in restored.items()}
            arrays |= {name: array for name, (_, array) in restored.items() if array is not None}
            whole: dict[_Place, Any] = {}
            if with_arrays:
                whole = {(name, ()): array for name, array in arrays.items()}
            copied = _copied(whole | parts)
        kept_copies = [store.copy(group) for store, group in kept.items()]
    own_parts: dict[str, list[tuple[Sequence[int], np.ndarray]]] = {
        name: [] for name in variables if name not in arrays
    }
    for name, begin in parts:
        # Without the padding at the end.
        sizes = [n - b for n, b in zip(stored_shape(entries[name]), begin, strict=True)]
        part = copied[name, begin][tuple([slice(max(0, size)) for size in sizes])]
        if part.size:
            own_parts[name].append((begin, part))
    copies_of_whole = {name: copied[name, begin] for name, begin in whole}
    return Snapshot(entries, dict(counters), copies_of_whole, own_parts, kept_copies)


def check_outside(what: str) -> None:
    """Checks that `Checkpoint.<what>` is called outside of traced functions."""
    if current_scope() is not None:
        raise ContextError(
            f"Checkpoint.{what} was called inside Strategy.run or distributary.function, where"
            " variables have no values yet. Call it between steps."
        )


#: Names of variables and where a part begins.
_Place: TypeAlias = tuple[str, tuple[int, ...]]


def _stored(
    variables: Mapping[str, SavedVariable],
) -> tuple[dict[str, jax.Array | np.ndarray], dict[_Place, jax.Array | np.ndarray]]:
    """Returns the stored arrays of variables, and the parts of others that this process saves.

    A variable with a value per replica is stored as `[replica, *shape]`. Steps may donate the
    arrays, so hold the lock of `latest_program` while you use them. All workers call this, because
    it fetches such values from other workers' devices, and compares the copies of others.
    """
    arrays: dict[str, jax.Array | np.ndarray] = {}
    parts: dict[_Place, jax.Array | np.ndarray] = {}
    for name, variable in variables.items():
        if isinstance(variable, ShardedVariable):
            arrays[name] = np.asarray(variable)
        elif variable._value.is_fully_replicated:
            arrays[name] = variable._value
        elif variable._handle.per_replica:
            arrays[name] = fetch_whole(variable._value, variable._value.shape)
        else:
            for shard in variable._value.addressable_shards:
                if shard.replica_id == 0:  # another worker may have the part, too
                    begin = tuple([span.start or 0 for span in shard.index])
                    parts[name, begin] = shard.data
    of_job = {
        name: array
        for name, array in arrays.items()
        if isinstance(array, jax.Array) and not array.is_fully_addressable
    }
    names = [variables[name].name for name in of_job]
    copies.compare("while saving", names, list(of_job.values()))
    return arrays, parts


def _copied(arrays: Mapping[_Place, jax.Array | np.ndarray]) -> dict[_Place, np.ndarray]:
    """Returns copies of arrays in host memory, made by several threads."""
    # From the data of one device: the variable's own array would keep NumPy's view of it, and then
    # no step could donate that array.
    sources = [
        array.addressable_data(0)
        if isinstance(array, jax.Array) and array.is_fully_replicated
        else array
        for array in arrays.values()
    ]
    for array in sources:
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    copied = in_threads([functools.partial(_copy, source) for source in sources])
    return dict(zip(arrays, copied, strict=True))


def _copy(array: jax.Array | np.ndarray) -> np.ndarray:
    source = np.ascontiguousarray(array).reshape(array.shape)
    # Only CPUs share their memory with NumPy.
    is_copy = isinstance(array, jax.Array) and next(iter(array.devices())).platform != "cpu"
    return source if is_copy else source.copy()


def _of_all(entry: Entry, states: list[str | None]) -> Entry:
    """Returns an entry as it is saved. States of iterators may differ between workers."""
    if entry["kind"] != "state" or len(set(states)) == 1:
        return entry
    return {"kind": "state", "states": states}
