"""Parts of Keras that need TensorFlow, without it: in `tf.keras`, and in Keras beside `tf`."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary import keras_bridge
from distributary._summaries import Summaries, has_tensorflow
from distributary.context import get_strategy
from distributary.data import DistributedInput
from distributary.errors import check_type
from distributary.keras_bridge import import_keras
from distributary.options import InputOptions
from distributary.tensorflow import _arrays, _math, _random, _text_layers
from distributary.tensorflow._operations import (
    REQUIRED,
    Operation,
    array,
    keras_of_tensorflow,
    named,
    operations,
    taking,
)

_keras = import_keras()


class TensorBoard(_keras.callbacks.TensorBoard):  # type: ignore[name-defined]
    """Writes with tensorboardX where TensorFlow is missing, also for a model without a strategy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not has_tensorflow():
            self._summary_module = Summaries()
            self.write_graph = False


@_keras.saving.register_keras_serializable("distributary")
class ConstantInitializer(_keras.initializers.Initializer):  # type: ignore[name-defined]
    """Fills an array with as many numbers as it has places."""

    def __init__(self, value: list[Any]) -> None:
        self.value = value

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> Any:
        """Returns the array."""
        return _arrays.constant(self.value, dtype, tuple(shape))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of this initializer."""
        return {"value": self.value}


#: What replaces names of Keras, by the path of their module.
PARTS: Final[dict[str, dict[str, Any]]] = {
    "": named(_text_layers, "Input"),
    ".callbacks": {"TensorBoard": TensorBoard},
    ".layers": named(_text_layers, "Input IntegerLookup StringLookup TextVectorization"),
}


def complete(tensorflow: ModuleType) -> None:
    """Gives Keras these parts, and `tf` for its functions that make datasets, if it has no other.

    Layers may compute shapes from `tf.shape` of open sizes. Models get what steps that were written
    for Keras 2 use.

    Source: `keras.utils.image_dataset_from_directory` and others call TensorFlow.
    """
    keras_bridge.replace_shape_inference(_output_spec)
    _keras.Model.compiled_loss = compiled_loss
    _keras.Model.compiled_metrics = property(compiled_metrics)
    _keras.Model.distribute_strategy = property(distribute_strategy)
    if has_tensorflow():
        return
    keras_bridge.lazy_tensorflow.module = tensorflow
    for path, parts in PARTS.items():
        vars(sys.modules[f"keras{path}"]).update(parts)


def compiled_loss(self: Any, y: Any, y_pred: Any, sample_weight: Any = None, *rest: object) -> Any:
    """Returns the model's `compute_loss`."""
    return self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)


def compiled_metrics(self: Any) -> Any:
    """Returns an object that updates all metrics of a model; a mean is that of predictions."""

    def update_state(y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        for metric in self.metrics:
            values = (y_pred,) if type(metric) is _keras.metrics.Mean else (y, y_pred)
            metric.update_state(*values, sample_weight=sample_weight)

    return SimpleNamespace(update_state=update_state)


def distribute_strategy(self: Any) -> Any:
    """Returns the strategy of a model; without one, the current strategy."""
    return keras_bridge.strategy_of(self) or get_strategy()


# Sizes that stand for open ones; models mostly halve, split or pool them.
_SIZES = (96, 192)


def _output_spec(
    original: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Infers shapes also if JAX cannot with open sizes, such as those in values of `tf.shape`.

    The function then runs with two numbers in place of open sizes, and what differs is open.
    """
    try:
        return original(fn, *args, **kwargs)
    except Exception:
        leaves = _keras.tree.flatten((args, kwargs))
        if any(isinstance(x, _keras.KerasTensor) and None in x.shape for x in leaves):
            with contextlib.suppress(Exception):
                specs = (_with_size(size, original, fn, args, kwargs) for size in _SIZES)
                return _keras.tree.map_structure(_in_common, *specs)
        raise


def _with_size(size: int, original: Callable[..., Any], fn: Any, args: Any, kwargs: Any) -> Any:
    def closed(x: Any) -> Any:
        if not isinstance(x, _keras.KerasTensor):
            return x
        shape = [size if dim is None else dim for dim in x.shape]
        return _keras.KerasTensor(shape, x.dtype, x.sparse)

    args, kwargs = _keras.tree.map_structure(closed, (args, kwargs))
    return original(fn, *args, **kwargs)


def _in_common(a: Any, b: Any) -> Any:
    if not isinstance(a, _keras.KerasTensor):
        return a
    shape = [i if i == j else None for i, j in zip(a.shape, b.shape, strict=True)]
    return _keras.KerasTensor(shape, a.dtype, a.sparse)


# `tf.keras.utils.experimental.DatasetCreator`, with which one `fit` serves every strategy.


@final
@dataclass(frozen=True)
class DatasetCreator(DistributedInput):
    """A function that makes the dataset of each worker, for `fit` and `evaluate`.

    Args:
        dataset_fn: Function from an `InputContext` to a dataset of per-replica batches.
        input_options: Options for distributing the dataset.

    Source: `tf.keras.utils.experimental.DatasetCreator`.
    """

    dataset_fn: Callable[..., Any]
    input_options: InputOptions | None = None

    def __post_init__(self) -> None:
        expected = "a function from an InputContext to a dataset"
        check_type("DatasetCreator: dataset_fn", self.dataset_fn, Callable, expected)

    def __call__(self) -> Any:
        """Distributes the dataset with the current strategy, in whose scope `fit` calls this."""
        strategy = get_strategy()
        dataset = strategy.distribute_datasets_from_function(self.dataset_fn, self.input_options)
        remote = strategy.extended.remote_steps
        return dataset if remote is None else remote.per_worker_dataset(strategy, dataset)


# `tf.keras.backend`: its functions that have no other name; the others are in the tables.


def batch_get_value(tensors: Iterable[Any]) -> list[np.ndarray]:
    """`tf.keras.backend.batch_get_value`: copies as NumPy arrays."""
    return [get_value(tensor) for tensor in tensors]


def batch_set_value(tuples: Iterable[tuple[Any, Any]]) -> None:
    """`tf.keras.backend.batch_set_value`: assigns values to variables."""
    for variable, value in tuples:
        set_value(variable, value)


def concatenate(tensors: list[Array], axis: int = -1) -> Array:
    """`tf.keras.backend.concatenate`."""
    return _arrays.concat(tensors, axis)


def count_params(x: Array) -> int:
    """`tf.keras.backend.count_params`: the number of elements."""
    return x.size


def dtype(x: Array) -> str:
    """`tf.keras.backend.dtype`: the name of the dtype."""
    return x.dtype.name


def get_value(x: Any) -> np.ndarray:
    """`tf.keras.backend.get_value`: a copy as a NumPy array, a number for a scalar."""
    return np.array(array(x))[()]


def set_value(x: Any, value: ArrayLike) -> None:
    """`tf.keras.backend.set_value`: assigns a value to a variable, such as a learning rate."""
    x.assign(np.asarray(value, _keras.backend.standardize_dtype(x.dtype)))


def update(x: Any, new_x: Array) -> Any:
    """`tf.keras.backend.update`."""
    return x.assign(new_x)


def update_add(x: Any, increment: Array) -> Any:
    """`tf.keras.backend.update_add`."""
    return x.assign_add(increment)


def update_sub(x: Any, decrement: Array) -> Any:
    """`tf.keras.backend.update_sub`."""
    return x.assign_sub(decrement)


def variable(value: Array, dtype: DTypeLike | None = None) -> Any:
    """`tf.keras.backend.variable`: a Keras variable with `value`."""
    return _keras.Variable(value, dtype=dtype)


def permute_dimensions(x: ArrayLike, pattern: Sequence[int]) -> Array:
    """`tf.keras.backend.permute_dimensions`."""
    return jnp.transpose(x, pattern)


def relu(
    x: ArrayLike, alpha: float = 0.0, max_value: float | None = None, threshold: float = 0.0
) -> Array:
    """`tf.keras.backend.relu`."""
    return _keras.activations.relu(x, alpha, max_value, threshold)


def tile(x: ArrayLike, n: Sequence[int]) -> Array:
    """`tf.keras.backend.tile`."""
    return jnp.tile(x, n)


_SAME = (
    "abs cos equal exp greater greater_equal less less_equal maximum minimum not_equal round"
    " sigmoid sign sin sqrt square tanh"
)


def backend_names() -> dict[str, Any]:
    """Returns the names of `tf.keras.backend`."""
    return {
        **named(
            _keras.backend,
            "backend clear_session epsilon floatx get_uid image_data_format is_keras_tensor"
            " result_type set_epsilon set_floatx set_image_data_format standardize_dtype",
        ),
        **{name: _math.EVERYWHERE[name] for name in _SAME.split()},
        **taking(
            named(jnp, "log ndim transpose")
            | {
                "flatten": jnp.ravel,
                "hard_sigmoid": _keras.ops.hard_sigmoid,
                "int_shape": jnp.shape,
                "softplus": jax.nn.softplus,
                "softsign": jax.nn.soft_sign,
            },
            "x",
        ),
        **taking(
            named(jnp, "all any max mean min prod std sum var"), "x", axis=None, keepdims=False
        ),
        **taking(named(jnp, "argmax argmin expand_dims") | named(jax.nn, "softmax"), "x", axis=-1),
        **taking(named(jnp, "cumprod cumsum stack"), "x", axis=0),
        **taking(named(jnp, "ones_like zeros_like"), "x", dtype=None),
        **taking(named(jnp, "ones zeros"), shape=REQUIRED, dtype=None),
        **taking(
            named(_keras.ops, "categorical_crossentropy sparse_categorical_crossentropy"),
            "target",
            "output",
            from_logits=False,
            axis=-1,
        ),
        "arange": Operation(jnp.arange, "start", stop=None, step=1, dtype="int32"),
        "binary_crossentropy": Operation(
            _keras.ops.binary_crossentropy, "target", "output", from_logits=False
        ),
        "clip": Operation(jnp.clip, "x", "min_value", "max_value"),
        "cast_to_floatx": keras_of_tensorflow().backend.cast_to_floatx,
        "dot": Operation(jnp.dot, "x", "y"),
        "elu": Operation(jax.nn.elu, "x", alpha=1.0),
        "eye": Operation(jnp.eye, "size", dtype=None),
        "one_hot": Operation(jax.nn.one_hot, "indices", num_classes=REQUIRED),
        "pow": Operation(jnp.power, "x", "a"),
        "repeat_elements": Operation(jnp.repeat, "x", "rep", "axis"),
        "reshape": Operation(jnp.reshape, "x", shape=REQUIRED),
        "squeeze": Operation(jnp.squeeze, "x", axis=REQUIRED),
        "stop_gradient": Operation(jax.lax.stop_gradient, "variables"),
        "switch": Operation(jnp.where, "condition", "then_expression", "else_expression"),
        **operations(
            sys.modules[__name__],
            "concatenate count_params dtype get_value permute_dimensions relu set_value tile update"
            " update_add update_sub variable",
        ),
        **operations(_arrays, "cast constant shape"),
        **operations(_math, "l2_normalize"),
        "batch_get_value": batch_get_value,
        "batch_set_value": batch_set_value,
        "random_normal": Operation(_random.normal),
        "random_uniform": Operation(_random.uniform),
        "truncated_normal": Operation(_random.truncated_normal),
    }
