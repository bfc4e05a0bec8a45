"""A loss that relates rows of the batch is told from one that does not, while a step is traced."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import DistributaryWarning

_RANDOM = np.random.default_rng(0)
_X = _RANDOM.normal(size=(16, 6)).astype(np.float32)
_Y = _RANDOM.normal(size=(16, 3)).astype(np.float32)
_W = _RANDOM.normal(size=(6, 6)).astype(np.float32)


def _unit(z):
    return z / jnp.sqrt(jnp.sum(z * z, -1, keepdims=True) + 1e-6)


def _cross_entropy(labels, logits):
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(labels.shape[0]), labels])


def _in_batch_softmax(y, p):
    logits = p[:, :3] @ p[:, 3:].T
    return -jnp.mean(jnp.sum(jnp.eye(len(p)) * jax.nn.log_softmax(logits), -1))


def _number(y):
    """Numbers from the data, from 0 to 2."""
    return jnp.argmax(y, -1)


def _edges(y, p):
    return jnp.mean((p[_number(y)] - y[:, :1]) ** 2)


def _regions_of_images(y, p):
    images = p.reshape(-1, 2, 3)
    return jnp.mean(images[_number(y)[:, None], jnp.arange(2)[None], 1] ** 2)


def _masked_positions(y, p):
    return jnp.mean(p.reshape(-1)[jnp.arange(len(p)) * p.shape[1] + _number(y)] ** 2)


def _labels_of_images(y, p):
    images = p.reshape(-1, 2, 3)
    return jnp.mean(images[jnp.arange(len(p))[:, None], jnp.arange(2), _number(y)[:, None]] ** 2)


def _clip(y, p):
    logits = _unit(p[:, :3]) @ _unit(p[:, 3:]).T
    labels = jnp.arange(len(p))
    return _cross_entropy(labels, logits) + _cross_entropy(labels, logits.T)


def _nt_xent(y, p):
    z = _unit(jnp.concatenate([p[:, :3], p[:, 3:]]))
    logits = z @ z.T - 1e9 * jnp.eye(len(z))
    return _cross_entropy((jnp.arange(len(z)) + len(p)) % len(z), logits)


def _router(y, p):
    gates = jax.nn.softmax(p)
    share = jnp.mean(jax.nn.one_hot(jnp.argmax(gates, -1), 6), 0)
    return jnp.sum(share * jnp.mean(gates, 0))


def _standardized(z):
    return (z - jnp.mean(z, 0)) / jnp.std(z, 0)


def _barlow_twins(y, p):
    c = _standardized(p[:, :3]).T @ _standardized(p[:, 3:]) / len(p)
    return jnp.sum((c - jnp.eye(3)) ** 2)


def _variance(y, p):
    return jnp.mean(jax.nn.relu(1 - jnp.sqrt(jnp.var(p, 0) + 1e-4)))


def _covariance(y, p):
    return jnp.sum((p.T @ p / len(p)) ** 2)


def _hardest_triplet(y, p):
    d = jnp.sum((p[:, None] - p[None]) ** 2, -1)
    return jnp.mean(jax.nn.relu(d.max(1) - (d + 1e3 * jnp.eye(len(p))).min(1) + 0.2))


def _mmd(y, p):
    kernel = lambda a, b: jnp.mean(jnp.exp(-jnp.sum((a[:, None] - b) ** 2, -1)))
    return kernel(p[:, :3], p[:, :3]) - 2 * kernel(p[:, :3], p[:, 3:])


def _coral(y, p):
    def covariance(z):
        z = z - jnp.mean(z, 0)
        return z.T @ z

    return jnp.mean((covariance(p[:, :3]) - covariance(p[:, 3:])) ** 2)


def _dice(y, p):
    target, guess = (y > 0).astype(p.dtype), jax.nn.sigmoid(p[:, :3])
    return 1 - 2 * jnp.sum(target * guess) / (jnp.sum(target) + jnp.sum(guess))


def _router_of_masked_tokens(y, p):
    tokens = p.reshape(-1, 3, 2)
    mask = (y[:, None, :] > 0) & jnp.tri(3, dtype=bool)[None]
    scores = jnp.where(mask, jnp.einsum("bid,bjd->bij", tokens, tokens), -1e9)
    gates = jax.nn.softmax((jax.nn.softmax(scores) @ tokens).reshape(-1, 2))
    weight = (y > 0).astype(p.dtype).reshape(-1, 1)
    share = jnp.sum(jax.nn.one_hot(jnp.argmax(gates, -1), 2) * weight, 0) / jnp.sum(weight)
    return jnp.sum(share * jnp.sum(gates * weight, 0) / jnp.maximum(jnp.sum(weight), 1e-9))


def _advantage(y, p):
    return -jnp.mean(_standardized(y[:, 0]) * p[:, 0])


def _hard_negative(y, p):
    logits = p[:, :3] @ p[:, 3:].T
    nearest = jnp.argmax(logits - 1e9 * jnp.eye(len(p)), 1)
    return jnp.mean((p[:, :3] - p[nearest, 3:]) ** 2)


def _permuted(y, p):
    other = p[jax.random.permutation(jax.random.key(0), len(p))]
    return jnp.mean(jnp.abs(p - other))


def _cox(y, p):
    return -jnp.mean(p[:, 0] - jnp.log(jnp.cumsum(jnp.exp(p[:, 0]))))


def _loop_over_pairs(y, p):
    return jnp.mean(jax.lax.map(lambda row: jnp.sum(jnp.exp(-jnp.sum((row - p) ** 2, -1))), p))


def _mapped_pairs(y, p):
    return jnp.mean(jax.vmap(lambda a: jax.vmap(lambda b: jnp.sum((a - b) ** 4))(p))(p))


def _jitted(y, p):
    return jax.jit(_in_batch_softmax)(y, p)


def _rematerialized(y, p):
    return jax.checkpoint(_in_batch_softmax)(y, p)


def _per_example(y, p):
    return jnp.mean((y - p[:, :3]) ** 2, -1)


RELATING = [
    _edges,
    _regions_of_images,
    _in_batch_softmax,
    _clip,
    _nt_xent,
    _router,
    _router_of_masked_tokens,
    _barlow_twins,
    _variance,
    _covariance,
    _hardest_triplet,
    _mmd,
    _coral,
    _dice,
    _advantage,
    _hard_negative,
    _permuted,
    _cox,
    _loop_over_pairs,
    _mapped_pairs,
    _jitted,
    _rematerialized,
    lambda y, p: jnp.mean((p - jnp.roll(p, 1, 0)) ** 2),
    lambda y, p: jnp.mean((p - jnp.roll(p, jnp.int32(1), 0)) ** 2),
    lambda y, p: jnp.mean((p - p[::-1]) ** 2),
    lambda y, p: jnp.mean((p[: len(p) // 2] - p[len(p) // 2 :]) ** 2),
    lambda y, p: jnp.mean((p[0] - p) ** 2),
    lambda y, p: jnp.mean(p.reshape(2, -1, 6).sum(0) ** 2),
    lambda y, p: jnp.sqrt(jnp.mean(_per_example(y, p))),
    lambda y, p: jnp.mean(jax.lax.top_k(_per_example(y, p), 2)[0]),
    lambda y, p: jnp.mean(jnp.sort(_per_example(y, p))[:2]),
    lambda y, p: jnp.max(_per_example(y, p)),
    lambda y, p: jnp.mean(jnp.stack([p, jnp.flip(p, 0)]).prod(0)),
    lambda y, p: jnp.mean((jnp.tile(p, (2, 1)) @ p.T) ** 2),
    lambda y, p: jnp.maximum(jnp.mean(p**2), 0.01),
    lambda y, p: jnp.sum(jnp.linalg.svd(p, compute_uv=False)),
    lambda y, p: -jnp.linalg.slogdet(p.T @ p + jnp.eye(6))[1],
    lambda y, p: jnp.mean(jax.nn.logsumexp(jnp.einsum("bd,cd->bc", p, p), 1)),
]


def _amplitudes(y, p):
    return jnp.mean(jnp.real(jnp.fft.fft(p) * (2 + 1j)) ** 2)


def _masked(y, p):
    mask = (y > 0).astype(p.dtype)
    return jnp.sum(mask * (y - p[:, :3]) ** 2) / jnp.sum(mask)


def _masked_rows(y, p):
    mask = y[:, 0] > 0
    total = jnp.sum(jnp.where(mask, _per_example(y, p), 0.0))
    return total / jnp.maximum(jnp.sum(mask), 1)


def _kl_and_rows(y, p):
    kl = -0.5 * jnp.mean(jnp.sum(1 + p[:, :3] - p[:, 3:] ** 2 - jnp.exp(p[:, :3]), -1))
    return jnp.mean(_per_example(y, p) + 0.1 * kl)


def _own_labels(y, p):
    labels = jnp.clip(jnp.abs(y[:, 0]) * 2, 0, 5).astype(jnp.int32)
    return _cross_entropy(labels, p)


def _taken_along(y, p):
    labels = jnp.clip(jnp.abs(y[:, :1]) * 2, 0, 5).astype(jnp.int32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(p), labels, 1))


def _class_weights(y, p):
    labels = (y[:, 0] > 0).astype(jnp.int32)
    counts = jnp.sum(jax.nn.one_hot(labels, 2), 0)
    return jnp.mean((1 / jnp.maximum(counts, 1))[labels] * _per_example(y, p))


def _attention(y, p):
    z = jnp.tanh(p.reshape(-1, 3, 2))
    weights = jax.nn.softmax(jnp.einsum("bid,bjd->bij", z, z))
    return jnp.mean(jnp.einsum("bij,bjd->bid", weights, z) ** 2)


def _recurrent(y, p):
    def cell(state, x):
        state = jnp.tanh(state + x[:, None])
        return state, state

    _, states = jax.lax.scan(cell, jnp.zeros((len(p), 4)), p.T)
    return jnp.mean(states**2)


def _real_and_fake(y, p):
    both = jnp.concatenate([p[:, :3], p[:, 3:]])
    labels = jnp.concatenate([jnp.ones(len(p)), jnp.zeros(len(p))])
    errors = jax.nn.softplus(jnp.sum(both, -1) * (1 - 2 * labels))
    return jnp.mean(errors[: len(p)]) + jnp.mean(errors[len(p) :])


def _gradient_penalty(y, p):
    norms = jnp.sqrt(jnp.sum(jax.vmap(jax.grad(lambda r: jnp.sum(jnp.tanh(r))))(p) ** 2, -1))
    return jnp.mean((norms - 1) ** 2)


def _masked_attention(y, p):
    z = p.reshape(-1, 3, 2)
    mask = (y[:, None, :] > 0) & jnp.tri(3, dtype=bool)[None]
    scores = jnp.where(mask[:, None], jnp.einsum("bid,bjd->bij", z, z)[:, None], -1e9)
    return jnp.mean(jax.nn.softmax(scores).reshape(-1, 9) ** 2)


def _mixup(y, p):
    # Of the data, with a random partner.
    other = y[jax.random.permutation(jax.random.key(0), len(y))]
    return jnp.mean(_per_example(0.7 * y + 0.3 * other, p))


def _shuffled(y, p):
    order = jax.random.permutation(jax.random.key(0), len(p))
    return jnp.mean(_per_example(y[order], p[order]))


NOT_RELATING = [
    _masked_positions,
    _labels_of_images,
    _masked,
    _masked_rows,
    _kl_and_rows,
    _own_labels,
    _taken_along,
    _class_weights,
    _attention,
    _recurrent,
    _real_and_fake,
    _amplitudes,
    _gradient_penalty,
    _masked_attention,
    _mixup,
    _shuffled,
    lambda y, p: jnp.mean(_per_example(y, p)),
    lambda y, p: jnp.sum(_per_example(y, p)) / 16,
    lambda y, p: jnp.mean((y.ravel() - p[:, :3].ravel()) ** 2),
    lambda y, p: jnp.mean(jax.nn.relu(1 - p[:, :, None] + p[:, None, :])),
    lambda y, p: jnp.mean(jax.vmap(lambda a, b: jnp.sum(jnp.outer(a, b) ** 2))(y, p)),
    lambda y, p: jnp.mean(jax.lax.map(lambda row: jnp.sum(row**2), p)),
    lambda y, p: jnp.mean(jax.lax.map(lambda part: jnp.mean(part**2), p.reshape(2, -1, 6))),
    lambda y, p: jnp.mean(jnp.prod(p.reshape(-1, 2, 6), 1)),
    lambda y, p: jnp.where(jnp.isnan(jnp.mean(p)), 0.0, jnp.mean(p**2)),
    lambda y, p: jnp.mean(jnp.sort(p, -1)[:, :2]),
    lambda y, p: jnp.mean((jnp.maximum(y, jnp.max(y) - 1) - p[:, :3]) ** 2),
    lambda y, p: jnp.mean(jnp.stack([p, 2 * p], 1) ** 2 * jnp.tile(p[:, None], (1, 2, 1))),
    lambda y, p: jnp.mean(jnp.cumsum(p, -1) ** 2),
    lambda y, p: jnp.mean(jnp.linalg.det(p.reshape(-1, 6, 1) * p[:, None] + jnp.eye(6))),
    lambda y, p: jnp.mean(jnp.abs(jnp.fft.rfft(p)) ** 2),
    lambda y, p: jnp.mean(jnp.pad(p, ((0, 0), (1, 1))) ** 2) + jnp.mean(p[:, ::2] ** 2),
]


def _name(value):
    return getattr(value, "__name__", None)


def _gradient_with_tape(loss, w, x, y):
    with dist.GradientTape() as tape:
        value = loss(y, x @ w.value())
    return tape.gradient(value, w)


def _gradient_with_value_and_grad(loss, w, x, y):
    return dist.value_and_grad(lambda: loss(y, x @ w.value()), w)()[1]


def _gradient_with_jax(loss, w, x, y):
    return jax.grad(lambda w: loss(y, x @ w))(w.value())


_GRADIENTS = [_gradient_with_tape, _gradient_with_value_and_grad, _gradient_with_jax]


def _warnings_of(strategy, loss, gradient_of=_gradient_with_tape, rows=16, times=1):
    """The warnings about a step that trains with the loss; it is traced only."""
    with strategy.scope():
        w = dist.Variable(_W)

    def step(x, y):
        gradient = gradient_of(loss, w, x, y)
        w.assign_sub(0.1 * dist.get_replica_context().all_reduce("MEAN", gradient))

    dataset = strategy.experimental_distribute_dataset([(_X[:rows], _Y[:rows])] * times)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in dataset:
            strategy.extended.lower(step, batch)
    return [str(w.message) for w in caught if issubclass(w.category, DistributaryWarning)]


@pytest.mark.parametrize("loss", RELATING, ids=_name)
def test_a_loss_that_relates_rows_is_warned_of(loss, strategy_of):
    found = _warnings_of(strategy_of(2), loss)

    assert len(found) == 1
    assert "the loss relates rows of the batch to each other" in found[0]


@pytest.mark.parametrize("loss", NOT_RELATING, ids=_name)
def test_a_loss_of_single_rows_is_not_warned_of(loss, strategy_of):
    assert _warnings_of(strategy_of(2), loss) == []


@pytest.mark.parametrize("gradient_of", _GRADIENTS, ids=_name)
def test_the_warning_names_the_line_however_the_loss_is_differentiated(gradient_of, strategy_of):
    line = _in_batch_softmax.__code__.co_firstlineno + 1

    (found,) = _warnings_of(strategy_of(2), _in_batch_softmax, gradient_of)

    assert f"dot_general at {__file__}:{line} (_in_batch_softmax)" in found
    assert "distributary.global_batch_loss(function)" in found


def test_the_warning_comes_once_per_strategy_and_place(strategy_of):
    strategy = strategy_of(2)

    assert len(_warnings_of(strategy, _clip, times=3)) == 1
    assert _warnings_of(strategy, _clip) == []
    assert len(_warnings_of(strategy, _covariance)) == 1


def test_one_replica_is_not_warned(strategy_of):
    assert _warnings_of(strategy_of(1), _in_batch_softmax) == []


def test_an_uneven_batch_is_looked_at_as_well(strategy_of):
    assert len(_warnings_of(strategy_of(2), _in_batch_softmax, rows=11)) == 1
    assert _warnings_of(strategy_of(2), _masked, rows=11) == []


def test_what_a_step_does_with_its_gradients_is_no_relation(strategy_of):
    def clipped(loss, w, x, y):
        gradient = _gradient_with_tape(loss, w, x, y)
        return gradient / jnp.maximum(jnp.sqrt(jnp.sum(gradient**2)), 1.0)

    assert _warnings_of(strategy_of(2), _masked, clipped) == []


def test_numbers_that_a_step_only_reports_are_no_loss(strategy_of):
    strategy = strategy_of(2)

    def reporting(loss, w, x, y):
        dist.get_replica_context().all_reduce("MEAN", _in_batch_softmax(y, x @ w.value()))
        return _gradient_with_tape(loss, w, x, y)

    assert _warnings_of(strategy, _masked, reporting) == []


def test_data_that_was_related_before_the_tape_counts(strategy_of):
    def standardizing(loss, w, x, y):
        return _gradient_with_tape(loss, w, _standardized(x), y)

    assert len(_warnings_of(strategy_of(2), _masked, standardizing)) == 1


def test_rows_of_all_replicas_may_be_related(strategy_of):
    def gathered(y, p):
        everything = dist.get_replica_context().all_gather(p, axis=0)
        return _in_batch_softmax(y, everything)

    assert _warnings_of(strategy_of(2), gathered) == []
