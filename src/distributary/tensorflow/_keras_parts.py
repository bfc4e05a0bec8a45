"""Parts of Keras that need TensorFlow, without it: in `tf.keras`, and in Keras beside `tf`."""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, final

from distributary.context import get_strategy
from distributary.data import DistributedInput
from distributary.errors import check_type
from distributary.keras_bridge import (
    Summaries,
    has_tensorflow,
    import_keras,
    lazy_tensorflow,
    replace_shape_inference,
)
from distributary.options import InputOptions
from distributary.tensorflow import _text_layers
from distributary.tensorflow._arrays import constant
from distributary.tensorflow._operations import named

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
        return constant(self.value, dtype, tuple(shape))

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

    Layers may compute shapes from `tf.shape` of open sizes.

    Source: `keras.utils.image_dataset_from_directory` and others call TensorFlow.
    """
    replace_shape_inference(_output_spec)
    if has_tensorflow():
        return
    lazy_tensorflow.module = tensorflow
    for path, parts in PARTS.items():
        vars(sys.modules[f"keras{path}"]).update(parts)


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
