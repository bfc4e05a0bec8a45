"""Trains a case, alone or under a strategy, and compares all that it returned."""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from tests.awkward._case import BATCH, EPOCHS, Case, data

#: Largest difference between two results, relative to the largest value of an array.
TOLERANCE = 2e-5
# Values below it count as that large: what is left of numbers that cancel has no digits to compare.
_SMALLEST = 0.05
Results = dict[str, np.ndarray]


class Difference(NamedTuple):
    """How far two results are apart, and where."""

    relative: float
    where: str


def train(
    case: Case,
    strategy: Any = None,
    *,
    steps_per_execution: int = 1,
    quick: bool = False,
    rounding: int | None = None,
    **options: Any,
) -> Results:
    """Trains, evaluates and predicts with the model of a case.

    Args:
        case: The case.
        strategy: The strategy in whose scope the model is made, or None for plain Keras.
        steps_per_execution: Steps in one program.
        quick: Evaluates and predicts with one batch only, that no number of replicas divides.
        rounding: Number of a draw of signs: weights begin a unit of their last place away.
        **options: Further arguments of `fit`.

    Returns:
        Arrays by name: what `fit` logged, what `evaluate` and `predict` returned, the variables of
        the model and of its optimizer.
    """
    policy = keras.config.dtype_policy()
    # Names count from the start, so that logs have the same keys.
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = (case.twin if case.twin and strategy is None else case.build)()
        if steps_per_execution > 1:
            model.steps_per_execution = steps_per_execution
        return _results(case, model, quick, rounding, options)
    finally:
        keras.config.set_dtype_policy(policy)


def _results(
    case: Case, model: Any, quick: bool, rounding: int | None, options: dict[str, Any]
) -> Results:
    x, y = data(case.x, case.rows), data(case.y, case.rows)
    if not model.built:
        model(jax.tree.map(lambda array: array[:2], x))
    if rounding is not None:
        _change_a_little(model, rounding)
    trained = list(model.trainable_variables)
    before = [np.array(v) for v in trained]
    if case.train:
        history = case.train(model, x, y)
    else:
        given = case.fit(model, x, y) if callable(case.fit) else case.fit
        given = {"batch_size": BATCH, "epochs": EPOCHS, **given, **options}
        given = {"x": x, "y": y, "verbose": 0, "shuffle": False, **given}
        history = model.fit(**{k: v for k, v in given.items() if v is not None}).history
    results = {f"history/{key}": np.asarray(value, float) for key, value in history.items()}
    after = [np.array(v) for v in trained]
    finite = all(np.isfinite(value).all() for value in after)
    if not case.stays and not (finite and _largest_change(before, after) > 1e-4):
        raise AssertionError(f"{case.name}: fit changed no weight, or to NaN, so it shows nothing")
    # Weights may share arrays with averages of them, which Keras gives away to evaluate.
    for number, variable in enumerate(model.optimizer.variables if model.optimizer else ()):
        results[f"optimizer/{number} {variable.path}"] = _as_array(variable)
    if quick:
        x, y = jax.tree.map(lambda array: array[:7], (x, y))
    if case.evaluate:
        logs = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
        results |= {f"evaluate/{key}": np.asarray(value, float) for key, value in logs.items()}
    if case.predict:
        for path, leaf in jax.tree.leaves_with_path(model.predict(x, batch_size=BATCH, verbose=0)):
            results[f"predict{jax.tree_util.keystr(path)}"] = np.asarray(leaf)
    for number, variable in enumerate(model.variables):
        results[f"variables/{number} {variable.path}"] = _as_array(variable)
    return results


def _as_array(variable: Any) -> np.ndarray:
    value = variable.numpy() if hasattr(variable, "numpy") else np.asarray(variable)
    return np.asarray(value, bool if value.dtype == bool else float)


def _largest_change(before: list[np.ndarray], after: list[np.ndarray]) -> float:
    pairs = zip(before, after, strict=True)
    changes = [np.max(np.abs(np.asarray(b, float) - a), initial=0) for b, a in pairs]
    return float(max(changes, default=0))


def _change_a_little(model: Any, number: int) -> None:
    random = np.random.default_rng(number)
    for variable in model.trainable_variables:
        value = np.array(variable)
        eps = max(float(jnp.finfo(dtype).eps) for dtype in (value.dtype, model.compute_dtype))
        by = 1 + eps * random.choice([-1.0, 1.0], value.shape)
        variable.assign((np.asarray(value, float) * by).astype(value.dtype))


def difference(expected: Results, actual: Results) -> Difference:
    """Returns the largest difference of two results, relative to the largest value of an array."""
    if expected.keys() != actual.keys():
        return Difference(float("inf"), f"other names: {sorted(expected.keys() ^ actual.keys())}")
    worst = Difference(0.0, "")
    for name, value in expected.items():
        found = _distance(np.asarray(value, float), np.asarray(actual[name], float))
        if found > worst.relative:
            worst = Difference(found, name)
    return worst


def _distance(expected: np.ndarray, actual: np.ndarray) -> float:
    if expected.shape != actual.shape:
        return float("inf")
    same = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
    if same.all():
        return 0.0
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(expected - actual))
    size = np.max(np.abs(expected), initial=_SMALLEST, where=np.isfinite(expected))
    return float("inf") if np.isnan(gap).any() else float(np.max(gap) / size)


def rounding_of(case: Case, expected: Results, found: float, **options: Any) -> float:
    """Returns how far plain Keras is from itself if its weights begin a rounding away.

    Args:
        case: The case.
        expected: What `train` returned for it.
        found: The difference that rounding may explain; what is far from it is not drawn again.
        **options: Those with which it did.
    """
    largest = 0.0
    for number in range(3):
        run = train(case, rounding=number, **options)
        largest = max(largest, difference(expected, run).relative)
        if not found / 100 < largest < found:
            break
    return largest
