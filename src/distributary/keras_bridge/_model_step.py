"""The model's own step of `fit`, `evaluate` or `predict`, as a function for the engine."""

import inspect
from operator import attrgetter
from typing import Any, Literal, final

import jax
import keras
import numpy as np

from distributary.devices import Nest
from distributary.keras_bridge._custom_loops import assign_agreed
from distributary.keras_bridge._variables import in_parts, keeps_on_servers, model_step
from distributary.tracing import current_scope

Kind = Literal["train", "test", "predict"]
_MODEL = ("trainable_variables", "non_trainable_variables")
# The attributes with the variables whose values Keras passes to a step and gets from it, in order.
PARTS: dict[Kind, tuple[str, ...]] = {
    "train": (*_MODEL, "optimizer.variables", "metrics_variables"),
    "test": (*_MODEL, "metrics_variables"),
    "predict": _MODEL,
}
_OF_OPTIMIZER = ("trainable_variables", "optimizer.variables")  # what it assigns


@final
class ModelStep:
    """The model's own `train_step`, `test_step` or `predict_step`, on a whole batch.

    The step reads the variables of the model, and assigns those that it changes, like a step of a
    custom loop.

    Args:
        trainer: The model.
        kind: Selects one of the three methods.
        strategy: The strategy of the model.
    """

    def __init__(self, trainer: Any, kind: Kind, strategy: Any) -> None:
        self._trainer = trainer
        self._kind = kind
        self._on_servers = keeps_on_servers(strategy)
        #: The method, if it takes only the batch: it reads and assigns the variables itself, as
        #: methods for TensorFlow do.
        self.stateful = getattr(trainer, f"{kind}_step") if takes_only_data(trainer, kind) else None

    def __call__(self, data: Nest) -> Nest:
        """Runs the step; returns the logs or predictions."""
        if self.stateful is not None:
            return values_of_variables(self.stateful(data))
        variables = dict(zip(PARTS[self._kind], self.variables(), strict=True))
        with in_parts():  # layers gather them
            state = {name: [v.value for v in part] for name, part in variables.items()}
        with model_step() as is_kept:
            step = getattr(self._trainer, f"{self._kind}_step")
            out, after = step(tuple(map(list, state.values())), data)
        if self._kind == "predict":  # changes no trainable variable, so Keras returns the others
            after = state["trainable_variables"], after
        # Servers combine what workers assign; an optimizer has done so with the others. A step that
        # runs operation by operation assigns as any other Python code does.
        is_traced = current_scope() is not None
        for (name, part), new in zip(variables.items(), after, strict=True):
            is_agreed = is_traced and (name in _OF_OPTIMIZER or not self._on_servers)
            changed = {
                id(variable): (variable, value)  # a list may have a variable twice
                for variable, old, value in zip(part, state[name], new, strict=True)
                if value is not old and not is_kept(variable)
            }
            for variable, value in changed.values():
                if is_agreed:
                    assign_agreed(variable, value)
                else:
                    variable.assign(value)
        return out

    def variables(self) -> list[list[Any]]:
        """Returns the variables of the model whose values make up the state, see `PARTS`."""
        return [list(attrgetter(part)(self._trainer)) for part in PARTS[self._kind]]


def values_of_variables(results: Nest) -> Nest:
    """Returns results of a model with values in place of variables."""
    return jax.tree.map(lambda x: x.value if isinstance(x, keras.Variable) else x, results)


def takes_only_data(trainer: object, kind: Kind) -> bool:
    """Returns whether a model's step has one parameter, the batch, and none for the state."""
    try:
        parameters = inspect.signature(getattr(trainer, f"{kind}_step")).parameters.values()
    except (TypeError, ValueError):
        return False
    return [p.kind for p in parameters] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def num_rows(data: Nest, axis: int = 0) -> int:
    """Returns the size of dim `axis` of the first array of a batch; 0 if unknown or missing."""
    leaves = jax.tree.leaves(data)
    shape = np.shape(leaves[0]) if leaves else ()
    return int(shape[axis] or 0) if len(shape) > axis else 0
