"""Losses of the rows of all replicas, in loops of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import InvalidTypeError, InvalidValueError

_RANDOM = np.random.default_rng(0)
_X = _RANDOM.normal(size=(16, 6)).astype(np.float32)
_Y = _RANDOM.normal(size=(16, 3)).astype(np.float32)
_W = _RANDOM.normal(size=(6, 6)).astype(np.float32) * 0.5
_RATE = 0.02


def _per_row(y, p):
    logits = p[:, :3] @ p[:, 3:].T
    return -jnp.sum(jnp.eye(len(p)) * jax.nn.log_softmax(logits), -1)


def _in_batch_softmax(y, p):
    return jnp.mean(_per_row(y, p))


def _covariance(y, p):
    z = p - jnp.mean(p, 0)
    return jnp.sum((z.T @ z / len(z)) ** 2)


def _hardest(y, p):
    d = jnp.sum((p[:, None] - p[None]) ** 2, -1) + jnp.sum(y[:, None] * y[None], -1)
    return jnp.mean(jnp.max(d, 1))


def _rows_of_alone(loss, rows, batch_size):
    """The losses and weights of plain JAX."""
    w, losses = jnp.asarray(_W), []
    for i in range(0, rows, batch_size):
        x, y = _X[i : min(i + batch_size, rows)], _Y[i : min(i + batch_size, rows)]
        value, gradient = jax.value_and_grad(lambda w, x, y: jnp.mean(loss(y, x @ w)))(w, x, y)
        w = w - _RATE * gradient
        losses.append(value)
    return losses, w


def _trained(strategy, loss, rows, batch_size, differentiate):
    with strategy.scope():
        w = dist.Variable(_W)

    def step(x, y, num_rows):
        def part():
            value = loss(y, x @ w.value())
            return jnp.sum(value) / num_rows if value.ndim else value

        value, gradient = differentiate(part, w)
        w.assign_sub(_RATE * dist.get_replica_context().all_reduce("SUM", gradient))
        return value

    slices = [slice(i, min(i + batch_size, rows)) for i in range(0, rows, batch_size)]
    sizes = [len(_X[part]) for part in slices]
    dataset = strategy.experimental_distribute_dataset([(_X[part], _Y[part]) for part in slices])
    losses = [
        strategy.reduce("SUM", strategy.run(step, args=(x, y, np.float32(size))), axis=None)
        for (x, y), size in zip(dataset, sizes, strict=True)
    ]
    return losses, w.value()


def _with_tape(function, w):
    with dist.GradientTape() as tape:
        value = function()
    return value, tape.gradient(value, w)


def _with_value_and_grad(function, w):
    return dist.value_and_grad(function, w)()


@pytest.mark.parametrize(
    ("loss", "num_replicas", "differentiate"),
    [
        (_in_batch_softmax, 2, _with_tape),
        (_in_batch_softmax, 1, _with_tape),
        (_per_row, 4, _with_value_and_grad),
        (_covariance, 2, _with_value_and_grad),
        (_hardest, 4, _with_tape),
    ],
)
def test_losses_and_weights_are_those_of_one_device(loss, num_replicas, differentiate, strategy_of):
    expected = _rows_of_alone(loss, 13, 8)  # the second batch is uneven

    made = _trained(strategy_of(num_replicas), dist.global_batch_loss(loss), 13, 8, differentiate)

    np.testing.assert_allclose(made[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(made[1], expected[1], rtol=1e-5, atol=1e-6)


def test_a_loss_may_read_variables_that_are_trained(strategy):
    with strategy.scope():
        temperature = dist.Variable(0.5)

    @dist.global_batch_loss
    def loss(p):
        logits = p @ p.T / temperature.value()
        return jnp.mean(jax.nn.logsumexp(logits, -1))

    def step(x):
        with dist.GradientTape() as tape:
            value = loss(x)
        return dist.get_replica_context().all_reduce("SUM", tape.gradient(value, temperature))

    (x,) = strategy.experimental_distribute_dataset([_X])
    made = strategy.run(step, args=(x,))

    expected = jax.grad(lambda t: jnp.mean(jax.nn.logsumexp(_X @ _X.T / t, -1)))(0.5)
    for value in strategy.experimental_local_results(made):
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_every_replica_has_its_own_rows_of_the_result(strategy_of):
    strategy = strategy_of(4)
    (x,) = strategy.experimental_distribute_dataset([_X[:6]])  # 2, 2, 1 and 1 rows
    ranks = dist.global_batch_loss(lambda x: jnp.argsort(jnp.argsort(x[:, 0])))

    made = strategy.experimental_local_results(strategy.run(ranks, args=(x,)))

    assert [len(part) for part in made] == [2, 2, 1, 1]
    np.testing.assert_array_equal(np.concatenate(made), np.argsort(np.argsort(_X[:6, 0])))


def test_nests_scalars_and_keywords_reach_the_loss(strategy):
    seen = []

    @dist.global_batch_loss
    def loss(features, scale, *, table):
        seen.append((features["a"].shape, features["b"][0].shape, jnp.shape(scale), table.shape))
        return scale * jnp.sum(features["a"]) + jnp.sum(table)

    def step(x):
        return loss({"a": x, "b": [x[:, 0] > 0]}, 3.0, table=jnp.ones((5, 2)))

    (x,) = strategy.experimental_distribute_dataset([_X])
    made = strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)

    assert seen == [((16, 6), (16,), (), (5, 2))]
    np.testing.assert_allclose(made, 3 * _X.sum() + 10, rtol=1e-5)


def test_outside_of_replicas_the_function_is_the_loss():
    @dist.global_batch_loss
    def spread(p):
        """Says how far rows lie apart."""
        return jnp.var(p, 0)

    np.testing.assert_array_equal(spread(_X), jnp.var(_X, 0))
    assert (spread.__name__, spread.__doc__) == ("spread", "Says how far rows lie apart.")


def test_one_in_another_gathers_once(strategy):
    inner = dist.global_batch_loss(_covariance)
    (batch,) = strategy.experimental_distribute_dataset([(_Y, _X)])

    made = strategy.run(dist.global_batch_loss(lambda y, p: 2 * inner(y, p)), args=batch)

    expected = 2 * _covariance(_Y, _X)
    np.testing.assert_allclose(strategy.reduce("SUM", made, axis=None), expected, rtol=1e-5)


_REFUSED = [
    (lambda x: x[:3], lambda x: (x,), r"returned an array of shape \(3, 6\) for 16 examples"),
    (lambda x, t: x, lambda x: (x, np.ones(5)), r"arrays of \[5, 8\] rows .* by keyword"),
    (lambda t: t, lambda x: (3.0,), r"no array in its positional arguments"),
]


def test_what_does_not_belong_to_rows_or_is_no_function_is_refused(strategy):
    (x,) = strategy.experimental_distribute_dataset([_X])

    for loss, args_of, message in _REFUSED:
        step = lambda x, loss=loss, args_of=args_of: dist.global_batch_loss(loss)(*args_of(x))
        with pytest.raises(InvalidValueError, match=message):
            strategy.run(step, args=(x,))
    with pytest.raises(InvalidTypeError, match=r"loss is 'mse', expected a function"):
        dist.global_batch_loss("mse")
