"""Losses of users on uneven batches of `fit` that speak of the rows of all replicas."""

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


def _square(y, p):
    return jnp.mean((y - p[:, :3]) ** 2)


def contrastive(y, p):
    """Every row has to find itself among the rows of all replicas."""
    others, first = p, 0
    if (context := dist.get_replica_context()) is not None:
        number = context.replica_id_in_sync_group
        owners = jnp.full((len(p),), number, jnp.int32)
        others, owners = context.all_gather([p, owners], axis=0)
        first = jnp.sum(owners < number)
    labels, logits = first + jnp.arange(len(p)), 0.1 * p @ others.T
    return jnp.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


def spread(y, p):
    """The variance of all rows, by a collective of ours."""
    total, count = jnp.sum(p, 0), jnp.float32(len(p))
    if (context := dist.get_replica_context()) is not None:
        total, count = context.all_reduce("SUM", [total, count])
    return jnp.mean((p - total / count) ** 2)


def in_control_flow(y, p):
    def body(p, _):
        return p - 0.5 * jnp.sin(p) * spread(y, p), None

    looped = lax.scan(body, p, None, length=2)[0] ** 2
    return lax.cond(jnp.sum(p) < 100, spread, _square, y, looped)


def of_a_gradient(y, p):
    """A loss that is made of gradients, of which those of the spread come from other replicas."""
    own = lambda p: len(p) * spread(y, jnp.tanh(p))
    return jnp.mean(jax.grad(own)(p) ** 2) + _square(y, p)


class _Checkpointed(keras.Sequential):
    """A step with a loss of the user alone, which is computed again on the way back."""

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data

        def loss_of(trainable):
            p, new = self.stateless_call(trainable, non_trainable, x, training=True)
            return jax.jit(jax.checkpoint(self.own_loss))(y, p), new

        (loss, new), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, new, optimizer, metrics)


class _Added(keras.Sequential):
    """Adds a mean of the user to a loss of Keras."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred[:, :3], sample_weight, training)
        return loss + self.own_loss(y, y_pred)


# Batches of 8 and 5 rows, so that two replicas have an even and an uneven one.
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (_Checkpointed, contrastive),
        (_Checkpointed, in_control_flow),
        (_Checkpointed, dist.global_batch_loss(lambda y, p: jnp.sum(jnp.var(p, 0) ** 2))),
        (_Added, of_a_gradient),
    ],
    ids=["all_gather", "control flow", "global batch", "second gradient"],
)
def test_an_uneven_batch_trains_as_on_one_device(kind, loss, train_twice, assert_same_training):
    def build():
        normalization = kl.BatchNormalization(synchronized=True)
        model = kind([keras.Input((6,)), kl.Dense(8, "tanh"), normalization, kl.Dense(6)])
        model.own_loss = loss
        sgd = keras.optimizers.SGD(0.05)
        if kind is _Added:
            model.compile(keras.optimizers.LossScaleOptimizer(sgd), "mse")
        else:
            model.compile(sgd)
        return model

    alone, distributed = train_twice(build, _X, _Y, num_replicas=2, batch_size=8)

    assert_same_training(alone, distributed, unchanged=("bias", "beta"))
