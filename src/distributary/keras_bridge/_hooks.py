"""The only module that hooks into Keras.

Keras has no public way to run its trainer under another strategy. So `install` replaces the
functions in `HOOKS`, once per process. Every replacement calls the original unless a strategy is
involved, so models without a strategy work as they do without distributary.

`SUPPORTED` has the supported versions of Keras. `tests/keras_bridge/test_hooks.py` fails if a new
version moves one of the functions.
"""

import functools
import importlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

import keras

from distributary.errors import UnsupportedError
from distributary.keras_bridge import (
    _callbacks,
    _data,
    _layers,
    _losses,
    _metrics,
    _models,
    _optimizers,
    _saving,
    _variables,
)

#: First supported version of Keras, and the first one that is not supported.
SUPPORTED = ((3, 15), (3, 16))

#: Module in `keras.src` and path of each function to replace, and a function from the original to
#: the replacement.
HOOKS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    # Values of variables. `Variable` is another class with Flax NNX.
    ("backend.jax.core", "Variable._direct_assign", _variables.direct_assign),
    ("backend.common.variables", "Variable.value", _variables.value),
    # Models have a strategy and train under it.
    ("backend.jax.trainer", "JAXTrainer.__init__", _models.init),
    ("trainers.trainer", "Trainer.compile", _models.compile_),
    ("backend.jax.trainer", "JAXTrainer.fit", _models.in_scope),
    ("backend.jax.trainer", "JAXTrainer.evaluate", _models.in_scope),
    ("backend.jax.trainer", "JAXTrainer.predict", _models.in_scope),
    ("backend.jax.trainer", "JAXTrainer.train_on_batch", _models.in_scope),
    ("backend.jax.trainer", "JAXTrainer.test_on_batch", _models.in_scope),
    ("backend.jax.trainer", "JAXTrainer.predict_on_batch", _models.in_scope),
    ("backend.jax.trainer", "JAXTrainer._make_function", _models.make_function),
    ("backend.jax.trainer", "JAXTrainer._get_jax_state", _models.get_jax_state),
    ("backend.jax.trainer", "JAXEpochIterator._get_iterator", _models.get_iterator),
    ("backend.jax.trainer", "_distribute_data", _models.distribute_data),
    ("callbacks.callback_list", "CallbackList.__init__", _callbacks.init),
    ("trainers.data_adapters", "get_data_adapter", _data.get_data_adapter),
    ("trainers.epoch_iterator", "EpochIterator._interrupted_warning", _data.interrupted_warning),
    # Files.
    ("saving.saving_lib", "save_model", _saving.save),
    ("saving.saving_lib", "save_weights_only", _saving.save),
    ("legacy.saving.legacy_h5_format", "save_model_to_hdf5", _saving.save),
    ("saving.saving_api", "load_weights", _saving.load_weights),
    ("saving.saving_lib", "_load_state", _saving.load_state),
    ("legacy.saving.legacy_h5_format", "load_model_from_hdf5", _saving.load_model),
    ("callbacks.backup_and_restore", "BackupAndRestore._save_model", _saving.backup),
    ("callbacks.backup_and_restore", "BackupAndRestore._load_model", _saving.restore),
    ("callbacks.backup_and_restore", "BackupAndRestore.on_train_end", _saving.training_ended),
    # Turn numbers of one replica into those of the whole batch.
    ("losses.loss", "reduce_weighted_values", _losses.reduce_weighted_values),
    ("trainers.trainer", "Trainer.get_metrics_result", _metrics.get_metrics_result),
    ("metrics.metric", "Metric.stateless_result", _metrics.stateless_result),
    (
        "metrics.reduction_metrics",
        "reduce_to_samplewise_values",
        _metrics.reduce_to_samplewise_values,
    ),
    ("optimizers.base_optimizer", "BaseOptimizer.add_variable", _optimizers.add_variable),
    ("optimizers.base_optimizer", "BaseOptimizer.stateless_apply", _optimizers.combining),
    ("optimizers.base_optimizer", "BaseOptimizer.apply", _optimizers.combining),
    (
        "optimizers.loss_scale_optimizer",
        "LossScaleOptimizer.stateless_apply",
        _optimizers.combining,
    ),
    ("optimizers.loss_scale_optimizer", "LossScaleOptimizer.apply", _optimizers.combining),
    ("optimizers.loss_scale_optimizer", "LossScaleOptimizer.scale_loss", _optimizers.scale_loss),
    ("random.seed_generator", "SeedGenerator.next", _layers.next_seed),
    (
        "layers.normalization.batch_normalization",
        "BatchNormalization.__init__",
        _layers.batch_normalization_init,
    ),
    (
        "layers.normalization.batch_normalization",
        "BatchNormalization._moments",
        _layers.batch_normalization_moments,
    ),
)
# On other backends, there is nothing to distribute. Creating a model or variable in a scope raises
# an error.
_REFUSALS = (
    ("backend.common.variables", "Variable.__init__", _variables.refuse),
    ("layers.layer", "Layer.__init__", _variables.refuse),
)

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Replaces the functions in `HOOKS`; only the first call does anything.

    Raises:
        UnsupportedError: if this version of Keras does not have one of the functions.
    """
    global _installed
    if _installed:
        return
    with _lock:
        if _installed:
            return
        uses_jax = keras.backend.backend() == "jax"
        hooks = HOOKS if uses_jax else _REFUSALS
        targets = [(*find(module, path), make) for module, path, make in hooks]
        for owner, name, make in targets:
            _replace(owner, name, make)
        if uses_jax:
            # Not a replacement, because Keras' trainer inherits this from another class.
            _models.store_state_untracked(
                importlib.import_module("keras.src.backend.jax.trainer").JAXTrainer
            )
        _installed = True


def find(module: str, path: str) -> tuple[Any, str]:
    """Returns the object that has the last part of `path` as its own attribute, and that part.

    Args:
        module: A module in `keras.src`.
        path: An attribute of the module, or of a class in it.

    Raises:
        UnsupportedError: if this version of Keras does not have it.
    """
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(f"keras.src.{module}")
        for parent in parents:
            owner = getattr(owner, parent)
        vars(owner)[name]
    except (ImportError, AttributeError, KeyError) as error:
        first, beyond = (".".join(map(str, version)) for version in SUPPORTED)
        raise UnsupportedError(
            f"Keras {keras.__version__} has no keras.src.{module}.{path}, into which distributary"
            f" hooks. Install a supported version: pip install 'keras>={first},<{beyond}'."
        ) from error
    return owner, name


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = vars(owner)[name]
    replacement = make(original)
    if inspect.isfunction(original):
        functools.update_wrapper(replacement, original)
        # Keras reads the arguments of layers from their signature.
        replacement.__signature__ = inspect.signature(original)
    setattr(owner, name, replacement)
