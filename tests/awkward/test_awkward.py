"""A selection of the cases; tests/nightly/awkward.py runs all of them, in more settings."""

import numpy as np
import pytest

from tests.awkward._all import CASES
from tests.awkward._run import TOLERANCE, difference, train

_SELECTION = {
    "losses": ["clip", "median", "scan_over_rows", "fixed_key", "whitened_by_eigenvectors",
               "ranks_by_callback", "branch_on_mean"],
    "layers": ["times_position", "expert_capacity", "batch_normalization_of_images",
               "largest_of_neighbors"],
    "state": ["running_maximum", "queue"],
    "random": ["dropout", "random_flip"],
    "metrics": ["function_correlation", "class_welford"],
    "optimizers": ["own_noise_of_norm", "loss_scale_of_one_row", "schedule_cosine_decay",
                   "several_optimizers"],
    "steps": ["clips_by_norm", "sharpness_aware", "momentum_contrast", "own_predict_step",
              "own_test_step", "as_in_the_guide", "compute_metrics_of_batch", "two_steps_in_one"],
    "replicas": ["gathered_rows", "tape_clips"],
    "models": ["two_outputs"],
    "fit": ["weights_of_a_batch_are_zero", "batches_of_other_sizes"],
}  # fmt: skip
_NAMES = [name for names in _SELECTION.values() for name in names]


@pytest.mark.parametrize("name", _NAMES)
def test_two_replicas_have_the_numbers_of_one_device(name, strategy_of):
    alone = train(CASES[name], quick=True)

    distributed = train(CASES[name], strategy_of(2), quick=True)

    found = difference(alone, distributed)
    assert found.relative <= TOLERANCE, found.where


def test_the_selection_has_cases_of_every_kind():
    assert {case.kind: True for case in CASES.values()}.keys() == _SELECTION.keys()
    for kind, names in _SELECTION.items():
        assert {CASES[name].kind for name in names} == {kind}


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ({"a": np.array([2.0, 1.0])}, 0.0),
        ({"a": np.array([2.0, 1.5])}, 0.25),
        ({"a": np.array([2.0])}, np.inf),
        ({"a": np.array([np.nan, 1.0])}, np.inf),
        ({"b": np.array([2.0, 1.0])}, np.inf),
    ],
    ids=["equal", "another value", "another shape", "not a number", "another name"],
)
def test_a_difference_is_relative_to_the_largest_value(actual, expected):
    assert difference({"a": np.array([2.0, 1.0])}, actual).relative == expected
