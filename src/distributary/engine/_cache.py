"""Arguments and results of functions, and compiled programs; functions are not kept alive."""

import contextlib
import contextvars
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary._threads import bound
from distributary.data import DatasetIterator
from distributary.devices import Nest, is_left_over
from distributary.errors import ContextError, InvalidTypeError, a_kind, described, shown, warn
from distributary.tracing import Subject, leaked_at, narrowed
from distributary.variables import (
    DistributedValues,
    IndexedSlices,
    Variable,
    in_order,
    key_order,
)

# The key of one argument in the cache: cheap to make and to compare.

# Types of arrays that are not tracers. JAX checks in Python whether an object is an array.
_array_types: set[type] = set()


def signature_of(leaf: Any, what: str) -> Any:
    """Returns the key of an argument; if keys are equal, the same program can be used.

    The key of an array is its shape and dtype, that of a Python number its type. Everything else is
    static: hashable objects are compared by value, others by identity. The key does not keep an
    object alive if it can be referenced weakly.
    """
    kind = type(leaf)
    if kind in _array_types or isinstance(leaf, jax.Array):
        if kind not in _array_types:
            if isinstance(leaf, jax.core.Tracer):
                raise traced(leaf, what)
            _array_types.add(kind)
        aval = leaf.aval
        # Arrays of random keys have no weak types.
        return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
    if isinstance(leaf, (np.ndarray, np.generic)):
        if leaf.dtype.kind in "OUSV" and not _is_extension(leaf.dtype):
            raise InvalidTypeError(
                f"{what}: an argument is a NumPy array of dtype {leaf.dtype}; arrays of strings or"
                " objects cannot go to a device. Map them to numbers first."
            )
        return leaf.shape, leaf.dtype
    if kind in (int, float, complex):
        return kind
    if isinstance(leaf, Variable):
        return leaf._handle
    if kind in (bool, str, bytes) or leaf is None:
        return kind, leaf
    if kind is DatasetIterator:  # every call looks at the elements that it gives
        return kind
    try:
        hash(leaf)
    except TypeError:
        hashable = False
    else:
        hashable = True
    try:
        return weakref.ref(leaf) if hashable else WeakIdentity(leaf)
    except TypeError:
        pass
    if not hashable:
        raise InvalidTypeError(
            f"{what}: an argument is {described(leaf)}, which is neither an array"
            " nor hashable. Pass arrays, numbers, nests of them, or objects to which a compiled"
            " step can be keyed."
        )
    return kind, leaf


def own_arrays(leaves: Sequence[Any], what: str) -> list[Any]:
    """Returns arguments that stay as they are: NumPy arrays are copies, in dtypes of JAX.

    A program may read the memory of a NumPy array after the call, when its owner writes to it.
    """
    return [narrowed(leaf, what) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]


def check_static(value: object, step: str, argument: str) -> None:
    """Raises if an argument that is not data gives data: of another library, or of an iterator.

    Such a value would become a constant of the program, the same for all batches and replicas.

    Args:
        value: The argument.
        step: Name of the function, for messages.
        argument: Name of the argument, for messages.
    """
    kind = type(value)
    roots = {parent.__module__.partition(".")[0] for parent in kind.__mro__}
    library = next((root for root in ("torch", "tensorflow") if root in roots), None)
    has_array = hasattr(kind, "__array__")
    if library is not None:
        if has_array or hasattr(value, "numpy") or "Tensor" in kind.__name__:
            name = {"torch": "torch.Tensor", "tensorflow": "tf.Tensor"}[library]
            before = ".detach().cpu()" if library == "torch" else ""
            raise InvalidTypeError(
                f"{step}: {argument} is a {name}, but steps compute with arrays of JAX or NumPy."
                f" Pass tensor{before}.numpy(), or give the dataset to"
                " strategy.experimental_distribute_dataset, which converts its batches."
            )
        raise InvalidTypeError(
            f"{step}: {argument} is {kind.__name__}, a {library} model or object, but steps compute"
            " with JAX. Write the model with Keras (KERAS_BACKEND=jax), Flax or functions of JAX."
        )
    if isinstance(value, Iterator) and kind.__module__ in ("builtins", "itertools", "_csv"):
        raise InvalidTypeError(
            f"{step}: {argument} is a Python iterator ({kind.__name__}). The function is"
            " compiled, so every call would compute with what the first one takes from it. Pass"
            " next(iterator), or iter(dataset) of a distributary.data.Dataset."
        )
    if hasattr(kind, "toarray"):
        raise InvalidTypeError(
            f"{step}: {argument} is a sparse {kind.__name__}, but arguments are dense arrays. Pass"
            f" matrix.toarray(), for large data one batch at a time."
        )
    if has_array and roots.isdisjoint(("keras", "distributary", "jax", "jaxlib", "flax")):
        raise InvalidTypeError(
            f"{step}: {argument} is a {kind.__name__} of {kind.__module__.partition('.')[0]}, not"
            " an array of JAX or NumPy. Pass np.asarray(value)."
        )


@contextmanager
def changes_refused(arguments: Nest, step: str) -> Iterator[None]:
    """Runs the block, the code of a step, and raises if it changes objects of Flax NNX.

    A step gets objects of its own with the arrays of the ones that it was given, so changes would
    be lost.
    """
    objects = [x for x in jax.tree.leaves(arguments, is_leaf=_is_nnx) if _is_nnx(x)]
    before = jax.tree.leaves(objects)
    yield
    after = jax.tree.leaves(objects)
    if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
        raise ContextError(
            f"{step}: the step changes the {type(objects[0]).__name__} of Flax NNX in its"
            " arguments, and the new values would be lost. Write state = dist.nnx.State(model)"
            " before, in the scope of the strategy, and in the step `with state.merged() as"
            " model:`, as in examples/digits_flax.py."
        )


def _where_in(result: object, leaf: object) -> str:
    """Returns the place of a part of a result, as a part of a sentence."""
    for path, value in jax.tree.leaves_with_path(result):
        if path and value is leaf:
            return f" in result{jax.tree_util.keystr(path)}"
    return ""


def _is_nnx(value: object) -> bool:
    kinds = type(value).__mro__
    return any(k.__name__ == "Pytree" and k.__module__.startswith("flax.nnx") for k in kinds)


def argument_error(error: InvalidTypeError, leaves: list[Any], subject: Subject) -> Exception:
    """Returns the error of `signature_of` with the name of the step and of its argument."""
    names = subject.arguments(len(leaves))
    for leaf, name in zip(leaves, names, strict=True):
        try:
            signature_of(leaf, str(subject))
        except InvalidTypeError as again:
            return InvalidTypeError(str(again).replace("an argument", name, 1))
    return error


def _is_extension(dtype: Any) -> bool:
    """Returns whether a dtype that NumPy shows as void is one of JAX's, such as bfloat16."""
    return dtype.kind == "V" and dtype.names is None and jnp.issubdtype(dtype, jnp.number)


def is_dynamic(leaf: object) -> bool:
    """Returns whether an argument is data, rather than part of the program."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)) and (
        not isinstance(leaf, bool)
    )


def split_result(result: object, what: str) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the arrays of a function's result, and a function that rebuilds it from their values.

    Python numbers, strings and variables are part of the program and are returned unchanged, or
    replaced by the `constants` that the function is given for all numbers and strings.

    Raises:
        InvalidTypeError: for anything else that is not an array, and for dicts whose keys cannot
            be sorted.
    """
    if isinstance(result, (types.GeneratorType, types.CoroutineType)):
        word = "yield" if isinstance(result, types.GeneratorType) else "async"
        result.close()  # a coroutine would warn that nobody awaits it
        raise InvalidTypeError(
            f"{what}: the function is {a_kind(type(result))}, because of its `{word}`, so it has"
            " not run. Write it as a plain function that returns its result."
        )
    order = key_order(result)
    leaves, tree = jax.tree.flatten(
        result, is_leaf=lambda x: isinstance(x, (DistributedValues, IndexedSlices))
    )
    arrays: list[Any] = []
    slots: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, (Variable, bool, int, float, complex, str, bytes)):
            slots.append(("static", leaf))
        elif isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            slots.append(("array", None))
            arrays.append(leaf)
        elif isinstance(leaf, (DistributedValues, IndexedSlices)):
            inner, inner_tree = jax.tree.flatten(leaf)
            slots.append(("tree", inner_tree))
            arrays += inner
        else:
            raise InvalidTypeError(
                f"{what}: the function returned {described(leaf)}{_where_in(result, leaf)}."
                " It is compiled, so it can return arrays, numbers, strings, None, variables and"
                " nests of them."
            )

    if all(kind == "array" for kind, _ in slots):
        is_array = bool(arrays) and jax.tree_util.treedef_is_leaf(tree)

        def rebuild_arrays(values: Sequence[Any], wrap: Callable[[Any], Any] | None = None) -> Any:
            if is_array:
                return values[0] if wrap is None else wrap(values[0])
            return jax.tree.unflatten(tree, values if wrap is None else map(wrap, values))

        return arrays, _in_order_of(order, rebuild_arrays)

    def rebuild(
        values: Sequence[Any],
        wrap: Callable[[Any], Any] = lambda value: value,
        constants: Sequence[Any] = (),
    ) -> Any:
        remaining, known = iter(values), iter(constants)
        parts = []
        for kind, content in slots:
            if kind == "static":
                is_variable = isinstance(content, Variable)
                parts.append(content if is_variable else next(known, content))
            elif kind == "array":
                parts.append(wrap(next(remaining)))
            else:
                content_leaves = [next(remaining) for _ in range(content.num_leaves)]
                parts.append(wrap(jax.tree.unflatten(content, content_leaves)))
        return jax.tree.unflatten(tree, parts)

    return arrays, _in_order_of(order, rebuild)


def _in_order_of(order: Any, rebuild: Callable[..., Any]) -> Callable[..., Any]:
    if order is None:
        return rebuild
    return lambda *args, **kwargs: in_order(rebuild(*args, **kwargs), order)


def placed_struct_of(leaf: object) -> Any:
    """Returns shape, dtype and place of an array; a Python number is returned unchanged."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.aval.weak_type
        )
    return struct_of(leaf) if hasattr(leaf, "dtype") else leaf


def struct_of(leaf: Any) -> Any:
    """Returns shape and dtype of an array or number, without its place."""
    if hasattr(leaf, "dtype") and not isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def traced(value: object, what: str) -> ContextError:
    """Returns the error for a traced value that is passed to a program."""
    if not is_left_over(value):
        return inside_jax(what)
    return ContextError(
        f"{what} was given {shown(value)}, which an earlier step has left in a list, an attribute"
        f" or a global variable{leaked_at(value)}. Values of a step exist only while it is traced."
        " Return from it what you need later, or assign it to a distributary.Variable."
    )


def inside_jax(what: str) -> ContextError:
    """Returns the error for a program that is called while JAX traces something else."""
    return ContextError(
        f"{what} was called inside jax.jit, jax.grad or another JAX transformation. Compile the"
        " outer function with distributary.function instead, and differentiate inside the step."
    )


_TRACES_BEFORE_WARNING = 8


@final
class ProgramCache:
    """The programs of one strategy or of one `distributary.function`.

    An entry is removed when its function is collected. A bound method is identified by its function
    and its object. If a `distributary.function` defines a function anew in every call, all of these
    count as one, see `Inner`.

    Args:
        what: Name of the caller in warnings.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._functions: ByIdentity[dict[Any, Any]] = ByIdentity(dict)
        self._methods: ByIdentity[ByIdentity[dict[Any, Any]]] = ByIdentity(lambda: ByIdentity(dict))
        self._functions_per_code: dict[Any, int] = {}
        self._warned: set[Any] = set()

    def __len__(self) -> int:
        of_functions = [*self._functions.values()]
        of_methods = [programs for owners in self._methods.values() for programs in owners.values()]
        return sum(map(len, of_functions + of_methods))

    def programs_of(self, function: Callable[..., Any]) -> dict[Any, Any]:
        """Returns the programs of a function, by key; the caller adds new ones."""
        owner = getattr(function, "__self__", None)
        if owner is not None and hasattr(function, "__func__"):
            return self._methods[function.__func__][owner]
        inner = _inner.get()
        return self._functions[function if inner is None else inner.same(function)]

    def note_trace(
        self, function: Callable[..., Any], programs: dict[Any, Any], key: object
    ) -> None:
        """Warns once if a function is traced again and again, and names the cause."""
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code in self._warned:
            return
        if len(programs) >= _TRACES_BEFORE_WARNING:
            self._warn(code, function, _difference(next(reversed(programs)), key))
        elif not programs and code is not None:
            self._functions_per_code[code] = self._functions_per_code.get(code, 0) + 1
            if self._functions_per_code[code] > _TRACES_BEFORE_WARNING:
                self._warn(
                    code,
                    function,
                    "each call brings a new function object. Define it once, outside of the loop",
                )

    def _warn(self, code: object, function: object, cause: str) -> None:
        self._warned.add(code)
        warn(
            f"{self._what}: {getattr(function, '__qualname__', function)!r} has been traced and"
            f" compiled {_TRACES_BEFORE_WARNING} times, which is slow: {cause}."
        )


_inner: "contextvars.ContextVar[Inner | None]" = contextvars.ContextVar("_inner", default=None)


@final
class Inner:
    """The functions that are defined in a function whose Python code runs in every call.

    Two of them are the same if they have the same code and capture the same objects.
    """

    def __init__(self) -> None:
        self._stand_ins: dict[Any, object] = {}

    def active(self) -> AbstractContextManager[None]:
        """Makes this object known to every `ProgramCache` while the block runs."""
        return bound(_inner, self)

    def same(self, function: Callable[..., Any]) -> object:
        """Returns an object that stands for all functions that are the same as this one."""
        try:
            key = _captured(function, [])
        except (TypeError, ValueError):  # ValueError: a captured variable has no value yet
            return function
        stand_in = self._stand_ins.get(key)
        if stand_in is None:
            self._stand_ins = {k: v for k, v in self._stand_ins.items() if _is_alive(k)}
            stand_in = self._stand_ins[key] = _StandIn()
        return stand_in


class _StandIn:
    """An object that can be referenced weakly."""


def _captured(value: object, outer: list[Any]) -> Any:
    """Returns a key for a value that a function captures, without keeping the value alive.

    Raises:
        TypeError: for arrays, which differ in every call, and for objects without weak references.
    """
    if isinstance(value, types.FunctionType):
        if any(value is function for function in outer):  # it calls itself
            return "recursion"
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        inside = [_captured(part, [*outer, value]) for part in (*cells, *defaults)]
        return value.__code__, id(value.__globals__), tuple(inside)
    if isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (tuple, list)):
        return tuple(_captured(part, outer) for part in value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), repr(value)  # tells 0.0 from -0.0
    return WeakIdentity(value)


def _is_alive(key: object) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_alive, key))
    return not isinstance(key, WeakIdentity) or key() is not None


_V = TypeVar("_V")


@final
class ByIdentity(Generic[_V]):
    """A value for each object, made on first use and dropped when the object is collected.

    Objects that cannot be referenced weakly get a new value each time.

    Args:
        make: Makes a value.
    """

    def __init__(self, make: Callable[[], _V]) -> None:
        self._make = make
        self._entries: dict[int, tuple[weakref.ref[Any], _V]] = {}

    def __getitem__(self, owner: object) -> _V:
        entry = self._entries.get(id(owner))
        if entry is not None and entry[0]() is owner:
            return entry[1]
        return self._add(owner)

    def _add(self, owner: object) -> _V:
        entries, number, value = self._entries, id(owner), self._make()

        def forget(reference: object) -> None:
            if entries.get(number, (None,))[0] is reference:
                del entries[number]

        with contextlib.suppress(TypeError):
            entries[number] = weakref.ref(owner, forget), value
        return value

    def values(self) -> list[_V]:
        """Returns the values of the objects that are alive."""
        return [value for _, value in list(self._entries.values())]


@final
class WeakIdentity:
    """A key for an object by identity; the object need not be hashable and is not kept alive.

    Args:
        value: The object.

    Raises:
        TypeError: if the object cannot be referenced weakly.
    """

    __slots__ = ("_hash", "_reference")

    def __init__(self, value: object) -> None:
        self._hash = id(value)
        self._reference = weakref.ref(value)

    def __call__(self) -> Any:
        """Returns the object, or None if it was collected."""
        return self._reference()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, WeakIdentity):
            return False
        value = self()
        return value is not None and value is other()


def _difference(before: Any, after: Any) -> str:
    tree_before, signature_before = before[:2]
    tree_after, signature_after = after[:2]
    if tree_before != tree_after:
        return f"the structure of its arguments changes, from {tree_before} to {tree_after}"
    for i, (old, new) in enumerate(zip(signature_before, signature_after, strict=False)):
        if old != new:
            return (
                f"its argument number {i} (counting the leaves of all arguments) changes from"
                f" {_describe(old)} to {_describe(new)}. Keep shapes and dtypes the same, for"
                " example with drop_remainder, and pass changing numbers as arrays"
            )
    return "its arguments change"


def _describe(part: object) -> str:
    if isinstance(part, (weakref.ref, WeakIdentity)):
        return f"the object {part()!r}"
    if isinstance(part, tuple) and part and isinstance(part[0], tuple):
        return f"{part[1]}{list(part[0])}"
    return repr(part)
