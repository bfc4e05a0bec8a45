"""A selection of the cases; tests/nightly/awkward.py runs all of them, in more settings."""

import numpy as np
import pytest

import distributary as dist
from tests.awkward._all import CASES
from tests.awkward._run import TOLERANCE, difference, train

_SELECTION = {
    "losses": ["clip", "median", "scan_over_rows", "fixed_key", "whitened_by_eigenvectors",
               "ranks_by_callback", "branch_on_mean", "sorted_outputs"],
    "layers": ["times_position", "expert_capacity", "batch_normalization_of_images",
               "largest_of_neighbors", "fourier_of_transposed_rows"],
    "state": ["running_maximum", "queue"],
    "random": ["dropout", "random_flip"],
    "metrics": ["function_correlation", "class_welford"],
    "optimizers": ["own_noise_of_norm", "loss_scale_of_one_row", "schedule_cosine_decay",
                   "several_optimizers"],
    "steps": ["clips_by_norm", "sharpness_aware", "momentum_contrast", "own_predict_step",
              "own_test_step", "as_in_the_guide", "compute_metrics_of_batch", "two_steps_in_one"],
    "replicas": ["gathered_rows", "tape_clips"],
    "models": ["two_outputs", "outputs_by_name", "without_targets"],
    "fit": ["weights_of_a_batch_are_zero", "batches_of_other_sizes", "endless_generator",
            "two_fits_and_another_optimizer"],
}  # fmt: skip
_NAMES = [name for names in _SELECTION.values() for name in names]
_DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
_OTHERS = {
    "central storage": ("nested", lambda: dist.CentralStorageStrategy(_DEVICES), {}),
    "state in parts, several steps": (
        "nested",
        lambda: dist.MirroredStrategy(_DEVICES, experimental_shard_optimizer_state=True),
        {"steps_per_execution": 3},
    ),
    "ids of variables in parts": (
        "sorted_weights",
        lambda: dist.MirroredStrategy(_DEVICES[:2], experimental_shard_parameters=True),
        {},
    ),
}


@pytest.mark.parametrize("name", _NAMES)
def test_two_replicas_have_the_numbers_of_one_device(name, strategy_of):
    alone = train(CASES[name], quick=True)

    distributed = train(CASES[name], strategy_of(2), quick=True)

    found = difference(alone, distributed)
    assert found.relative <= TOLERANCE, found.where


@pytest.mark.parametrize(("name", "make_strategy", "options"), _OTHERS.values(), ids=_OTHERS)
def test_other_strategies_have_the_numbers_of_one_device(name, make_strategy, options):
    alone = train(CASES[name], quick=True, **options)

    distributed = train(CASES[name], make_strategy(), quick=True, **options)

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
