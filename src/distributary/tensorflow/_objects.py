"""Objects of `tf`: nests, shapes, arrays of several arrays, variables and modules."""

import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from distributary._late import Library, register
from distributary.data import TensorSpec
from distributary.devices import Nest
from distributary.errors import InvalidValueError
from distributary.keras_bridge import import_keras
from distributary.options import VariableAggregation, VariableSynchronization
from distributary.tensorflow._functions import name_scope
from distributary.tensorflow._operations import (
    Element,
    TensorLike,
    array,
    canonical,
    converted,
    host_array,
    require_host,
    without_effect,
)
from distributary.tensorflow._random import Generator
from distributary.tensorflow.autograph import NOT_YET, is_traced
from distributary.tracing import leave_trace
from distributary.variables import (
    ArrayInput,
    DistributedValues,
    IndexedSlices,
    ShardedVariable,
    Variable as _Variable,
)


def map_structure(
    func: Callable[..., Any],
    *structure: Nest,
    check_types: bool = True,
    expand_composites: bool = False,
) -> Any:
    """`tf.nest.map_structure`."""
    return jax.tree.map(func, *structure, is_leaf=_ends(expand_composites))


def flatten(structure: Nest, expand_composites: bool = False) -> list[Any]:
    """`tf.nest.flatten`."""
    return jax.tree.leaves(structure, is_leaf=_ends(expand_composites))


def pack_sequence_as(
    structure: Nest, flat_sequence: Sequence[Any], expand_composites: bool = False
) -> Any:
    """`tf.nest.pack_sequence_as`."""
    tree = jax.tree.structure(structure, is_leaf=_ends(expand_composites))
    return jax.tree.unflatten(tree, flat_sequence)


def assert_same_structure(
    nest1: Nest, nest2: Nest, check_types: bool = True, expand_composites: bool = False
) -> None:
    """`tf.nest.assert_same_structure`."""
    is_leaf = _ends(expand_composites)
    first, second = (jax.tree.structure(nest, is_leaf=is_leaf) for nest in (nest1, nest2))
    if str(first) != str(second):
        raise InvalidValueError(f"tf.nest: the structures differ: {first} and {second}.")


def is_nested(seq: object) -> bool:
    """`tf.nest.is_nested`."""
    return isinstance(seq, (list, tuple, dict))


def _ends(expand_composites: bool) -> Callable[[object], bool]:
    """Returns a function that says what a nest ends with, besides arrays."""
    whole: tuple[type, ...] = (DistributedValues, TensorArray)
    if not expand_composites:
        whole += (IndexedSlices, SparseTensor)
    return lambda value: value is None or isinstance(value, whole)


@final
class TensorShape(tuple[int | None, ...]):
    """`tf.TensorShape`: a tuple of sizes, None for one that is not known."""

    def __new__(cls, dims: int | Iterable[int | None] | None) -> "TensorShape":
        return super().__new__(cls, dims if isinstance(dims, Iterable) else (dims,))

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self)

    ndims = rank
    dims = property(list)

    def as_list(self) -> list[int | None]:
        """Returns the sizes."""
        return list(self)

    def concatenate(self, other: Iterable[int | None]) -> "TensorShape":
        """Returns the sizes of both."""
        return TensorShape((*self, *other))

    def is_compatible_with(self, other: Iterable[int | None]) -> bool:
        """Returns whether some array has both shapes."""
        return TensorSpec(self).accepts(TensorSpec(other))

    def assert_is_compatible_with(self, other: Iterable[int | None]) -> None:
        """Raises an error if no array has both shapes."""
        if not self.is_compatible_with(other):
            raise InvalidValueError(f"TensorShape: {self} and {tuple(other)} do not fit.")

    def assert_has_rank(self, rank: int) -> None:
        """Raises an error for another number of dims."""
        self.with_rank(rank)

    def assert_is_fully_defined(self) -> None:
        """Raises an error if a size is unknown."""
        if not self.is_fully_defined():
            raise InvalidValueError(f"TensorShape: {self} has unknown sizes.")

    def merge_with(self, other: Iterable[int | None]) -> "TensorShape":
        """Returns the sizes that one of both knows.

        Raises:
            InvalidValueError: if no array has both shapes.
        """
        sizes = tuple(other)
        self.assert_is_compatible_with(sizes)
        return TensorShape(b if a is None else a for a, b in zip(self, sizes, strict=True))

    def most_specific_compatible_shape(self, other: Iterable[int | None]) -> "TensorShape":
        """Returns the sizes that both have, and None for the others."""
        return TensorShape(a if a == b else None for a, b in zip(self, other, strict=True))

    def with_rank(self, rank: int) -> "TensorShape":
        """Returns this shape; an error if it has another number of dims."""
        return self._with_dims(len(self) == rank, f"{rank}")

    def with_rank_at_least(self, rank: int) -> "TensorShape":
        """Returns this shape; an error if it has fewer dims."""
        return self._with_dims(len(self) >= rank, f"{rank} or more")

    def with_rank_at_most(self, rank: int) -> "TensorShape":
        """Returns this shape; an error if it has more dims."""
        return self._with_dims(len(self) <= rank, f"at most {rank}")

    def _with_dims(self, holds: bool, wanted: str) -> "TensorShape":
        if not holds:
            raise InvalidValueError(f"TensorShape: {self} has {len(self)} dims, expected {wanted}.")
        return self

    def is_fully_defined(self) -> bool:
        """Returns whether all sizes are known."""
        return None not in self

    def num_elements(self) -> int | None:
        """Returns the number of elements; None if it is not known."""
        return math.prod(size for size in self if size is not None) if None not in self else None


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseTensor:
    """The elements of an array that are there, by their indices.

    Args:
        indices: Indices `[n, ndim]`.
        values: The elements `[n]`.
        dense_shape: Shape of the array.

    Source: `tf.SparseTensor`.
    """

    indices: Any
    values: Any
    dense_shape: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(int(size) for size in self.dense_shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the elements."""
        return self.values.dtype


def sparse_rows(rows: list[np.ndarray]) -> SparseTensor:
    """Returns rows of different lengths as one array `[row, longest]`."""
    indices = [(number, place) for number, row in enumerate(rows) for place in range(len(row))]
    return SparseTensor(
        np.array(indices, np.int64).reshape(-1, 2),
        np.concatenate(rows),
        np.array([len(rows), max(map(len, rows))], np.int64),
    )


@without_effect("validate_indices name")
def to_dense(sp_input: SparseTensor, default_value: object = None) -> np.ndarray:
    """`tf.sparse.to_dense`: on the host, in `Dataset.map` or outside of steps.

    Args:
        sp_input: The `SparseTensor`.
        default_value: What the other elements are; None means 0 or empty bytes.
    """
    require_host("tf.sparse.to_dense", sp_input)
    indices, values = np.asarray(sp_input.indices), np.asarray(sp_input.values)
    shape = sp_input.shape if np.ndim(sp_input.dense_shape) == 1 else ()
    fits = indices.shape == (len(values), len(shape)) and values.ndim == 1
    if not fits or (indices < 0).any() or (indices >= shape).any():
        raise InvalidValueError(
            f"tf.sparse.to_dense: indices of shape {indices.shape} and values of shape"
            f" {values.shape} do not fit dense_shape {np.asarray(sp_input.dense_shape).tolist()}."
            " Batch records before you parse them with tf.io.parse_example."
        )
    if default_value is None:
        default_value = b"" if values.dtype.kind == "O" else 0
    dense = np.full(shape, default_value, values.dtype)
    dense[tuple(indices.T)] = values
    return host_array(dense)


@final
@jax.tree_util.register_pytree_node_class
class TensorArray:
    """Rows of one shape, which are written one by one and read together.

    It grows if `dynamic_size` is True. A compiled loop has a `size` that stays: a `tf.function` in
    which one could grow is not compiled, and runs its Python code in every call; in a step, `size`
    must be the final one, and a write beyond it makes the last row NaN, if rows are not integers.
    Rows that are not written are zeros.

    Args:
        dtype: Dtype of the rows.
        size: Number of rows.
        dynamic_size: Whether `write` may add rows.
        clear_after_read: No effect: rows stay readable.
        tensor_array_name: No effect.
        handle: No effect.
        flow: No effect.
        infer_shape: No effect: all rows have one shape.
        element_shape: Shape of a row, checked by `write`; None for any size.
        colocate_with_first_write_call: No effect.
        name: No effect.

    Source: `tf.TensorArray`.
    """

    @without_effect(
        "clear_after_read tensor_array_name handle flow infer_shape", before="element_shape"
    )
    def __init__(
        self,
        dtype: DTypeLike,
        size: int | None = None,
        dynamic_size: bool | None = None,
        element_shape: Sequence[int | None] | None = None,
        colocate_with_first_write_call: bool = True,
        name: str | None = None,
    ) -> None:
        if is_traced(size):
            raise InvalidValueError(
                "tf.TensorArray: size is known only when the step runs. Pass the largest number of"
                " rows, and slice what stack() returns outside of the step."
            )
        #: Dtype of the rows.
        self.dtype = canonical(dtype)
        self._size = 0 if size is None else int(size)
        #: Whether `write` may add rows.
        self.dynamic_size = bool(dynamic_size)
        self._shape = None if element_shape is None else tuple(element_shape)
        self._rows: Any = NOT_YET

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        return (self._rows,), (self.dtype, self._size, self.dynamic_size, self._shape)

    @classmethod
    def tree_unflatten(cls, fixed: tuple[Any, ...], rows: Sequence[Any]) -> "TensorArray":
        result = cls.__new__(cls)
        result.dtype, result._size, result.dynamic_size, result._shape = fixed
        (result._rows,) = rows
        return result

    def _with(self, rows: jax.Array, size: int | None = None) -> "TensorArray":
        fixed = self.dtype, len(rows) if size is None else size, self.dynamic_size, self._shape
        return TensorArray.tree_unflatten(fixed, (rows,))

    @property
    def element_shape(self) -> tuple[int | None, ...] | None:
        """Shape of a row; None if nothing is known about it."""
        return self._shape if self._rows is NOT_YET else tuple(self._rows.shape[1:])

    def write(self, index: TensorLike, value: TensorLike, name: str | None = None) -> "TensorArray":
        """Returns the rows with one of them set."""
        row, place = converted("tf.TensorArray", value, self.dtype), array(index)
        if not TensorSpec(self._shape).accepts(row):
            raise InvalidValueError(
                f"tf.TensorArray: a row has shape {row.shape}, expected {self._shape}."
            )
        rows = self._rows
        if rows is NOT_YET:
            rows = jnp.zeros((self._size, *row.shape), self.dtype)
        if rows.shape[1:] != row.shape:
            raise InvalidValueError(
                f"tf.TensorArray: a row has shape {row.shape}, but others have {rows.shape[1:]}."
                " All rows have one shape; pad them."
            )
        if is_traced(place) and self.dynamic_size:
            leave_trace()
        if is_traced(place) and not self._size:
            raise InvalidValueError(
                "tf.TensorArray: a compiled loop writes to an array of size 0. Pass the number of"
                " rows, tf.TensorArray(dtype, size=n)."
            )
        size = self._size
        if not is_traced(place):
            size = max(size, int(place) + 1)
            if int(place) < 0 or (size > self._size and not self.dynamic_size):
                raise InvalidValueError(
                    f"tf.TensorArray: write to row {int(place)} of {self._size}. Pass a larger"
                    " size, or dynamic_size=True."
                )
            if size > len(rows):  # room for more, because JAX compiles for every length
                rows = jnp.pad(rows, [(0, size)] + [(0, 0)] * row.ndim)
        elif jnp.issubdtype(self.dtype, jnp.inexact):
            # JAX drops a write beyond the end, for which TensorFlow raises or grows.
            row = jnp.where((place >= 0) & (place < size), row, jnp.nan)
            place = jnp.clip(place, 0, size - 1)
        return self._with(rows.at[place].set(row), size)

    def read(self, index: TensorLike, name: str | None = None) -> jax.Array:
        """Returns a row."""
        return self.stack()[array(index)]

    def stack(self, name: str | None = None) -> jax.Array:
        """Returns all rows, `[size, ...]`."""
        if self._rows is not NOT_YET:
            return self._rows[: self._size]
        if self._shape is None or None in self._shape:
            raise InvalidValueError(
                "tf.TensorArray: nothing has been written, so there is no shape. Write a row, or"
                " pass element_shape."
            )
        return jnp.zeros((self._size, *self._shape), self.dtype)

    def gather(self, indices: TensorLike, name: str | None = None) -> jax.Array:
        """Returns some rows, `[n, ...]`."""
        return self.stack()[array(indices)]

    def concat(self, name: str | None = None) -> jax.Array:
        """Returns the rows one after the other along their dim 0."""
        rows = self.stack()
        return rows.reshape(-1, *rows.shape[2:])

    def unstack(self, value: TensorLike, name: str | None = None) -> "TensorArray":
        """Returns these rows: all of `value` along dim 0."""
        return self._with(converted("tf.TensorArray", value, self.dtype))

    def scatter(
        self, indices: TensorLike, value: TensorLike, name: str | None = None
    ) -> "TensorArray":
        """Returns the rows with several of them set."""
        written, rows = self, converted("tf.TensorArray", value, self.dtype)
        for index, row in zip(np.asarray(indices), rows, strict=True):
            written = written.write(index, row)
        return written

    def split(
        self, value: TensorLike, lengths: ArrayLike, name: str | None = None
    ) -> "TensorArray":
        """Returns these rows: parts of `value` of one length."""
        sizes = set(np.asarray(lengths).tolist())
        if len(sizes) != 1:
            raise InvalidValueError(
                f"tf.TensorArray.split: lengths are {sorted(sizes)}, expected one. Pad the parts."
            )
        values = converted("tf.TensorArray", value, self.dtype)
        return self._with(values.reshape(-1, *sizes, *values.shape[1:]))

    def identity(self) -> "TensorArray":
        """Returns the same rows."""
        return self

    def size(self, name: str | None = None) -> np.ndarray:
        """Returns the number of rows."""
        return host_array(self._size, np.int32)

    def close(self, name: str | None = None) -> None:
        """Has no effect."""


# Variables.


class _Arguments(type(_Variable)):  # type: ignore[misc]
    """Makes `Variable(...)` create a variable of distributary, which is an instance of it."""

    def __call__(
        cls,
        initial_value: ArrayInput | Callable[[], ArrayInput] | None = None,
        trainable: bool | None = None,
        validate_shape: bool = True,
        caching_device: object = None,
        name: str | None = None,
        variable_def: object = None,
        dtype: DTypeLike | None = None,
        import_scope: str | None = None,
        constraint: Callable[..., Any] | None = None,
        synchronization: VariableSynchronization | None = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | None = VariableAggregation.NONE,
        shape: Sequence[int | None] | None = None,
        experimental_enable_variable_lifting: bool = True,
    ) -> _Variable:
        if constraint is not None:
            raise InvalidValueError(
                f"tf.Variable: constraint is {getattr(constraint, '__name__', constraint)}, but"
                " optimizers of Keras apply only those of Keras variables. Call"
                " v.assign(constraint(v)) after the optimizer."
            )
        known: Any = None if shape is None or None in tuple(shape) else list(shape)
        if isinstance(initial_value, (int, float, complex, list, tuple)) and dtype is not None:
            initial_value = converted("tf.Variable", initial_value, dtype)
        return _Variable(initial_value, trainable, name, dtype, synchronization, aggregation, known)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Variable)


@final
class Variable(_Variable, metaclass=_Arguments):
    """Creates a `distributary.Variable` with the arguments of `tf.Variable`.

    `validate_shape`, `caching_device`, `variable_def`, `import_scope` and
    `experimental_enable_variable_lifting` have no effect. The dims of `shape` that are None have
    the sizes of the initial value, and keep them.

    Source: `tf.Variable`.
    """


# Of every slice of a variable, by its id and as long as it lives: the variable and the index.
_slices: dict[int, tuple[weakref.ref[Any], _Variable, Any]] = {}


@final
class ExponentialMovingAverage:
    """Averages of variables in which each step counts less the older it is.

    Args:
        decay: Weight of the average; 1 - decay is that of a new value.
        num_updates: Number of steps; the weight is then at most (1 + n) / (10 + n).
        zero_debias: Not supported; averages begin with the value of the variable.
        name: No effect.

    Source: `tf.train.ExponentialMovingAverage`.
    """

    def __init__(
        self,
        decay: float,
        num_updates: Any = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ) -> None:
        if zero_debias:
            raise InvalidValueError(
                "tf.train.ExponentialMovingAverage: zero_debias is True, but averages begin with"
                " the value of the variable and need no correction. Leave it out."
            )
        #: The name.
        self.name = name
        self._decay, self._num_updates = decay, num_updates
        self._averages: dict[int, tuple[Any, _Variable]] = {}

    def apply(self, var_list: Sequence[Any] | None = None) -> None:
        """Takes the values of variables into their averages, which the first call makes."""
        if var_list is None:
            var_list = [variable for variable, _ in self._averages.values()]
        decay = jnp.float32(self._decay)
        if self._num_updates is not None:
            updates = array(self._num_updates).astype(jnp.float32)
            decay = jnp.minimum(decay, (1 + updates) / (10 + updates))
        for variable in var_list:
            if id(variable) not in self._averages:
                average = _Variable(array(variable), False, f"{variable.name}/{self.name}")
                self._averages[id(variable)] = variable, average
            average = self._averages[id(variable)][1]
            average.assign_sub((1 - decay) * (average.value() - array(variable)))

    def average(self, var: Any) -> _Variable | None:
        """Returns the average of a variable, which is a variable; None if there is none."""
        return self._averages.get(id(var), (None, None))[1]

    def average_name(self, var: Any) -> str:
        """Returns the name of the average of a variable."""
        return f"{var.name}/{self.name}"

    def variables_to_restore(
        self, moving_avg_variables: Sequence[Any] | None = None
    ) -> dict[str, _Variable]:
        """Returns the averages by their names."""
        return {average.name: average for _, average in self._averages.values()}


def install() -> None:
    """Gives arrays and variables the methods."""
    kinds: tuple[Any, ...] = (jax.Array, jax.core.Tracer)
    jax.Array.numpy = _numpy  # type: ignore[attr-defined]
    for kind in (*kinds, Element, _Variable, ShardedVariable):
        kind.get_shape, kind.set_shape = _get_shape, _set_shape
    for kind in kinds:
        kind.assign = _assignment("set")
        kind.assign_add = _assignment("add")
        kind.assign_sub = _assignment("subtract")
    _Variable.__getitem__ = _slice  # type: ignore[method-assign, assignment]


def _numpy(array: jax.Array) -> np.ndarray:
    """Returns a copy as a NumPy array, or a number for a scalar, as TensorFlow does."""
    return np.array(array)[()]


def _get_shape(array: Any) -> TensorShape:
    return TensorShape(array.shape)


def _set_shape(array: Any, shape: Any) -> None:
    """Raises an error if an array has another shape; its own is always known."""
    if shape is not None:
        TensorShape(shape).assert_is_compatible_with(array.shape)


def _slice(variable: _Variable, index: Any) -> Any:
    part = variable.value()[index]
    key = id(part)
    _slices[key] = weakref.ref(part, lambda _: _slices.pop(key, None)), variable, index
    return part


def _assignment(method: str) -> property:
    """Returns a method of arrays that changes the variable of which they are a slice.

    Args:
        method: The method of `array.at[index]`, such as `"add"`.
    """

    def bound(part: jax.Array) -> Callable[..., Any]:
        if id(part) not in _slices:
            raise AttributeError(
                "An array that is no slice of a variable never changes: keep what changes in a"
                " tf.Variable."
            )
        _, variable, index = _slices[id(part)]

        def assign(
            value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
        ) -> Any:
            return variable.assign(getattr(variable.value().at[index], method)(array(value)))

        return assign

    return property(bound)


def is_tensor(x: object) -> bool:
    """`tf.is_tensor`: True for JAX arrays and variables."""
    return isinstance(x, jax.Array) or hasattr(x, "__jax_array__")


def get_logger() -> logging.Logger:
    """`tf.get_logger`: the logger of distributary."""
    return logging.getLogger("distributary")


def constant_initializer(value: Any = 0, support_partition: bool = False) -> Any:
    """`tf.constant_initializer`: a number everywhere, or as many numbers as there are places."""
    number = np.asarray(value).tolist()
    if not isinstance(number, list):
        return import_keras().initializers.Constant(number)
    from distributary.tensorflow._keras_parts import ConstantInitializer

    return ConstantInitializer(number)


def identity_n(input: Sequence[Any], name: str | None = None) -> list[jax.Array]:
    """`tf.identity_n`."""
    return [array(value) for value in input]


class Module:
    """`tf.Module`: an object that knows the variables and modules in its attributes."""

    def __init__(self, name: str | None = None) -> None:
        self.name = type(self).__name__.lower() if name is None else name

    @property
    def variables(self) -> tuple[Any, ...]:
        """The variables in attributes, and in lists, dicts and modules there."""
        parts = (part for part in _parts_of(self) if not isinstance(part, Module))
        return tuple({id(part): part for part in parts}.values())

    @property
    def trainable_variables(self) -> tuple[Any, ...]:
        """The variables that are trainable."""
        return tuple([variable for variable in self.variables if variable.trainable])

    @property
    def non_trainable_variables(self) -> tuple[Any, ...]:
        """The variables that are not trainable."""
        return tuple([variable for variable in self.variables if not variable.trainable])

    @property
    def name_scope(self) -> name_scope:
        """A `tf.name_scope` with the name of the module."""
        return name_scope(self.name)

    @classmethod
    def with_name_scope(cls, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method that runs in the name scope of its module."""

        @functools.wraps(method)
        def named(self: Module, *args: Any, **kwargs: Any) -> Any:
            with self.name_scope:
                return method(self, *args, **kwargs)

        return named

    @property
    def submodules(self) -> tuple["Module", ...]:
        """The modules below this one."""
        return tuple([part for part in _parts_of(self) if isinstance(part, Module)])


def _parts_of(module: object) -> Iterator[Any]:
    """Yields the modules and variables below a module, those of its own before those below them.

    They come in the order of the names of attributes.
    """
    below: list[Any] = []
    for leaf in jax.tree.leaves(dict(vars(module)), is_leaf=lambda x: isinstance(x, Module)):
        if isinstance(leaf, Module):
            yield leaf
            below.append(leaf)
        elif hasattr(leaf, "trainable_variables"):  # a layer or model of Keras
            below.append(leaf)
        elif hasattr(leaf, "trainable"):  # a variable; optimizers of Keras have `assign`, too
            yield leaf
    for part in below:
        yield from _parts_of(part) if isinstance(part, Module) else part.variables


@final
class _Modules(Library):
    def parts(self, value: object) -> dict[str, Any] | None:
        if isinstance(value, Generator):
            return {"state": value.state}
        if not isinstance(value, Module):
            return None
        return {name: part for name, part in vars(value).items() if _has_state(part)}


def _has_state(value: object) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, Module))
    names = ("assign", "variables", "get_state")
    return any(
        isinstance(leaf, Generator) or any(hasattr(leaf, name) for name in names) for leaf in leaves
    )


register(_Modules())
