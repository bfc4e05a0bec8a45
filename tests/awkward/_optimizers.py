"""Optimizers: all of Keras with their options, and own ones that look at all gradients."""

from typing import Any

import jax.numpy as jnp
from keras import ops, optimizers as ko

from tests.awkward._case import add, compiled, net


def _optimizer(name, make, *, loss="mse", **options):
    add(name, "optimizers", lambda: compiled(net(), loss, make()), **options)


# A loss whose parts do not add up makes every mistake in the gradient show.
def _root(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)))


_MADE: dict[str, Any] = {
    "sgd": ko.SGD,
    "rmsprop": ko.RMSprop,
    "adam": ko.Adam,
    "adamw": ko.AdamW,
    "adadelta": ko.Adadelta,
    "adagrad": ko.Adagrad,
    "adamax": ko.Adamax,
    "adafactor": ko.Adafactor,
    "nadam": ko.Nadam,
    "ftrl": ko.Ftrl,
    "lion": ko.Lion,
    "lamb": ko.Lamb,
    "muon": ko.Muon,
    "schedule_free": ko.ScheduleFreeAdamW,
}
for _name, _class in _MADE.items():
    _optimizer(_name, lambda cls=_class: cls(0.02), loss=_root)
for _name, _class, _options in [
    ("sgd_momentum", ko.SGD, {"momentum": 0.9, "nesterov": True}),
    ("sgd_weight_decay", ko.SGD, {"weight_decay": 0.1}),
    ("sgd_clip_norm", ko.SGD, {"clipnorm": 0.3}),
    ("sgd_clip_value", ko.SGD, {"clipvalue": 0.1}),
    ("sgd_clip_global_norm", ko.SGD, {"global_clipnorm": 0.4}),
    ("sgd_accumulates_2", ko.SGD, {"gradient_accumulation_steps": 2}),
    ("sgd_accumulates_3_and_clips", ko.SGD, {"gradient_accumulation_steps": 3, "clipnorm": 0.2}),
    ("sgd_average", ko.SGD, {"use_ema": True, "ema_momentum": 0.8}),
    (
        "sgd_average_overwrites",
        ko.SGD,
        {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
    ),
    ("adam_amsgrad", ko.Adam, {"amsgrad": True}),
    ("adam_clip_global_norm", ko.Adam, {"global_clipnorm": 0.2}),
    ("adam_accumulates_3", ko.Adam, {"gradient_accumulation_steps": 3}),
    (
        "adam_of_all",
        ko.Adam,
        {"clipnorm": 0.5, "weight_decay": 0.05, "use_ema": True, "gradient_accumulation_steps": 2},
    ),
    ("rmsprop_centred", ko.RMSprop, {"centered": True, "momentum": 0.5}),
    ("adafactor_relative", ko.Adafactor, {"relative_step": True, "clip_threshold": 0.5}),
    ("lamb_clip_value", ko.Lamb, {"clipvalue": 0.05}),
    ("lion_clip_norm", ko.Lion, {"global_clipnorm": 0.1}),
    ("muon_weight_decay", ko.Muon, {"weight_decay": 0.1}),
    ("nadam_average", ko.Nadam, {"use_ema": True, "ema_momentum": 0.7}),
]:
    _optimizer(_name, lambda cls=_class, options=_options: cls(0.02, **options), loss=_root)


def _without_decay_of_biases():
    optimizer = ko.AdamW(0.02, weight_decay=0.2)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


_optimizer("adamw_excludes", _without_decay_of_biases)
for _name, _make in {
    "exponential_decay": lambda: ko.schedules.ExponentialDecay(0.05, 2, 0.5),
    "cosine_decay": lambda: ko.schedules.CosineDecay(0.01, 8, warmup_target=0.08, warmup_steps=3),
    "piecewise": lambda: ko.schedules.PiecewiseConstantDecay([2, 5], [0.1, 0.05, 0.01]),
}.items():
    _optimizer(f"schedule_{_name}", lambda make=_make: ko.SGD(make()))
_optimizer("loss_scale", lambda: ko.LossScaleOptimizer(ko.SGD(0.05)))
_optimizer(
    "loss_scale_grows",
    lambda: ko.LossScaleOptimizer(ko.Adam(0.02), initial_scale=8.0, dynamic_growth_steps=2),
)
_optimizer(
    "loss_scale_of_root", lambda: ko.LossScaleOptimizer(ko.SGD(0.05, clipnorm=0.3)), loss=_root
)
# A scale that overflows in the first steps: they are skipped, and the scale falls.
_optimizer("loss_scale_falls", lambda: ko.LossScaleOptimizer(ko.SGD(0.05), initial_scale=2.0**127))


def _overflows_of_one_row():
    """One row of the second batch overflows, which skips the step for all."""

    def loss(y, p):
        return ops.mean(ops.square(y - p), -1) * ops.where(y[:, 0] > 1.45, 1e38, 1.0)

    optimizer = ko.LossScaleOptimizer(ko.SGD(0.01), initial_scale=4.0)
    return compiled(net(), loss, optimizer)


add("loss_scale_of_one_row", "optimizers", _overflows_of_one_row, stays=True)


def _several_optimizers():
    model = net()
    of_head = {f"{model.layers[-1].path}/.*": ko.Adam(0.02)}
    return compiled(model, "mse", ko.MultiOptimizer(ko.OptimizerMap(ko.SGD(0.05), of_head)))


def _norm(gradients):
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))


class _NoiseOfNorm(ko.SGD):
    """Adds noise whose size is the norm of all gradients."""

    def apply(self, grads, trainable_variables=None):
        noise = 0.1 * _norm(grads)
        super().apply([g + noise * jnp.cos(g * 50) for g in grads], trainable_variables)


class _SkipsOutliers(ko.SGD):
    """Skips a step whose norm is larger than twice the running one."""

    def build(self, variables):
        super().build(variables)
        self.running = self.add_variable((), initializer="ones", name="running")

    def apply(self, grads, trainable_variables=None):
        norm = _norm(grads)
        keep = jnp.where(norm > 2 * self.running, 0.1, 1.0)
        self.running.assign(0.9 * self.running + 0.1 * norm)
        super().apply([g * keep for g in grads], trainable_variables)


class _Own(ko.Optimizer):
    """An update per variable: trust ratios, a sign, and a state that keeps the largest."""

    def __init__(self, kind):
        super().__init__(learning_rate=0.02, name="own")
        self.kind = kind

    def build(self, variables):
        super().build(variables)
        self.slots = [self.add_variable_from_reference(v, "slot") for v in variables]
        self.order = {v.path: i for i, v in enumerate(variables)}

    def update_step(self, gradient, variable, learning_rate):
        slot = self.slots[self.order[variable.path]]
        rate = ops.cast(learning_rate, variable.dtype)
        norm = ops.sqrt(ops.sum(ops.square(gradient))) + 1e-6
        if self.kind == "trust":
            ratio = ops.sqrt(ops.sum(ops.square(variable))) / norm
            self.assign(slot, 0.9 * slot + ratio * gradient)
        elif self.kind == "sign":
            self.assign(slot, 0.9 * slot + ops.tanh(100 * gradient))
        elif self.kind == "largest":
            self.assign(slot, ops.maximum(ops.abs(gradient), 0.9 * slot))
            self.assign_sub(variable, rate * gradient / (slot + 1e-2))
            return
        else:
            self.assign(slot, gradient - 0.5 * slot)
        self.assign_sub(variable, rate * slot)


class _Lookahead(ko.Optimizer):
    """Goes back half of the way every third step."""

    def __init__(self):
        super().__init__(learning_rate=0.05, name="lookahead")

    def build(self, variables):
        super().build(variables)
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]
        self.momenta = [self.add_variable_from_reference(v, "momentum") for v in variables]
        self.order = {v.path: i for i, v in enumerate(variables)}

    def update_step(self, gradient, variable, learning_rate):
        slow = self.slow[self.order[variable.path]]
        before = ops.convert_to_tensor(slow)
        momentum = self.momenta[self.order[variable.path]]
        self.assign(momentum, 0.9 * momentum + gradient)
        fast = variable - ops.cast(learning_rate, variable.dtype) * momentum
        back = (self.iterations + 1) % 3 == 0
        mean = 0.5 * (fast + before)
        self.assign(slow, ops.where(back, mean, before))
        self.assign(variable, ops.where(back, mean, fast))


class _OfLastGradient(ko.SGD):
    """Steps along the last gradient: `stateless_apply` itself is changed."""

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        grads = [g * jnp.minimum(1.0, 0.2 / (jnp.sqrt(jnp.sum(g * g)) + 1e-6)) for g in grads]
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)


for _name, _make in {
    "own_noise_of_norm": lambda: _NoiseOfNorm(0.05),
    "own_skips_outliers": lambda: _SkipsOutliers(0.05),
    "own_lookahead": _Lookahead,
    "own_stateless_apply": lambda: _OfLastGradient(0.05),
}.items():
    _optimizer(_name, _make, loss=_root)


for _kind in ("trust", "sign", "largest", "difference"):
    _optimizer(f"own_{_kind}", lambda kind=_kind: _Own(kind), loss=_root)
add("several_optimizers", "optimizers", _several_optimizers)
