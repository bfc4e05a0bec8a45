"""Several steps of a loop in one program."""

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist

_X = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)


def _trained(strategy, num_steps, step_of=lambda step: step):
    """Weights, results and compiled runs of an epoch with `num_steps` steps in each program."""
    with strategy.scope():
        w = dist.Variable(np.ones(3, np.float32))
        seen = dist.Variable(
            0.0,
            synchronization=dist.VariableSynchronization.ON_READ,
            aggregation=dist.VariableAggregation.SUM,
        )

    def step(x):
        context = dist.get_replica_context()
        with dist.GradientTape() as tape:
            loss = jnp.sum((x @ w - 1.0) ** 2)
        gradient = context.all_reduce("SUM", tape.gradient(loss, w))
        w.assign_sub(0.01 * gradient)
        seen.assign_add(jnp.float32(x.shape[0]))
        return loss

    step = step_of(step)
    dataset = strategy.experimental_distribute_dataset(
        dist.data.Dataset.from_tensor_slices(_X).batch(4)
    )
    iterator, losses = iter(dataset), []
    while True:
        try:
            result = strategy.extended.run_steps(step, iterator, num_steps)
        except StopIteration:
            break
        losses.append(float(strategy.reduce("SUM", result, axis=None)))
    return np.asarray(w.value()), float(seen.value()), losses


@pytest.mark.parametrize(("num_replicas", "num_steps"), [(1, 10), (3, 4)])
def test_they_equal_single_steps(num_replicas, num_steps, strategy_of):
    expected, seen, losses = _trained(strategy_of(num_replicas), 1)

    weights, num_rows, last = _trained(strategy_of(num_replicas), num_steps)

    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert num_rows == seen == len(_X)
    ends = [*range(num_steps - 1, len(losses) - 1, num_steps), len(losses) - 1]
    np.testing.assert_allclose(last, [losses[i] for i in ends], rtol=1e-5)


def test_they_are_one_program(strategy):
    _trained(strategy, 5)
    # Five even batches, and a last one of 3 rows.
    assert strategy.step_statistics.num_runs == 2


def test_a_number_below_one_is_refused(strategy_of):
    with pytest.raises(dist.errors.InvalidValueError, match="num_steps is 0, expected 1 or more"):
        strategy_of(1).extended.run_steps(lambda x: x, iter([]), 0)
