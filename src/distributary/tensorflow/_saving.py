"""`tf.saved_model`: functions with their variables, which run without Python; `tf.train`.

A saved model is a checkpoint of the variables and of the arrays that functions have captured, with
the functions in its index, as StableHLO of `jax.export`. So it appears as a whole, and the chief
writes it.
"""

import abc
import base64
import inspect
import json
import logging
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import export

from distributary.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    list_variables,
    load_variable,
    numbered,
    read,
    read_arrays,
)
from distributary.data import TensorSpec
from distributary.devices import local_copy
from distributary.errors import (
    CheckpointError,
    InvalidTypeError,
    InvalidValueError,
    MissingPackageError,
    UnsupportedError,
    described,
)
from distributary.tensorflow._functions import ConcreteFunction, Function, Method
from distributary.tensorflow._operations import array, canonical, package
from distributary.variables import ForeignVariable, Variable

_logger = logging.getLogger(__name__)

_PLATFORMS = ("cpu", "cuda", "tpu")
_DEFAULT = "serving_default"
_MAX_ATTEMPTS = 32
#: The name under which the checkpoint has the functions.
INDEX = "saved_model"
_Path = str | os.PathLike[str]


def save(obj: object, export_dir: _Path, signatures: object = None, options: object = None) -> None:
    """Saves the functions of a `tf.Module` or a Keras model, with the values of their variables.

    A `tf.function` is saved for its `input_signature`, or for all that its `get_concrete_function`
    was called with. A Keras model is saved as it predicts. Dims of size None stay open;
    if the function fits only some sizes, such as those of a kernel, it is saved for these.

    Args:
        obj: The module or model.
        export_dir: Folder to write. A saved model that is there is replaced.
        signatures: A `tf.function` with an `input_signature`, a concrete function, or a dict of
            these. A model has a signature of its own.
        options: No effect.

    Raises:
        UnsupportedError: if a function does more than computing its result.
        InvalidValueError: if shapes and dtypes of arguments are not known.
        CheckpointError: if the folder cannot be written, or something else is there.

    Source: `tf.saved_model.save`.
    """
    path = Path(export_dir).absolute()
    is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not is_free and not contains_saved_model(path):
        raise CheckpointError(
            f"tf.saved_model.save: {path} is not a saved model, and is not replaced. Move it away,"
            " or choose another path."
        )
    functions, named = _functions_of(obj), _concrete(signatures)
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(obj, keras.Model):
        if isinstance(obj, keras.Sequential):
            (inputs,) = obj.inputs or (None,)
        else:
            inputs = getattr(obj, "input", None)
        if inputs is not None:  # models that only have a method `call` do not know them
            functions["__call__"] = [_prediction_of(obj, inputs)]
            named.setdefault(_DEFAULT, functions["__call__"][0])
    functions = functions if functions or named else _functions_of(obj, called=True)
    if not (functions or named):
        raise InvalidValueError(
            f"tf.saved_model.save: {described(obj)} has no function with known arguments. Give a"
            " tf.function an input_signature, or call it once; make a model with"
            " keras.Model(x, model(x)), where x is keras.Input(shape)."
        )
    programs = _Programs()
    index = {
        "functions": {
            name: [programs.number(name, one) for one in of_name]
            for name, of_name in functions.items()
        },
        "signatures": {name: programs.number(name, one) for name, one in named.items()},
        "programs": programs.entries,
    }
    state = {"variables": programs.variables, "constants": programs.constants}
    Checkpoint(**{INDEX: json.dumps(index)}, **state).write(path)


def _functions_of(obj: object, called: bool = False) -> dict[str, list[ConcreteFunction]]:
    """Returns the functions of an object and its class, for each of their known arguments."""
    functions: dict[str, list[ConcreteFunction]] = {}
    attributes = getattr(obj, "__dict__", {})
    for name in sorted({*dir(type(obj)), *attributes}):
        value = attributes.get(name, inspect.getattr_static(type(obj), name, None))
        if isinstance(value, Function) and name not in attributes:
            value = Method(value, obj)
        if isinstance(value, ConcreteFunction):
            functions[name] = [value]
        elif isinstance(value, (Function, Method)) and value.concrete_functions(called=called):
            functions[name] = value.concrete_functions(called=called)
    return functions


def _concrete(signatures: object) -> dict[str, ConcreteFunction]:
    if signatures is None:
        return {}
    functions = {}
    named = signatures if isinstance(signatures, Mapping) else {_DEFAULT: signatures}
    for name, function in named.items():
        if isinstance(function, (Function, Method)) and function.input_signature is not None:
            (function,) = function.concrete_functions()
        if not isinstance(function, ConcreteFunction):
            raise InvalidValueError(
                f"tf.saved_model.save: signature {name!r} is {function!r}, expected a tf.function"
                " with an input_signature, or the result of its get_concrete_function."
            )
        functions[name] = function
    return functions


def _prediction_of(model: Any, inputs: Any) -> ConcreteFunction:
    specs = jax.tree.map(lambda one: TensorSpec(one.shape, canonical(one.dtype)), inputs)
    predict = lambda inputs: model(inputs, training=False)
    return Function(predict, [specs], autograph=True).concrete_functions()[0]


@final
class _Programs:
    """The programs of functions, and the variables and captured arrays that they share.

    Attributes:
        entries: The entries of the programs in the index.
        variables: The variables.
        constants: The captured arrays.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.variables: list[Any] = []
        self.constants: list[Any] = []
        self._known: dict[int, tuple[Any, Any]] = {}  # by id, with the object, so that it stays

    def number(self, name: str, function: ConcreteFunction) -> int:
        """Returns the number of a function, and exports it if it is new."""
        if id(function) not in self._known:
            self.entries.append(self._entry(f"the function {name!r}", function))
            self._known[id(function)] = len(self.entries) - 1, function
        return int(self._known[id(function)][0])

    def _entry(self, what: str, function: ConcreteFunction) -> dict[str, Any]:
        # None stands for all that is not an array.
        keep = lambda leaf: leaf if isinstance(leaf, TensorSpec) else None
        taken = {name: jax.tree.map(keep, one) for name, one in function.arguments.items()}
        taken = {name: nest for name, nest in taken.items() if jax.tree.leaves(nest)}
        specs = jax.tree.leaves(list(taken.values()))
        structure = jax.tree.structure(list(taken.values()))
        shared = sum(spec.shape[:1] == (None,) for spec in specs if spec.shape is not None) > 1
        attempts: list[tuple[tuple[str, ...], str]] = [((), "batch")]
        if shared:
            attempts.insert(0, ((), "batch{}"))
        error: Exception | None = None
        for constraints, first in attempts:  # grows by those that JAX asks for
            structs = _structs_of(what, specs, first, constraints)
            try:
                code, places = self._exported(what, function, structs, structure)
                break
            except (UnsupportedError, MissingPackageError):
                raise
            except Exception as failure:  # of the function itself, or of JAX
                error = error if constraints else failure
                more = [((*constraints, one), first) for one in _constraints_in(str(failure))]
                attempts += more[: _MAX_ATTEMPTS - len(attempts)]
        else:
            problem = str(error).partition("\n")[0].removesuffix(".")
            raise UnsupportedError(
                f"tf.saved_model.save: {what} cannot be exported for {specs}: {problem}. Give dims"
                " of size None their sizes, return arrays in dicts, lists or tuples, or leave the"
                " function out."
            ) from error
        if constraints:
            _logger.warning(
                "tf.saved_model.save: %s takes only sizes with %s, because %s",
                *(what, " and ".join(constraints), error),
            )
        return {
            "names": list(taken),
            "specs": [
                [[n if isinstance(n, int) else None for n in struct.shape], str(struct.dtype)]
                for struct in structs
            ],
            "state": places,
            "code": base64.b64encode(zlib.compress(code)).decode(),
        }

    def _exported(
        self, what: str, function: ConcreteFunction, structs: list[Any], structure: object
    ) -> tuple[bytes, list[str]]:
        program, rebuild, order = function.program(structs)
        problem = ""
        if program.written:
            names = ", ".join(repr(handle.name) for handle in program.written)
            problem = f"assigns {names}. Return the new values instead"
        elif program.has_effects:
            problem = "calls Python when it runs, as tf.print and tf.py_function do. Remove that"
        elif program.strategies:
            problem = "calls Strategy.run. Save a function that computes for one replica"
        if problem:
            raise UnsupportedError(
                f"tf.saved_model.save: {what} {problem}, or leave the function out; to go on with"
                " training, use tf.train.Checkpoint."
            )
        handles = program.read_only
        # The data of random keys, because files have arrays of numbers.
        keys = [jax.random.key_impl(one) if _is_key(one) else None for one in program.captures[0]]
        captures = [
            jax.random.key_data(one) if _is_key(one) else one for one in program.captures[0]
        ]

        def run(state: list[Any], arguments: object) -> Any:
            leaves = jax.tree.leaves(arguments)
            captured = [
                one if impl is None else jax.random.wrap_key_data(one, impl=impl)
                for one, impl in zip(state[len(handles) :], keys, strict=True)
            ]
            ordered = [leaves[i] for i in order]
            _, outs = program([captured], [], state[: len(handles)], ordered)
            result = rebuild(outs)
            for leaf in jax.tree.leaves(result):
                if isinstance(leaf, (Variable, str, bytes)):
                    raise InvalidTypeError(f"it returns {described(leaf)}, not an array")
            return result

        avals = [handle.aval(of_one_replica=False) for handle in handles]
        avals += map(jax.typeof, captures)
        state = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        arguments = jax.tree.unflatten(structure, structs)
        exported = export.export(jax.jit(run), platforms=_PLATFORMS)(state, arguments)
        package("tf.saved_model.save", "flatbuffers", "flatbuffers")  # which JAX writes
        code = exported.serialize()
        places = [self._place("variables", handle.cell()) for handle in handles]
        return bytes(code), places + [self._place("constants", one) for one in captures]

    def _place(self, kind: str, value: object) -> str:
        """Returns the name that a variable or array has in the checkpoint."""
        if isinstance(value, ForeignVariable):
            value = value.variable
        if id(value) not in self._known:
            values = self.variables if kind == "variables" else self.constants
            self._known[id(value)] = f"{kind}/{len(values)}", value
            values.append(local_copy(value) if kind == "constants" else value)
        return str(self._known[id(value)][0])


def _is_key(captured: Any) -> bool:
    return bool(jnp.issubdtype(captured.dtype, jax.dtypes.prng_key))


def _constraints_in(message: str) -> Iterator[str]:
    """Yields constraints that can mend what JAX says: sizes, and remainders of sizes.

    JAX decides whether they do, and checks them when the loaded function is called.
    """
    for remainder in re.findall(r"(mod\(.*\)) should be 0", message):
        yield f"{remainder} == 0"
    for name, offset in re.findall(r"(?<![\w*])(dim\d+_\d+)( [+-] \d+)?(?! *\*)", message):
        for size in dict.fromkeys(re.findall(r"(?<![+-] )\b\d+\b", message)):
            number = int(size) - int(offset.replace(" ", "") or 0)
            if number > 0:
                yield f"{name} == {number}"


def _structs_of(
    what: str, specs: Sequence[Any], first: str, constraints: Sequence[str]
) -> list[jax.ShapeDtypeStruct]:
    """Returns structs in which dims of size None are open; `first` names the first of them."""
    scope, structs = export.SymbolicScope(constraints), []
    for number, spec in enumerate(specs):
        if spec.shape is None or spec.dtype == object:
            raise InvalidValueError(
                f"tf.saved_model.save: {what} takes {spec}. Give it a number of dims, and a dtype"
                " of numbers."
            )
        names = [first.format(number), *[f"dim{number}_{i}" for i in range(1, len(spec.shape))]]
        sizes = zip(spec.shape, names, strict=False)
        text = ", ".join(name if size is None else str(size) for size, name in sizes)
        shape = export.symbolic_shape(text, scope=scope)
        structs.append(jax.ShapeDtypeStruct(shape, canonical(spec.dtype)))
    return structs


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
        package("tf.saved_model.load", "flatbuffers", "flatbuffers")  # which JAX reads
        exported = export.deserialize(bytearray(zlib.decompress(base64.b64decode(entry["code"]))))
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


# `tf.train`: looking at checkpoints, and what they save.


@final
@dataclass
class CheckpointOptions:
    """`tf.train.CheckpointOptions`: no option has an effect."""

    experimental_io_device: object = None
    experimental_enable_async_checkpoint: bool = False
    experimental_write_callbacks: Sequence[Callable[..., Any]] | None = None
    enable_async: bool = False
    experimental_skip_slot_variables: bool = False
    experimental_sharding_callback: object = None

    def __post_init__(self) -> None:
        if self.experimental_write_callbacks:
            raise InvalidValueError(
                "tf.train.CheckpointOptions: experimental_write_callbacks are not called. Do it"
                " after save, or after CheckpointManager.wait_until_finished."
            )


@final
@dataclass(frozen=True)
class CheckpointState:
    """The checkpoints of a folder, the last one and all of them.

    Source: `tf.train.get_checkpoint_state`.
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: list[str]


def get_checkpoint_state(
    checkpoint_dir: _Path, latest_filename: str | None = None
) -> CheckpointState | None:
    """`tf.train.get_checkpoint_state`: None if the folder has no checkpoint."""
    last = latest_checkpoint(checkpoint_dir)
    if last is None:
        return None
    return CheckpointState(last, [str(p) for p, _ in numbered(Path(checkpoint_dir).absolute())])


@final
class CheckpointReader:
    """Reads the arrays of a checkpoint.

    Source: `tf.train.load_checkpoint`.
    """

    def __init__(self, path: _Path) -> None:
        self._path = path
        self._shapes = dict(list_variables(path))

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shapes of all arrays, by name."""
        return dict(self._shapes)

    def has_tensor(self, tensor_str: str) -> bool:
        """Returns whether there is an array of this name."""
        return tensor_str in self._shapes

    def get_tensor(self, tensor_str: str) -> Any:
        """Returns an array."""
        return load_variable(self._path, tensor_str)


def load_checkpoint(ckpt_dir_or_file: _Path) -> CheckpointReader:
    """`tf.train.load_checkpoint`: a reader of its arrays."""
    return CheckpointReader(ckpt_dir_or_file)


class PythonState(abc.ABC):
    """State of Python that a checkpoint saves as text; a subclass has the two methods.

    Source: `tf.train.experimental.PythonState`.
    """

    @abc.abstractmethod
    def serialize(self) -> str:
        """Returns the state."""

    @abc.abstractmethod
    def deserialize(self, string_value: str) -> None:
        """Takes over a state."""

    def get_state(self) -> dict[str, str]:
        """Returns the state, for checkpoints."""
        return {"text": self.serialize()}

    def set_state(self, state: dict[str, str]) -> None:
        """Takes over the state of a checkpoint."""
        self.deserialize(state["text"])


def checkpoints_iterator(
    checkpoint_dir: _Path,
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """`tf.train.checkpoints_iterator`: each newest checkpoint of a folder, as it appears."""
    last: str | None = None
    while True:
        began = time.monotonic()
        while (path := latest_checkpoint(checkpoint_dir)) in (None, last):
            if timeout is not None and time.monotonic() - began >= timeout:
                if timeout_fn is None or timeout_fn():
                    return
                began = time.monotonic()
            time.sleep(min(1.0, timeout or 1.0))
        last = path
        assert path is not None
        yield path
        time.sleep(max(0.0, began + min_interval_secs - time.monotonic()))
