"""Comparison of the workers before a call of `fit`, `evaluate` or `predict` begins."""

import inspect
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from distributary.devices import JobEvent, job_programs

# Arguments that decide how many steps a worker takes, and which ones.
_NUMBERS = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps",
    "steps_per_epoch",
    "validation_batch_size",
    "validation_freq",
    "validation_split",
    "validation_steps",
)
_PRESENCE = ("class_weight", "sample_weight", "validation_data", "y")
# Entries that may differ between workers: the origin of an object, and seeds, because all workers
# use the values of the chief.
_IGNORED = frozenset(
    {"build_config", "input_cached_tensor", "module", "registered_name", "seed", "shared_object_id"}
)


def begin_call(model: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Checks that all workers call a method of the same model with the same arguments.

    Args:
        model: The model.
        method: `fit`, `evaluate` or `predict`.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        WorkerMismatchError: if they do not.
    """
    if job_programs.enter is None:
        return
    try:
        call = inspect.signature(method).bind(model, *args, **kwargs)
    except TypeError:
        return  # Keras reports the error
    call.apply_defaults()

    values = call.arguments
    lines = [f"{name}={values[name]!r}" for name in _NUMBERS if name in values]
    lines += [f"{'no' if values.get(name) is None else 'a'} {name}" for name in _PRESENCE]
    lines += _lines_of(model)
    event = JobEvent(f"{method.__name__} of {model.name}", lambda: [(line, "") for line in lines])
    job_programs.begin(event)


# The description of a model, and the state for which it holds.
_described: weakref.WeakKeyDictionary[Any, tuple[Any, list[str]]] = weakref.WeakKeyDictionary()


def _lines_of(model: Any) -> list[str]:
    state = (
        getattr(model, "_compile_config", None),
        [(variable.path, variable.trainable) for variable in model.variables],
    )
    known = _described.get(model)
    if known is None or known[0] != state:
        known = _described[model] = state, list(_of_model(model))
    return known[1]


def _of_model(model: Any) -> Iterator[str]:
    for name in ("optimizer", "loss", "steps_per_execution", "run_eagerly"):
        yield f"compiled with {name}={_text(getattr(model, name, None))}"
    config = getattr(model, "_compile_config", None)
    if config is not None:
        yield f"compiled with {_text(config.config)}"
    for layer in getattr(model, "layers", ()):
        yield f"layer {layer.name}: {type(layer).__name__} {_text(layer)}"
    for variable in model.variables:
        trainable = ", trainable" if variable.trainable else ""
        yield f"variable {variable.path} {variable._dtype}{list(variable.shape)}{trainable}"


def _text(value: object) -> str:
    """Returns a text for a configuration; equal ones have the same text on every worker."""
    try:
        config = keras.saving.serialize_keras_object(value)
        return json.dumps(_cleaned(config), sort_keys=True)
    except Exception:  # custom objects need not have a configuration
        return getattr(value, "__name__", type(value).__name__)


def _cleaned(config: object) -> Any:
    if isinstance(config, dict):
        return {k: _cleaned(v) for k, v in config.items() if k not in _IGNORED}
    if isinstance(config, (list, tuple)):
        return [_cleaned(item) for item in config]
    return config
