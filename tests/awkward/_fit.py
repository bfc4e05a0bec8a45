"""What else is given to `fit`: weights, callbacks, other batches, several fits in a row."""

import keras
import numpy as np
from keras import layers as kl, ops

from tests.awkward._case import BATCH, add, adder, compiled, net, sgd

case = adder("fit")


def _root(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)))


def _weights(model, x, y):
    return {"sample_weight": np.abs(x[:, 0]) + 0.1}


def _all_of(*histories):
    """Joins the logs of several fits; those of different models may have different names."""
    joined: dict[str, list[float]] = {}
    for number, history in enumerate(histories):
        for key, values in getattr(history, "history", history).items():
            joined[f"{number} {key}"] = list(values)
    return joined


def _normalized(**options):
    return compiled(net(kl.BatchNormalization(), kl.Dropout(0.2)), **options)


@case(fit=_weights)
def sample_weights():
    return _normalized(weighted_metrics=["mae", "mse"], metrics=["mae"])


@case(fit=lambda model, x, y: {"sample_weight": (np.arange(len(x)) % 5 == 0).astype("float32")})
def most_weights_are_zero():
    return _normalized(weighted_metrics=["mae"])


@case(fit=lambda model, x, y: {"sample_weight": (np.arange(len(x)) >= 15).astype("float32")})
def weights_of_a_batch_are_zero():
    """All weights of the first batch, and of the first replica in the second."""
    return _normalized(weighted_metrics=["mae"])


@case(y="labels", fit={"class_weight": {0: 0.2, 1: 1.0, 2: 3.0}})
def class_weights():
    return compiled(
        net(activation="softmax"), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )


@case(
    y=("targets", "targets"),
    fit=lambda model, x, y: {"sample_weight": (abs(x[:, 0]), abs(x[:, 1]))},
)
def weights_of_two_outputs():
    x = keras.Input((6,))
    return compiled(keras.Model(x, [kl.Dense(3)(x), kl.Dense(3)(x)]), ["mse", "mae"])


@case(fit={"validation_split": 0.3})
def validation():
    return _normalized(metrics=["mae", lambda y, p: ops.max(p)])


@case(fit={"batch_size": 1, "epochs": 1}, rows=7)
def batches_of_one():
    return compiled(net(kl.Dropout(0.3)), _root)


@case(fit={"batch_size": 42})
def one_row_left():
    return compiled(net(kl.Dropout(0.3)), _root, metrics=[lambda y, p: ops.std(p)])


@case(fit={"shuffle": True, "epochs": 3})
def shuffled():
    return _normalized()


@case(fit={"epochs": 3, "initial_epoch": 1})
def later_epoch():
    return _normalized()


def _uneven(x, y):
    start = 0
    for size in (12, 5, 1, 7, 2, 12, 3, 1):
        yield x[start : start + size], y[start : start + size]
        start += size


@case(
    fit=lambda model, x, y: {"x": _Batches(x, y), "y": None,
                             "batch_size": None, "shuffle": None},
)  # fmt: skip
def batches_of_other_sizes():
    return compiled(net(kl.Dropout(0.3), kl.LayerNormalization()), _root, metrics=["mae"])


class _Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.batches = list(_uneven(x, y))

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def _endless(x, y):
    while True:
        yield from _uneven(x, y)


@case(
    fit=lambda model, x, y: {
        "x": _endless(x, y), "y": None, "batch_size": None, "steps_per_epoch": 5
    },
)  # fmt: skip
def endless_generator():
    return compiled(net(kl.Dropout(0.3)), _root)


class _BatchLogs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({key: float(value) for key, value in logs.items()})


def _seen_batches(model, x, y):
    seen = _BatchLogs()
    history = model.fit(
        x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False, callbacks=[seen]
    )
    logs = {key: [one[key] for one in seen.seen] for key in seen.seen[0]}
    return _all_of(history, logs)


@case(train=_seen_batches)
def logs_of_batches():
    return _normalized(metrics=["mae", lambda y, p: ops.max(p)])


class _Changes(keras.callbacks.Callback):
    """Calls a function at the end of every epoch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_epoch_end(self, epoch, logs=None):
        self.function(self.model, epoch, logs)


def _calls(function, **more):
    return lambda model, x, y: {"callbacks": [_Changes(function)], "epochs": 3, **more}


@case(fit=_calls(lambda model, epoch, logs: model.optimizer.learning_rate.assign(0.01 * epoch)))
def learning_rate_by_callback():
    return _normalized()


@case(fit=_calls(lambda model, epoch, logs: model.layers[0].kernel.assign(
    0.5 * model.layers[0].kernel)))  # fmt: skip
def weights_by_callback():
    return _normalized()


@case(fit=_calls(lambda model, epoch, logs: model.set_weights(
    [0.9 * np.asarray(w) for w in model.get_weights()])))  # fmt: skip
def all_weights_by_callback():
    return _normalized()


def _loss_with_weight():
    weight = [1.0]

    def loss(y, p):
        return weight[0] * ops.mean(ops.square(y - p))

    loss.weight = weight
    return loss


def _closure_in_one_fit(model, x, y):
    """Under `jax.jit`, and so in plain Keras, the value of the first batch stays."""
    loss = model.loss

    def change(model, epoch, logs):
        loss.weight[0] = 10.0

    one = model.fit(x, y, batch_size=43, epochs=3, verbose=0, callbacks=[_Changes(change)])
    return one.history


def _closure_and_compile(model, x, y):
    """What is compiled again sees the new value."""
    loss = model.loss
    one = model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
    loss.weight[0] = 3.0
    model.compile(model.optimizer, loss)
    return _all_of(one, model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False))


add("closure_in_one_fit", "fit", lambda: compiled(net(), _loss_with_weight()),
    train=_closure_in_one_fit, evaluate=False)  # fmt: skip
add("closure_and_compile", "fit", lambda: compiled(net(), _loss_with_weight()),
    train=_closure_and_compile)  # fmt: skip


def _two_fits(between):
    def train(model, x, y):
        fit = lambda: model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
        one = fit()
        between(model, x, y)
        return _all_of(one, fit())

    return train


def _other_optimizer(model, x, y):
    model.optimizer = keras.optimizers.SGD(0.2)
    model.optimizer.build(model.trainable_variables)


def _frozen_and_compiled(model, x, y):
    model.layers[0].trainable = False
    compiled(model)


def _compiled_anew(model, x, y):
    model.compile(keras.optimizers.Adam(0.02), _root, metrics=[lambda y, p: ops.max(p)])


def _trained_on_batches(model, x, y):
    for _ in range(3):
        model.train_on_batch(x[:7], y[:7])


def _evaluated(model, x, y):
    model.evaluate(x, y, batch_size=5, verbose=0)
    model.predict(x[:3], verbose=0)


for _name, _between in {
    "nothing": lambda model, x, y: None,
    "another_optimizer": _other_optimizer,
    "frozen_layers": _frozen_and_compiled,
    "another_compile": _compiled_anew,
    "train_on_batch": _trained_on_batches,
    "evaluate": _evaluated,
    "another_rate": lambda model, x, y: model.optimizer.learning_rate.assign(0.3),
    "other_weights": lambda model, x, y: model.set_weights(
        [np.asarray(w) * 0.5 for w in model.get_weights()]
    ),
}.items():
    add(f"two_fits_and_{_name}", "fit", _normalized, train=_two_fits(_between))


def _on_batches(model, x, y):
    logs = [
        model.train_on_batch(x[i : i + 7], y[i : i + 7], abs(x[i : i + 7, 0]), return_dict=True)
        for i in range(0, len(x), 7)
    ]
    tested = model.test_on_batch(x[:5], y[:5], return_dict=True)
    predicted = model.predict_on_batch(x[:3])
    joined = _all_of({key: [one[key] for one in logs] for key in logs[0]})
    tested = {f"tested {key}": [value] for key, value in tested.items()}
    return joined | tested | {"predicted": np.ravel(predicted)}


@case(train=_on_batches)
def train_on_batch():
    return _normalized(weighted_metrics=["mae", "mse"])


for _name, _make in {
    "early_stopping": lambda: keras.callbacks.EarlyStopping(
        "loss", patience=1, min_delta=0.4, restore_best_weights=True
    ),
    "reduce_on_plateau": lambda: keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.1, patience=0, min_delta=0.3
    ),
    "scheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    "terminate_on_nan": keras.callbacks.TerminateOnNaN,
}.items():
    add(
        f"callback_{_name}",
        "fit",
        lambda: _normalized(),
        fit=lambda model, x, y, make=_make: {"callbacks": [make()], "epochs": 5},
    )


def _several_compiled():
    """Steps in one program, in all settings."""
    model = _normalized(metrics=[lambda y, p: ops.max(p)])
    model.compile(sgd(), _root, metrics=[lambda y, p: ops.max(p)], steps_per_execution=2)
    return model


add("two_steps_per_execution", "fit", _several_compiled)


@case(y=lambda: np.ones((43, 3), np.float16), fit={})
def half_precision_targets():
    return _normalized(metrics=["mae"])


@case(fit=lambda model, x, y: {"x": np.asarray(x, np.float64), "y": np.asarray(y, np.float64)})
def double_precision_inputs():
    return _normalized()
