"""Losses of your own on uneven batches of `fit`, whose gradients pass through collectives."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from keras import layers as kl

import distributary as dist

_RANDOM = np.random.default_rng(0)
_X = _RANDOM.normal(size=(13, 6)).astype(np.float32)
_Y = _RANDOM.normal(size=(13, 3)).astype(np.float32)


def _replicas():
    context = dist.get_replica_context()
    return None if context is None or context.num_replicas_in_sync == 1 else context


def _square(y, p):
    return jnp.mean((y - p[:, :3]) ** 2)


def contrastive(y, p):
    """Every row has to find itself among the rows of all replicas."""
    others, first = p, 0
    if (context := _replicas()) is not None:
        number = context.replica_id_in_sync_group
        owners = jnp.full((len(p),), number, jnp.int32)
        others, owners = context.all_gather([p, owners], axis=0)
        first = jnp.sum(owners < number)
    logits = 0.1 * p @ others.T
    return jnp.mean(keras.losses.sparse_categorical_crossentropy(
        first + jnp.arange(len(p)), logits, from_logits=True
    ))  # fmt: skip


def mean_of_all(p):
    """The mean over the rows of all replicas, by a collective of ours."""
    total, count = jnp.sum(p, 0), jnp.float32(len(p))
    if (context := _replicas()) is not None:
        total, count = context.all_reduce("SUM", [total, count])
    return total / count


def spread(y, p):
    return jnp.mean((p - mean_of_all(p)) ** 2)


def spread_by_jax(y, p):
    total, count = jnp.sum(p, 0), jnp.float32(len(p))
    if _replicas() is not None:
        total, count = lax.psum((total, count), "replica")
    return jnp.mean((p - total / count) ** 2)


def in_a_loop(y, p):
    def body(p, _):
        return p - 0.5 * mean_of_all(jnp.sin(p)), None

    return spread(y, lax.scan(body, p, None, length=2)[0] ** 2)


def in_a_branch(y, p):
    return lax.cond(jnp.sum(mean_of_all(p)) < 100, spread, _square, y, p)


def of_a_gradient(y, p):
    """A loss that is made of gradients, of which those of the spread come from other replicas."""
    own = lambda p: len(p) * spread(y, jnp.tanh(p))
    return jnp.mean(jax.grad(own)(p) ** 2) + _square(y, p)


class _OwnStep(keras.Sequential):
    wraps = staticmethod(lambda function: function)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data

        def loss_of(trainable):
            p, new = self.stateless_call(trainable, non_trainable, x, training=True)
            return self.wraps(self.own_loss)(y, p), new

        (loss, new), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, new, optimizer, metrics)


class _OwnLoss(keras.Sequential):
    """Adds a mean of its own to a loss of Keras."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred[:, :3], sample_weight, training)
        return loss + self.own_loss(y, y_pred)


class _Checkpointed(_OwnStep):
    wraps = staticmethod(jax.checkpoint)


class _Jitted(_OwnStep):
    wraps = staticmethod(lambda function: jax.jit(jax.checkpoint(function)))


def _builder(loss, kind=_OwnStep, layers=lambda: (), compiled=None, optimizer=None):
    def build():
        model = kind([keras.Input((6,)), kl.Dense(8, "tanh"), *layers(), kl.Dense(6)])
        model.own_loss = loss
        make = optimizer or (lambda: keras.optimizers.SGD(0.05))
        model.compile(make(), compiled)
        return model

    return build


def _synchronized():
    return [kl.BatchNormalization(synchronized=True)]


# Batches of 8 and 5 rows, so that two replicas have an even and an uneven one.
@pytest.mark.parametrize(
    "build",
    [
        _builder(contrastive),
        _builder(spread),
        _builder(spread_by_jax),
        _builder(dist.global_batch_loss(lambda y, p: jnp.sum(jnp.var(p, 0) ** 2))),
        _builder(_square, layers=_synchronized),
        _builder(contrastive, _Checkpointed),
        _builder(spread, _Jitted, _synchronized),
        _builder(in_a_loop),
        _builder(in_a_loop, _Checkpointed),
        _builder(in_a_branch),
        _builder(of_a_gradient),
        _builder(spread, _OwnLoss, compiled="mse"),
        _builder(_square, _OwnLoss, _synchronized, compiled="mse"),
        _builder(
            spread,
            _OwnLoss,
            compiled="mse",
            optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)),
        ),
    ],
    ids=[
        "all_gather",
        "all_reduce",
        "lax.psum",
        "global batch",
        "batch normalization",
        "checkpoint",
        "jit and checkpoint",
        "loop",
        "checkpointed loop",
        "branch",
        "second gradient",
        "beside a loss of Keras",
        "batch normalization beside a loss of Keras",
        "scaled loss",
    ],
)
def test_an_uneven_batch_trains_as_on_one_device(build, train_twice, assert_same_training):
    alone, distributed = train_twice(build, _X, _Y, num_replicas=2, batch_size=8, epochs=2)

    assert_same_training(alone, distributed, unchanged=("bias", "beta"))


@pytest.mark.parametrize("loss", [contrastive, spread_by_jax])
def test_replicas_of_few_rows_train_as_on_one_device(loss, train_twice, assert_same_training):
    alone, distributed = train_twice(
        _builder(loss, layers=_synchronized), _X, _Y, num_replicas=4, batch_size=7, epochs=2
    )

    assert_same_training(alone, distributed, unchanged=("bias", "beta"))


class _Unrolled(kl.Layer):
    """Computes its loop again on the way back, to keep less in memory."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        def loop(x):
            step = lambda carry, _: (jnp.tanh(carry @ self.kernel.value), None)
            return lax.scan(step, x, None, length=2)[0]

        return jax.checkpoint(loop)(x)


def test_a_checkpointed_loop_of_a_layer_trains_as_on_one_device(train_twice, assert_same_training):
    build = _builder(_square, _OwnLoss, lambda: [_Unrolled()], compiled="mse")

    alone, distributed = train_twice(build, _X, _Y, batch_size=8)

    assert_same_training(alone, distributed, unchanged=("bias",))
