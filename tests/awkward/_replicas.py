"""Steps that speak of replicas, or have the shape of `tf.distribute`: `train_step(self, data)`."""

import jax
import jax.numpy as jnp
import keras
from keras import layers as kl, ops

import distributary as dist
import distributary.compat.tensorflow as tf
from tests.awkward._case import add, adder, compiled, net
from tests.awkward._steps import Plain, Step, inputs_of

case = adder("replicas")


def _loss(function):
    """Makes a case of a loss `(y, p)`."""
    add(function.__name__, "replicas", lambda: compiled(net(), function))
    return function


@_loss
def divided_by_replicas(y, p):
    return ops.mean(ops.square(y - p)) / dist.get_strategy().num_replicas_in_sync


@_loss
def divided_by_global_batch(y, p):
    rows = p.shape[0] * dist.get_strategy().num_replicas_in_sync
    return ops.sum(ops.square(y - p)) / rows


@_loss
def average_loss(y, p):
    return tf.nn.compute_average_loss(ops.mean(ops.square(y - p), -1))


@_loss
def average_loss_of_part(y, p):
    """The number of rows is said by hand."""
    rows = ops.mean(ops.square(y - p), -1)
    count = p.shape[0] * dist.get_replica_context().num_replicas_in_sync
    return tf.nn.compute_average_loss(rows, global_batch_size=count)


@_loss
def scaled_regularization(y, p):
    return ops.mean(ops.square(y - p)) + tf.nn.scale_regularization_loss(ops.mean(p**2))


@_loss
def gathered_rows(y, p):
    """Contrasts every row with those of all replicas."""
    context = dist.get_replica_context()
    everyone = context.all_gather(p, axis=0)
    labels = jnp.arange(p.shape[0]) + context.replica_id_in_sync_group * p.shape[0]
    return keras.losses.sparse_categorical_crossentropy(labels, p @ everyone.T, from_logits=True)


@_loss
def reduced_mean(y, p):
    context = dist.get_replica_context()
    mean = context.all_reduce(dist.ReduceOp.MEAN, jnp.mean(p, 0))
    return jnp.mean(jnp.square(p - mean - y))


@_loss
def reduced_sums(y, p):
    context = dist.get_replica_context()
    errors, squares = context.all_reduce("SUM", [jnp.sum((y - p) ** 2), jnp.sum(y**2)])
    return errors / squares


@_loss
def only_on_first_replica(y, p):
    here = dist.get_replica_context().replica_id_in_sync_group == 0
    return jnp.mean(jnp.square(y - p)) * jnp.where(here, 1.0, 3.0)


@case()
def reduces_gradients_itself():
    class Reduces(Step):
        def changed(self, gradients):
            context = dist.get_replica_context()
            return context.all_reduce(dist.ReduceOp.MEAN, gradients)

    return compiled(Reduces())


@case()
def sums_gradients_of_shares():
    class Sums(Step):
        def loss_of(self, trainable, others, x, y):
            loss, aux = super().loss_of(trainable, others, x, y)
            return loss / dist.get_strategy().num_replicas_in_sync, aux

        def changed(self, gradients):
            return dist.get_replica_context().all_reduce("SUM", gradients)

    return compiled(Sums())


@case()
def merges():
    class Merges(Step):
        def logs(self, loss, y, p, gradients):
            context = dist.get_replica_context()
            total = context.merge_call(
                lambda strategy, value: strategy.reduce("SUM", value, axis=None),
                args=(jnp.max(jnp.abs(p)),),
            )
            return {"merged": total, "replicas": jnp.float32(context.num_replicas_in_sync)}

    return compiled(Merges())


@case()
def layer_that_reduces():
    """Synchronizes statistics itself, as layers for `tf.distribute` do."""

    class Reduces(kl.Layer):
        def call(self, x, training=False):
            context = dist.get_replica_context()
            if not training or context is None:
                return x
            moments = [jnp.mean(x, 0), jnp.mean(jnp.square(x), 0)]
            mean, square = context.all_reduce(dist.ReduceOp.MEAN, moments)
            return (x - mean) / jnp.sqrt(square - mean**2 + 0.1)

    return compiled(net(Reduces()))


class _WithTape(Plain):
    """The step of a program for TensorFlow."""

    def changed(self, gradients):
        return gradients

    def logs(self, y, p):
        return {}

    def train_step(self, data):
        x, y = data[:2]
        with dist.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=p)
        gradients = self.changed(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, p)
        return {m.name: m.result() for m in self.metrics} | self.logs(y, p)


def _built(model):
    model.build((None, 6))
    return compiled(model, "mse", keras.optimizers.Adam(0.02))


def _with_tape(cls, twin):
    """Makes a case of a step with a tape and of the same step for Keras on JAX."""
    name = "tape" + "".join("_" * c.isupper() + c.lower() for c in cls.__name__.strip("_"))
    add(name, "replicas", lambda: _built(cls()), twin=lambda: _built(twin()))


def _norm(gradients):
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))


class _Plain(_WithTape):
    pass


class _Clips(_WithTape):
    def changed(self, gradients):
        norm = _norm(gradients)
        return [g * jnp.minimum(1, 0.3 / norm) for g in gradients]


class _ClipsTwin(Step):
    changed = _Clips.changed


class _Says(_WithTape):
    def logs(self, y, p):
        return {"worst": jnp.max(p), "rows": jnp.float32(p.shape[0]), "spread": jnp.std(p)}


class _SaysTwin(Step):
    def logs(self, loss, y, p, gradients):
        return {"worst": jnp.max(p), "rows": jnp.float32(p.shape[0]), "spread": jnp.std(p)}


class _Normalizes(_WithTape):
    def __init__(self):
        super().__init__(net(kl.BatchNormalization(), kl.Dropout(0.3)))


class _NormalizesTwin(Step):
    def __init__(self):
        super().__init__(net(kl.BatchNormalization(), kl.Dropout(0.3)))


class _Relates(_WithTape):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return jnp.sqrt(jnp.mean(jnp.square(y - y_pred))) + jnp.std(y_pred)


class _RelatesTwin(Step):
    compute_loss = _Relates.compute_loss


class _Shares(_WithTape):
    """Divides its loss by the number of replicas that it reads in the step."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        rows = jnp.mean(jnp.square(y - y_pred), -1)
        return tf.nn.compute_average_loss(rows)


class _SharesTwin(Step):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return jnp.mean(jnp.square(y - y_pred))


class _Mixes(_WithTape):
    def train_step(self, data):
        x, y = data[:2]
        partner = jax.random.permutation(jax.random.key(1), x.shape[0])
        return super().train_step((0.7 * x + 0.3 * x[partner], 0.7 * y + 0.3 * y[partner]))


class _MixesTwin(Step):
    def given(self, x, y):
        partner = jax.random.permutation(jax.random.key(1), x.shape[0])
        return 0.7 * x + 0.3 * x[partner], 0.7 * y + 0.3 * y[partner]


for _cls, _twin in [
    (_Plain, Step),
    (_Clips, _ClipsTwin),
    (_Says, _SaysTwin),
    (_Normalizes, _NormalizesTwin),
    (_Relates, _RelatesTwin),
    (_Shares, _SharesTwin),
    (_Mixes, _MixesTwin),
]:
    _with_tape(_cls, _twin)


class _Tests(_WithTape):
    """Tests and predicts with steps of that shape, too."""

    def test_step(self, data):
        x, y = data[:2]
        p = self(x, training=False)
        return {"worst": jnp.max(jnp.abs(y - p)), "rows": jnp.float32(p.shape[0])}

    def predict_step(self, data):
        p = self(inputs_of(data), training=False)
        return p - jnp.mean(p, 0)


class _TestsTwin(Step):
    def test_step(self, state, data):
        trainable, others, metrics = state
        x, y = data[:2]
        p, others = self.stateless_call(trainable, others, x, training=False)
        logs = {"worst": jnp.max(jnp.abs(y - p)), "rows": jnp.float32(p.shape[0])}
        return logs, (trainable, others, metrics)

    def predict_step(self, state, data):
        p, others = self.stateless_call(*state, inputs_of(data), training=False)
        return p - jnp.mean(p, 0), others


_with_tape(_Tests, _TestsTwin)
