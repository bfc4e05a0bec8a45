"""Saving and loading models of a strategy: one writer, complete files, the same values everywhere.

With several workers, all of them call `save`, with the same path or with a path each. The first
worker writes its file. The others wait for it, and write only if their path is another one. When a
model is loaded, all workers get the values of the first one, so the others do not need the files.
"""

import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np

from distributary.checkpoint import complete_file, not_of_keras, settle, write_once
from distributary.context import default_mode, entered, get_strategy, has_strategy
from distributary.devices import job_programs, progress
from distributary.errors import CheckpointError, DistributaryError
from distributary.job import consensus
from distributary.keras_bridge._custom_loops import refuse_in_step
from distributary.keras_bridge._keras_private import (
    file_utils,
    in_stateless_scope,
    sync_state,
    to_snake_case,
)
from distributary.keras_bridge._models import strategy_of
from distributary.keras_bridge._variables import (
    is_in_parts_of_workers,
    keeps_on_servers,
    loading_together,
    saved_variables,
    take_turn,
)


def save(
    original: Callable[..., Any], model: Any, filepath: object, *args: Any, **kwargs: Any
) -> None:
    """Makes saved files of a strategy's models appear complete, written by one worker."""
    strategy = strategy_of(model)
    refuse_in_step(model, "save")
    if strategy is None or not isinstance(filepath, (str, os.PathLike)):
        with by_itself(strategy):
            original(model, filepath, *args, **kwargs)
        return
    options = inspect.signature(original).bind(model, filepath, *args, **kwargs).arguments
    several_files = not options.get("zipped", True) or options.get("max_shard_size") is not None

    def write() -> None:
        if several_files or file_utils.is_remote_path(filepath):
            original(model, filepath, *args, **kwargs)
            return
        with complete_file(Path(filepath)) as temporary:
            original(model, str(temporary), *args, **kwargs)

    with progress.doing("saving"), by_itself(strategy):
        sync_state(model)
        _once(model, strategy, os.fspath(filepath), write)


def load_weights(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    """Makes the first worker read weights for all workers."""
    strategy = strategy_of(model)

    def load() -> None:
        with by_itself(strategy):
            original(model, *args, **kwargs)

    if strategy is None:
        load()
        return
    path = os.fspath(args[0] if args else kwargs.get("filepath", ""))
    refuse_in_step(model, "load_weights")
    other = not_of_keras(Path(path)) if path else None
    if other is not None:
        raise CheckpointError(f"{model.name}.load_weights cannot read {path}: {other}")
    sync_state(model)
    try:
        take_turn(0, model, strategy, load)
    finally:  # before an error, the first worker may have assigned some
        take_over(model, strategy)


def load_state(original: Callable[..., Any], saveable: object, *args: Any, **kwargs: Any) -> Any:
    """Gives a model that is loaded in a scope the first worker's weights on all workers."""
    if not has_strategy():  # also for the parts of the model
        return original(saveable, *args, **kwargs)
    strategy = get_strategy()
    with by_itself(strategy), loading_together(strategy):
        result = original(saveable, *args, **kwargs)
    take_over(saveable, strategy)
    return result


def load_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Does the same as `load_state` for files in the old format."""
    strategy = get_strategy()
    with loading_together(strategy):
        model = original(*args, **kwargs)
    take_over(model, strategy)
    return model


@contextmanager
def by_itself(strategy: Any) -> Iterator[None]:
    """Runs the block as the work of this worker alone, outside of the strategy.

    While Keras saves and loads, it makes metrics and optimizers, to learn the names of their
    attributes. In the scope, their variables would come from the chief. With servers, only one
    process saves and loads, and variables are assigned in the scope.

    Args:
        strategy: The strategy of the model; None for a model of Keras alone.
    """
    is_inside = strategy is not None and keeps_on_servers(strategy)
    with nullcontext() if is_inside else entered(default_mode()), job_programs.alone():
        yield


def take_over(model: Any, strategy: Any) -> None:
    """Gives the variables that all workers have the first worker's values."""
    if strategy.extended.num_workers == 1:
        return
    variables = [v for v in saved_variables(model) if not is_in_parts_of_workers(v)]
    values = strategy.extended.from_chief(
        [np.asarray(v.value) for v in variables], f"the loaded weights of {model.name}"
    )
    with job_programs.alone():  # the values are the same on all workers
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def _once(model: Any, strategy: Any, path: str, write: Callable[[], None]) -> None:
    """Calls `write` on the first worker, and on those that have another path."""
    if strategy.extended.num_workers == 1:
        write()
        return
    place = path if file_utils.is_remote_path(path) else os.path.abspath(path)
    if not any(map(is_in_parts_of_workers, saved_variables(model))):
        write_once(path, place, write)
        return
    job = consensus()
    assert job is not None
    paths = job.agree(f"saving {model.name}", lambda: place)
    for worker, worker_path in enumerate(paths):
        if worker == 0 or worker_path != paths[0]:
            take_turn(worker, model, strategy, write)


# The state of Keras objects for checkpoints, under names that are the same in every process.


def parts_of(value: object) -> dict[str, Any] | None:
    """Returns the variables and parts of a Keras object by name; None for other objects.

    Keras numbers objects over the whole process, as in `dense_7`. Here, they are numbered within
    the object that contains them.
    """
    if isinstance(value, keras.optimizers.Optimizer):
        return _of_optimizer(value)
    if isinstance(value, keras.Layer):
        return _of_layer(value)
    if isinstance(value, keras.metrics.Metric):
        return _numbered((_name(variable), variable) for variable in value.variables)
    if isinstance(value, keras.random.SeedGenerator):
        return {"state": value.state}
    return None


def build_optimizer(value: object, others: Iterable[Any]) -> bool:
    """Builds an optimizer for the only model among the other objects of a checkpoint.

    An optimizer gets its state in the first step, and a checkpoint is restored before that.
    """
    models = [other for other in others if isinstance(other, keras.Model) and other.built]
    if not isinstance(value, keras.optimizers.Optimizer) or value.built or len(models) != 1:
        return False
    _build(value, models[0])
    return True


def _build(optimizer: Any, model: Any) -> None:
    strategy = strategy_of(model)
    with nullcontext() if strategy is None else strategy.scope():
        optimizer.build(model.trainable_variables)


def waits(value: object) -> bool:
    """Returns whether a layer, model or optimizer is not built yet."""
    return isinstance(value, (keras.Layer, keras.optimizers.Optimizer)) and not value.built


def post_build(original: Callable[..., Any], self: Any) -> Any:
    """Tells that a layer or model has been built."""
    result = original(self)
    try:
        settle(self)
    except DistributaryError:
        # Keras goes on if its first, symbolic call fails: then the next call builds it again.
        self.built = False
        raise
    return result


def _of_layer(layer: Any) -> dict[str, Any]:
    sync_state(layer)
    variables = [*layer._trainable_variables, *layer._non_trainable_variables]
    variables += [generator.state for generator in layer._seed_generators]
    parts = [(_name(part), part) for part in (*variables, *layer._layers)]
    optimizer = getattr(layer, "optimizer", None) if isinstance(layer, keras.Model) else None
    if optimizer is not None:
        if layer.built and not optimizer.built and not in_stateless_scope():
            _build(optimizer, layer)
        parts.append(("optimizer", optimizer))
    return _numbered(parts)


def _of_optimizer(optimizer: Any) -> dict[str, Any]:
    """Names an optimizer's variables: `momentum.3` belongs to the fourth variable of the model."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    prefixes = {
        f"{reference.path.replace('/', '_')}_": number
        for number, reference in enumerate(inner._trainable_variables)
    }
    parts = []
    for variable in optimizer.variables:
        name = variable.name
        starts = (name[: i + 1] for i in range(len(name) - 1, -1, -1) if name[i] == "_")
        prefix = next((start for start in starts if start in prefixes), None)
        if prefix is not None:
            name = f"{name.removeprefix(prefix)}.{prefixes[prefix]}"
        parts.append((name, variable))
    return _numbered(parts)


def _name(part: Any) -> str:
    """Returns a part's name without the number that Keras gives it."""
    kind = "variable" if isinstance(part, keras.Variable) else to_snake_case(type(part).__name__)
    # `Bidirectional` names its layers after the name that it got for one of them.
    numbered = re.fullmatch(rf"((?:forward_|backward_)?{re.escape(kind)})_\d+", part.name)
    return numbered[1] if numbered else part.name


def _numbered(parts: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the parts by name; the second `dense` becomes `dense_1`."""
    result: dict[str, Any] = {}
    for name, part in parts:
        names = (f"{name}_{number}" if number else name for number in itertools.count())
        result[next(one for one in names if one not in result)] = part
    return result
