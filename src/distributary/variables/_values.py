"""Arithmetic of what stands for an array; values of replicas, rows of a table, and their nests."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias, final

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike, DTypeLike

from distributary.context import in_cross_replica_context, in_default_context
from distributary.devices import REPLICA_AXIS, Nest, local_copy, num_logical_devices, uncommitted
from distributary.errors import (
    InvalidTypeError,
    InvalidValueError,
    ReplicaMismatchError,
    described,
    shown,
)

# Python's operators and the methods of arrays.


class ArrayOperators:
    """Python's operators and the methods of `jax.Array`, applied to the array of `__jax_array__`.

    Comparison with `==` is element-wise, as for arrays.
    """

    __slots__ = ()

    # Makes NumPy arrays on the left leave the operation to us instead of converting to NumPy.
    __array_priority__ = 100

    def value(self) -> Any:
        """Returns the array."""
        raise NotImplementedError

    def numpy(self) -> np.ndarray:
        """Returns the array as a NumPy array."""
        raise NotImplementedError

    def __jax_array__(self) -> Any:
        return self.value()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)  # `numpy` gives a number for a scalar

    if TYPE_CHECKING:
        __hash__: ClassVar[None]  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            """Returns an attribute of the array. For type checkers only.

            At run time, the attributes of `jax.Array` are properties. With this function, Python
            could not cache where it finds attributes, and each would take twice as long to read,
            including those that a cached program reads of its variables.
            """

        def _operator(self, other: object) -> Any: ...

        __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _operator
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _operator
        __rpow__ = __matmul__ = __rmatmul__ = __lshift__ = __rlshift__ = _operator
        __rshift__ = __rrshift__ = __and__ = __rand__ = __or__ = __ror__ = _operator
        __xor__ = __rxor__ = __lt__ = __le__ = __gt__ = __ge__ = _operator

        def _unary_operator(self) -> Any: ...

        __neg__ = __pos__ = __abs__ = __invert__ = __index__ = _unary_operator
        __bool__ = __int__ = __float__ = __complex__ = __len__ = __iter__ = _unary_operator

    def __getitem__(self, index: object) -> Any:
        return self.value()[index]

    def __round__(self, ndigits: int | None = None) -> Any:
        return jnp.round(self.value(), ndigits or 0)


def _unary(function: Callable[[Any], Any]) -> Any:
    return lambda self: function(self.value())


def _binary(function: Callable[[Any, Any], Any]) -> Any:
    def method(self: ArrayOperators, other: object) -> Any:
        if isinstance(other, (list, tuple)):  # which operators of JAX's arrays do not take
            dtype = self.value().dtype if jnp.issubdtype(self.value().dtype, jnp.inexact) else None
            other = jnp.asarray(other, dtype)
        plain = other.value() if isinstance(other, ArrayOperators) else other
        return function(self.value(), plain)

    return method


def _reflected(function: Callable[[Any, Any], Any]) -> Any:
    return _binary(lambda value, other: function(other, value))


def _attribute(name: str) -> property:
    return property(lambda self: getattr(self.value(), name))


_ARITHMETIC = (
    "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()  # noqa: SIM905
)
_COMPARISON = ("eq", "ne", "lt", "le", "gt", "ge")
for _name in ("neg", "pos", "abs", "invert", "index"):
    setattr(ArrayOperators, f"__{_name}__", _unary(getattr(operator, _name)))
for _function in (bool, int, float, complex, len, iter):
    setattr(ArrayOperators, f"__{_function.__name__}__", _unary(_function))
for _name in (*_ARITHMETIC, *_COMPARISON):
    setattr(ArrayOperators, f"__{_name}__", _binary(getattr(operator, f"__{_name}__")))
for _name in _ARITHMETIC:
    setattr(ArrayOperators, f"__r{_name}__", _reflected(getattr(operator, f"__{_name}__")))
for _name in dir(jax.Array):
    if not _name.startswith("_"):
        setattr(ArrayOperators, _name, _attribute(_name))
ArrayOperators.__hash__ = None


# Values of replicas.

Array: TypeAlias = jax.Array | np.ndarray


class DistributedValues:
    """The base of everything that has a component per replica.

    `PerReplica`, `Mirrored` and the variables of a strategy are `DistributedValues`.

    Source: `tf.distribute.DistributedValues`.
    """

    __slots__ = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, in replica order."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self._text(repr)

    def __str__(self) -> str:
        return self._text(str)

    def _text(self, component: Callable[[Any], str]) -> str:
        lines = ",\n".join(f"  {i}: {component(v)}" for i, v in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"


#: A value that becomes one array: an array, a number, nested lists of numbers, or a variable.
ArrayInput: TypeAlias = ArrayLike | ArrayOperators | DistributedValues | Sequence[Any]


@final
@jax.tree_util.register_pytree_node_class
class PerReplica(DistributedValues):
    """A value with one component per replica.

    In a cross-replica context, you cannot compute with it: look at `values`, or combine the
    components with `Strategy.reduce` or `Strategy.gather`. `Strategy.run` passes each replica its
    component.

    Args:
        values: One component per replica, in replica order: arrays, or nests of arrays with the
            same structure. Shapes may differ.

    Source: `tf.types.experimental.distributed.PerReplica`.
    """

    __slots__ = ("_traced_values", "_values", "form", "num_replicas", "payload")

    #: Form in which the components are stored. "components": a tuple of trees; "stacked": a tree of
    #: arrays `[replica, *shape]`, one row per device; "local": in a replica program, its own tree.
    form: str
    #: The stored tree, or tuple of trees.
    payload: Any
    #: Number of components.
    num_replicas: int

    def __init__(self, values: Sequence[Nest]) -> None:
        if not isinstance(values, (list, tuple)) or not values:
            raise InvalidTypeError(
                f"PerReplica: got {shown(values)}, expected a non-empty list or tuple with one"
                " component per replica."
            )
        self.form = "components"
        self.payload = tuple(values)
        self.num_replicas = len(values)
        self._values: tuple[Any, ...] | None = self.payload
        self._traced_values: tuple[Any, tuple[Any, ...]] | None = None

    @classmethod
    def from_stacked(cls, tree: Nest, num_replicas: int) -> "PerReplica":
        """Returns a value whose components are the rows of a tree of arrays `[replica, *shape]`."""
        return cls.tree_unflatten(("stacked", num_replicas), (tree,))

    @classmethod
    def from_local(cls, tree: Nest, num_replicas: int) -> "PerReplica":
        """Returns a value given by the component of the traced replica, which stands for all."""
        return cls.tree_unflatten(("local", num_replicas), (tree,))

    @property
    def values(self) -> tuple[Any, ...]:
        if self._values is not None:
            return self._values
        leaves = jax.tree.leaves(self.payload)
        if self.form != "local" and not any(isinstance(x, jax.core.Tracer) for x in leaves):
            # Concrete arrays even while a step is traced, so that they can be cached.
            with jax.ensure_compile_time_eval():
                self._values = self._make_values()
            return self._values
        # Cached per trace, as tracers are valid only in their own trace.
        state = jex_core.get_opaque_trace_state()
        if self._traced_values is None or self._traced_values[0] != state:
            self._traced_values = state, self._make_values()
        return self._traced_values[1]

    def _make_values(self) -> tuple[Any, ...]:
        def rows(leaf: Array) -> list[Any]:
            stacked = lax.all_gather(leaf, REPLICA_AXIS) if self.form == "local" else leaf
            return _rows(stacked, self.num_replicas)

        return _components(self.payload, rows, self.num_replicas)

    def tree_flatten(self) -> tuple[Any, tuple[str, int]]:
        if self.form != "local" and not (in_default_context() or in_cross_replica_context()):
            # As a nest of its components, a replica would compute with those of all replicas.
            self.refuse()
        return (self.payload,), (self.form, self.num_replicas)

    @classmethod
    def tree_unflatten(cls, aux: tuple[str, int], children: tuple[Nest]) -> "PerReplica":
        new = object.__new__(cls)
        new.form, new.num_replicas = aux
        (new.payload,) = children
        new._values = new.payload if new.form == "components" else None
        new._traced_values = None
        return new

    def refuse(self) -> NoReturn:
        """Raises the error for a value that a step uses and was not given."""
        raise InvalidTypeError(f"A replica cannot use this PerReplica: {self._advice()}")

    def _refuse_number(self, *_: object) -> NoReturn:
        raise InvalidTypeError(f"A PerReplica is not a number: {self._advice()}")

    __float__ = __int__ = __add__ = __radd__ = __sub__ = __rsub__ = _refuse_number
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = _refuse_number

    def _refuse_array(self, *_: object, **__: object) -> NoReturn:
        raise InvalidValueError(f"A PerReplica cannot be converted to one array: {self._advice()}")

    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __iter__ = __getitem__ = _refuse_number
    __len__ = __round__ = __neg__ = __abs__ = __pow__ = __floordiv__ = __mod__ = _refuse_number
    __array__ = __jax_array__ = _refuse_array

    if not TYPE_CHECKING:  # or type checkers accept any name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"PerReplica has no attribute {name!r}")
            raise AttributeError(f"A PerReplica has no attribute {name!r}: {self._advice()}")

    def _advice(self) -> str:
        return (
            f"it holds the values of {self.num_replicas} replicas. Combine them with"
            ' strategy.reduce("SUM", value, axis=None) or strategy.gather(value, axis=0), look at'
            " strategy.experimental_local_results(value), or pass it to strategy.run through args,"
            " not through a closure."
        )

    def __format__(self, spec: str) -> str:
        return self._refuse_number() if spec else str(self)

    def _text(self, component: Callable[[Any], str]) -> str:
        if self.form == "local":
            return f"PerReplica:{{this replica: {self.payload!r}}}"
        return super()._text(component)


def _components(
    tree: Nest, parts_of: Callable[[Array], list[Any]], num_replicas: int
) -> tuple[Nest, ...]:
    """Returns a tree for every replica of this process, given the parts of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [parts_of(leaf) for leaf in leaves]
    return tuple(
        jax.tree.unflatten(structure, [of_leaf[i] for of_leaf in parts])
        for i in range(len(parts[0]) if parts else num_replicas)
    )


def _rows(stacked: Array, num_replicas: int) -> list[Any]:
    """Returns this process's rows of `[replica, *shape]`, each on its replica's device.

    If a replica has several logical devices, its row is on the first. The rows are not committed to
    their devices: JAX moves them to where it computes with other arrays.
    """
    if isinstance(stacked, (jax.core.Tracer, np.ndarray)):
        return [stacked[i] for i in range(num_replicas)]
    if stacked.is_fully_replicated and num_replicas > 1:
        copy = local_copy(stacked)
        return [copy[i] for i in range(num_replicas)]
    first_copies = [shard for shard in stacked.addressable_shards if shard.replica_id == 0]
    shards = {shard.index[0].start or 0: shard.data for shard in first_copies}
    return [uncommitted(shards[start].reshape(stacked.shape[1:])) for start in sorted(shards)]


@final
@jax.tree_util.register_pytree_node_class
class Mirrored(DistributedValues, ArrayOperators):
    """A value with a copy on every replica. It behaves like the array it holds.

    Args:
        value: The array or nest of arrays that all replicas hold.
        num_replicas: Number of copies.

    Source: `tf.types.experimental.distributed.Mirrored`.
    """

    __slots__ = ("_num_replicas", "_value")

    def __init__(self, value: Nest, num_replicas: int = 1) -> None:
        self._value = value
        self._num_replicas = num_replicas

    @property
    def values(self) -> tuple[Any, ...]:
        count = self._num_replicas
        return _components(self._value, lambda leaf: _copies(leaf, count), count)

    def value(self) -> Any:
        """Returns the array or nest that all replicas hold."""
        return jax.tree.map(local_copy, self._value)

    def numpy(self) -> np.ndarray:
        """Returns the value as a NumPy array."""
        return np.array(self.value())

    def tree_flatten(self) -> tuple[Any, int]:
        return (self._value,), self._num_replicas

    @classmethod
    def tree_unflatten(cls, num_replicas: int, children: tuple[Nest]) -> "Mirrored":
        return cls(children[0], num_replicas)


def _copies(value: Array, num_replicas: int) -> list[Any]:
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        shards = [shard.data for shard in value.addressable_shards]
        if isinstance(value.sharding, NamedSharding) and REPLICA_AXIS in value.sharding.mesh.shape:
            shards = shards[:: num_logical_devices(value.sharding.mesh)]
        if len(shards) == num_replicas or not value.is_fully_addressable:
            return [uncommitted(shard) for shard in shards]
    return [value] * num_replicas


def stack_components(value: PerReplica) -> PerReplica | None:
    """Returns the value as rows of one array, or None if components differ in shape or dtype.

    Raises:
        ReplicaMismatchError: if the components differ in structure.
        InvalidTypeError: if a component is not made of arrays or numbers.
    """
    parts, tree = flat_parts("PerReplica", value.values)
    columns = []
    for column in zip(*parts, strict=True):
        arrays = [_component_array(leaf, i) for i, leaf in enumerate(column)]
        if len({(array.shape, array.dtype) for array in arrays}) > 1:
            return None
        arrays = _where_stacked(arrays)
        host = isinstance(arrays[0], np.ndarray)
        columns.append(np.stack(arrays) if host else jnp.stack(arrays))
    return PerReplica.from_stacked(jax.tree.unflatten(tree, columns), value.num_replicas)


def flat_parts(
    what: str, parts: Sequence[Nest], is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[list[Any]], jax.tree_util.PyTreeDef]:
    """Returns the leaves of each replica's part of a value, and their common structure.

    Raises:
        ReplicaMismatchError: if the parts differ in structure.
    """
    flat = [jax.tree.flatten(part, is_leaf=is_leaf) for part in parts]
    first: Any = flat[0][1]
    for i, (_, tree) in enumerate(flat):
        if first != tree:
            raise ReplicaMismatchError(
                f"{what}: the value of replica {i} has structure {tree}, and that of replica 0"
                f" {first}; the structures must agree."
            )
    return [leaves for leaves, _ in flat], first


def _where_stacked(arrays: list[Array]) -> list[Array]:
    """Returns the arrays unchanged if all are on one accelerator, otherwise as NumPy arrays.

    On a CPU, NumPy can use the memory directly, and JAX would compile a program for each shape.
    Random keys are moved to one device instead.
    """
    jax_arrays = [array for array in arrays if isinstance(array, jax.Array)]
    if any(isinstance(array, jax.core.Tracer) for array in jax_arrays):
        return arrays
    devices = {device for array in jax_arrays for device in array.devices()}
    if any(jnp.issubdtype(array.dtype, jax.dtypes.extended) for array in jax_arrays):
        return jax.device_put(arrays, min(devices, key=lambda device: device.id))
    if len(devices) == 1 and devices.pop().platform != "cpu":
        return arrays
    return [np.asarray(array) for array in arrays]


def _component_array(leaf: object, replica: int) -> Array:
    if isinstance(leaf, (jax.Array, np.ndarray)):
        array = leaf
    elif isinstance(leaf, (bool, int, float, complex, np.generic)):
        with jax.ensure_compile_time_eval():  # also in a `dist.function`
            array = np.asarray(jnp.asarray(leaf))
    else:
        raise InvalidTypeError(
            f"PerReplica: the component of replica {replica} is"
            f" {described(leaf)}. The step is one compiled program for all replicas, so values"
            " that differ between replicas must be arrays or numbers."
        )
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.extended)
    if not is_key and (array.dtype == object or array.dtype.kind in "US"):
        raise InvalidTypeError(
            f"PerReplica: the component of replica {replica} has dtype {array.dtype}; arrays of"
            " strings or objects cannot go to a device. Map them to numbers first."
        )
    return array


def component_arrays(value: PerReplica) -> list[Nest]:
    """Returns the components as trees of arrays, with the same checks as `stack_components`."""
    return [
        jax.tree.map(lambda leaf, i=i: _component_array(leaf, i), component)
        for i, component in enumerate(value.values)
    ]


@final
@jax.tree_util.register_pytree_node_class
class IndexedSlices:
    """Rows of a larger array: row `values[i]` belongs at index `indices[i]` of dim 0.

    Rows with equal indices add up. Reductions over replicas concatenate the rows; they never create
    the dense array.

    Args:
        values: Rows `[num_rows, *row_shape]`.
        indices: Integer row numbers `[num_rows]`.
        dense_shape: Shape of the array that the rows belong to, a tuple of ints, or None.

    Raises:
        InvalidValueError: if `indices` is not one-dimensional, or not as long as `values`.

    Source: `tf.IndexedSlices`.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(
        self, values: ArrayLike, indices: ArrayLike, dense_shape: Iterable[int] | None = None
    ) -> None:
        shapes = [getattr(part, "shape", None) for part in (values, indices)]
        if None not in shapes and (len(shapes[1]) != 1 or shapes[0][:1] != shapes[1]):  # type: ignore[index,arg-type]
            raise InvalidValueError(
                f"IndexedSlices: values has shape {shapes[0]} and indices {shapes[1]}; expected"
                " values [num_rows, ...] and indices [num_rows]."
            )
        self.values: Any = values
        self.indices: Any = indices
        self.dense_shape = None if dense_shape is None else tuple(int(d) for d in dense_shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the rows."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The same as `dense_shape`."""
        return self.dense_shape

    def to_dense(self) -> jax.Array:
        """Returns the dense array of shape `dense_shape`, with rows of equal indices added up.

        Raises:
            InvalidValueError: if `dense_shape` is not known.
        """
        if self.dense_shape is None:
            raise InvalidValueError(
                "IndexedSlices.to_dense: dense_shape is None. Pass it to IndexedSlices(values,"
                " indices, dense_shape)."
            )
        return jnp.zeros(self.dense_shape, self.values.dtype).at[self.indices].add(self.values)

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, ...] | None]:
        return (self.values, self.indices), self.dense_shape

    @classmethod
    def tree_unflatten(
        cls, dense_shape: tuple[int, ...] | None, children: tuple[Any, Any]
    ) -> "IndexedSlices":
        new = object.__new__(cls)
        new.values, new.indices = children
        new.dense_shape = dense_shape
        return new

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r},"
            f" dense_shape={self.dense_shape})"
        )


# Nests: the order of the keys in dicts, which JAX sorts.


def key_order(nest: Nest) -> Any:
    """Returns the order of the keys in the dicts of a nest, for `in_order`.

    None means that JAX keeps it, because the keys are sorted.

    Raises:
        InvalidTypeError: for keys that cannot be compared.
    """
    if type(nest) is dict:
        orders = {key: key_order(part) for key, part in nest.items()}
        try:
            is_sorted = [*nest] == sorted(nest)
        except TypeError:
            raise InvalidTypeError(
                f"A step or its values have a dict with the keys {shown([*nest])}, which JAX"
                " cannot sort. Use keys of one type, such as strings."
            ) from None
        return orders if not is_sorted or any(o is not None for o in orders.values()) else None
    if isinstance(nest, (tuple, list)):
        parts = [key_order(part) for part in nest]
        return parts if any(part is not None for part in parts) else None
    return None


def in_order(nest: Nest, order: Any) -> Any:
    """Returns a nest of the same structure with its keys in an order that `key_order` returned."""
    if order is None:
        return nest
    if type(nest) is dict:
        return {key: in_order(nest[key], part) for key, part in order.items()}
    parts = [in_order(part, keys) for part, keys in zip(nest, order, strict=True)]
    return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)


# Nests: their components for each replica.


def _is_distributed(value: object) -> bool:
    """Returns whether `value` is a leaf with a component per replica, or rows of a table."""
    return isinstance(value, (DistributedValues, IndexedSlices))


def map_leaves(function: Callable[[Any], Nest], tree: Nest) -> Nest:
    """Applies a function to a nest's leaves, including distributed values and `IndexedSlices`."""
    return jax.tree.map(function, tree, is_leaf=_is_distributed)


def component_of_traced(leaf: Any) -> Any:
    """Returns the component of the replica that is traced, and anything else unchanged."""
    if isinstance(leaf, PerReplica) and leaf.form == "local":
        return leaf.payload
    return leaf.value() if isinstance(leaf, Mirrored) else leaf


def local_results(value: Nest) -> tuple[Any, ...]:
    """Returns the components of this process's replicas, in order; `(value,)` if it has none.

    A nest that holds distributed values becomes one nest per replica.

    Source: `tf.distribute.Strategy.experimental_local_results`.
    """
    if isinstance(value, DistributedValues):
        return value.values
    order = key_order(value)
    leaves, tree = jax.tree.flatten(value, is_leaf=_is_distributed)
    counts = {len(leaf.values) for leaf in leaves if isinstance(leaf, DistributedValues)}
    if not counts:
        return (value,)
    parts = [
        leaf.values if isinstance(leaf, DistributedValues) else (leaf,) * max(counts)
        for leaf in leaves
    ]
    return tuple(
        in_order(jax.tree.unflatten(tree, [part[i] for part in parts]), order)
        for i in range(max(counts))
    )
