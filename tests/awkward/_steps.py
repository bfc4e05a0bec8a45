"""Own steps of training, testing and predicting, as the guides and examples of Keras have them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from keras import layers as kl, ops

from tests.awkward._case import DATA, add, adder, compiled, net, sgd

case = adder("steps")


class Plain(keras.Model):
    """A model that keeps its network as an attribute."""

    def __init__(self, network: Any = None) -> None:
        super().__init__()
        self.network = network or net()

    def call(self, x, training=False):
        return self.network(x, training=training)


class Step(Plain):
    """The step of Keras' guide on JAX, in parts that a case changes."""

    def loss_of(self, trainable, others, x, y):
        """Returns the loss, and the predictions and new other variables."""
        p, others = self.stateless_call(trainable, others, x, training=True)
        return self.compute_loss(x, y, p), (p, others)

    def gradients(self, trainable, others, x, y):
        return jax.value_and_grad(self.loss_of, has_aux=True)(trainable, others, x, y)

    def changed(self, gradients):
        return gradients

    def given(self, x, y):
        return x, y

    def logs(self, loss, y, p, gradients):
        return {}

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        x, y = self.given(*data[:2])
        (loss, (p, others)), gradients = self.gradients(trainable, others, x, y)
        gradients = self.changed(gradients)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = self.measured(metrics, loss, y, p)
        return logs | self.logs(loss, y, p, gradients), (trainable, others, optimizer, metrics)

    def measured(self, variables, loss, y, p):
        logs, new = {}, []
        for metric in self.metrics:
            own = variables[len(new) : len(new) + len(metric.variables)]
            given = (loss,) if metric.name == "loss" else (y, p)
            own = metric.stateless_update_state(own, *given)
            logs[metric.name] = metric.stateless_result(own)
            new += own
        return logs, new


def _name(cls: type) -> str:
    return "".join("_" * c.isupper() + c.lower() for c in cls.__name__.strip("_")).strip("_")


def _step(cls: type, **options: Any) -> type:
    """Makes a case of a subclass of `Step`, by its name in the way of functions."""
    metrics = options.pop("metrics", None)

    def build():
        model = cls(net())
        # A model without an `Input` is built by a call, in the scope.
        model.build((None, *DATA[options.get("x", "vectors")]().shape[1:]))
        return compiled(model, metrics=metrics)

    add(_name(cls), "steps", build, **options)
    return cls


def _own(
    loss: Any = "mse", optimizer: Any = sgd, built: bool = False, **options: Any
) -> Callable[[type], type]:
    """Makes a case of a model that has its network, by its name in the way of functions."""

    def register(cls: type) -> type:
        def build() -> Any:
            model = cls()
            if built:
                model.build((None, 6))
            return compiled(model, loss, optimizer())

        add(_name(cls), "steps", build, **options)
        return cls

    return register


def _norm(gradients):
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))


def inputs_of(data):
    """Returns the inputs, which come alone where there are no targets."""
    return data[0] if isinstance(data, tuple) else data


# Gradients that are changed before they are applied.


class _AsInTheGuide(Step):
    """Logs the results of compiled metrics in a dict of their own."""


_step(_AsInTheGuide, metrics=["mae"])


@_step
class _SignOfGradients(Step):
    def changed(self, gradients):
        return [jnp.tanh(100 * g) for g in gradients]


@_step
class _ClipsByNorm(Step):
    def changed(self, gradients):
        scale = jnp.minimum(1, 0.3 / _norm(gradients))
        return [scale * g for g in gradients]


@_step
class _CentralizesGradients(Step):
    def changed(self, gradients):
        return [g - jnp.mean(g, 0, keepdims=True) if g.ndim > 1 else g for g in gradients]


@_step
class _NoisyGradients(Step):
    def changed(self, gradients):
        keys = jax.random.split(jax.random.key(0), len(gradients))
        norm = _norm(gradients)
        return [
            g + 0.1 * norm * jax.random.normal(k, g.shape, g.dtype)
            for g, k in zip(gradients, keys, strict=True)
        ]


@_step
class _LossByHand(Step):
    def loss_of(self, trainable, others, x, y):
        p, others = self.stateless_call(trainable, others, x, training=True)
        return jnp.sqrt(jnp.mean(jnp.square(p - y))) + 0.1 * jnp.max(jnp.abs(p)), (p, others)


@_step
class _SharpnessAware(Step):
    """Goes up along the gradient, and takes the gradient there."""

    def gradients(self, trainable, others, x, y):
        _, gradients = super().gradients(trainable, others, x, y)
        scale = 0.1 / (_norm(gradients) + 1e-6)
        higher = [v + scale * g for v, g in zip(trainable, gradients, strict=True)]
        return super().gradients(higher, others, x, y)


@_step
class _GradientPenalty(Step):
    def loss_of(self, trainable, others, x, y):
        loss, aux = super().loss_of(trainable, others, x, y)
        of_inputs = lambda x: jnp.sum(self.stateless_call(trainable, others, x)[0])
        norms = jnp.sqrt(jnp.sum(jnp.square(jax.grad(of_inputs)(x)), -1) + 1e-6)
        return loss + 0.1 * jnp.mean(jnp.square(norms - 1)), aux


@_step
class _PenaltyOfNorm(Step):
    """The gradient of the norm of the gradient."""

    def loss_of(self, trainable, others, x, y):
        loss, aux = super().loss_of(trainable, others, x, y)
        inner = jax.grad(lambda t: super(_PenaltyOfNorm, self).loss_of(t, others, x, y)[0])
        return loss + 0.1 * _norm(inner(trainable)), aux


@_step
class _GaussNewton(Step):
    """Divides by the mean of squared gradients of single rows."""

    def gradients(self, trainable, others, x, y):
        aux, gradients = super().gradients(trainable, others, x, y)
        one = lambda a, b: jax.grad(lambda t: self.loss_of(t, others, a[None], b[None])[0])(
            trainable
        )
        of_rows = jax.vmap(one)(x, y)
        pairs = zip(gradients, of_rows, strict=True)
        return aux, [g / (0.1 + jnp.mean(jnp.square(r), 0)) for g, r in pairs]


@_step
class _PrivateGradients(Step):
    """Clips the gradient of every row, and adds noise to the sum."""

    def gradients(self, trainable, others, x, y):
        aux, _ = super().gradients(trainable, others, x, y)

        def clipped(a, b):
            g = jax.grad(lambda t: self.loss_of(t, others, a[None], b[None])[0])(trainable)
            scale = jnp.minimum(1, 1 / (_norm(g) + 1e-6))
            return [scale * part for part in g]

        sums = [jnp.sum(g, 0) for g in jax.vmap(clipped)(x, y)]
        keys = jax.random.split(jax.random.key(1), len(sums))
        return aux, [
            (s + 0.5 * jax.random.normal(k, s.shape, s.dtype)) / x.shape[0]
            for s, k in zip(sums, keys, strict=True)
        ]


# Inputs that are changed in the step.


@_step
class _Mixup(Step):
    def given(self, x, y):
        partner = jax.random.permutation(jax.random.key(1), x.shape[0])
        return 0.7 * x + 0.3 * x[partner], 0.7 * y + 0.3 * y[partner]


@_step
class _Standardizes(Step):
    def given(self, x, y):
        return (x - jnp.mean(x, 0)) / (jnp.std(x, 0) + 1e-3), y


@_step
class _TwoViews(Step):
    """Trains on the batch and on its noisy copy at once."""

    def given(self, x, y):
        noise = 0.5 * jax.random.normal(jax.random.key(2), x.shape, x.dtype)
        return jnp.concatenate([x, x + noise]), jnp.concatenate([y, y])


@_step
class _OnlyHardRows(Step):
    def given(self, x, y):
        rows = lax.top_k(jnp.sum(jnp.square(y), -1), 4)[1]
        return x[rows], y[rows]


@_step
class _Adversarial(Step):
    """Moves inputs along the gradient of the loss, divided by the norm over the batch."""

    def gradients(self, trainable, others, x, y):
        of = lambda x: self.loss_of(trainable, others, x, y)[0]
        g = jax.grad(of)(x)
        return super().gradients(trainable, others, x + 0.5 * g / jnp.linalg.norm(g), y)


@_step
class _Consistency(Step):
    """Two passes with their own dropout must agree (R-Drop)."""

    def __init__(self, network):
        super().__init__(net(kl.Dropout(0.3)))

    def loss_of(self, trainable, others, x, y):
        loss, (p, others) = super().loss_of(trainable, others, x, y)
        again, others = self.stateless_call(trainable, others, x, training=True)
        return loss + jnp.mean(jnp.square(p - again)), (p, others)


# Logs of a step.


@_step
class _OddLogs(Step):
    def logs(self, loss, y, p, gradients):
        return {
            "median": jnp.median(p),
            "first": p[0, 0],
            "last": p[-1, 0],
            "sum": jnp.sum(p),
            "hits": jnp.sum(jnp.argmax(p, -1) == jnp.argmax(y, -1)),
            "smallest": jnp.min(p),
            "spread": jnp.std(p),
            "any": jnp.any(p > 1.5),
            "quantile": jnp.quantile(jnp.abs(p - y), 0.9),
        }


@_own()
class _MetricsOfItsOwn(Step):
    """Trackers that are the model's, updated with statistics of the batch."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="spread")
        self.total = keras.metrics.Sum(name="rows")

    @property
    def metrics(self):
        return [self.tracker, self.total]

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        (loss, (p, others)), gradients = self.gradients(trainable, others, *data[:2])
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        own = self.tracker.stateless_update_state(metrics[:2], jnp.std(p))
        total = self.total.stateless_update_state(metrics[2:], jnp.float32(p.shape[0]))
        logs = {
            "loss": loss,
            "spread": self.tracker.stateless_result(own),
            "rows": self.total.stateless_result(total),
        }
        return logs, (trainable, others, optimizer, own + total)

    def test_step(self, state, data):
        trainable, others, metrics = state
        p, _ = self.stateless_call(trainable, others, data[0])
        own = self.tracker.stateless_update_state(metrics[:2], jnp.max(p))
        logs = {"spread": self.tracker.stateless_result(own)}
        return logs, (trainable, others, own + metrics[2:])


@_own()
class _OwnTestStep(Step):
    def test_step(self, state, data):
        trainable, others, metrics = state
        x, y = data[:2]
        p, others = self.stateless_call(trainable, others, x, training=False)
        logs = {"worst": jnp.max(jnp.abs(p - y)), "rows": jnp.float32(x.shape[0])}
        logs["correlation"] = jnp.mean((p - jnp.mean(p)) * (y - jnp.mean(y)))
        return logs, (trainable, others, metrics)


@_own()
class _OwnPredictStep(Step):
    """Predictions that relate rows to each other."""

    def predict_step(self, state, data):
        p, others = self.stateless_call(*state, inputs_of(data), training=False)
        ranks = jnp.argsort(jnp.argsort(p[:, 0])) / p.shape[0]
        return {"relative": p - jnp.mean(p, 0), "rank": ranks}, others


# State that a step changes.


@_own()
class _TeacherOfAverages(Step):
    """A teacher whose weights are a moving average of the student's (mean teacher, BYOL)."""

    def __init__(self):
        super().__init__()
        self.teacher = net()
        self.teacher.trainable = False

    def loss_of(self, trainable, others, x, y):
        loss, (p, others) = super().loss_of(trainable, others, x, y)
        target = self._of_teacher(others, x + 0.1)
        return loss + jnp.mean(jnp.square(p - lax.stop_gradient(target))), (p, others)

    def _of_teacher(self, others, x):
        return self.teacher.stateless_call([], others[-4:], x)[0]

    def train_step(self, state, data):
        logs, (trainable, others, optimizer, metrics) = super().train_step(state, data)
        pairs = zip(others[-4:], trainable, strict=True)
        others = others[:-4] + [0.8 * t + 0.2 * s for t, s in pairs]
        return logs, (trainable, others, optimizer, metrics)


@_own()
class _MomentumContrast(Step):
    """MoCo: keys of a slow encoder, negatives from a queue of the last rows."""

    def __init__(self):
        super().__init__()
        self.slow = net()
        self.slow.trainable = False
        self.queue = self.add_weight(
            shape=(20, 3), initializer=keras.initializers.RandomNormal(seed=1), trainable=False
        )

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        x = data[0]
        *slow, queue = [others[i] for i in self.positions(others)]
        keys = self.slow.stateless_call([], slow, x + 0.2)[0]

        def loss_of(trainable):
            q = self.stateless_call(trainable, others, x, training=True)[0]
            positive = jnp.sum(q * keys, -1, keepdims=True)
            logits = jnp.concatenate([positive, q @ queue.T], 1)
            return jnp.mean(jax.nn.logsumexp(logits, 1) - logits[:, 0])

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        slow = [0.7 * a + 0.3 * b for a, b in zip(slow, trainable, strict=True)]
        queue = jnp.concatenate([keys, queue])[:20]
        others = list(others)
        for position, value in zip(self.positions(others), [*slow, queue], strict=True):
            others[position] = value
        return {"contrast": loss}, (trainable, others, optimizer, metrics)

    def positions(self, others):
        paths = [v.path for v in self.non_trainable_variables]
        wanted = [v.path for v in [*self.slow.variables, self.queue]]
        return [paths.index(path) for path in wanted]


@_own(optimizer=lambda: keras.optimizers.Adam(0.05))
class _EveryThirdStepOnly(Step):
    """Applies gradients when a counter of its own says so."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32",
                                     trainable=False)  # fmt: skip

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        (loss, (p, others)), gradients = self.gradients(trainable, others, *data[:2])
        new, moved = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        due = others[-1] % 3 == 0
        trainable, optimizer = jax.tree.map(
            lambda a, b: jnp.where(due, a, b), (new, moved), (trainable, optimizer)
        )
        others = [*others[:-1], others[-1] + 1]
        logs, metrics = self.measured(metrics, loss, data[1], p)
        return logs, (trainable, others, optimizer, metrics)


@_own()
class _TwoStepsInOne(Step):
    """Applies the optimizer twice to one batch."""

    def train_step(self, state, data):
        _, state = super().train_step(state, data)
        return super().train_step(state, data)


@_own()
class _InnerLoop(Step):
    """Model-agnostic meta-learning: adapts to one half of the batch, learns from the other."""

    def loss_of(self, trainable, others, x, y):
        n = x.shape[0] // 2
        inner = lambda t: super(_InnerLoop, self).loss_of(t, others, x[:n], y[:n])[0]
        fast = [v - 0.2 * g for v, g in zip(trainable, jax.grad(inner)(trainable), strict=True)]
        loss, (p, others) = super().loss_of(fast, others, x[n:], y[n:])
        return loss, (jnp.concatenate([p, p])[: x.shape[0]], others)

    def measured(self, variables, loss, y, p):
        return {"outer": loss}, variables


# Examples of keras.io.


@case(y=None, predict=False)
def variational_autoencoder():
    """Draws codes with a generator of seeds, and adds the divergence of the codes."""

    class Sampling(kl.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(7)

        def call(self, inputs):
            mean, log_var = inputs
            noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
            return mean + ops.exp(0.5 * log_var) * noise

    class Autoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.mean, self.log_var = kl.Dense(8, "tanh"), kl.Dense(2), kl.Dense(2)
            self.sampling, self.decoder = Sampling(), kl.Dense(6)

        def call(self, x):
            h = self.hidden(x)
            mean, log_var = self.mean(h), self.log_var(h)
            return mean, log_var, self.decoder(self.sampling([mean, log_var]))

        def loss_of(self, trainable, others, x):
            (mean, log_var, again), others = self.stateless_call(trainable, others, x)
            rebuilt = jnp.mean(jnp.sum(jnp.square(x - again), -1))
            divergence = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), 1)
            return rebuilt + jnp.mean(divergence), (rebuilt, others)

        def train_step(self, state, data):
            trainable, others, optimizer, metrics = state
            x = inputs_of(data)
            (loss, (rebuilt, others)), gradients = jax.value_and_grad(self.loss_of, has_aux=True)(
                trainable, others, x
            )
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            return {"loss": loss, "rebuilt": rebuilt}, (trainable, others, optimizer, metrics)

        def test_step(self, state, data):
            trainable, others, metrics = state
            loss, (_, others) = self.loss_of(trainable, others, inputs_of(data))
            return {"loss": loss}, (trainable, others, metrics)

    model = Autoencoder()
    model(np.zeros((2, 6)))
    return compiled(model, None, keras.optimizers.Adam(0.01))


@_own(
    loss=None, optimizer=lambda: keras.optimizers.Adam(0.01), y=None, evaluate=False, predict=False
)
class _GenerativeAdversarial(keras.Model):
    """Two networks against each other on noise, whose key is a state of the model."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), kl.Dense(8, "tanh"), kl.Dense(6)])
        self.critic = keras.Sequential(
            [keras.Input((6,)), kl.Dense(8, "tanh"), kl.BatchNormalization(), kl.Dense(1)]
        )
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="uint32",
                                     trainable=False)  # fmt: skip
        self.built = True

    def call(self, x):
        return self.critic(x)

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        n = len(self.generator.trainable_variables)
        g, d = trainable[:n], trainable[n:]
        count, *others = others
        real = inputs_of(data)
        noise = jax.random.normal(jax.random.key(count), (real.shape[0], 4))

        def of_critic(d):
            fake, _ = self.generator.stateless_call(g, [], noise)
            both = jnp.concatenate([real, fake])
            logits, state = self.critic.stateless_call(d, others, both, training=True)
            labels = jnp.concatenate([jnp.ones((len(real), 1)), jnp.zeros((len(fake), 1))])
            loss = keras.losses.binary_crossentropy(labels, logits, from_logits=True)
            return jnp.mean(loss), state

        def of_generator(g):
            fake, _ = self.generator.stateless_call(g, [], noise)
            logits, _ = self.critic.stateless_call(d, others, fake)
            return -jnp.mean(jnp.log(jax.nn.sigmoid(logits) + 1e-3)) + jnp.std(fake)

        (loss_d, others), of_d = jax.value_and_grad(of_critic, has_aux=True)(d)
        loss_g, of_g = jax.value_and_grad(of_generator)(g)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, of_g + of_d, trainable)
        logs = {"critic": loss_d, "generator": loss_g}
        return logs, (trainable, [count + 1, *others], optimizer, metrics)


@_own(built=True)
class _ComputeLossOfBatch(Plain):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return jnp.sqrt(jnp.mean(jnp.square(y - y_pred))) + jnp.std(y_pred)


@_own(built=True)
class _ComputeMetricsOfBatch(Plain):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"top": jnp.max(y_pred), "rows": jnp.float32(x.shape[0])}


@_own(built=True)
class _LossesInATracker(Plain):
    """`compute_loss` that feeds a metric of its own with a statistic of the batch."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="spread")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = jnp.mean(jnp.square(y - y_pred))
        self.tracker.update_state(jnp.std(y_pred))
        return loss


@_own(loss=None, built=True)
class _DenoisingDiffusion(Step):
    """Times and noise drawn in the step, a table of times indexed, and an average of weights."""

    def __init__(self):
        super().__init__(net(units=6))
        self.seeds = keras.random.SeedGenerator(1)

    def loss_of(self, trainable, others, x, y):
        seeds = [(self.seeds.state, others[-1])]
        with keras.StatelessScope(state_mapping=seeds) as scope:
            times = keras.random.uniform((x.shape[0], 1), seed=self.seeds)
            noise = keras.random.normal(x.shape, seed=self.seeds)
        state = scope.get_current_value(self.seeds.state)
        noisy = jnp.cos(times) * (x - jnp.mean(x, 0)) / jnp.std(x, 0) + jnp.sin(times) * noise
        p, others = self.stateless_call(trainable, others, noisy, training=True)
        return jnp.mean(jnp.abs(p - noise)), (p[:, :3], [*others[:-1], state])


@_own()
class _Reinforcement(Step):
    """Policy gradients whose advantages are standardized over the batch."""

    def loss_of(self, trainable, others, x, y):
        logits, others = self.stateless_call(trainable, others, x, training=True)
        actions = jax.random.categorical(jax.random.key(2), lax.stop_gradient(logits))
        rewards = jnp.take_along_axis(y, actions[:, None], 1)[:, 0]
        advantages = (rewards - jnp.mean(rewards)) / (jnp.std(rewards) + 1e-3)
        log_p = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_p, actions[:, None], 1)[:, 0]
        return -jnp.mean(chosen * advantages), (logits, others)


@_own()
class _WeightsAveragedInTheStep(Step):
    def train_step(self, state, data):
        before = state[0]
        logs, (trainable, *rest) = super().train_step(state, data)
        mean = [0.3 * b + 0.7 * a for b, a in zip(before, trainable, strict=True)]
        far = _norm([a - b for a, b in zip(trainable, before, strict=True)])
        return logs | {"far": far}, (mean, *rest)


@_own()
class _LearningRateInTheStep(Step):
    """Sets the learning rate of its optimizer from the loss of the batch."""

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        (loss, (p, others)), gradients = self.gradients(trainable, others, *data[:2])
        names = [v.path for v in self.optimizer.variables]
        place = names.index(self.optimizer._learning_rate.path)
        optimizer = list(optimizer)
        optimizer[place] = 0.05 * jnp.tanh(loss)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = self.measured(metrics, loss, data[1], p)
        return logs, (trainable, others, optimizer, metrics)


@_own(built=True)
class _ModelThatAssigns(Plain):
    """A call that assigns a variable of the model itself."""

    def __init__(self):
        super().__init__()
        self.top = self.add_weight(shape=(), initializer="zeros", trainable=False, name="top")

    def call(self, x, training=False):
        p = self.network(x)
        if training:
            self.top.assign(ops.maximum(self.top, ops.max(p)))
        return p + 0.1 * self.top


@_own(fit=lambda model, x, y: {"sample_weight": np.abs(x[:, 0]) + 0.1})
class _WeightsOfRowsInStep(Step):
    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        x, y, weight = data

        def loss_of(trainable):
            p, _ = self.stateless_call(trainable, others, x, training=True)
            return jnp.sum(weight * jnp.mean(jnp.square(p - y), -1)) / jnp.sum(weight)

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs = {"loss": loss, "weight": jnp.sum(weight)}
        return logs, (trainable, others, optimizer, metrics)
