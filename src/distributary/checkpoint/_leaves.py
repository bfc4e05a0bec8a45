"""The named leaves of a checkpoint: of the objects that a user passes, or waiting for them."""

import abc
import dataclasses
import functools
import json
import logging
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary._late import libraries
from distributary.checkpoint._files import Box, SavedPart
from distributary.devices import is_divided, local_box, local_copy, put_sharded
from distributary.errors import (
    DistributaryError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    described,
    shown,
)
from distributary.options import VariableAggregation
from distributary.variables import (
    DistributedValues,
    ForeignVariable,
    ShardedVariable,
    Variable,
    as_variable,
    of_rows,
)

# Other processes that store variables, as checkpoints see them.

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


# The leaves

#: The description of a leaf without its array, which is saved as JSON.
Entry = dict[str, Any]
#: Reads a box of an array; None stands for all of it.
Read: TypeAlias = Callable[[Box | None], np.ndarray]
_NUMBERS = (bool, int, float, str)
_MAX_NAMES_SHOWN = 10


@dataclass(frozen=True)
class Leaf(abc.ABC):
    """One named piece of state."""

    name: str

    @abc.abstractmethod
    def entry(self) -> Entry:
        """Returns the current description of the leaf. Its array, if any, is saved separately."""

    @abc.abstractmethod
    def problem(self, entry: Entry) -> str | None:
        """Returns why the leaf cannot be restored from `entry`, or None if it can."""

    def box(self, entry: Entry) -> Box | None:
        """Returns what this process has of a saved array in parts; None if it needs all of it."""
        return None

    @abc.abstractmethod
    def restore(self, entry: Entry, read: Read) -> Any:
        """Restores the leaf; returns the object that takes its place from now on.

        Args:
            entry: The description that was saved.
            read: Reads the array, if there is one.
        """


#: Turns the restored leaves, by name, into the object that takes the place of a nest.
Rebuild = Callable[[Mapping[str, Any]], Any]


@final
@dataclass(frozen=True)
class Found:
    """The leaves of objects.

    Attributes:
        leaves: The leaves, by name.
        rebuild: Puts restored leaves back into the objects.
        waiting: Objects that get more leaves when they are built, by name.
    """

    leaves: dict[str, Leaf]
    rebuild: Rebuild
    waiting: dict[str, Any]

    def problems(self, entries: Mapping[str, Entry]) -> list[str]:
        """Returns which leaves cannot be restored from their entries, each with the reason."""
        return [
            f"{name} {problem}"
            for name, leaf in self.leaves.items()
            if name in entries and (problem := leaf.problem(entries[name])) is not None
        ]

    def waits_for(self, name: str) -> bool:
        """Returns whether a leaf of this name may come later."""
        return any(name.startswith(f"{root}/") for root in self.waiting)

    def check_built(self, restored: Iterable[str]) -> None:
        """Raises an error if an object has no state because it is not built.

        Args:
            restored: Names of leaves that wait for the objects.

        Raises:
            InvalidValueError: with its name.
        """
        for name, value in self.waiting.items():
            start = name.rpartition("/")[0] or name
            others = tuple(f"{other}/" for other in self.waiting if other != name)
            leaves = (leaf for leaf in self.leaves if leaf.startswith(f"{start}/"))
            waits = any(leaf.startswith(f"{name}/") for leaf in restored)
            if not waits and all(leaf.startswith(others) for leaf in leaves):
                raise InvalidValueError(
                    f"Checkpoint: {name!r}, {described(value)}, has no variables yet, so there is"
                    " nothing to save. Begin a model with keras.Input(...), or call"
                    " build(input_shape) first."
                )


def find_leaves(objects: Mapping[str, Any]) -> Found:
    """Finds the leaves of objects, by names such as `model/dense/kernel`.

    An object that is found twice is saved once: under its own name if it is one of `objects`,
    otherwise under the name of the first place.

    Raises:
        InvalidTypeError: for objects that cannot be saved.
    """
    search = _Search(objects)
    rebuilds = {name: search.find(name, value) for name, value in objects.items()}

    def rebuild(restored: Mapping[str, Any]) -> Any:
        return {name: part(restored) for name, part in rebuilds.items()}

    return Found(search.leaves, rebuild, search.waiting)


@final
class _Search:
    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.waiting: dict[str, Any] = {}
        self._arguments = {id(value): name for name, value in objects.items()}
        self._seen: dict[int, Any] = {}  # by id; keeps the objects, so that no id is reused

    def find(self, name: str, value: object) -> Rebuild:
        is_elsewhere = self._arguments.get(id(value), name) != name
        leaf = _leaf_of(name, value)
        if isinstance(leaf, (_Number, ArrayLeaf)):
            self.leaves[name] = leaf
            return lambda restored: restored.get(name, value)
        if is_elsewhere or id(value) in self._seen:
            return lambda restored: value
        self._seen[id(value)] = value
        if leaf is not None:
            self.leaves[name] = leaf
            return lambda restored: value
        return self._find_in(name, value)

    def _find_in(self, name: str, value: object) -> Rebuild:
        if value is None:
            return lambda restored: None
        pair = _parts_of(value)
        if pair is None:
            raise InvalidTypeError(
                f"Checkpoint: {name!r} is {described(value)}, which cannot be"
                " saved. Pass variables, arrays, numbers, iterators over datasets, Keras models,"
                " optimizers and metrics, generators of random numbers, or dicts, lists, tuples"
                " and dataclasses of them."
            )
        parts, replace_parts = pair
        if is_unbuilt(value):
            self.waiting[name] = value
        rebuilds = {key: self._find_part(name, key, part) for key, part in parts.items()}

        def rebuild(restored: Mapping[str, Any]) -> Any:
            new = {key: of_part(restored) for key, of_part in rebuilds.items()}
            return replace_parts({key: new[key] for key in new if new[key] is not parts[key]})

        return rebuild

    def _find_part(self, name: str, key: object, part: object) -> Rebuild:
        # Escaped: with the separator of names in a key, two leaves could get the same name.
        return self.find(f"{name}/{str(key).replace('%', '%25').replace('/', '%2F')}", part)


def _leaf_of(name: str, value: Any) -> Leaf | None:
    if isinstance(value, _NUMBERS):
        return _Number(name, value)
    variable = value if isinstance(value, ShardedVariable) else as_variable(value)
    if variable is not None:
        return VariableLeaf(name, variable)
    if isinstance(value, DistributedValues):
        raise UnsupportedError(
            f"Checkpoint: {name!r} is {shown(value)}. Values of replicas are results, not state:"
            " keep them in a distributary.Variable with synchronization ON_READ, or reduce them."
        )
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return ArrayLeaf(name, value)
    return _state_of(name, value)


class Group:
    """Base class of checkpoints, which can be parts of others."""

    _objects: dict[str, Any]


def _parts_of(value: Any) -> tuple[dict[Any, Any], Callable[[dict[Any, Any]], Any]] | None:
    """Returns the parts of an object, and a function that replaces some; None if it has none.

    The function returns the object, or a new one if the object is immutable.
    """
    container = value._objects if isinstance(value, Group) else value
    if isinstance(container, dict | list):
        parts = dict(container if isinstance(container, dict) else enumerate(container))
        return parts, functools.partial(_put, value, container.__setitem__)
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)  # of a named tuple
        parts = dict(zip(fields or range(len(value)), value, strict=True))

        def make(changed: dict[Any, Any]) -> Any:
            new = (parts | changed).values()
            return tuple(new) if fields is None else type(value)(*new)

        return parts, make
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            return parts, lambda changed: dataclasses.replace(value, **changed)
        return parts, functools.partial(_put, value, functools.partial(setattr, value))
    candidates = (library.parts(value) for library in libraries())
    foreign = next((parts for parts in candidates if parts is not None), None)
    return None if foreign is None else (dict(foreign), lambda changed: value)


def is_unbuilt(value: object) -> bool:
    """Returns whether an object of another library gets state later."""
    return any(library.is_unbuilt(value) for library in libraries())


def _put(value: Any, put: Callable[[Any, Any], object], changed: dict[Any, Any]) -> Any:
    for key, part in changed.items():
        put(key, part)
    return value


@final
@dataclass(frozen=True)
class VariableLeaf(Leaf):
    """A leaf that is a variable."""

    variable: SavedVariable

    @property
    def remote_store(self) -> RemoteStore | None:
        """RemoteStore that saves and restores the value; None if this process does."""
        shards = getattr(self.variable, "_shards", ())
        store: RemoteStore | None = getattr(shards[0], "_remote_store", None) if shards else None
        return None if 0 in self.variable.shape else store

    @property
    def num_rows(self) -> int | None:
        """Number of replicas if each has its own value, so that the state is `[replica, *shape]`.

        None if there is one value for all replicas.
        """
        variable = self.variable
        if isinstance(variable, ShardedVariable) or not variable._handle.per_replica:
            return None
        return variable._layout.num_replicas

    def entry(self) -> Entry:
        variable = self.variable
        if (
            self.remote_store is None
            and not isinstance(variable, ShardedVariable)
            and variable._value is None
        ):
            raise InvalidValueError(
                f"Checkpoint: the variable {self.name!r} has no value yet. Build the model first."
            )
        entry = _array_entry(variable.shape, jnp.dtype(variable.dtype))
        if self.num_rows is not None:
            assert isinstance(variable, Variable)
            # `shape` stays that of one replica, which does not depend on the number of replicas.
            entry |= {"rows": self.num_rows, "aggregation": variable.aggregation.name}
        return entry

    def problem(self, entry: Entry) -> str | None:
        problem = _array_problem(entry, self.variable.shape, self.variable.dtype)
        has_no_sum = entry.get("aggregation") == VariableAggregation.NONE.name
        if problem is None and has_no_sum and entry["rows"] != self.num_rows:
            return (
                f"holds a value for each of {entry['rows']} replicas and aggregation NONE, which"
                f" does not say how to combine them for {self.num_rows or 1}"
            )
        return problem

    def box(self, entry: Entry) -> Box | None:
        variable, has_rows = self.variable, "rows" in entry or self.num_rows is not None
        if has_rows or isinstance(variable, ShardedVariable):
            return None
        sharding: Any = getattr(variable._value, "sharding", None)
        return local_box(variable.shape, sharding) if is_divided(sharding) else None

    def restore(self, entry: Entry, read: Read) -> None:
        """Restores the value. What `read` gives is `[replica, *shape]` if each replica had its own.

        If there are as many replicas as rows, each replica gets its own row back. Otherwise, the
        aggregated value stays the same. With SUM, replica 0 then holds all of it and the others
        hold zero, so that the sum is exactly the same.
        """
        variable, num_rows, box = self.variable, self.num_rows, self.box(entry)
        if box is not None:
            assert not isinstance(variable, ShardedVariable)
            sharding = variable._value.sharding
            variable._value = put_sharded(read(box), sharding, variable.shape, box)
            variable._shared = False
            return
        array = read(None)
        if "rows" in entry and entry["rows"] != num_rows:
            aggregation = VariableAggregation[entry["aggregation"]]
            array = np.asarray(of_rows(jnp.asarray(array), aggregation, variable.name))
        if num_rows is not None and entry.get("rows") != num_rows:
            assert isinstance(variable, Variable)
            array = np.broadcast_to(array, (num_rows, *array.shape))
            if variable.aggregation is VariableAggregation.SUM:
                array = array.copy()
                array[1:] = 0
        if isinstance(variable, Variable):
            layout = variable._layout
            variable._value = layout.place(array, variable.dtype, stacked=num_rows is not None)
            variable._shared = False
        elif not (isinstance(variable, ForeignVariable) and variable.begin_with(array)):
            # The library that keeps the value has its own way to assign.
            target = variable.variable if isinstance(variable, ForeignVariable) else variable
            target.assign(array)


@final
@dataclass(frozen=True)
class ArrayLeaf(Leaf):
    """A leaf that is a NumPy or JAX array."""

    value: jax.Array | np.ndarray | np.generic

    def array(self) -> jax.Array | np.ndarray:
        """Returns the array to save."""
        if isinstance(self.value, jax.Array):
            if not self.value.is_fully_addressable and not self.value.is_fully_replicated:
                raise UnsupportedError(
                    f"Checkpoint: the array {self.name!r} is divided between processes. Keep it in"
                    " a distributary.Variable, or gather it first."
                )
            if _is_key(self.value):
                return local_copy(jax.random.key_data(self.value))
            return local_copy(self.value)
        return np.asarray(self.value)

    def entry(self) -> Entry:
        entry = _array_entry(self.value.shape, self.value.dtype)
        dtype = self.value.dtype
        if isinstance(dtype, np.dtype) and (dtype.kind in "OUSMm" or dtype.names):
            raise InvalidTypeError(
                f"Checkpoint: the array {self.name!r} has dtype {self.value.dtype}; expected"
                " numbers."
            )
        if isinstance(self.value, jax.Array) and _is_key(self.value):
            data = jax.random.key_data(self.value)
            entry["data"] = {"shape": list(data.shape), "dtype": str(data.dtype)}
        return entry

    def problem(self, entry: Entry) -> str | None:
        return _array_problem(entry, self.value.shape, self.value.dtype)

    def restore(self, entry: Entry, read: Read) -> jax.Array | np.ndarray | np.generic:
        value, array = self.value, read(None)
        if isinstance(value, jax.Array):
            if _is_key(value):
                return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(value))
            # Committed only if it was before, as uncommitted arrays work with any device.
            return jax.device_put(array, value.sharding) if value.committed else jnp.array(array)
        if isinstance(value, np.ndarray) and value.flags.writeable:
            value[...] = array
            return value
        return array[()]


def _is_key(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def by_store(leaves: Mapping[str, Leaf]) -> dict[RemoteStore, dict[str, SavedVariable]]:
    """Returns the variables that are kept elsewhere, by their store and their names."""
    variables: dict[RemoteStore, dict[str, SavedVariable]] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, VariableLeaf) and leaf.remote_store is not None:
            variables.setdefault(leaf.remote_store, {})[name] = leaf.variable
    return variables


def _array_entry(shape: Sequence[int], dtype: object) -> Entry:
    return {"kind": "array", "shape": list(shape), "dtype": str(dtype)}


def _array_problem(entry: Entry, shape: Sequence[int], dtype: object) -> str | None:
    if entry["kind"] != "array":
        return f"is {_described(entry)}, and here it is an array"
    if tuple(entry["shape"]) != tuple(shape):
        return f"has shape {tuple(entry['shape'])}, and here {tuple(shape)}"
    if entry["dtype"] != str(dtype):
        return f"has dtype {entry['dtype']}, and here {dtype}"
    return None


@final
@dataclass(frozen=True)
class _Number(Leaf):
    value: bool | int | float | str

    def entry(self) -> Entry:
        return {"kind": "value", "type": type(self.value).__name__, "value": self.value}

    def problem(self, entry: Entry) -> str | None:
        name = type(self.value).__name__
        if entry["kind"] == "value" and entry["type"] == name:
            return None
        return f"is {_described(entry)}, and here of type {name}"

    def restore(self, entry: Entry, read: Read) -> bool | int | float | str:
        return type(self.value)(entry["value"])


@final
@dataclass(frozen=True)
class _State(Leaf):
    """A leaf whose state is saved as JSON text, which may differ between workers."""

    value: object
    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]

    def entry(self) -> Entry:
        state = self.get_state()
        try:
            text = json.dumps(state, default=lambda array: array.tolist())
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidTypeError(
                f"Checkpoint: the state of {self.name!r} is {state!r}, which JSON cannot hold:"
                " expected dicts, lists, numbers and strings."
            ) from error
        return {"kind": "state", "state": text}

    def problem(self, entry: Entry) -> str | None:
        if entry["kind"] != "state":
            return f"is {_described(entry)}, and here a {type(self.value).__name__}"
        return entry.get("problem")

    def restore(self, entry: Entry, read: Read) -> None:
        self.set_state(json.loads(entry["state"]))


def _state_of(name: str, value: Any) -> _State | None:
    """Returns the state of a random number generator or an iterator; None for other objects."""
    if isinstance(value, random.Random):
        return _State(
            name,
            value,
            value.getstate,
            lambda state: value.setstate((state[0], tuple(state[1]), state[2])),
        )
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return _State(name, value, lambda: bits.state, functools.partial(setattr, bits, "state"))
    get_state, set_state = (getattr(value, method, None) for method in ("get_state", "set_state"))
    if callable(get_state) and callable(set_state):
        return _State(name, value, get_state, set_state)
    return None


def _described(entry: Entry) -> str:
    if entry["kind"] == "array":
        return f"an array of shape {tuple(entry['shape'])}"
    return f"of type {entry['type']}" if entry["kind"] == "value" else "the state of an object"


def enumerated(names: Sequence[str]) -> str:
    """Returns names for a message: `"a, b and 3 more"`."""
    more = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


# State for objects that are not built yet: it arrives when they are.

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
        is_kept = lambda value: value is not None and id(value) not in ids
        self._objects = {n: r for n, r in self._objects.items() if is_kept(r())}

    def state_of(self, value: object) -> dict[str, tuple[Entry, np.ndarray | None]]:
        """Returns what waits for an object and its parts: entries and arrays, by name inside it."""
        return {
            leaf.removeprefix(f"{name}/"): (self._entries[leaf], self._arrays.get(leaf))
            for name, reference in self._objects.items()
            if reference() is value
            for leaf in self._left(name)
        }

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


def restored_state(found: Found) -> dict[str, tuple[Entry, np.ndarray | None]]:
    """Returns what `restore` has read for objects that are still not built, as `save` keeps it.

    Returns:
        Entries and arrays, by the names that they have in `found`.
    """
    with _lock:
        return {
            f"{root}/{name}": state
            for root, value in found.waiting.items()
            for deferred in _all
            for name, state in deferred.state_of(value).items()
            if f"{root}/{name}" not in found.leaves
        }


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
