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

#: Module and path of each function to replace, and a function from the original to the replacement.
HOOKS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    # Storage of variables.
    ("keras.src.backend.jax.core", "JaxVariable._initialize_layout", _variables.initialize_layout),
    ("keras.src.backend.jax.core", "JaxVariable._initialize", _variables.initialize),
    (
        "keras.src.backend.jax.core",
        "JaxVariable._initialize_with_initializer",
        _variables.initialize_with_initializer,
    ),
    ("keras.src.backend.jax.core", "JaxVariable._direct_assign", _variables.direct_assign),
    ("keras.src.backend.jax.distribution_lib", "distribute_tensor", _variables.distribute_tensor),
    ("keras.src.backend.common.variables", "Variable.value", _variables.value),
    # Models have a strategy and train under it.
    ("keras.src.backend.jax.trainer", "JAXTrainer.__init__", _models.init),
    ("keras.src.trainers.trainer", "Trainer.compile", _models.compile_),
    ("keras.src.backend.jax.trainer", "JAXTrainer.fit", _models.in_scope),
    ("keras.src.backend.jax.trainer", "JAXTrainer.evaluate", _models.in_scope),
    ("keras.src.backend.jax.trainer", "JAXTrainer.predict", _models.in_scope),
    ("keras.src.backend.jax.trainer", "JAXTrainer.train_on_batch", _models.in_scope),
    ("keras.src.backend.jax.trainer", "JAXTrainer.test_on_batch", _models.in_scope),
    ("keras.src.backend.jax.trainer", "JAXTrainer.predict_on_batch", _models.in_scope),
    ("keras.src.backend.jax.trainer", "JAXTrainer.make_train_function", _models.make("train")),
    ("keras.src.backend.jax.trainer", "JAXTrainer.make_test_function", _models.make("test")),
    ("keras.src.backend.jax.trainer", "JAXTrainer.make_predict_function", _models.make("predict")),
    ("keras.src.backend.jax.trainer", "JAXTrainer._get_jax_state", _models.get_jax_state),
    ("keras.src.backend.jax.trainer", "JAXTrainer.jax_state_sync", _models.jax_state_sync),
    ("keras.src.backend.jax.trainer", "JAXEpochIterator._get_iterator", _models.get_iterator),
    ("keras.src.backend.jax.trainer", "_distribute_data", _models.distribute_data),
    ("keras.src.backend.jax.trainer", "callbacks_module", _models.callbacks_module),
    ("keras.src.trainers.data_adapters", "get_data_adapter", _data.get_data_adapter),
    (
        "keras.src.trainers.epoch_iterator",
        "EpochIterator._interrupted_warning",
        _data.interrupted_warning,
    ),
    # Files.
    ("keras.src.saving.saving_lib", "save_model", _saving.save),
    ("keras.src.saving.saving_lib", "save_weights_only", _saving.save),
    ("keras.src.legacy.saving.legacy_h5_format", "save_model_to_hdf5", _saving.save),
    ("keras.src.saving.saving_lib", "get_attr_skipset", _saving.outside_of_strategies),
    ("keras.src.saving.saving_api", "load_weights", _saving.load_weights),
    ("keras.src.saving.saving_api", "load_model", _saving.load_model),
    ("keras.src.callbacks.backup_and_restore", "BackupAndRestore._save_model", _saving.backup),
    ("keras.src.callbacks.backup_and_restore", "BackupAndRestore._load_model", _saving.restore),
    (
        "keras.src.callbacks.backup_and_restore",
        "BackupAndRestore.on_train_end",
        _saving.training_ended,
    ),
    ("keras.src.utils.io_utils", "print_msg", _callbacks.print_msg),
    # Turn numbers of one replica into those of the whole batch.
    ("keras.src.losses.loss", "reduce_values", _losses.reduce_values),
    ("keras.src.losses.loss", "apply_mask", _losses.apply_mask),
    ("keras.src.trainers.trainer", "Trainer.get_metrics_result", _metrics.get_metrics_result),
    ("keras.src.metrics.metric", "Metric.stateless_result", _metrics.stateless_result),
    (
        "keras.src.metrics.reduction_metrics",
        "reduce_to_samplewise_values",
        _metrics.reduce_to_samplewise_values,
    ),
    (
        "keras.src.optimizers.base_optimizer",
        "BaseOptimizer.add_variable",
        _optimizers.add_variable,
    ),
    (
        "keras.src.optimizers.base_optimizer",
        "BaseOptimizer.add_variable_from_reference",
        _optimizers.add_variable_from_reference,
    ),
    (
        "keras.src.optimizers.base_optimizer",
        "BaseOptimizer.stateless_apply",
        _optimizers.stateless_apply,
    ),
    ("keras.src.optimizers.base_optimizer", "BaseOptimizer.apply", _optimizers.apply),
    (
        "keras.src.optimizers.loss_scale_optimizer",
        "LossScaleOptimizer.stateless_apply",
        _optimizers.stateless_apply,
    ),
    (
        "keras.src.optimizers.loss_scale_optimizer",
        "LossScaleOptimizer.apply",
        _optimizers.apply,
    ),
    (
        "keras.src.optimizers.loss_scale_optimizer",
        "LossScaleOptimizer.scale_loss",
        _optimizers.scale_loss,
    ),
    ("keras.src.random.seed_generator", "SeedGenerator.next", _layers.next_seed),
    (
        "keras.src.layers.normalization.batch_normalization",
        "BatchNormalization.__init__",
        _layers.batch_normalization_init,
    ),
    (
        "keras.src.layers.normalization.batch_normalization",
        "BatchNormalization._moments",
        _layers.batch_normalization_moments,
    ),
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
        if keras.backend.backend() != "jax":
            # There is nothing to distribute. Creating a model or variable in a scope raises an
            # error.
            hooks: Any = (
                ("keras.src.backend.common.variables", "Variable.__init__", _variables.refuse),
                ("keras.src.layers.layer", "Layer.__init__", _variables.refuse),
            )
        else:
            hooks = HOOKS
        targets = [(*find(module, path), make) for module, path, make in hooks]
        for owner, name, make in targets:
            _replace(owner, name, make)
        if hooks is HOOKS:
            # Keras' trainers inherit this from another class that models have.
            _models.store_state_untracked(
                importlib.import_module("keras.src.backend.jax.trainer").JAXTrainer
            )
        _installed = True


def find(module: str, path: str) -> tuple[Any, str]:
    """Returns the object that has the last part of `path` as its own attribute, and that part.

    Raises:
        UnsupportedError: if this version of Keras does not have it.
    """
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        vars(owner)[name]
    except (ImportError, AttributeError, KeyError) as error:
        first, beyond = (".".join(map(str, version)) for version in SUPPORTED)
        raise UnsupportedError(
            f"Keras {keras.__version__} has no {module}.{path}, into which distributary hooks."
            f" Install a supported version: pip install 'keras>={first},<{beyond}'."
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
