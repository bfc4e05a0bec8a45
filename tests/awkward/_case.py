"""What a case is: a small compiled model, and the data that it is trained on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers as kl

#: Three full batches and one of seven rows, which neither two nor three nor four replicas divide.
ROWS, BATCH = 43, 12
#: Passes over the data: state of the first shows in the second.
EPOCHS = 2
CASES: dict[str, "Case"] = {}


@dataclass(frozen=True)
class Case:
    """A model whose numbers under a strategy are compared with those of plain Keras.

    Attributes:
        name: Name of the case.
        kind: File that has it.
        build: Returns the compiled model.
        x: Name of its inputs in `DATA`, or a function that returns them.
        y: Name of its targets, a function, or None.
        fit: Further arguments of `fit`, or a function `(model, x, y) -> arguments`.
        train: Function `(model, x, y) -> history`, for what is more than one `fit`.
        evaluate: Whether the model is evaluated, too.
        predict: Whether it predicts, too.
        twin: The model of plain Keras, where a step that only a strategy has is written otherwise.
        stays: Whether no weight need change.
        rows: Number of rows.
    """

    name: str
    kind: str
    build: Callable[[], Any]
    x: Any = "vectors"
    y: Any = "targets"
    fit: Any = field(default_factory=dict)
    train: Callable[[Any, Any, Any], dict[str, Any]] | None = None
    evaluate: bool = True
    predict: bool = True
    twin: Callable[[], Any] | None = None
    stays: bool = False
    rows: int = ROWS


def add(name: str, kind: str, build: Callable[[], Any], **options: Any) -> None:
    """Adds a case to the registry."""
    assert name not in CASES, name
    CASES[name] = Case(name, kind, build, **options)


def adder(kind: str) -> Callable[..., Callable[[Any], Any]]:
    """Returns a decorator `case(**options)` for functions that build the model of a case."""

    def case(**options: Any) -> Callable[[Any], Any]:
        def register(build: Callable[[], Any]) -> Callable[[], Any]:
            add(build.__name__, kind, build, **options)
            return build

        return register

    return case


def sgd() -> Any:
    """Returns an optimizer whose steps are proportional to the gradient, so that a scale shows."""
    return keras.optimizers.SGD(0.05)


def net(*layers: Any, x: str = "vectors", units: int = 3, activation: str | None = None) -> Any:
    """Returns a network of a kind of input, not compiled, with `layers` in its middle."""
    shape = DATA[x]().shape[1:]
    before = {
        "vectors": [kl.Dense(8, "tanh")],
        "images": [kl.Conv2D(4, 3, padding="same", activation="tanh")],
        "series": [kl.Dense(4, "tanh")],
        "tokens": [kl.Embedding(12, 4)],
    }.get(x, [])
    after = {
        "images": [kl.Flatten()],
        "volumes": [kl.Flatten()],
        "films": [kl.Flatten()],
        "series": [kl.Flatten()],
        "tokens": [kl.Flatten()],
    }.get(x, [])
    inputs = keras.Input(shape, dtype="int32" if x == "tokens" else None)
    return keras.Sequential([inputs, *before, *layers, *after, kl.Dense(units, activation)])


def compiled(model: Any, loss: Any = "mse", optimizer: Any = None, **options: Any) -> Any:
    """Compiles a model with SGD, unless told otherwise, and returns it."""
    model.compile(optimizer or sgd(), loss, **options)
    return model


def _drawn(seed: int, *shape: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.normal(size=(ROWS, *shape)).astype(keras.config.floatx())


def _vectors() -> np.ndarray:
    return _drawn(0, 6)


def _logits() -> np.ndarray:
    return np.sin(_vectors()[:, :3] * 1.5) + 0.5 * _vectors()[:, 3:]


def _tokens() -> np.ndarray:
    random = np.random.default_rng(6)
    tokens = random.integers(1, 12, (ROWS, 7)).astype(np.int32)
    lengths = random.integers(2, 8, ROWS)
    return np.where(np.arange(7) < lengths[:, None], tokens, 0).astype(np.int32)


def _series() -> np.ndarray:
    series = _drawn(3, 6, 4)
    lengths = np.random.default_rng(7).integers(2, 7, ROWS)
    return series * (np.arange(6) < lengths[:, None])[..., None]


def _sequence_labels() -> np.ndarray:
    return np.random.default_rng(8).integers(1, 4, (ROWS, 2)).astype(np.int32)


#: Inputs and targets by name.
DATA: dict[str, Callable[[], np.ndarray]] = {
    "vectors": _vectors,
    "images": lambda: _drawn(1, 6, 6, 2),
    "volumes": lambda: _drawn(2, 4, 4, 4, 1),
    "series": _series,
    "films": lambda: _drawn(4, 3, 5, 5, 2),
    "tokens": _tokens,
    "targets": lambda: _logits().astype(keras.config.floatx()),
    "positive": lambda: np.exp(0.3 * _logits()).astype(keras.config.floatx()),
    "shares": lambda: (np.exp(_logits()) / np.exp(_logits()).sum(1, keepdims=True)).astype(
        keras.config.floatx()
    ),
    "labels": lambda: np.argmax(_logits(), 1)[:, None].astype(np.int32),
    "onehot": lambda: np.eye(3, dtype=keras.config.floatx())[np.argmax(_logits(), 1)],
    "binary": lambda: (_logits()[:, :1] > 0.2).astype(keras.config.floatx()),
    "bits": lambda: (_logits() > 0.1).astype(keras.config.floatx()),
    "signs": lambda: np.sign(_logits()).astype(keras.config.floatx()),
    # Sorted by class, so that a replica's part has one class only.
    "sorted binary": lambda: (np.arange(ROWS) % BATCH < BATCH // 2)[:, None].astype(
        keras.config.floatx()
    ),
    "sequences": lambda: _drawn(5, 6, 3),
    "sequence labels": _sequence_labels,
    "weights": lambda: (
        np.random.default_rng(9).uniform(0.2, 3.0, ROWS).astype(keras.config.floatx())
    ),
}


def data(name: Any, rows: int = ROWS) -> Any:
    """Returns inputs or targets by their name, or by the function that makes them."""
    if name is None:
        return None
    if isinstance(name, tuple):
        return tuple(data(one, rows) for one in name)
    if isinstance(name, dict):
        return {key: data(one, rows) for key, one in name.items()}
    made = name() if callable(name) else DATA[name]()
    return keras.tree.map_structure(lambda array: array[:rows], made)
