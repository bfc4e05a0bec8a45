"""Models under a strategy: makes `fit` and related methods distributed."""

import gc
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax

from distributary.context import (
    check_same_strategy,
    current_mode,
    get_strategy,
    has_strategy,
    in_default_context,
)
from distributary.errors import ContextError, DistributaryWarning, shown
from distributary.keras_bridge._calls import begin_call
from distributary.keras_bridge._data import Call, DatasetAdapter, batches_of, current_call
from distributary.keras_bridge._model_step import PARTS, Kind, takes_only_data
from distributary.keras_bridge._step_function import StepFunction
from distributary.keras_bridge._variables import keeps_on_servers, place, place_in_parts
from distributary.strategies import OneDeviceStrategy, check_job, unused_strategies
from distributary.tracing import explained, shorten, user_stacklevel

# Strategies that have a model already: a further one outside of their scope is on purpose.
_with_models: "weakref.WeakSet[Any]" = weakref.WeakSet()


def strategy_of(model: Any) -> Any:
    """Returns the strategy in whose scope a model was created or compiled, or None."""
    return getattr(model, "_distributary_strategy", None)


def init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a model the strategy in whose scope it is created."""

    def __init__(self: Any) -> None:  # noqa: N807
        original(self)
        self._distributary_strategy = None
        if has_strategy():
            _give(self, get_strategy())

    return __init__


def compile_(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a model without a strategy the one in whose scope it is compiled."""

    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        _join(self, "compile")
        if kwargs.get("jit_compile") is False and not kwargs.get("run_eagerly"):
            strategy = strategy_of(self)
            if strategy is not None:
                warnings.warn(
                    f"{self.name}.compile: jit_compile=False has no effect under {shown(strategy)},"
                    " where a step is one compiled program of all replicas. Leave it out; to look"
                    " into a step while debugging use run_eagerly=True.",
                    DistributaryWarning,
                    stacklevel=user_stacklevel(),
                )
        return original(self, *args, **kwargs)

    return compile


def _give(model: Any, strategy: Any) -> None:
    model._distributary_strategy = strategy
    _with_models.add(strategy)


def _warn_outside(model: Any) -> None:
    """Warns once if a model was made outside of the scope of a strategy that waits for one."""
    if not _waiting():
        return
    gc.collect()  # strategies that nothing refers to any more
    for strategy in _waiting():
        _with_models.add(strategy)  # so that it is warned about once
        warnings.warn(
            f"{model.name}.fit runs on one device: the model was created outside of the scope of"
            f" {shown(strategy)}, which has no model. Create it and compile it inside `with"
            " strategy.scope():`. If one device is what you want, ignore this with"
            ' warnings.filterwarnings("ignore", ".*fit runs on one device").',
            DistributaryWarning,
            stacklevel=user_stacklevel(),
        )
        return


def _waiting() -> list[Any]:
    return [strategy for strategy in unused_strategies() if strategy not in _with_models]


def _join(model: Any, what: str) -> None:
    """Checks that model and scope belong together; gives a model without a strategy the scope's."""
    if not has_strategy():
        return
    own, current = strategy_of(model), get_strategy()
    if own is None:
        _give(model, current)
        model.train_function = model.test_function = model.predict_function = None
    elif own is not current:
        raise ContextError(
            f"{model.name}.{what} was called in the scope of {shown(current)}, but the model"
            f" belongs to {shown(own)}, in whose scope it was created. Leave the scope, or create"
            " the model again inside it, for example with keras.models.clone_model(model) and"
            " set_weights."
        )


def in_scope(original: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a method of a model in the scope of the model's strategy."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        what = original.__name__
        if not in_default_context() and current_mode().role == "replica":
            raise ContextError(
                f"{self.name}.{what} was called inside Strategy.run. It distributes its work by"
                " itself: call it outside."
            )
        _join(self, what)
        strategy = strategy_of(self)
        if strategy is None:
            if what in ("fit", "train_on_batch"):
                check_job(f"{self.name}.{what} without a strategy")
            if what == "fit":
                _warn_outside(self)
            if not any(takes_only_data(self, kind) for kind in PARTS):
                return original(self, *args, **kwargs)
            # Keras on JAX cannot call steps that are written for TensorFlow; the engine can.
            _give(self, strategy := OneDeviceStrategy(jax.local_devices()[0]))
            self.train_function = self.test_function = self.predict_function = None
        check_same_strategy(strategy, f"{self.name}.{what}")
        with strategy.scope():
            token = current_call.set(Call(what))
            try:
                if what in ("fit", "evaluate", "predict") and strategy.extended.num_workers > 1:
                    begin_call(self, original, args, kwargs)
                return original(self, *args, **kwargs)
            except Exception as error:
                told = explained(error)
                shorten(told)
                raise told from None
            finally:
                current_call.reset(token)

    return method


def _step_function(model: Any, kind: Kind, strategy: Any) -> Any:
    if keeps_on_servers(strategy):
        from distributary.keras_bridge._server_steps import ServerSteps

        return ServerSteps(model, kind, strategy)
    return StepFunction(model, kind, strategy)


def make_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the functions that Keras' loops call for every step."""
    signature = inspect.signature(original)

    def _make_function(
        self: object, step_function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            return original(self, step_function, *args, **kwargs)
        given = signature.bind(self, step_function, *args, **kwargs).arguments
        concatenate_outputs = given.get("concatenate_outputs", False)
        kind: Kind = "predict" if concatenate_outputs else _kind_of(self, step_function)
        return _step_function(self, kind, strategy)

    return _make_function


def _kind_of(model: Any, step_function: Any) -> Kind:
    step = getattr(step_function, "__wrapped__", step_function)  # inside of `jax.jit`
    # With Flax NNX, it is a function that Keras defines in `make_test_function`.
    is_test = "make_test" in getattr(step, "__qualname__", "")
    return "test" if is_test or model.test_step in (step, step_function) else "train"


def get_jax_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Moves variables that were created elsewhere to the devices of the strategy, before a step.

    The state stays in the variables, so Keras gets none.
    """

    def _get_jax_state(self: Any, purge_model_variables: bool = False, **parts: bool) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            return original(self, purge_model_variables=purge_model_variables, **parts)
        optimizer = getattr(self, "optimizer", None)
        for variable in () if optimizer is None else optimizer.variables:
            place_in_parts(variable, strategy)
        for variable in (*self.variables, *self.metrics_variables):
            place(variable, strategy)
        return ((),) * sum(parts.values())

    return _get_jax_state


def store_state_untracked(trainer: Any) -> None:
    """Makes models store the state after a step, which is empty, without a search for layers.

    Args:
        trainer: The class that gives models their `fit`.
    """

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        if name == "_jax_state" and strategy_of(self) is not None:
            object.__setattr__(self, name, value)
        else:
            super(trainer, self).__setattr__(name, value)

    trainer.__setattr__ = __setattr__


def get_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps batches on the host until a step splits them, under a strategy.

    The end of a dataset whose length was unknown is nothing to warn of.
    """

    def _get_iterator(self: Any) -> Any:
        if isinstance(self.data_adapter, DatasetAdapter) and not self.steps_per_epoch:
            self._interrupted_warning = lambda: None
        if has_strategy():
            return batches_of(self.data_adapter, get_strategy().extended)
        return original(self)

    return _get_iterator
