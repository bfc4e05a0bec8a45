"""Lists, dicts, sets, objects and names that blocks of converted code can change in place.

    found = []
    if x > 0:                # both branches are recorded, whichever runs
        found.append(x)

What a block does to them must not stay when it has been recorded: it is a part of its result. So
they are found before, and put back after, by following what the block refers to.
"""

import array
import collections
import dis
import functools
import inspect
import operator
import sys
import types
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np

from distributary.errors import UnsupportedError
from distributary.tracing import script_line

_LIBRARIES = frozenset(
    {"distributary", "jax", "jaxlib", "numpy", "scipy", "keras", "keras_hub", "keras_rs", "flax"}
    | {"optax", "orbax", "chex", "grain", "malt", "tensorflow", "torch"}
)
CONTAINERS = (list, dict, set, collections.deque)
# Larger arrays of NumPy, such as a buffer of experience, are not compared: it takes too long.
_COMPARED_BYTES = 2**24
# Modules of Python whose objects have attributes that are the user's, and those of whose classes
# the user derives.
_STRUCTURES = frozenset({"argparse", "collections", "types"})
_BASES = _STRUCTURES | {"abc", "builtins", "collections.abc", "enum", "typing"}
_WITHOUT_PARTS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), types.ModuleType}
)


def is_of_library(module: str | None) -> bool:
    """Returns whether a module is one of JAX, Keras and the like, whose code is not rewritten."""
    return (module or "").partition(".")[0] in _LIBRARIES


@functools.cache
def _is_own(module: str | None) -> bool:
    """Returns whether a module is the user's own: not installed, nor of Python."""
    file = str(getattr(sys.modules.get(module or ""), "__file__", None) or "")
    root = (module or "").partition(".")[0]
    is_installed = "site-packages" in file or "dist-packages" in file
    return not (is_of_library(module) or root in sys.stdlib_module_names or is_installed)


@final
class Contents:
    """The values that a container holds, in order.

    Args:
        keys: The keys of a dict, the names of attributes, the positions in a list, or the items of
            a set.
        values: As many values; none in a set.
    """

    def __init__(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        self.keys = tuple(keys)
        self.values = list(values)

    def is_as(self, other: "Contents") -> bool:
        """Returns whether another one has the same objects."""
        return self.keys == other.keys and all(map(operator.is_, self.values, other.values))


_MISSING = object()


@final
class _Attributes:
    """The attributes of an object.

    Args:
        owner: An object, a class or a function.
        name: The only attribute that matters, such as one of a layer or a class; None for all.
    """

    def __init__(self, owner: Any, name: str | None = None) -> None:
        self.owner = owner
        self.name = name

    def get(self) -> Contents:
        owner = self.owner
        of_class = vars(owner) if isinstance(owner, type) else None
        look = functools.partial(getattr, owner) if of_class is None else of_class.get
        names = _attributes_of(owner) if self.name is None else [self.name]
        found = {k: v for k in names if (v := look(k, _MISSING)) is not _MISSING}
        return Contents([*found], [*found.values()])

    def put(self, contents: Contents) -> None:
        of, now = type if isinstance(self.owner, type) else object, self.get()
        for name in set(now.keys).difference(contents.keys):
            of.__delattr__(self.owner, name)
        held = dict(zip(now.keys, now.values, strict=True))
        for name, value in zip(contents.keys, contents.values, strict=True):
            if held.get(name, _MISSING) is not value:
                of.__setattr__(self.owner, name, value)


@final
class _Name:
    """A variable that functions share: a cell of their closures, or one of their module."""

    def __init__(self, cell: Any, name: str) -> None:
        self.cell = cell
        self.name = name

    def get(self) -> Contents:
        try:
            is_cell = isinstance(self.cell, types.CellType)
            value = self.cell.cell_contents if is_cell else self.cell[self.name]
        except (KeyError, ValueError):
            return Contents((), ())
        return Contents((self.name,), (value,))

    def put(self, contents: Contents) -> None:
        for value in contents.values:
            if isinstance(self.cell, types.CellType):
                self.cell.cell_contents = value
            else:
                self.cell[self.name] = value


@final
class _Unchanged:
    """Checks that arrays of NumPy do not change meanwhile.

    They are not locked, because other threads may write to them.

    Args:
        arrays: The arrays with their names.
    """

    def __init__(self, arrays: "Sequence[tuple[str, np.ndarray[Any, Any]]]") -> None:
        self._arrays = arrays
        self._before = [_checksum(part) for _, part in arrays]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, UnsupportedError):
            return
        for (name, part), before in zip(self._arrays, self._before, strict=True):
            if _checksum(part) != before:
                raise UnsupportedError(
                    f"The branch or loop at {script_line()} changes an array of NumPy in place,"
                    f" `{name}`, or another thread does while it is traced. Whether the branch runs"
                    " is known only when the step runs, so make it an array of JAX before,"
                    " jnp.asarray(array), and write array = array.at[i].set(value). If it is"
                    " another thread, let that wait until the step has been traced."
                )


@final
class Reached:
    """A snapshot of the values that some blocks can change in place.

    Args:
        blocks: The functions of the blocks.
        private: Variables of lists that nothing else refers to.
        dead: Those of them that nothing reads after the blocks.
    """

    def __init__(
        self, *blocks: Callable[..., Any], private: Sequence[str] = (), dead: Sequence[str] = ()
    ) -> None:
        self._names_private = private
        self._private: set[int] = set()
        self._dead: set[int] = set()
        self.names: list[str] = []
        self._things: list[Any] = []
        self._seen: dict[Any, Any] = {}  # holds them, so that no number is used again
        self._arrays: list[tuple[str, np.ndarray[Any, Any]]] = []
        self._blocks = blocks
        for block in blocks:
            code = block.__code__
            cells = zip(code.co_freevars, block.__closure__ or (), strict=True)
            for name, cell in cells:
                if name != "ag__":
                    value = self._visit_cell(cell, name)
                    for names, ids in ((private, self._private), (dead, self._dead)):
                        if name in names:
                            ids.add(id(value))
            self._visit_globals(code, block.__globals__)
        self.before = [contents_of(thing) for thing in self._things]

    def again(self) -> "Reached":
        """Returns the things as they are now."""
        return Reached(*self._blocks, private=self._names_private)

    def is_dead(self, k: int) -> bool:
        """Returns whether nothing looks at a thing after the blocks."""
        return id(self._things[k]) in self._dead

    def is_list(self, k: int) -> bool:
        """Returns whether a thing is a list, which loops can make longer."""
        return isinstance(self._things[k], list)

    def holds(self, value: Any) -> bool:
        """Returns whether a value is one of the things."""
        return id(value) in self._seen and isinstance(value, CONTAINERS)

    def shares(self, value: Any) -> bool:
        """Returns whether a value is one of the things, which others can refer to."""
        return self.holds(value) and id(value) not in self._private

    def refers_to(self, value: Any) -> bool:
        """Returns whether the blocks refer to a value."""
        return id(value) in self._seen

    def protected(self) -> "_Unchanged":
        """Returns what checks that recorded code does not change arrays of NumPy."""
        return _Unchanged(self._arrays)

    def changes(self) -> dict[int, Contents]:
        """Returns what is in those things that are not as before.

        A flag, a counter or a part that a layer makes at its first use is Python's, and stays.
        """
        changed = {}
        for k, (thing, before) in enumerate(zip(self._things, self.before, strict=True)):
            contents = contents_of(thing)
            if contents.is_as(before):
                continue
            if _can_be_python(thing) and not _has_step_values(before, contents):
                self.before[k] = contents
            else:
                changed[k] = contents
        return changed

    def name_of(self, k: int, key: Any) -> str:
        """Returns the name of a value that a thing holds."""
        thing, name = self._things[k], self.names[k]
        if not isinstance(thing, (_Name, _Attributes)):
            return f"{name}[{key!r}]"
        return f"{name}.{key}" if thing.name is None else name

    def put(self, k: int, contents: Contents) -> None:
        """Gives a thing other contents."""
        thing = self._things[k]
        if isinstance(thing, (_Name, _Attributes)):
            thing.put(contents)
        elif isinstance(thing, dict):
            of = OrderedDict if isinstance(thing, OrderedDict) else dict
            of.clear(thing)
            for key, value in zip(contents.keys, contents.values, strict=True):
                of.__setitem__(thing, key, value)
        elif isinstance(thing, list):
            list.__setitem__(thing, slice(None), contents.values)
        elif isinstance(thing, collections.deque):
            thing.clear()
            thing.extend(contents.values)
        elif isinstance(thing, set):
            thing.clear()
            thing.update(contents.keys)
        elif isinstance(thing, bytearray):
            thing[:] = contents.keys[0]
        else:
            thing[:] = array.array(thing.typecode, contents.keys[0])

    def _visit(self, value: Any, name: str) -> None:
        kind = type(value)
        if kind in _WITHOUT_PARTS or isinstance(value, jax.Array) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        match value:
            case types.FunctionType():
                self._visit_function(value)
            case types.MethodType():
                self._visit(value.__self__, name)
                self._visit(value.__func__, name)
            case functools.partial():
                for k, part in enumerate((value.func, *value.args, *value.keywords.values())):
                    self._visit(part, f"{name}.args[{k}]")
            case staticmethod() | classmethod():
                self._visit(value.__func__, name)
            case property():
                self._visit(value.fget, name)
                self._visit(value.fset, name)
            case type():
                if _is_own(value.__module__):
                    hidden = "_" if _library_bases_of(value) else "__"
                    for key, part in list(vars(value).items()):
                        if not key.startswith(hidden):
                            self._note(_Attributes(value, key), f"{value.__name__}.{key}")
                        if not key.startswith("__") or isinstance(part, types.FunctionType):
                            self._visit(part, f"{value.__name__}.{key}")
            case np.ndarray():
                if value.flags.writeable and value.nbytes <= _COMPARED_BYTES:
                    self._arrays.append((name, value))
            case bytearray() | array.array():
                self._note(value, name)
            case tuple() | list() | dict() | collections.deque() | set():
                root = kind.__module__.partition(".")[0]  # Keras' lists are those of layers
                if _is_own(kind.__module__) or root in ("builtins", "collections", "keras"):
                    self._visit_items(value, name)
                self._visit_object(value, kind, name)
            case _:
                self._visit_object(value, kind, name)

    def _visit_items(self, value: Any, name: str) -> None:
        if not isinstance(value, tuple):
            self._note(value, name)
        if isinstance(value, set):
            return  # whose order would not be the same in all processes
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in list(items):
            if type(part) not in _WITHOUT_PARTS:
                self._visit(part, f"{name}[{key!r}]")

    def _visit_object(self, value: Any, kind: type, name: str) -> None:
        if not _is_own(kind.__module__) and kind.__module__ not in _STRUCTURES:
            if kind.__module__.startswith("distributary."):  # a compiled function
                self._visit(getattr(value, "python_function", None), name)
            return
        keys = _attributes_of(value)
        if others := _library_bases_of(kind):
            keys = [key for key in keys if not key.startswith("_")]
            of_library = frozenset[str]().union(*map(_attributes_set_by, others))
            for key in keys:
                if key not in of_library:
                    self._note(_Attributes(value, key), f"{name}.{key}")
        else:
            self._note(_Attributes(value), name)
        for key in keys:
            self._visit(getattr(value, key, None), f"{name}.{key}")
        for base in kind.__mro__:
            self._visit(base, base.__name__)

    def _visit_function(self, function: types.FunctionType) -> None:
        if not _is_own(function.__module__):
            return
        for key, value in list(vars(function).items()):
            self._note(_Attributes(function, key), f"{function.__name__}.{key}")
            self._visit(value, f"{function.__name__}.{key}")
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name in _uses_of(code).nonlocals and id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._note(_Name(cell, name), name)
            if name != "ag__":
                self._visit_cell(cell, name)
        for k, value in enumerate(function.__defaults__ or ()):
            self._visit(value, f"{function.__name__}.__defaults__[{k}]")
        for name, value in (function.__kwdefaults__ or {}).items():
            self._visit(value, name)
        self._visit_globals(code, function.__globals__)

    def _visit_globals(self, code: types.CodeType, space: dict[str, Any]) -> None:
        for name in _uses_of(code).names:
            if name in space:
                self._visit(space[name], name)
        for name in _uses_of(code).globals:
            if (id(space), name) not in self._seen:
                self._seen[id(space), name] = space
                self._note(_Name(space, name), name)

    def _visit_cell(self, cell: Any, name: str) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:
            return None
        self._visit(value, name)
        return value

    def _note(self, thing: Any, name: str) -> None:
        self._things.append(thing)
        self.names.append(name)


def contents_of(thing: Any) -> Contents:
    """Returns what a container or another thing that can be changed holds now."""
    if isinstance(thing, (_Name, _Attributes)):
        return thing.get()
    if isinstance(thing, dict):
        return Contents([*thing], [*thing.values()])
    if isinstance(thing, (list, collections.deque)):
        return Contents(range(len(thing)), thing)
    if isinstance(thing, set):
        return Contents(sorted(thing, key=hash), ())
    return Contents((bytes(thing),), ())


def _checksum(array: "np.ndarray[Any, Any]") -> int:
    return zlib.crc32(array.tobytes())


def _can_be_python(thing: Any) -> bool:
    """Returns whether code of a library can change a thing for its own purposes."""
    is_of_keras = isinstance(thing, CONTAINERS) and is_of_library(type(thing).__module__)
    return is_of_keras or (isinstance(thing, _Attributes) and thing.name is not None)


def _has_step_values(before: Contents, after: Contents) -> bool:
    """Returns whether a change is one of arrays, or of numbers one of which is a float."""
    one, two = (dict(zip(c.keys, c.values, strict=False)) for c in (before, after))
    for key in one | two:
        values = one.get(key), two.get(key)
        kinds = set(map(type, values))
        if values[0] is not values[1] and (
            any(map(_has_array, values)) or (float in kinds and kinds <= {bool, int, float})
        ):
            return True
    return False


def _has_array(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_array, value))
    if isinstance(value, dict):
        return any(map(_has_array, value.values()))
    return isinstance(value, jax.Array)


def _attributes_of(thing: Any) -> list[str]:
    slots = [
        name
        for base in type(thing).__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
        and hasattr(thing, name)
        and not name.startswith("__")  # of C functions: numbers that are new at each look
    ]
    return [*slots, *getattr(thing, "__dict__", ())]


def _library_bases_of(kind: type) -> list[type]:
    """Returns the bases of a class, or itself, that keep records which are not the user's."""
    return [b for b in kind.__mro__ if not (_is_own(b.__module__) or b.__module__ in _BASES)]


@functools.cache
def _attributes_set_by(base: type) -> frozenset[str]:
    """Returns the attributes that methods of a library's class assign."""
    functions = [inspect.unwrap(f) for f in vars(base).values() if inspect.isfunction(f)]
    codes = [f.__code__ for f in functions if inspect.isfunction(f)]  # not of a ufunc or partial
    names = set[str]()
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        names.update(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")
    return frozenset(names)


class _Uses(NamedTuple):
    """The names that code uses, that of functions in it included, sorted.

    Attributes:
        names: Names of its module, among others.
        globals: Those that it assigns.
        nonlocals: Variables of functions around it that it assigns, among others.
    """

    names: tuple[str, ...]
    globals: tuple[str, ...]
    nonlocals: tuple[str, ...]


_uses: "weakref.WeakKeyDictionary[types.CodeType, _Uses]" = weakref.WeakKeyDictionary()


def _uses_of(code: types.CodeType) -> _Uses:
    if code in _uses:
        return _uses[code]
    names = [set(code.co_names), set[str](), set[str]()]
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            names[1 + (instruction.opname == "STORE_DEREF")].add(instruction.argval)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            for used, inner in zip(names, _uses_of(const), strict=True):
                used.update(inner)
    _uses[code] = uses = _Uses(*(tuple(sorted(used)) for used in names))
    return uses
