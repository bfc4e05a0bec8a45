"""The state of Keras objects, under names that are the same in every process."""

import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import keras

from distributary.checkpoint import settle
from distributary.errors import DistributaryError
from distributary.keras_bridge._keras_private import in_stateless_scope, sync_state, to_snake_case
from distributary.keras_bridge._models import strategy_of


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
    if isinstance(layer, keras.Model):
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
        unique, number = name, 0
        while unique in result:
            number += 1
            unique = f"{name}_{number}"
        result[unique] = part
    return result
