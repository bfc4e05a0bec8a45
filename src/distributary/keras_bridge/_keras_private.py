"""The only module that knows where Keras keeps what has no public name.

Keras moves such classes and functions between its modules, and renames them. So this module finds
them through public classes where it can. `tests/keras_bridge/test_hooks.py` names what has gone.
"""

import functools
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from distributary.devices import no_private_name, private

#: Classes without a public name, each under a name of ours: a public class that has it as a base,
#: or is it, and a method that it defines.
CLASSES = {
    # `keras.Variable` is another class with Flax NNX.
    "StoredVariable": ("keras.Variable", "_direct_assign"),
    "Trainer": ("keras.Model", "train_step"),
    "BaseTrainer": ("keras.Model", "compute_loss"),
    "BaseOptimizer": ("keras.optimizers.Optimizer", "stateless_apply"),
}

saving_api = private("keras.src.saving.saving_api")
saving_lib = private("keras.src.saving.saving_lib")
file_utils = private("keras.src.utils.file_utils")
array_slicing = private("keras.src.trainers.data_adapters.array_slicing")
apply_mask = private("keras.src.losses.loss:apply_mask")
mask_of = private("keras.src.backend.common.masking:get_keras_mask")
class_weight_to_sample_weights = private(
    "keras.src.trainers.data_adapters.data_adapter_utils:class_weight_to_sample_weights"
)
to_snake_case = private("keras.src.utils.naming:to_snake_case")
AutocastScope: Any = private("keras.src.backend.common.variables:AutocastScope")
get_stateless_scope = private("keras.src.backend.common.stateless_scope:get_stateless_scope")
initialize_all_variables = private("keras.src.backend.common.variables:initialize_all_variables")
current_path = private("keras.src.backend.common.name_scope:current_path")
get_global_attribute = private("keras.src.backend.common.global_state:get_global_attribute")
set_global_attribute = private("keras.src.backend.common.global_state:set_global_attribute")
in_stateless_scope = private("keras.src.backend.common.stateless_scope:in_stateless_scope")
in_symbolic_scope = private("keras.src.backend.common.symbolic_scope:in_symbolic_scope")
#: In place of TensorFlow's module, which Keras imports on first use.
lazy_tensorflow: Any = private("keras.src.utils.module_utils:tensorflow")
DataAdapter: Any = private("keras.src.trainers.data_adapters.data_adapter:DataAdapter")
ArrayDataAdapter = private("keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter")
GeneratorDataAdapter = private(
    "keras.src.trainers.data_adapters.generator_data_adapter:GeneratorDataAdapter"
)


def find(owner: str, name: str) -> Any:
    """Returns the module or class that has `name` as its own attribute.

    Args:
        owner: A module, a public class, or one of `CLASSES`.
        name: The attribute.

    Raises:
        UnsupportedError: if this version of Keras does not have it.
    """
    public, method = CLASSES.get(owner, (owner, None))
    try:
        target: Any = pkgutil.resolve_name(public)
        if method is not None:
            target = next(base for base in inspect.getmro(target) if method in vars(base))
        vars(target)[name]
    except (ImportError, AttributeError, KeyError, StopIteration) as error:
        raise no_private_name(f"{public}.{name}") from error
    return target


#: Keeps what it has found: every call of an optimizer asks.
signature_of = functools.cache(inspect.signature)


def current_layer() -> Any:
    """Returns the layer, or other object, that is creating a variable; None if there is none."""
    stack = get_global_attribute("name_scope_stack")
    return stack[-1].caller if stack else None


def sync_state(model: Any) -> None:
    """Stores the state of a model in its variables; during `fit`, it may be elsewhere."""
    if hasattr(model, "state_sync"):
        model.state_sync()
    elif hasattr(model, "jax_state_sync"):  # before Keras 3.16
        model.jax_state_sync()


def replace_shape_inference(function: Callable[..., Any]) -> None:
    """Lets a function infer the shapes of layers; it gets Keras' own first, then its arguments."""
    owner = find("keras.src.backend", "compute_output_spec")
    owner.compute_output_spec = functools.partial(function, owner.compute_output_spec)
