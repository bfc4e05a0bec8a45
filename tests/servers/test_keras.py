"""Keras with parameter servers: `fit`, `evaluate`, `predict`, and loops of one's own."""

import contextlib

import keras
import numpy as np
import pytest

import distributary as dist
from distributary.coordinator import ClusterCoordinator
from distributary.errors import InvalidValueError, UnsupportedError
from distributary.experimental import local_cluster

RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 8)).astype("float32")
Y = RNG.integers(0, 3, 70).astype("int32")
WEIGHTS = RNG.uniform(0.5, 2, 70).astype("float32")


def _network(dropout=False):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            *([keras.layers.Dropout(0.2)] if dropout else []),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def _model(metrics=("accuracy",), dropout=False, **options):
    model = _network(dropout)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, metrics=list(metrics), weighted_metrics=["accuracy"], **options)
    return model


def _strategy(workers):
    return dist.ParameterServerStrategy(local_cluster(workers, ps=2))


class _Halving(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2


def _fit(model, callbacks=()):
    history = model.fit(
        X,
        Y,
        batch_size=16,
        epochs=3,
        sample_weight=WEIGHTS,
        validation_data=(X[:20], Y[:20]),
        shuffle=False,
        verbose=0,
        callbacks=[_Halving(), *callbacks],
    )
    return history.history


def test_one_worker_fits_as_one_device_does(tmp_path):
    expected = _model(dropout=True)
    logs = _fit(expected)
    with _strategy(1).scope():
        model = _model(dropout=True, steps_per_execution=2)
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")

    found = _fit(model, [checkpoint])

    assert found.keys() == logs.keys()
    for name, values in logs.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)
    for value, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-6)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05 / 8)
    np.testing.assert_allclose(
        model.predict(X, batch_size=16, verbose=0), expected.predict(X, verbose=0), rtol=1e-4
    )
    saved = keras.models.load_model(tmp_path / "3.keras")
    np.testing.assert_array_equal(saved.get_weights()[0], model.get_weights()[0])
    np.testing.assert_allclose(
        model.train_on_batch(X[:16], Y[:16]), expected.train_on_batch(X[:16], Y[:16]), rtol=1e-4
    )


class _LossOfBatch(keras.Model):
    """Logs a loss of its own, and no metrics."""

    def train_step(self, state, data):
        _, (*state, _) = super().train_step(state, data)
        x, _ = data
        return {"largest": keras.ops.max(x[:, 0])}, (*state, [])

    @property
    def metrics(self):
        return []


def test_mixed_precision_and_logs_of_the_last_batch_are_those_of_one_device():
    def fitted():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((8,))
        outputs = keras.layers.Dense(3, "softmax", dtype="mixed_bfloat16")(inputs)
        model = _LossOfBatch(inputs, outputs)
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    expected = fitted()
    with _strategy(1).scope():
        model = fitted()
    own, logs = (
        m.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0) for m in (model, expected)
    )
    assert own.history == logs.history == {"largest": [X[64:, 0].max()] * 2}
    np.testing.assert_allclose(model.get_weights()[0], expected.get_weights()[0], rtol=1e-2)


_DECAY = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)


@pytest.mark.parametrize(
    ("optimizer", "ps"),
    [
        # Their variables need each other.
        (lambda: keras.optimizers.Adafactor(0.01, gradient_accumulation_steps=2), 1),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), 1),
        (lambda: keras.optimizers.SGD(_DECAY, nesterov=True, momentum=0.5), 2),
    ],
    ids=["accumulation", "loss scaling", "schedule"],
)
def test_servers_update_as_one_device_does(optimizer, ps):
    def fitted():
        model = _model()
        model.compile(optimizer(), "sparse_categorical_crossentropy")
        model.fit(X, Y, batch_size=35, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    with dist.ParameterServerStrategy(local_cluster(workers=1, ps=ps)).scope():
        own = fitted()
    for value, expected in zip(own, fitted(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


class _Ending(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def test_an_interrupted_fit_goes_on_from_its_backup(tmp_path):
    options = {"batch_size": 35, "epochs": 4, "shuffle": False, "verbose": 0}
    expected = _model()
    expected.fit(X, Y, **options)

    for callbacks in ([_Ending()], []):  # the second time, everything is new
        with _strategy(1).scope():
            model = _model()
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        with contextlib.suppress(KeyboardInterrupt):
            history = model.fit(X, Y, callbacks=[backup, *callbacks], **options)

    assert history.epoch == [2, 3]
    for value, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


def test_several_workers_evaluate_and_predict_exactly():
    expected = _model()
    with _strategy(3).scope():
        model = _model()
    model.set_weights(expected.get_weights())

    found = model.evaluate(X, Y, batch_size=9, sample_weight=WEIGHTS, verbose=0, return_dict=True)

    logs = expected.evaluate(X, Y, batch_size=9, sample_weight=WEIGHTS, verbose=0, return_dict=True)
    for name, value in logs.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(
        model.predict(X, batch_size=9, verbose=0), expected.predict(X, verbose=0), rtol=1e-5
    )


def test_workers_read_data_of_their_own():
    strategy = _strategy(2)
    with strategy.scope():
        model = _model()
    coordinator = ClusterCoordinator(strategy)
    data = coordinator.create_per_worker_dataset(lambda: [(X[:16], Y[:16]), (X[:8], Y[:8])] * 50)

    model.fit(data, steps_per_epoch=10, epochs=2, verbose=0)

    assert int(model.optimizer.iterations) == 20
    # The batches of a worker, whatever their number, are these two.
    losses = [model.evaluate(X[:n], Y[:n], batch_size=n, verbose=0)[0] for n in (8, 16)]
    found = model.evaluate(data, steps=4, verbose=0, return_dict=True)["loss"]
    assert min(losses) * 0.999 <= found <= max(losses) * 1.001
    with pytest.raises(InvalidValueError, match="give steps_per_epoch"):
        model.fit(data)
    with pytest.raises(InvalidValueError, match="class_weight cannot be given"):
        model.fit(data, steps_per_epoch=2, class_weight={0: 1.0})


def test_random_numbers_differ_between_steps():
    def model():
        inputs = keras.Input((1000,))
        return keras.Model(inputs, keras.layers.Dropout(0.5, seed=1)(inputs))

    class Masks(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = model()

        def predict_step(self, state, data):
            outputs, other = self.stateless_call(state[0], state[1], data, training=True)
            return outputs, other

        def call(self, x, training=False):
            return self.inner(x, training=training)

    with _strategy(2).scope():
        masks = Masks()
        masks.build((None, 1000))
    found = masks.predict(np.ones((12, 1000), "float32"), batch_size=1, verbose=0) > 0
    assert abs(found.mean() - 0.5) < 0.05
    # No two steps share a mask, whichever workers had them.
    assert len({row.tobytes() for row in found}) == 12


def test_errors_of_workers_end_fit():
    strategy = _strategy(1)
    with strategy.scope():
        model = _model()

    def broken():
        yield X[:16], Y[:16]
        yield X[:16], Y[:16]
        raise ValueError("the file is broken")

    data = ClusterCoordinator(strategy).create_per_worker_dataset(broken)
    with pytest.raises(ValueError, match="the file is broken"):
        model.fit(data, steps_per_epoch=20, verbose=0)
    assert int(model.optimizer.iterations) == 2
    model.fit(X, Y, batch_size=16, verbose=0)
    assert int(model.optimizer.iterations) == 7


@keras.saving.register_keras_serializable()
class _Latest(keras.metrics.Metric):
    def __init__(self, name="latest"):
        super().__init__(name=name)
        self.value_of = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value_of.assign(keras.ops.max(y_pred))

    def result(self):
        return 1 * self.value_of


@pytest.mark.parametrize("num_shards", [1, 2])
def test_what_cannot_be_right_is_refused(num_shards):
    partitioner = dist.experimental.partitioners.FixedShardsPartitioner(num_shards)
    strategy = dist.ParameterServerStrategy(local_cluster(1, ps=2), partitioner)
    with strategy.scope():
        model = _model([_Latest()])
        eager = _model(run_eagerly=True)
    with pytest.raises(UnsupportedError, match="'latest/value' is a sum over all workers"):
        model.fit(X, Y, verbose=0)
    with pytest.raises(UnsupportedError, match="run_eagerly=True is not possible"):
        eager.fit(X, Y, verbose=0)


# Loops of one's own


def _train(make_optimizer, in_run=True):
    strategy = _strategy(1)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    with strategy.scope():
        model, optimizer = _network(), make_optimizer()
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(batch):
        x, y = batch
        with dist.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = loss_of(y, outputs)
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        accuracy.update_state(y, outputs)
        return loss

    def closure(iterator):
        return strategy.run(step, args=(next(iterator),)) if in_run else step(next(iterator))

    batches = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 64, 16)]
    coordinator = ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: batches))
    losses = [coordinator.schedule(closure, args=(iterator,)) for _ in range(4)]
    coordinator.join()
    return model, optimizer, accuracy, coordinator.fetch(losses)


@pytest.mark.parametrize(
    ("make_optimizer", "in_run"),
    [
        (lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.1), True),
        (lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1, use_ema=True), False),
    ],
)
def test_one_worker_trains_as_one_device_does(make_optimizer, in_run):
    expected = _network()
    expected.compile(make_optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    logs = expected.fit(X[:64], Y[:64], batch_size=16, shuffle=False, verbose=0).history

    model, optimizer, accuracy, losses = _train(make_optimizer, in_run=in_run)
    optimizer.finalize_variable_values(model.trainable_variables)  # as fit does

    for value, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(value, other, rtol=2e-4, atol=1e-5)
    slots = [np.array(v) for v in optimizer.variables]
    for value, other in zip(slots, expected.optimizer.variables, strict=True):
        np.testing.assert_allclose(value, other, rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(np.mean(losses), logs["loss"][0], rtol=1e-4)
    np.testing.assert_allclose(accuracy.result(), logs["accuracy"][0], rtol=1e-6)


# Slots lie beside their variables, or the tests before would be refused as well.
def test_an_update_that_needs_several_servers_is_refused():
    with pytest.raises(UnsupportedError, match="Start one server"):
        _train(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
