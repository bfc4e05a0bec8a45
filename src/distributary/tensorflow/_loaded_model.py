"""Saved models as programs load them; see `_saved_model`."""

import base64
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import export

from distributary.checkpoint import latest_checkpoint, read, read_arrays
from distributary.data import TensorSpec
from distributary.errors import (
    CheckpointError,
    InvalidTypeError,
    InvalidValueError,
    MissingPackageError,
    UnsupportedError,
)
from distributary.tensorflow._operations import array

#: The name under which the checkpoint has the functions.
INDEX = "saved_model"
_Path = str | os.PathLike[str]


def load(export_dir: _Path, tags: Any = None, options: object = None) -> "SavedModel":
    """Returns the functions of a saved model; it needs none of the classes that made it.

    The functions compute results, without gradients.

    Args:
        export_dir: The folder.
        tags: None or "serve".
        options: No effect.

    Raises:
        CheckpointError: if there is no saved model, or it is damaged.
        UnsupportedError: if TensorFlow has written it.

    Source: `tf.saved_model.load`.
    """
    path = Path(export_dir).absolute()
    if any((path / name).exists() for name in ("saved_model.pb", "saved_model.pbtxt")):
        raise UnsupportedError(
            f"tf.saved_model.load: TensorFlow has written {path}, and only TensorFlow can run it."
            " Load the Keras model there, call model.save('model.keras') or model.save_weights, and"
            " load that file here."
        )
    if tags is not None and set([tags] if isinstance(tags, str) else tags) != {"serve"}:
        raise InvalidValueError(f"tf.saved_model.load: tags is {tags!r}, expected 'serve'.")
    if not contains_saved_model(path):
        raise CheckpointError(
            f"tf.saved_model.load: there is no saved model at {path}. Pass the folder that"
            " tf.saved_model.save has written."
        )
    saved = read(path)
    names = [name for name, entry in saved.entries.items() if "shape" in entry]
    arrays = {name: jnp.asarray(value) for name, value in read_arrays(path, names, saved).items()}
    return SavedModel(json.loads(saved.entries[INDEX]["value"]), arrays)


@contextmanager
def needs_flatbuffers(what: str) -> Iterator[None]:
    """Names the package that JAX needs for programs in files, if the block finds it missing."""
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(
            f"tf.saved_model.{what} needs flatbuffers, in whose format JAX keeps programs. Install"
            " it: pip install flatbuffers"
        ) from error


def contains_saved_model(export_dir: _Path) -> bool:
    """Returns whether a folder is a saved model that was written here.

    Source: `tf.saved_model.contains_saved_model`.
    """
    path = Path(export_dir).absolute()
    try:
        return latest_checkpoint(path) is None and INDEX in read(path).entries
    except CheckpointError:
        return False


@final
class SavedModel:
    """The functions of a saved model, which are attributes; `load` returns it.

    It can be called if it is that of a model, or of a module with a `__call__`.

    Attributes:
        signatures: Functions that take arrays by name, and return a dict of arrays.
    """

    def __init__(self, index: Mapping[str, Any], arrays: Mapping[str, jax.Array]) -> None:
        programs = [_Program(entry, arrays) for entry in index["programs"]]
        self._functions = {
            name: _Loaded(name, [programs[number] for number in numbers], is_signature=False)
            for name, numbers in index["functions"].items()
        }
        self.signatures = {
            name: _Loaded(name, [programs[number]], is_signature=True)
            for name, number in index["signatures"].items()
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "__call__" not in self._functions:
            raise InvalidTypeError(f"{self!r} cannot be called. Call one of its functions.")
        return self._functions["__call__"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        functions = self.__dict__.get("_functions", {})
        if name in functions:
            return functions[name]
        raise AttributeError(
            f"{self!r} has no {name!r}. A tf.function is saved if it has an input_signature, or if"
            " its get_concrete_function was called before tf.saved_model.save."
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._functions]

    def __repr__(self) -> str:
        names = dict.fromkeys([*self._functions, *self.signatures])
        return f"<saved model with {', '.join(names)}>"


@final
class _Program:
    """A function for arguments of certain shapes and dtypes."""

    def __init__(self, entry: Mapping[str, Any], arrays: Mapping[str, jax.Array]) -> None:
        self.names: list[str] = entry["names"]
        self.specs = [TensorSpec(shape, dtype) for shape, dtype in entry["specs"]]
        self._state = [arrays[place] for place in entry["state"]]
        with needs_flatbuffers("load"):
            exported = export.deserialize(
                bytearray(zlib.decompress(base64.b64decode(entry["code"])))
            )
        self._call = jax.jit(exported.call)
        (_, self._avals), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
        self._structure: Any = jax.tree.structure(self._avals)

    def __call__(self, leaves: Sequence[jax.Array]) -> Any:
        return self._call(self._state, jax.tree.unflatten(self._structure, leaves))

    def leaves(self, args: Any, kwargs: Any, is_signature: bool) -> list[jax.Array] | None:
        """Returns the arrays in the arguments of a call; None if they do not fit."""
        names = self.names
        if is_signature:  # every array has a name
            counts = map(len, map(jax.tree.leaves, self._avals))
            named = zip(names, counts, strict=True)
            names = [f"{name}_{i}" if i else name for name, count in named for i in range(count)]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != len(names) or arguments.keys() != set(names):
            return None
        flat: list[Any] = [arguments[name] for name in names]
        if not is_signature:
            try:
                flat = self._structure.flatten_up_to(flat)
            except ValueError:
                return None
        leaves = [array(leaf, spec.dtype) for leaf, spec in zip(flat, self.specs, strict=True)]
        return leaves if all(map(TensorSpec.accepts, self.specs, leaves)) else None


@final
class _Loaded:
    """A function of a saved model, for all arguments for which it was saved."""

    def __init__(self, name: str, programs: Sequence[_Program], is_signature: bool) -> None:
        self._name, self._programs, self._is_signature = name, programs, is_signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args_have, kwargs_have = jax.tree.map(jnp.shape, (args, kwargs))
        shapes = f"the arguments have the shapes {args_have} and {kwargs_have}"
        for program in self._programs:
            leaves = program.leaves(args, kwargs, self._is_signature)
            if leaves is not None:
                try:
                    result = program(leaves)
                except ValueError as error:  # sizes that break a constraint of JAX
                    problem = str(error).partition(". ")[0]
                    raise InvalidValueError(f"{self._name}: {shapes}. {problem}.") from error
                if not self._is_signature or isinstance(result, dict):
                    return result
                return {f"output_{i}": leaf for i, leaf in enumerate(jax.tree.leaves(result))}
        takes = " or ".join(f"{one.names}: {one.specs}" for one in self._programs)
        raise InvalidTypeError(f"{self._name}: {shapes}, but it was saved for {takes}.")
