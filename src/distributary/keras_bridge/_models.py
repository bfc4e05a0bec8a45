"""Models under a strategy: makes `fit` and related methods distributed."""

import gc
import inspect
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import keras
import numpy as np

from distributary._threads import bound
from distributary.context import entered, get_strategy, has_strategy
from distributary.devices import JobEvent, job_programs
from distributary.engine import mode_of
from distributary.errors import ContextError, InvalidTypeError, shown, warn
from distributary.keras_bridge import _keras_private as keras_private
from distributary.keras_bridge._custom_loops import refuse_in_step
from distributary.keras_bridge._data import (
    Call,
    DatasetAdapter,
    batches_of,
    check_count,
    check_same,
    current_call,
    explained_by_data,
)
from distributary.keras_bridge._step_function import (
    PARTS,
    Kind,
    StepFunction,
    takes_only_data,
    values_of_variables,
)
from distributary.keras_bridge._variables import keeps_on_servers, place
from distributary.strategies import OneDeviceStrategy, check_job, unused_strategies
from distributary.tracing import explained, native, shorten

# Comparison of the workers before a call of `fit`, `evaluate` or `predict` begins.

# Arguments that decide how many steps a worker takes, and which ones.
_NUMBERS = (
    *("batch_size", "epochs", "initial_epoch", "steps", "steps_per_epoch"),
    *("validation_batch_size", "validation_freq", "validation_split", "validation_steps"),
)
_PRESENCE = ("class_weight", "sample_weight", "validation_data", "y")


def begin_call(model: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Checks that all workers call a method of the same model with the same arguments.

    Args:
        model: The model.
        method: `fit`, `evaluate` or `predict`.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        TypeError: if the method has no such arguments.
        WorkerMismatchError: if they do not.
    """
    if job_programs.enter is None:
        return
    call = inspect.signature(method).bind(model, *args, **kwargs)
    call.apply_defaults()

    values = call.arguments
    lines = [f"{name}={values[name]!r}" for name in _NUMBERS if name in values]
    lines += [f"{'no' if values.get(name) is None else 'a'} {name}" for name in _PRESENCE]
    compiled = getattr(getattr(model, "_compile_config", None), "config", {})
    lines += [f"compiled with {name}={_text(value)}" for name, value in compiled.items()]
    event = JobEvent(f"{method.__name__} of {model.name}", lambda: [(line, "") for line in lines])
    job_programs.begin(event)


def _text(value: object) -> str:
    """Returns a text for a configuration; equal ones have the same text on every worker."""
    try:
        return json.dumps(keras.saving.serialize_keras_object(value), sort_keys=True)
    except Exception:  # custom objects need not have a configuration
        return getattr(value, "__name__", type(value).__name__)


# Models

# Strategies that have a model already: a further one outside of their scope is on purpose.
_with_models: "weakref.WeakSet[Any]" = weakref.WeakSet()

# The thread and the name of the outermost call of each model that changes its metrics.
_calls: "weakref.WeakKeyDictionary[Any, tuple[int, str]]" = weakref.WeakKeyDictionary()


def strategy_of(model: Any) -> Any:
    """Returns the strategy in whose scope a model was created or compiled, or None."""
    return getattr(model, "_distributary_strategy", None)


class Distributed:
    """A base class of models, which have the strategy in whose scope they are created."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns the model."""
        model = super().__new__(cls, *args, **kwargs)
        if has_strategy():
            _give(model, get_strategy())
        return model

    # What Keras notes of a model's state, which is empty under a strategy, belongs to a call. On
    # the model, it would be that of another thread, too; and Keras would search it for layers.

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_jax_state", "_jax_state_synced"):
            _place_of_state(self)[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def _jax_state(self) -> Any:
        return _place_of_state(self).get("_jax_state")

    @property
    def _jax_state_synced(self) -> Any:
        return _place_of_state(self).get("_jax_state_synced", True)


def _place_of_state(model: Any) -> dict[str, Any]:
    call = current_call.get()
    return vars(model if call is None or strategy_of(model) is None else call)


def compile_(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives a model without a strategy the one in whose scope it is compiled."""
    _join(self, "compile")
    optimizer = kwargs.get("optimizer", args[0] if args else None)
    if hasattr(optimizer, "init") and not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidTypeError(
            f"{self.name}.compile: optimizer is {shown(optimizer)}, expected one of Keras, such"
            " as keras.optimizers.Adam(1e-3). Those of optax are for loops of your own."
        )
    return original(self, *args, **kwargs)


def _give(model: Any, strategy: Any) -> None:
    # Not by Keras' `__setattr__`, which needs what `__init__` makes.
    functions = dict.fromkeys([f"{kind}_function" for kind in PARTS])
    vars(model).update(functions, _distributary_strategy=strategy)
    _with_models.add(strategy)


def _warn_outside(model: Any) -> None:
    """Warns once if a model was made outside of the scope of a strategy that waits for one."""
    if _waiting():
        gc.collect()  # strategies that nothing refers to any more
    for strategy in _waiting()[:1]:
        _with_models.add(strategy)  # so that it is warned about once
        warn(
            f"{model.name}.fit runs on one device: the model was created outside of the scope of"
            f" {shown(strategy)}, which has no model. Create it and compile it inside `with"
            " strategy.scope():`. If one device is what you want, ignore this with"
            ' warnings.filterwarnings("ignore", ".*fit runs on one device").'
        )


def _waiting() -> list[Any]:
    return [strategy for strategy in unused_strategies() if strategy not in _with_models]


def _join(model: Any, what: str) -> None:
    """Checks that model and scope belong together; gives a model without a strategy the scope's."""
    if not has_strategy():
        return
    owner, current = strategy_of(model), get_strategy()
    if owner is None:
        _give(model, current)
    elif owner is not current:
        raise ContextError(
            f"{model.name}.{what} was called in the scope of {shown(current)}, but the model"
            f" belongs to {shown(owner)}, in whose scope it was created. Leave the scope, or create"
            " the model again inside it, for example with keras.models.clone_model(model) and"
            " set_weights."
        )


# The context of a call of a model without a strategy, which `symbolic_build` may give one.
_late: ContextVar[ExitStack | None] = ContextVar("context of a call", default=None)


def infers_shapes() -> bool:
    """Returns whether Keras runs the caller for the shapes of its results.

    Notes that the caller's layer uses state that plain Keras would compile as a constant.
    """
    call = keras_private.get_global_attribute("current_call_ctx")
    is_symbolic = bool(keras_private.in_symbolic_scope())
    if is_symbolic and call is not None:
        vars(call.entry_layer)["_distributary_state"] = True
    return is_symbolic


def _needs_engine(model: Any) -> bool:
    """Returns whether Keras alone cannot train a model.

    It cannot call steps that are written for TensorFlow, or keep the state of `tf.random` and of
    metrics that a layer updates.
    """
    return any(takes_only_data(model, kind) for kind in PARTS) or any(
        "_distributary_state" in vars(layer)
        or (layer._metrics and not isinstance(layer, keras.Model))
        for layer in model._flatten_layers()
    )


def _give_one_device(model: Any) -> Any:
    _give(model, strategy := OneDeviceStrategy(jax.local_devices()[0]))
    return strategy


def in_scope(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a method of a model in the scope of the model's strategy."""
    what = original.__name__
    refuse_in_step(self, what)
    _join(self, what)
    strategy = strategy_of(self)
    if strategy is None:
        if what in ("fit", "train_on_batch"):
            check_job(f"{self.name}.{what} without a strategy")
        if what == "fit":
            _warn_outside(self)
        if not _needs_engine(self):
            with ExitStack() as late, bound(_late, late):
                return original(self, *args, **kwargs)
        strategy = _give_one_device(self)
    args = tuple(map(_native, args))
    kwargs = {key: _native(value) if key in _DATA else value for key, value in kwargs.items()}
    x, y = (kwargs.get(key, [*args, None, None][i]) for i, key in enumerate("xy"))
    for name in {"epochs", "steps_per_epoch", "steps", "validation_steps"} & kwargs.keys():
        check_count(f"{self.name}.{what}", name, kwargs[name], 0)
    with strategy.scope(), _in_one_thread(self, what), bound(current_call, Call(what)):
        try:
            if strategy.extended.num_workers > 1:
                if what.endswith("_on_batch"):
                    check_same((args, kwargs), f"The batch of {what}")
                else:
                    begin_call(self, original, args, kwargs)
            return original(self, *args, **kwargs)
        except Exception as error:
            validation = kwargs.get("validation_data")
            clear = explained_by_data(self, what, explained(error), x, y, validation)
            shorten(clear)
            raise clear from None


_DATA = ("x", "y", "sample_weight", "validation_data")


def _native(data: Any) -> Any:
    """Returns data for Keras with its arrays in the byte order of this machine."""
    return keras.tree.map_structure(lambda x: native(x) if isinstance(x, np.ndarray) else x, data)


@contextmanager
def _in_one_thread(model: Any, what: str) -> Iterator[None]:
    """Runs a call of a model; refuses one that would mix its metrics with those of a thread."""
    call = threading.get_ident(), what
    if what.startswith("predict"):  # has no metrics
        yield
        return
    outermost = _calls.setdefault(model, call)
    if outermost[0] != call[0]:
        raise ContextError(
            f"{model.name}.{what} was called while {model.name}.{outermost[1]} runs in another"
            " thread; both change the model's metrics. Call it from a callback, or on a copy of the"
            " model: keras.models.clone_model(model), compile and set_weights."
        )
    try:
        yield
    finally:
        if outermost is call:
            del _calls[model]


def make_function(kind: Kind, original: Callable[..., Any], self: Any, force: bool = False) -> Any:
    """Makes the function that Keras' loops call for every step of a kind."""
    attribute = f"{kind}_function"
    strategy = strategy_of(self)
    if strategy is None:
        return original(self, force)
    if force or getattr(self, attribute) is None:
        remote = strategy.extended.remote_steps
        of_model = StepFunction if remote is None else remote.of_model
        setattr(self, attribute, of_model(self, kind, strategy))
    return getattr(self, attribute)


def get_jax_state(
    original: Callable[..., Any], self: Any, purge_model_variables: bool = False, **parts: bool
) -> Any:
    """Moves variables that were created elsewhere to the devices of the strategy, before a step.

    The state stays in the variables, so Keras gets none.
    """
    strategy = strategy_of(self)
    if strategy is None:
        return original(self, purge_model_variables=purge_model_variables, **parts)
    variables = getattr(getattr(self, "optimizer", None), "variables", ())
    for variable in (*variables, *self.variables, *self.metrics_variables):
        place(variable, strategy)
    rules = strategy.extended.layout_rules
    if not rules.is_settled and self.built and self.variables:
        is_whole = lambda v: not hasattr(v, "_distributary_dim")
        found = [(v.path, v._value.nbytes, is_whole(v)) for v in self.variables]
        rules.check_complete(self.name, found)
    return ((),) * sum(parts.values())


def symbolic_build(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Builds a model with the step in the context in which it runs: the only replica's."""
    strategy = strategy_of(self)
    if strategy is None:
        result, late = original(self, *args, **kwargs), _late.get()
        if late is not None and _needs_engine(self):
            late.enter_context(_give_one_device(self).scope())
            late.enter_context(bound(current_call, Call("fit")))
        return result
    if keeps_on_servers(strategy):
        return original(self, *args, **kwargs)
    if type(self).call is keras.Model.call and takes_only_data(self, "train"):
        return None  # models such as a GAN have a step of their own, but no result to build
    with entered(mode_of(strategy, "global")):
        return original(self, *args, **kwargs)


def get_metrics_result(original: Callable[..., Any], self: Any) -> Any:
    """Returns the values of metrics whose `result` is a variable, as it may be in TensorFlow."""
    return values_of_variables(original(self))


def begin_epoch(original: Callable[..., Any], self: Any) -> Any:
    """Keeps batches on the host until a step splits them, under a strategy.

    The end of a dataset whose length was unknown is nothing to warn of.
    """
    adapter = self.data_adapter
    if isinstance(adapter, DatasetAdapter) and not self.steps_per_epoch:
        self._interrupted_warning = lambda: None
    if not has_strategy():
        return original(self)
    call = current_call.get()
    if call is not None and call.method == "fit" and call.data is adapter:
        self._epoch_iterator = call.begin_epoch(self)
        return self
    self._get_iterator = partial(batches_of, adapter, get_strategy().extended)
    return original(self)
