"""What a model that somebody else wrote needs to be trained here: sizes, inputs, targets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROWS = 21  # two batches of eight, and an uneven one of five
BATCH = 8
Input = Callable[[np.random.Generator, tuple[int, ...]], Any]


@dataclass(frozen=True)
class Case:
    """A Keras model.

    Attributes:
        name: Name of the row.
        package: Distribution that ships the model.
        build: Returns the model, not compiled. Sizes are small.
        sizes: Values of the dims that inputs leave open, by name of the input.
        inputs: Functions `(random, shape) -> array` of inputs that take only some values.
        vocabulary: Integers of other inputs are smaller.
        classes: Number of classes, for softmax outputs; 0 for targets like the outputs.
        loss: For targets like the outputs.
        compile: Further arguments of `compile`.
        optimizer: Returns the optimizer.
        batch: Size of a batch.
        amplifies: The model amplifies rounding so much that it is compared in float64.
        own_loss: The model computes its loss itself: there are no targets.
        after: Called with the trained model, returns arrays to be compared, too.
    """

    name: str
    package: str
    build: Callable[[], Any]
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: dict[str, Input] = field(default_factory=dict)
    vocabulary: int = 16
    classes: int = 0
    loss: Any = "mse"
    compile: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[], Any] | None = None
    batch: int = BATCH
    amplifies: bool = False
    own_loss: bool = False
    after: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Loop:
    """A model and an optimizer that work on arrays, trained by a custom loop.

    Attributes:
        name: Name of the row.
        package: Distribution that ships the model or the optimizer.
        initial: Returns the parameters, a tree of arrays.
        loss: Function `(parameters, x, y) -> sum of the rows' losses`.
        optimizer: Returns the optax transformation.
        x: Function `(random) -> inputs`.
        y: Function `(random) -> targets`.
    """

    name: str
    package: str
    initial: Callable[[], Any]
    loss: Callable[[Any, Any, Any], Any]
    optimizer: Callable[[], Any]
    x: Callable[[np.random.Generator], Any]
    y: Callable[[np.random.Generator], Any]


def data_of(model: Any, case: Case, seed: int = 0) -> Any:
    """Returns inputs for a functional model, in its structure."""
    import keras

    random = np.random.default_rng(seed)

    def array(tensor: Any) -> np.ndarray:
        name, dtype = tensor.name, keras.backend.standardize_dtype(tensor.dtype)
        given = case.sizes.get(name, ())
        shape = (ROWS, *(given or _closed(tensor.shape[1:])))
        if name in case.inputs:
            return np.asarray(case.inputs[name](random, shape), dtype)
        if "mask" in name:
            lengths = random.integers(max(1, shape[1] // 2), shape[1] + 1, ROWS)
            mask = np.arange(shape[1]) < lengths[:, None]
            return np.broadcast_to(mask.reshape(*mask.shape, *[1] * (len(shape) - 2)),
                                   shape).astype(dtype)  # fmt: skip
        if "segment" in name:
            return random.integers(0, 2, shape).astype(dtype)
        if "int" in dtype or "token_ids" in name:
            return random.integers(1, case.vocabulary, shape).astype(dtype)
        if dtype == "bool":
            return random.integers(0, 2, shape).astype(bool)
        return random.normal(size=shape).astype(dtype)

    return keras.tree.map_structure(array, model.input)


def _closed(shape: Sequence[int | None]) -> tuple[int, ...]:
    """Returns the shape with sizes for its open dims: those of a small image or short text."""
    size = 32 if len(shape) >= 3 else 8
    return tuple(size if dim is None else dim for dim in shape)
