"""Trains one model twice, alone and under a strategy, and compares the two."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest

import distributary as dist
from tests.keras_bridge import small


@dataclass(frozen=True)
class Trained:
    """A model after `fit`, with what it was before and what `fit` returned."""

    model: Any
    strategy: dist.Strategy | None
    initial: list[np.ndarray]
    history: dict[str, list[float]]


@pytest.fixture(autouse=True)
def _keras_as_found():
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)
    keras.backend.clear_session(free_memory=False)


class _Drawn(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        return keras.ops.convert_to_tensor(np.random.uniform(-0.6, 0.6, shape), dtype)


@pytest.fixture
def quick_initializers() -> Iterator[None]:
    """Draws weights with NumPy's generator: Keras compiles its initializers for every shape."""
    names = ("glorot_uniform", "orthogonal", "uniform", "_Drawn")
    with keras.saving.custom_object_scope(dict.fromkeys(names, _Drawn)):
        yield


@pytest.fixture
def train(quick_initializers) -> Callable[..., Trained]:
    """Builds a model from a fixed seed, in the scope of a strategy or of none, and fits it.

    `build` returns a compiled model; further keyword arguments are those of `fit`.
    """

    def train(build, x, y=None, *, strategy=None, seed=3, **fit) -> Trained:
        model = _built(build, strategy, seed)
        initial = _values(model)
        history = model.fit(x, y, **{"batch_size": 8, "shuffle": False, "verbose": 0, **fit})
        return Trained(model, strategy, initial, history.history)

    return train


def _built(build: Callable[[], Any], strategy: dist.Strategy | None, seed: int) -> Any:
    # Names count from the start, so that logs have the same keys.
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    with strategy.scope() if strategy else contextlib.nullcontext():
        return build()


@pytest.fixture
def train_in_loop(quick_initializers) -> Callable[..., Any]:
    """Trains a classifier in a loop of one's own, and returns it.

    A batch has at most 8 rows, and the loss of each counts an eighth.
    """

    def train_in_loop(make_model, batches, strategy, make_optimizer=small.momentum):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, optimizer = make_model(), make_optimizer()

        def step(x, y):
            losses_of = keras.losses.sparse_categorical_crossentropy
            loss_of = lambda: keras.ops.sum(losses_of(y, model(x), from_logits=True)) / 8
            return small.descend(optimizer, model.trainable_variables, loss_of)

        for batch in strategy.experimental_distribute_dataset(batches):
            strategy.run(step, args=batch)
        model.optimizer, model.step = optimizer, step
        return model

    return train_in_loop


@pytest.fixture
def train_twice(strategy_of, train) -> Callable[..., tuple[Trained, Trained]]:
    """Like `train`, in plain Keras and under a strategy, by default a `MirroredStrategy`."""

    def train_twice(build, x, y=None, *, strategy=None, num_replicas=2, **fit):
        alone, strategy = train(build, x, y, **fit), strategy or strategy_of(num_replicas)
        return alone, train(build, x, y, strategy=strategy, **fit)

    return train_twice


@pytest.fixture
def assert_same_training() -> Callable[..., None]:
    """Checks that two trainings began and ended with the same weights and logged the same.

    `rtol` is relative to the largest change of a weight and to each logged number. Variables in
    `unchanged` (parts of their path) may end as they began, all others that are trainable must not.
    """

    def assert_same_training(alone, distributed, *, rtol=1e-4, unchanged=()):
        extended = distributed.strategy.extended
        num_devices = len(extended.parameter_devices) * extended.num_logical_devices
        for variable in distributed.model.variables:
            assert len(variable.value.sharding.device_set) == num_devices, variable.path
        _compare_variables(alone, distributed, rtol, unchanged)
        assert distributed.history.keys() == alone.history.keys()
        for key, expected in alone.history.items():
            np.testing.assert_allclose(
                distributed.history[key], expected, rtol=min(rtol, 1e-5), atol=1e-6, err_msg=key
            )

    return assert_same_training


def _compare_variables(alone, distributed, rtol, unchanged) -> None:
    variables = alone.model.variables
    assert [v.path for v in distributed.model.variables] == [v.path for v in variables]
    for index, (variable, expected, actual) in enumerate(
        zip(variables, _values(alone.model), _values(distributed.model), strict=True)
    ):
        before = alone.initial[index]
        np.testing.assert_array_equal(
            distributed.initial[index], before, err_msg=f"{variable.path} before training"
        )
        change = float(np.max(np.abs(expected.astype(np.float64) - before), initial=0))
        if variable.trainable and not any(part in variable.path for part in unchanged):
            assert change > 1e-5, f"{variable.path} was not trained, so it shows nothing"
        rounding = 2e-6 * float(np.max(np.abs(expected), initial=0)) + 1e-7
        np.testing.assert_allclose(
            actual, expected, rtol=0, atol=rtol * change + rounding, err_msg=variable.path
        )


@pytest.fixture
def assert_same_evaluation() -> Callable[..., None]:
    """Checks that `evaluate` and `predict` of two trained models agree."""

    def assert_same_evaluation(alone, distributed, x, y, *, batch_size=8):
        options = {"batch_size": batch_size, "verbose": 0}
        models = alone.model, distributed.model
        expected, actual = (model.evaluate(x, y, **options) for model in models)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
        expected, actual = (model.predict(x, **options) for model in models)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-6)

    return assert_same_evaluation


def _values(model: Any) -> list[np.ndarray]:
    return [np.array(v.value) for v in model.variables]
