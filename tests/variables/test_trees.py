"""`values` and `assign`: trees of variables."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import distributary as dist


def test_optax_updates_a_tree_as_without_a_strategy(strategy):
    initial = {"kernel": np.arange(6.0, dtype="f").reshape(3, 2), "bias": [np.ones(2, "f")]}
    gradients = jax.tree.map(lambda value: value * 0.1 + 1, initial)
    optimizer = optax.adam(0.1)
    with strategy.scope():
        parameters = jax.tree.map(dist.Variable, initial)
        state = jax.tree.map(dist.Variable, optimizer.init(initial))

    def step():
        updates, new = optimizer.update(gradients, dist.values(state))
        dist.assign(parameters, optax.apply_updates(dist.values(parameters), updates))
        dist.assign(state, new)

    for _ in range(3):
        strategy.run(step)

    expected, expected_state = initial, optimizer.init(initial)
    for _ in range(3):
        updates, expected_state = optimizer.update(gradients, expected_state)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(
        lambda found, value: np.testing.assert_allclose(found, value, rtol=1e-6),
        dist.values((parameters, state)),
        (expected, expected_state),
    )


def test_keras_variables_and_other_leaves(strategy):
    with strategy.scope():
        tree = {"keras": keras.Variable(np.ones(2, "f")), "number": 3, "none": None}

    found = dist.values(tree)
    dist.assign(tree["keras"], np.full(2, 5, "f"))

    np.testing.assert_array_equal(found["keras"], [1, 1])
    assert (found["number"], found["none"]) == (3, None)
    np.testing.assert_array_equal(tree["keras"], [5, 5])


@pytest.mark.parametrize(
    ("tree", "values", "error", "text"),
    [
        (lambda v: {"a": v, "b": v}, {"a": 1.0}, dist.errors.InvalidValueError, "another struct"),
        (lambda v: {"a": v, "b": [2.0]}, {"a": 1.0, "b": [3.0]}, TypeError, r"tree\['b'\]\[0\]"),
    ],
)
def test_a_refused_tree_is_not_assigned_in_part(variable, tree, values, error, text):
    kept = variable(jnp.float32(7))

    with pytest.raises(error, match=text):
        dist.assign(tree(kept), values)

    assert kept.numpy() == 7
