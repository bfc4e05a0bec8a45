"""The only module that hooks into Keras.

Keras has no public way to run its trainer under another strategy. So `install` gives `keras.Model`
the `METHODS` of one more base class, lets Keras create lists of callbacks of our own, and replaces
the functions in `HOOKS`, once per process. All do as Keras does unless a strategy is involved, so
models without a strategy work as they do without distributary.
"""

import inspect
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import keras

from distributary.devices import warn_of_untested
from distributary.errors import WorkerMismatchError
from distributary.keras_bridge import _callbacks, _data, _models, _replica_view, _saving, _variables
from distributary.keras_bridge._keras_private import find
from distributary.keras_bridge._step_function import PARTS

#: Module or class (see `find`) and name of each function to replace, and what runs in its place: it
#: gets the original first, then its arguments. For a property, it makes the new one.
HOOKS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    # Values of variables.
    ("keras.src.backend.common.variables.Variable", "__init__", _variables.init),
    ("StoredVariable", "_initialize_with_initializer", _variables.initialize),
    ("StoredVariable", "_direct_assign", _variables.direct_assign),
    ("keras.src.backend.common.variables.Variable", "value", _variables.value),
    ("keras.StatelessScope", "add_update", _variables.add_update),
    # State of a checkpoint can wait for objects that are not built yet.
    ("keras.Operation", "_post_build", _saving.post_build),
    # Models train under their strategy, see also `METHODS`.
    ("BaseTrainer", "compile", _models.compile_),  # Keras looks whether a class overrides it
    ("keras.src.trainers.epoch_iterator.EpochIterator", "__iter__", _models.begin_epoch),
    ("keras.src.trainers.data_adapters", "get_data_adapter", _data.get_data_adapter),
    # Functional models of text compute on the host.
    (_data.FUNCTIONAL, "_convert_inputs_to_tensors", _data.convert_inputs),
    (_data.FUNCTIONAL, "_adjust_input_rank", _data.adjust_input_rank),
    # Files.
    ("keras.src.saving.saving_lib", "save_model", _saving.save),
    ("keras.src.saving.saving_lib", "save_weights_only", _saving.save),
    ("keras.src.legacy.saving.legacy_h5_format", "save_model_to_hdf5", _saving.save),
    ("keras.src.saving.saving_api", "load_weights", _saving.load_weights),
    ("keras.src.saving.saving_lib", "_load_state", _saving.load_state),
    ("keras.src.legacy.saving.legacy_h5_format", "load_model_from_hdf5", _saving.load_model),
    # In `Strategy.run`, turn numbers of one replica into those of the whole batch.
    ("keras.Loss", "__call__", _replica_view.call_loss),
    ("keras.src.losses.loss", "reduce_weighted_values", _replica_view.reduce_weighted_values),
    ("BaseTrainer", "_aggregate_additional_loss", _replica_view.aggregate_additional_loss),
    ("BaseOptimizer", "add_variable", _variables.add_variable),
    ("BaseOptimizer", "apply", _replica_view.combining),
    ("keras.optimizers.LossScaleOptimizer", "stateless_apply", _replica_view.combining),
    ("keras.optimizers.LossScaleOptimizer", "apply", _replica_view.combining),
    ("keras.random.SeedGenerator", "next", _replica_view.next_seed),
    ("keras.layers.BatchNormalization", "__init__", _replica_view.batch_normalization_init),
    ("keras.layers.BatchNormalization", "_moments", _replica_view.batch_normalization_moments),
    ("keras.layers.BatchNormalization", "call", _replica_view.batch_normalization_call),
)
#: Methods of one more base class of `keras.Model`, before the others; each calls that of a class.
METHODS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    *(("Trainer", name, _models.in_scope) for name in ("fit", "evaluate", "predict")),
    *(("Trainer", f"{kind}_on_batch", _models.in_scope) for kind in PARTS),
    ("BaseTrainer", "_symbolic_build", _models.symbolic_build),
    *(("Trainer", f"make_{kind}_function", partial(_models.make_function, kind)) for kind in PARTS),
    ("Trainer", "_get_jax_state", _models.get_jax_state),
    ("BaseTrainer", "get_metrics_result", _models.get_metrics_result),
)
# On other backends, there is nothing to distribute. Creating a model or variable in a scope raises
# an error.
_REFUSALS = (
    ("keras.src.backend.common.variables.Variable", "__init__", _variables.refuse),
    ("keras.Layer", "__init__", _variables.refuse),
)

_lock = threading.Lock()
_installed = False


def install() -> bool:
    """Adds `METHODS` and replaces the functions in `HOOKS`; returns whether it was to do.

    Raises:
        UnsupportedError: if this version of Keras does not have one of the functions.
    """
    global _installed
    with _lock:
        if _installed:
            return False
        uses_jax = keras.backend.backend() == "jax"
        hooks = HOOKS if uses_jax else _REFUSALS
        # All are found before the first is replaced.
        targets = [(find(owner, name), name, function) for owner, name, function in hooks]
        extra = METHODS if uses_jax else ()
        methods = {name: _hook(find(owner, name), name, run) for owner, name, run in extra}
        for owner, name, function in targets:
            setattr(owner, name, _hook(owner, name, function))
        if uses_jax:
            trainer = type("DistributedTrainer", (_models.Distributed,), methods)
            keras.Model.__bases__ = (trainer, *keras.Model.__bases__)
            keras.callbacks.CallbackList.__new__ = _callbacks.new
        warn_of_untested("keras", keras.__version__)
        _installed = True
        return True


def _hook(owner: object, name: str, function: Callable[..., Any]) -> Any:
    """Returns what replaces a function of Keras, see `HOOKS`."""
    original = vars(owner)[name]
    if isinstance(original, property):
        return function(original)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(original, *args, **kwargs)
        except WorkerMismatchError as error:  # its frames tell nothing to users
            raise error.with_traceback(None) from None

    # Keras reads the arguments of layers from their signature.
    replacement.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return replacement
