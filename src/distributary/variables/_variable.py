"""Variables, the state that a strategy keeps for its replicas."""

import inspect
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from distributary.context import (
    another_thread_in_scope,
    current_mode,
    get_strategy,
    in_default_context,
)
from distributary.devices import (
    fetch_whole,
    in_device_memory,
    in_host_memory,
    latest_program,
    local_copy,
    own_copies,
)
from distributary.errors import (
    ContextError,
    InvalidTypeError,
    InvalidValueError,
    ReplicaDivergenceError,
    ReplicaMismatchError,
    UnsupportedError,
    check_type,
    shown,
    warn,
)
from distributary.options import VariableAggregation, VariableSynchronization
from distributary.tracing import (
    Handle,
    TraceScope,
    advise,
    check_not_frozen,
    current_scope,
    drops_assignments,
    noted_read,
    noted_rows,
)
from distributary.variables._assignable import (
    SCATTER,
    Assignable,
    Change,
    GivenChange,
    check_member,
    checked_slices,
    combine,
    computed,
    initial_array,
    same_kind,
)
from distributary.variables._layout import StateList, VariableLayout, array_of, holding
from distributary.variables._values import (
    Array,
    ArrayInput,
    IndexedSlices,
    Mirrored,
    PerReplica,
    stack_components,
)


class Variable(Assignable):
    """A value that you can assign, kept by the strategy in whose scope you create it.

    Under a strategy with replicas, you get a `MirroredVariable`, whose value is the same on all
    replicas. With `synchronization=ON_READ`, you get a `SyncOnReadVariable`, with a value per
    replica. Both behave like an array in expressions and have the methods of one, and NumPy and
    `jnp.asarray` convert them. Most functions of `jax.numpy` and `jax.nn` are compiled by
    `jax.jit`, which accepts only arrays: pass them `v.value()`.

    Args:
        initial_value: Array, number, nest of lists, or a function without arguments that returns
            one. The value is copied.
        trainable: Whether `GradientTape` watches the variable automatically. By default True, but
            False for ON_READ.
        name: Name used in messages; "Variable" by default.
        dtype: Dtype; by default that of the initial value, or 32 bits for Python numbers.
        synchronization: A `VariableSynchronization`. None means AUTO.
        aggregation: A `VariableAggregation`, which says how to combine values that several replicas
            assign. None means NONE.
        shape: Accepted for compatibility; must be the shape of the initial value.

    Raises:
        InvalidValueError: for a missing initial value, an unknown synchronization or aggregation,
            synchronization NONE under a strategy with replicas, or aggregation MEAN with a dtype
            that cannot hold a mean.
        InvalidTypeError: if the initial value is not an array of numbers.

    Source: `tf.Variable` under `tf.distribute`.
    """

    # False if `_value` is read from somewhere else and not stored here.
    _stores_array: ClassVar[bool] = True
    # The classes of variables with a copy per replica, not and with ON_READ; both derive from this.
    _of_replicas: "ClassVar[tuple[type[Variable], type[Variable]]]"

    _dtype: np.dtype[Any]
    _layout: VariableLayout
    _slot: tuple[StateList, int]
    _handle: Handle

    def __new__(cls, *args: Any, **kwargs: Any) -> "Variable":
        if cls is not Variable:
            raise InvalidTypeError(
                f"{cls.__name__} is not constructed directly: create distributary.Variable(...)"
                " inside `with strategy.scope():`."
            )
        synchronization = kwargs.get("synchronization", args[4] if len(args) > 4 else None)
        layout = get_strategy().extended.variable_layout()
        if layout.kind is not None:
            new: Variable = layout.kind._new(*args, **kwargs)
            return new
        if not layout.mirrored:
            return super().__new__(cls)
        on_read = synchronization is VariableSynchronization.ON_READ
        return super().__new__(cls._of_replicas[on_read])

    def __init__(
        self,
        initial_value: ArrayInput | Callable[[], ArrayInput] | None = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        synchronization: VariableSynchronization | None = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | None = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
    ) -> None:
        self._name = "Variable" if name is None else str(name)
        what = f"Variable {self._name!r}"
        if synchronization in (None, VariableSynchronization.AUTO):
            synchronization = VariableSynchronization.ON_WRITE
        aggregation = aggregation or VariableAggregation.NONE
        check_member(what, "synchronization", synchronization, VariableSynchronization)
        check_member(what, "aggregation", aggregation, VariableAggregation)
        self._layout = get_strategy().extended.variable_layout()
        if self._layout.mirrored and synchronization is VariableSynchronization.NONE:
            raise InvalidValueError(
                f"{what}: synchronization is NONE, but {shown(self._layout.strategy)} keeps a copy"
                " per replica. Use AUTO or ON_WRITE for one value on all replicas, ON_READ for a"
                " value per replica."
            )
        on_read = synchronization is VariableSynchronization.ON_READ
        self._synchronization: VariableSynchronization = synchronization
        self._aggregation = aggregation
        kinds = bool | np.bool_ | int | None
        check_type(f"{what}: trainable", trainable, kinds, "True or False; write dtype=, name=")
        self._trainable = (not on_read) if trainable is None else bool(trainable)
        _warn_if_scope_is_in_another_thread(what)
        scope = current_scope()
        if scope is not None:
            _note_creation(scope, self._name)
        try:
            with jax.ensure_compile_time_eval():
                initial = initial_array(initial_value, what)
                # This changes only 64-bit NumPy dtypes: JAX holds 32 bits unless x64 is on.
                self._dtype = jnp.dtype(
                    jax.dtypes.canonicalize_dtype(initial.dtype if dtype is None else dtype)
                )
                self._shape = tuple(initial.shape)
                if shape is not None and tuple(shape) != self._shape:
                    raise InvalidValueError(
                        f"{what}: shape is {tuple(shape)}, but the initial value has shape"
                        f" {self._shape}. Leave shape out, it follows the initial value."
                    )
                self._check_aggregation(what)
                if not on_read:
                    self._layout = self._layout.of_variable(self._shape, self._dtype)
                self._slot = StateList([None]), 0
                initial = self._layout.initial(initial, self._description())
                self._value = self._initial_state(initial)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            error.add_note(f"In the creation of {what}.")
            advise(error)
            raise
        if self._layout.parts is None:
            get_strategy().extended.created(self._name)
        per_replica = self._layout.mirrored and on_read and self._layout.kind is None
        self._handle = Handle(
            weakref.ref(self),
            self._name,
            self._shape,
            self._dtype,
            self._layout.num_replicas if per_replica else None,
            parts=P() if self._layout.parts is None else self._layout.parts.spec,
        )

    def _description(self) -> str:
        """Describes the properties that must be the same on all workers."""
        return (
            f"variable {self._name!r} {self._dtype}{list(self._shape)} with"
            f" {self._synchronization.name}, {self._aggregation.name},"
            f" trainable={self._trainable}"
        )

    def _check_aggregation(self, what: str) -> None:
        if (
            self._layout.mirrored
            and self._aggregation is VariableAggregation.MEAN
            and not jnp.issubdtype(self._dtype, jnp.inexact)
        ):
            raise InvalidValueError(
                f"{what}: aggregation is MEAN, but dtype is {self._dtype}, which cannot hold a"
                " mean. Use dtype=jnp.float32, or aggregation SUM or ONLY_FIRST_REPLICA."
            )

    def _initial_state(self, initial: Array) -> jax.Array:
        return self._layout.place(initial, self._dtype)

    @property
    def _value(self) -> Any:
        """The stored array."""
        states, number = self._slot
        return states.arrays[number]

    @_value.setter
    def _value(self, value: jax.Array) -> None:
        states, number = self._slot
        states.arrays[number] = value

    @property
    def _shared(self) -> bool:
        """True if the buffer may be held elsewhere, so that it must not be donated."""
        states, number = self._slot
        return number in states.withheld

    @_shared.setter
    def _shared(self, shared: bool) -> None:
        states, number = self._slot
        (states.withheld.add if shared else states.withheld.discard)(number)

    # Attributes

    @property
    def name(self) -> str:
        """Name with TensorFlow's output number, such as `w:0`."""
        return f"{self._name}:0"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the value."""
        return self._dtype

    @property
    def trainable(self) -> bool:
        """True if `GradientTape` watches the variable automatically."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """Time at which copies are combined; AUTO shows as ON_WRITE."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """Way in which values of several replicas are combined."""
        return self._aggregation

    @property
    def constraint(self) -> None:
        """None: optimizers apply no function to a variable after an update."""
        return None

    def set_shape(self, shape: Sequence[int | None]) -> None:
        """Checks the shape, which never changes; None stands for any size.

        Raises:
            InvalidValueError: if the variable has another shape.
        """
        wanted = tuple(shape)
        fits = len(wanted) == len(self._shape) and all(
            size in (None, length) for size, length in zip(wanted, self._shape, strict=True)
        )
        if not fits:
            raise InvalidValueError(
                f"Variable {self._name!r}: set_shape got {wanted}, but its shape is {self._shape}."
            )

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that keeps the variable."""
        return self._layout.strategy

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The JAX sharding of the stored array."""
        sharding: jax.sharding.Sharding = self._value.sharding
        return sharding

    @property
    def device(self) -> str:
        """Canonical name of the device of the value; of replica 0's copy if there are several."""
        return self._layout.strategy.extended.variable_device()

    # Reading

    def value(self) -> jax.Array:
        """Returns the value as a JAX array.

        In `run`, it is the replica's own value. In a cross-replica context, it is the value that
        all replicas share, or the aggregated value for ON_READ. The array stays valid when the
        variable is assigned.

        Raises:
            ContextError: inside a raw `jax.jit`, which would keep the value forever.
            InvalidValueError: for ON_READ without an aggregation, outside of `run`.
        """
        scope = current_scope()
        if scope is not None:
            self._check_strategy("read")
            return self._read_traced(scope)
        check_not_frozen(self._name, "read")
        return noted_read(self, self._read_eager())

    def numpy(self) -> np.ndarray:
        """Returns a copy of the value as a NumPy array, a number for a scalar, as TensorFlow does.

        Raises:
            UnsupportedError: inside a traced function.
        """
        if current_scope() is not None:
            raise UnsupportedError(
                f"Variable {self._name!r}: numpy() is not possible inside Strategy.run or"
                " distributary.function, where values are traced. Use v.value()."
            )
        check_not_frozen(self._name, "read")
        if self._layout.parts is not None:
            with latest_program.lock:  # no step of another thread donates the parts
                return np.array(fetch_whole(self._value, self._shape))[()]
        try:
            return np.array(self._peek())[()]
        except RuntimeError:  # a step in another thread has just donated the buffer
            return np.array(self._read_eager())[()]

    def sparse_read(self, indices: ArrayLike, name: str | None = None) -> jax.Array:
        """Returns rows of the variable, `[*indices.shape, *shape[1:]]`.

        If a variable is only read this way, the gradient with respect to it is an `IndexedSlices`.
        Rows out of range are NaN, or the dtype's extreme value for integers.

        Args:
            indices: Integer numbers of rows along dim 0.
            name: Has no effect.
        """
        ids = jnp.asarray(indices)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise InvalidTypeError(
                f"Variable {self._name!r}: sparse_read needs integer indices, got {ids.dtype}."
            )
        if not self._shape:
            raise InvalidValueError(f"Variable {self._name!r} is a scalar and has no rows to read.")
        scope = current_scope()
        if scope is None:
            check_not_frozen(self._name, "read")
            return noted_rows(self, self._read_eager(), ids)
        if scope.kind == "function" and self._handle.per_replica:
            return jnp.take(self.value(), ids, axis=0)
        self._check_strategy("read")
        return scope.sparse_read(self._handle, ids)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Sets slices whose leading dims are a batch: `self[b, indices[b, i]] = values[b, i]`.

        Args:
            sparse_delta: `IndexedSlices` with indices `[*batch, n]`, values `[*batch, n, ...]`.
            use_locking: Has no effect.
            name: Has no effect.

        Returns:
            The same as `assign`.

        Raises:
            UnsupportedError: if a strategy keeps the variable.

        Source: `tf.Variable.batch_scatter_update`.
        """
        indices = jnp.asarray(sparse_delta.indices)
        batch = jnp.indices(indices.shape, sparse=True)[:-1]
        return self._scatter_at("update", (*batch, indices), sparse_delta.values)

    def scatter_nd_add(
        self, indices: ArrayLike, updates: ArrayInput, name: str | None = None
    ) -> Any:
        """Adds slices: `self[indices[i]] += updates[i]`.

        Args:
            indices: Integer positions `[*n, k]`: the last dim numbers the first k dims of the
                variable.
            updates: Array `[*n, *shape[k:]]`.
            name: Has no effect.

        Returns:
            The same as `assign`.

        Raises:
            UnsupportedError: if a strategy keeps the variable and k is not 1.

        Source: `tf.Variable.scatter_nd_add`.
        """
        return self._scatter_at("add", _positions(indices), updates)

    def scatter_nd_sub(
        self, indices: ArrayLike, updates: ArrayInput, name: str | None = None
    ) -> Any:
        """Subtracts slices; otherwise like `scatter_nd_add`."""
        return self._scatter_at("sub", _positions(indices), updates)

    def scatter_nd_update(
        self, indices: ArrayLike, updates: ArrayInput, name: str | None = None
    ) -> Any:
        """Sets slices; otherwise like `scatter_nd_add`."""
        return self._scatter_at("update", _positions(indices), updates)

    def gather_nd(self, indices: ArrayLike, name: str | None = None) -> jax.Array:
        """Returns the slices at `indices` `[*n, k]`, `[*n, *shape[k:]]`.

        Slices out of range are NaN, or the dtype's extreme value for integers.

        Source: `tf.Variable.gather_nd`.
        """
        return self.value().at[_positions(indices)].get(mode="fill")

    def _scatter_at(self, kind: str, positions: tuple[Any, ...], updates: ArrayInput) -> Any:
        if len(positions) == 1:
            rows = array_of(updates, f"Variable {self._name!r}: scatter_{kind}")
            return self._change(f"scatter_{kind}", IndexedSlices(rows, positions[0]), True)
        if type(self) is not Variable:  # replicas or workers would overwrite each other's changes
            raise UnsupportedError(
                f"Variable {self._name!r}: a strategy keeps it, so that you can scatter only along"
                f" dim 0, but the indices number {len(positions)} dims. Read it, change the array"
                " with .at[...] and assign it."
            )
        what = f"Variable {self._name!r}: scatter"
        array = array_of(updates, what)
        self._check_dtype(what, array)
        slices = *np.broadcast_shapes(*map(np.shape, positions)), *self._shape[len(positions) :]
        if tuple(array.shape) != slices:
            raise InvalidValueError(
                f"{what} got updates of shape {tuple(array.shape)} for slices of shape {slices}."
            )
        place = self.value().at[positions]
        changed = {"add": place.add, "sub": place.subtract, "update": place.set}[kind]
        return self.assign(changed(jnp.asarray(array, self._dtype)))

    def _read_traced(self, scope: TraceScope) -> jax.Array:
        return self._layout.read(scope.read(self._handle))

    def _read_eager(self) -> jax.Array:
        # Under the lock, so that a program of another thread sees `_shared` before it donates.
        with latest_program.lock:
            value = self._peek()
            # What is copied or put together is nobody else's.
            is_copy = self._layout.parts or in_host_memory(self._layout.replicated)
            self._shared = self._shared or not is_copy
        return value

    def _peek(self) -> jax.Array:
        """Returns the eager value, which is valid only until the next step."""
        return in_device_memory(local_copy(self._whole()))

    def _whole(self) -> jax.Array:
        """Returns the stored array, put together if it is in parts."""
        return self._layout.whole(self._value, self._shape)

    # Assigning

    def _change(self, kind: str, value: GivenChange, read_value: bool) -> Any:
        self._check_assignable(kind)
        if kind in SCATTER:
            self._check_scatter(kind)
        scope = current_scope()
        if scope is None:
            check_not_frozen(self._name, "assigned")
            converted = self._convert(kind, value)
            if drops_assignments():
                return self if read_value else None
            converted = computed(f"Variable {self._name!r}: {kind}", converted)
            if isinstance(converted, IndexedSlices):
                self._scatter_eager(kind, converted)
            else:
                self._change_eager(kind, converted)
            return self if read_value else None
        is_in_replica = scope.kind == "replica" and current_mode().role == "replica"
        if is_in_replica and isinstance(value, PerReplica) and value.form != "local":
            value = self._own_component(scope, kind, value)
        result = self._change_traced(scope, kind, value)
        return result if read_value else None

    def _own_component(self, scope: TraceScope, kind: str, value: PerReplica) -> jax.Array:
        """Returns the replica's component of a value that a step took from outside."""
        num_replicas = self._layout.num_replicas
        components = value.values
        with jax.ensure_compile_time_eval():
            rows = stack_components(PerReplica(components))
        if rows is None or len(components) != num_replicas:
            shapes = [jnp.shape(component) for component in components]
            raise ReplicaMismatchError(
                f"Variable {self._name!r}: {kind} got a PerReplica from outside of the step, with"
                f" components of the shapes {shapes} in this process. Expected are {num_replicas}"
                f" of shape {self._shape} and one dtype. Pass it to strategy.run through args."
            )
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[scope.replica_id()], rows.payload)

    def _change_eager(self, kind: str, value: Array) -> None:
        self._layout.assigned(f"{kind} of variable {self._name!r}", value)
        with latest_program.lock:
            if kind == "assign":
                self._value = self._layout.place(value, self._dtype)
            else:
                value = self._layout.bring(value, self._dtype)
                self._store(combine(kind, in_device_memory(self._whole()), value))
            self._shared = False

    def _scatter_eager(self, kind: str, slices: IndexedSlices) -> None:
        what = f"{kind} of variable {self._name!r}"
        self._layout.assigned(f"{what}, its indices", slices.indices)
        self._layout.assigned(f"{what}, its rows", slices.values)
        slices = jax.tree.map(self._layout.bring, slices)
        with latest_program.lock:
            self._store(combine(kind, in_device_memory(self._whole()), slices))
            self._shared = False

    def _store(self, new: jax.Array) -> None:
        """Stores a new value in the memory that the layout gives to variables."""
        sharding = self._layout.replicated
        if self._layout.parts is not None:
            new = self._layout.place(new, self._dtype)
        self._value = jax.device_put(new, sharding) if in_host_memory(sharding) else new

    def _change_traced(self, scope: TraceScope, kind: str, value: GivenChange) -> jax.Array:
        converted = self._convert(kind, value)
        if not isinstance(converted, IndexedSlices):
            converted = jnp.asarray(converted, self._dtype)
        combined = self._combined(scope, converted)
        current = None if kind == "assign" else scope.read(self._handle)
        new = combine(kind, current, combined)
        scope.write(self._handle, new)
        return new

    def _combined(self, scope: TraceScope, value: Change) -> Change:
        """Returns what all replicas together assign, given what the traced replica assigns."""
        return value

    def _convert(self, kind: str, value: GivenChange) -> Array | IndexedSlices:
        """Returns the assigned value as an array of the right shape and kind of dtype."""
        what = f"Variable {self._name!r}: {kind}"
        if kind in SCATTER:
            return self._convert_slices(what, value)
        if isinstance(value, PerReplica):
            where = " inside merge_call" if value.form == "local" else "(...)"
            raise ReplicaDivergenceError(
                f"{what} got a PerReplica in a cross-replica context; the copies of the variable"
                f" would differ. Combine it with strategy.reduce{where} first."
            )
        if isinstance(value, IndexedSlices):
            raise InvalidTypeError(
                f"{what} got IndexedSlices; use scatter_add, scatter_sub or scatter_update."
            )
        if isinstance(value, (Variable, Mirrored)):
            value = value.value()
        array = array_of(value, what)
        if tuple(array.shape) != self._shape:
            raise InvalidValueError(
                f"{what} got a value of shape {tuple(array.shape)}, but the variable has shape"
                f" {self._shape}. Shapes are not broadcast; use jnp.broadcast_to or jnp.full."
            )
        self._check_dtype(what, array)
        return array

    def _check_dtype(self, what: str, array: Array) -> None:
        if not same_kind(array.dtype, self._dtype):
            raise InvalidTypeError(
                f"{what} got dtype {array.dtype}, but the variable is {self._dtype}. Convert the"
                f" value first: value.astype({self._dtype.name!r})."
            )
        if isinstance(array, np.ndarray):
            holding(array, self._dtype)

    def _check_assignable(self, kind: str) -> None:
        self._check_strategy("assigned")
        mode = current_mode()
        if (
            not in_default_context()
            and mode.role == "replica"
            and mode.strategy is not self._layout.strategy
            and mode.strategy.extended.num_replicas > 1
        ):
            raise ContextError(
                f"Variable {self._name!r} was created outside of {shown(mode.strategy)}, so {kind}"
                " inside its run has no meaning: there is one copy and several replicas. Create the"
                " variable inside `with strategy.scope():`."
            )

    def _check_strategy(self, what: str) -> None:
        """Checks that the variable is not used under another strategy, unless it is a plain one."""
        if in_default_context():
            return
        strategy = current_mode().strategy
        if strategy is self._layout.strategy or self._layout.strategy.extended.is_default:
            return
        raise ContextError(
            f"Variable {self._name!r} of {shown(self._layout.strategy)} is {what} while"
            f" {shown(strategy)} is current: strategies cannot be mixed. Create the variable in the"
            " scope of the strategy that uses it."
        )

    def _convert_slices(self, what: str, slices: Any) -> IndexedSlices:
        """Returns the rows as arrays of the variable's dtype."""
        slices = checked_slices(what, slices)
        values, ids = array_of(slices.values, what), array_of(slices.indices, what)
        if not self._shape or ids.ndim != 1 or values.shape != (ids.size, *self._shape[1:]):
            raise InvalidValueError(
                f"{what} got rows of shape {values.shape} and indices of shape {ids.shape}, but"
                f" the variable has shape {self._shape}; expected rows [num_rows,"
                " *variable.shape[1:]] and indices [num_rows]."
            )
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise InvalidTypeError(f"{what} needs integer indices, got {ids.dtype}.")
        self._check_dtype(what, values)
        rows = jnp.asarray(values, self._dtype)
        return IndexedSlices(rows, jnp.asarray(ids), slices.dense_shape)

    def _check_scatter(self, kind: str) -> None:
        """Checks that the variable can scatter."""

    # Identity

    def ref(self) -> "VariableReference":
        """Returns a hashable reference, since `==` of variables compares their elements."""
        return VariableReference(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Variable":
        strategy = self._layout.strategy
        if not in_default_context() and get_strategy() is not strategy:
            raise ContextError(
                f"Variable {self._name!r} of {shown(strategy)} cannot be copied in the scope of"
                f" {get_strategy()!r}. Copy it in its own strategy's scope."
            )
        with strategy.scope():
            new = Variable(
                np.zeros(self._shape, self._dtype),
                self._trainable,
                self._name,
                self._dtype,
                self._synchronization,
                self._aggregation,
            )
        new._value = own_copies([self._value])[0]
        memo[id(self)] = new
        return new

    def __copy__(self) -> NoReturn:
        raise InvalidTypeError(
            f"Variable {self._name!r} cannot be copied shallowly: two variables would share one"
            " value. Use copy.deepcopy, or keep a reference."
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidTypeError(
            f"Variable {self._name!r} cannot be pickled: it lives on the devices of"
            f" {shown(self._layout.strategy)}. Pickle v.numpy(), and assign it to a new variable."
        )

    def _text_of(self, name: str, value: ArrayLike | None, kind: str = "dist.Variable") -> str:
        """Returns the text of a copy; without its numbers if they are not known in a trace."""
        text = f"<{kind} '{name}' shape={self._shape} dtype={self._dtype.name}"
        if value is None or isinstance(value, jax.core.Tracer):
            return f"{text}>"
        array = np.asarray(value)
        numbers = np.array2string(array, separator=", ") if self._shape else repr(array.item())
        return f"{text}, numpy={numbers}>"

    def __repr__(self) -> str:
        return self._text_of(self.name, None if current_scope() is not None else self._peek())

    __str__ = __repr__


def _positions(indices: ArrayLike) -> tuple[Any, ...]:
    """Returns an index of arrays for indices `[*n, k]`."""
    ids = jnp.asarray(indices)
    if not jnp.issubdtype(ids.dtype, jnp.integer) or not ids.ndim:
        raise InvalidTypeError(
            f"Indices of slices are an array of integers [..., k], got {ids.dtype}{[*ids.shape]}."
        )
    return tuple(jnp.moveaxis(ids, -1, 0))


# What `help` shows, in place of the arguments that `__new__` hands on. Types are in the docstring.
_, *_parameters = inspect.signature(Variable.__init__).parameters.values()
Variable.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [parameter.replace(annotation=parameter.empty) for parameter in _parameters]
)


@final
class VariableReference:
    """A hashable reference to a variable. Two references to the same variable are equal."""

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def deref(self) -> Variable:
        """Returns the variable."""
        return self._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VariableReference) and other._variable is self._variable

    def __repr__(self) -> str:
        return f"<reference to {self._variable.name}>"


def _note_creation(scope: TraceScope, name: str) -> None:
    if not scope.may_create:
        raise InvalidValueError(
            f"Variable {name!r} is created inside Strategy.run or distributary.function, and again"
            " when the function is traced anew. Create it only once: outside, or guarded by `if"
            " self.v is None: self.v = distributary.Variable(...)`."
        )
    scope.created.append(name)
    scope.num_created += 1


_has_warned = ContextVar("whether this thread has warned that it has no scope", default=False)


def _warn_if_scope_is_in_another_thread(what: str) -> None:
    if in_default_context() and not _has_warned.get() and another_thread_in_scope():
        _has_warned.set(True)
        warn(
            f"{what} is created in a thread without a strategy scope while another thread has one"
            " open. Scopes hold for one thread only: enter `with strategy.scope():` in this thread"
            " too, or the variable stays on one device."
        )
