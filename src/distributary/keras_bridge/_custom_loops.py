"""The replica and its Keras variables, inside `Strategy.run` and `distributary.function`.

Keras asks the current `StatelessScope` for the value of a variable, and passes every assignment to
it. While a function is traced, our scope passes both on to the trace. There, a Keras variable is
like any other variable: its value goes in and out of the compiled program.
"""

import weakref
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
from jax.sharding import PartitionSpec as P

from distributary.context import (
    Mode,
    ReplicaContext,
    current_mode,
    get_strategy,
    in_default_context,
)
from distributary.devices import is_divided
from distributary.errors import ContextError, InvalidValueError, UnsupportedError, shown
from distributary.keras_bridge import _keras_private as keras_private
from distributary.keras_bridge._variables import (
    in_model_step,
    in_optimizer,
    in_scope_of_keras,
    is_sum,
    keeps_on_servers,
    place,
    sharding_of,
)
from distributary.options import ReduceOp, VariableAggregation
from distributary.tracing import Handle, current_scope, outside_of_trace
from distributary.variables import ForeignVariable, across_replicas

# The replica whose code is being traced, as far as the hooks need to know it.


def _mode() -> Mode | None:
    """Returns the mode of the code of a replica, in `run` or in a step of `fit`; None elsewhere."""
    mode = None if in_default_context() else current_mode()
    return mode if mode is not None and mode.role == "replica" else None


def replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that is being traced, if there are several replicas."""
    mode: Any = _mode()
    is_alone = mode is None or mode.strategy.extended.num_replicas == 1
    return None if is_alone else mode.replica_context


def refuse_in_step(model: Any, what: str) -> None:
    """Checks that a method of a model is called outside of `Strategy.run`."""
    if _mode() is not None:
        raise ContextError(
            f"{model.name}.{what} was called inside Strategy.run. It works for all replicas, and"
            " needs the values of variables: call it outside."
        )


def in_own_step() -> bool:
    """Returns whether a step of the user's own is being traced, not one of `fit`."""
    mode = _mode()
    return mode is not None and not mode.is_global and not is_for_servers()


def is_away_from_variables() -> bool:
    """Returns whether the only replica computes on another device than that of the variables."""
    mode = _mode()
    if mode is None or current_scope() is None:
        return False
    extended = mode.strategy.extended
    return extended.num_replicas == 1 and extended.placement.home is not None


def is_for_servers() -> bool:
    """Returns whether the step that is traced gets its updates computed by parameter servers."""
    return current_scope() is not None and keeps_on_servers(current_mode().strategy)


def is_uneven() -> bool:
    """Returns whether the replicas may have batches of different sizes."""
    scope = current_scope()
    return scope is not None and scope.uneven is not None


def total(context: ReplicaContext, value: object) -> Any:
    """Returns the sum of `value` over all replicas."""
    return context.all_reduce(ReduceOp.SUM, value)


# Variables


@final
class KerasVariable(ForeignVariable):
    """A stand-in for one Keras variable in programs; the variable itself keeps it alive.

    Args:
        variable: The Keras variable.
        strategy: The strategy whose programs use it.
    """

    def __init__(self, variable: Any, strategy: Any) -> None:
        self.holder = weakref.ref(variable)
        self.strategy = strategy
        self._layout = strategy.extended.variable_layout()
        # A variable that is created in a trace gets its value, and then its layout, afterwards.
        is_new = variable._value is None
        layout = sharding_of(strategy, variable) if is_new else variable._layout
        #: Whether the value stands for a sum over replicas or workers, like the values of metrics.
        self.is_sum = is_sum(variable)
        self._handle = Handle(
            weakref.ref(self),
            variable.path,
            tuple(variable.shape),
            # That of what is stored: under autocast, `dtype` is that of what is read.
            jax.dtypes.canonicalize_dtype(variable._dtype),
            summed=self.is_sum and self._layout.num_replicas > 1,
            parts=layout.spec if is_divided(layout) else P(),
        )

    def begin_with(self, array: object) -> bool:
        """Makes an array the first value, if the variable was created in a trace."""
        variable = self.variable
        if variable._value is not None:
            if keras_private.in_stateless_scope():
                raise UnsupportedError(
                    f"Keras variable {variable.path!r} is to be restored while a function that uses"
                    " it is traced. Build its model or optimizer before that."
                )
            return False
        variable._initializer = lambda shape, dtype=None: jnp.asarray(array, dtype)
        return True

    @property
    def _shards(self) -> list[Any]:
        """Variables on servers that keep the value."""
        return list(getattr(self._value, "_shards", []))


def resolve(value: object) -> KerasVariable | None:
    """Returns the stand-in for `value` in programs, if `value` is a Keras variable."""
    return _stand_in(value) if isinstance(value, keras.Variable) else None


def _stand_in(variable: Any) -> KerasVariable:
    known: KerasVariable | None = getattr(variable, "_distributary_stand_in", None)
    strategy = get_strategy()
    if known is not None and known.strategy is strategy:
        return known
    owner = getattr(variable, "_distributary_strategy", None)
    if owner is None and known is not None and not known.strategy.extended.is_default:
        owner = known.strategy
    if owner is not None and owner is not strategy:
        if in_default_context() and known is not None:
            return known
        if not in_default_context():
            raise ContextError(
                f"Keras variable {variable.path!r} of {shown(owner)} is used while"
                f" another strategy, {shown(strategy)}, is current: strategies cannot be mixed."
                " Create the model in the scope of the strategy that uses it."
            )
        strategy = owner
    place(variable, strategy)
    variable._distributary_stand_in = known = KerasVariable(variable, strategy)
    return known


def assign_agreed(variable: object, value: object) -> None:
    """Assigns a value that all replicas share, in a step."""
    scope = current_scope()
    assert scope is not None
    stand_in = _stand_in(variable)
    scope.write(stand_in._handle, jnp.asarray(value, stand_in.dtype))


@final
class TracedVariables(keras.StatelessScope):
    """A scope that sends reads and assignments of Keras variables to the trace in progress."""

    def get_current_value(self, variable: object) -> Any:
        scope = current_scope()
        return None if scope is None else scope.read(_stand_in(variable)._handle)

    def add_update(self, update: Any) -> None:
        variable, value = update
        stand_in = _stand_in(variable)
        # An optimizer assigns the same value everywhere: it gets gradients that are combined.
        is_agreed = stand_in._handle.summed or in_optimizer() or variable.trainable
        if replica_context() is not None and not is_agreed:
            value = _agreed(stand_in, jnp.asarray(value, stand_in.dtype))
        assign_agreed(variable, value)

    def __exit__(self, *exc_info: Any) -> None:
        with jax.ensure_compile_time_eval():  # for the variables that were created in the trace
            super().__exit__(*exc_info)


def drops_assignments() -> bool:
    """Returns whether Keras runs the caller to build a model: in a scope, and not in a step."""
    scope = keras_private.get_stateless_scope()
    return scope is not None and not (isinstance(scope, TracedVariables) or in_model_step())


def build_optimizer(optimizer: Any, variables: list[Any]) -> None:
    """Builds an optimizer in a step as if nothing were traced; the step is then traced once more.

    What it assigns while it is built is for its first step only.
    """
    trace, scope = current_scope(), keras_private.get_stateless_scope()
    if optimizer.built or trace is None or not isinstance(scope, TracedVariables):
        return
    name_scope = keras.name_scope(optimizer.name, caller=optimizer)
    with in_scope_of_keras(None), outside_of_trace(), name_scope:
        keras_private.initialize_all_variables()
        optimizer.build(variables)
        optimizer.built = True
    trace.created.append(optimizer.name)


def _agreed(stand_in: KerasVariable, value: Any) -> Any:
    """Returns the value to assign to a variable that has one value for all replicas.

    State that layers keep, such as moving averages, becomes the mean. If the replicas would assign
    different values to anything else, the trace ends with an error.
    """
    scope, variable = current_scope(), stand_in.variable
    assert scope is not None
    if variable.aggregation == "sum":
        # Keras makes `assign_add` an `assign` of the new value, so what to add is not known.
        raise InvalidValueError(
            f"Variable {variable.path!r} has aggregation 'sum', but a layer assigns its value, and"
            " the replicas' values hold what was there before. Create it without an aggregation,"
            " and add up the replicas before you assign it:"
            " distributary.get_replica_context().all_reduce('SUM', value)."
        )
    is_float = jnp.issubdtype(value.dtype, jnp.inexact)
    aggregation = VariableAggregation.MEAN if is_float else VariableAggregation.NONE
    if variable.aggregation == "only_first_replica":
        aggregation = VariableAggregation.ONLY_FIRST_REPLICA
    if not is_float or not keeps_on_servers(stand_in.strategy):
        return across_replicas(value, aggregation, scope)
    # Servers add the change of a step, so that the steps of all workers count.
    before = scope.read(stand_in._handle)
    return before + across_replicas(value - before, aggregation, scope)
