"""Arguments and results of functions: which of them are data, and what identifies a program."""

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distributary.data import DatasetIterator
from distributary.devices import Nest, is_left_over
from distributary.engine._cache import WeakIdentity
from distributary.errors import ContextError, InvalidTypeError, a_kind, described, shown
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
