"""The named leaves of a checkpoint, found in the objects that a user passes."""

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from distributary.topology import local_copy
from distributary.values import DistributedValues
from distributary.variables import (
    Keeper,
    SavedVariable,
    ShardedVariable,
    Variable,
    VariableAggregation,
    as_variable,
    foreign_parts,
    is_per_replica,
    keeper_of,
    put_back,
)

#: The description of a leaf without its array, which is saved as JSON.
Entry = dict[str, Any]
_NUMBERS = (bool, int, float, str)


class Leaf(Protocol):
    """One named piece of state."""

    def entry(self) -> Entry:
        """Returns the current description of the leaf. Its array, if any, is saved separately."""
        ...

    def problem(self, entry: Entry) -> str | None:
        """Returns why the leaf cannot be restored from `entry`, or None if it can."""
        ...

    def restore(self, entry: Entry, array: Any) -> Any:
        """Restores the leaf; returns the object that takes its place from now on."""
        ...


#: Turns the restored leaves, by name, into the object that takes the place of a nest.
Rebuild = Callable[[Mapping[str, Any]], Any]


def find_leaves(objects: Mapping[str, Any]) -> tuple[dict[str, Leaf], Rebuild]:
    """Finds the leaves of objects, by names such as `model/dense/kernel`.

    An object that is found twice is saved once: under its own name if it is one of `objects`,
    otherwise under the name of the first place.

    Returns:
        The leaves, and a function that puts restored leaves back into the objects.

    Raises:
        InvalidTypeError: for objects that cannot be saved.
    """
    search = _Search(objects)
    rebuilds = {name: search.find(name, value) for name, value in objects.items()}

    def rebuild(restored: Mapping[str, Any]) -> Any:
        return {name: part(restored) for name, part in rebuilds.items()}

    return search.leaves, rebuild


@final
class _Search:
    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._arguments = {id(value): name for name, value in objects.items()}
        self._seen: dict[int, Any] = {}  # by id; keeps the objects, so that no id is reused

    def find(self, name: str, value: Any) -> Rebuild:
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

    def _find_in(self, name: str, value: Any) -> Rebuild:
        parts: Mapping[Any, Any] | None
        if value is None:
            return lambda restored: None
        if isinstance(value, (dict, list)):
            parts = value if isinstance(value, dict) else dict(enumerate(value))
            return self._mutable(name, value, parts, value.__setitem__)
        if isinstance(value, tuple):
            return self._tuple(name, value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            if value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
                return self._frozen(name, value, fields)
            return self._mutable(name, value, fields, lambda k, v: setattr(value, k, v))
        parts = foreign_parts(value)
        if parts is None:
            raise InvalidTypeError(
                f"Checkpoint: {name!r} is {value!r}, a {type(value).__name__}, which cannot be"
                " saved. Pass variables, arrays, numbers, iterators over datasets, Keras models,"
                " optimizers and metrics, generators of random numbers, or dicts, lists, tuples"
                " and dataclasses of them."
            )
        return self._mutable(name, value, parts, None)

    def _mutable(
        self,
        name: str,
        value: Any,
        parts: Mapping[Any, Any],
        put: Callable[[Any, Any], None] | None,
    ) -> Rebuild:
        rebuilds = [(key, part, self._find_part(name, key, part)) for key, part in parts.items()]

        def rebuild(restored: Mapping[str, Any]) -> Any:
            for key, part, of_part in rebuilds:
                new = of_part(restored)
                if put is not None and new is not part:
                    put(key, new)
            return value

        return rebuild

    def _tuple(self, name: str, value: Any) -> Rebuild:
        keys = getattr(value, "_fields", range(len(value)))
        rebuilds = [self._find_part(name, k, v) for k, v in zip(keys, value, strict=True)]

        def rebuild(restored: Mapping[str, Any]) -> Any:
            new = [of_part(restored) for of_part in rebuilds]
            return type(value)(*new) if hasattr(value, "_fields") else tuple(new)

        return rebuild

    def _frozen(self, name: str, value: Any, fields: Mapping[str, Any]) -> Rebuild:
        rebuilds = {key: self._find_part(name, key, part) for key, part in fields.items()}

        def rebuild(restored: Mapping[str, Any]) -> Any:
            new = {key: of_part(restored) for key, of_part in rebuilds.items()}
            changed = {key: part for key, part in new.items() if part is not fields[key]}
            return dataclasses.replace(value, **changed)

        return rebuild

    def _find_part(self, name: str, key: Any, part: Any) -> Rebuild:
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
            f"Checkpoint: {name!r} is {value!r}. Values of replicas are results, not state: keep"
            " them in a distributary.Variable with synchronization ON_READ, or reduce them."
        )
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return ArrayLeaf(name, value)
    if isinstance(value, (np.random.Generator, random.Random)):
        return _Generator(name, value)
    if callable(getattr(value, "get_state", None)) and callable(getattr(value, "set_state", None)):
        return _Stateful(name, value)
    return None


@final
@dataclass(frozen=True)
class VariableLeaf:
    """A leaf that is a variable."""

    name: str
    variable: SavedVariable

    @property
    def keeper(self) -> Keeper | None:
        """Keeper that saves and restores the value; None if this process does."""
        return keeper_of(self.variable)

    def entry(self) -> Entry:
        variable = self.variable
        if (
            self.keeper is None
            and not isinstance(variable, ShardedVariable)
            and variable._value is None
        ):
            raise InvalidValueError(
                f"Checkpoint: the variable {self.name!r} has no value yet. Build the model first."
            )
        entry: Entry = {
            "kind": "array",
            "shape": list(variable.shape),
            "dtype": str(jnp.dtype(variable.dtype)),
        }
        if is_per_replica(variable):
            assert isinstance(variable, Variable)
            # `shape` stays that of one replica, which does not depend on the number of replicas.
            entry["rows"] = variable._layout.num_replicas
            entry["aggregation"] = variable.aggregation.name
        return entry

    def problem(self, entry: Entry) -> str | None:
        problem = _array_problem(entry, self.variable.shape, self.variable.dtype)
        if problem is None and entry.get("aggregation") == VariableAggregation.NONE.name:
            rows = entry["rows"]
            here = self.variable._layout.num_replicas if is_per_replica(self.variable) else 1
            if not is_per_replica(self.variable) or rows != here:
                return (
                    f"holds a value for each of {rows} replicas and aggregation NONE, which says"
                    f" not how to combine them for {here}"
                )
        return problem

    def restore(self, entry: Entry, array: Any) -> Any:
        aggregation = entry.get("aggregation")
        rows_of = None if aggregation is None else VariableAggregation[aggregation]
        put_back(self.variable, array, rows_of)
        return None


@final
@dataclass(frozen=True)
class ArrayLeaf:
    """A leaf that is a NumPy or JAX array."""

    name: str
    value: Any

    def array(self) -> Any:
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
        entry: Entry = {
            "kind": "array",
            "shape": list(self.value.shape),
            "dtype": str(self.value.dtype),
        }
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

    def restore(self, entry: Entry, array: Any) -> Any:
        value = self.value
        if isinstance(value, jax.Array):
            if _is_key(value):
                return jax.random.wrap_key_data(array, impl=jax.random.key_impl(value))
            # Committed only if it was before, as uncommitted arrays work with any device.
            return jax.device_put(array, value.sharding) if value.committed else jnp.array(array)
        if isinstance(value, np.ndarray) and value.flags.writeable:
            value[...] = array
            return value
        return array[()]


def _is_key(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _array_problem(entry: Entry, shape: Any, dtype: Any) -> str | None:
    if entry["kind"] != "array":
        return f"is {_described(entry)}, and here it is an array"
    if tuple(entry["shape"]) != tuple(shape):
        return f"has shape {tuple(entry['shape'])}, and here {tuple(shape)}"
    if entry["dtype"] != str(dtype):
        return f"has dtype {entry['dtype']}, and here {dtype}"
    return None


@final
@dataclass(frozen=True)
class _Number:
    name: str
    value: Any

    def entry(self) -> Entry:
        return {"kind": "value", "type": type(self.value).__name__, "value": self.value}

    def problem(self, entry: Entry) -> str | None:
        name = type(self.value).__name__
        if entry["kind"] == "value" and entry["type"] == name:
            return None
        return f"is {_described(entry)}, and here of type {name}"

    def restore(self, entry: Entry, array: Any) -> Any:
        return type(self.value)(entry["value"])


class _State:
    """A leaf whose state is saved as JSON text, which may differ between workers."""

    def __init__(self, name: str, value: Any) -> None:
        self._name = name
        self._value = value

    def entry(self) -> Entry:
        state = self.state()
        try:
            text = json.dumps(state, default=lambda array: array.tolist())
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidTypeError(
                f"Checkpoint: the state of {self._name!r} is {state!r}, which JSON cannot hold:"
                " expected dicts, lists, numbers and strings."
            ) from error
        return {"kind": "state", "state": text}

    def state(self) -> Any:
        raise NotImplementedError

    def set_state(self, state: Any) -> None:
        raise NotImplementedError

    def problem(self, entry: Entry) -> str | None:
        if entry["kind"] != "state":
            return f"is {_described(entry)}, and here a {type(self._value).__name__}"
        return entry.get("problem")

    def restore(self, entry: Entry, array: Any) -> Any:
        self.set_state(json.loads(entry["state"]))
        return None


@final
class _Stateful(_State):
    def state(self) -> Any:
        return self._value.get_state()

    def set_state(self, state: Any) -> None:
        self._value.set_state(state)


@final
class _Generator(_State):
    def state(self) -> Any:
        if isinstance(self._value, random.Random):
            return self._value.getstate()
        return self._value.bit_generator.state

    def set_state(self, state: Any) -> None:
        if isinstance(self._value, random.Random):
            version, internal, gauss = state
            self._value.setstate((version, tuple(internal), gauss))
        else:
            self._value.bit_generator.state = state


def _described(entry: Entry) -> str:
    if entry["kind"] == "array":
        return f"an array of shape {tuple(entry['shape'])}"
    return f"of type {entry['type']}" if entry["kind"] == "value" else "the state of an object"
