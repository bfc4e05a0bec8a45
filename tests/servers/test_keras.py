"""Keras models and optimizers in closures: as on one device, with one worker."""

import keras
import numpy as np
import pytest

import distributary as dist
from distributary.coordinator import ClusterCoordinator
from distributary.errors import UnsupportedError
from distributary.experimental import local_cluster

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 8)).astype("float32")
Y = RNG.integers(0, 3, 64).astype("int32")
BATCHES = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 64, 16)]


def _model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )


def _loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _train(make_optimizer, in_run=True):
    strategy = dist.ParameterServerStrategy(local_cluster(workers=1, ps=2))
    loss_of = _loss()
    with strategy.scope():
        model, optimizer = _model(), make_optimizer()
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(batch):
        x, y = batch
        with dist.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_of(y, logits)
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        accuracy.update_state(y, logits)
        return loss

    def closure(iterator):
        return strategy.run(step, args=(next(iterator),)) if in_run else step(next(iterator))

    coordinator = ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: BATCHES))
    losses = [coordinator.schedule(closure, args=(iterator,)) for _ in range(4)]
    coordinator.join()
    return model, optimizer, accuracy, coordinator.fetch(losses)


@pytest.mark.parametrize(
    ("make_optimizer", "in_run"),
    [
        (lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.1), True),
        (lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1, use_ema=True), False),
        (lambda: keras.optimizers.Ftrl(0.05), True),
    ],
)
def test_one_worker_trains_as_one_device_does(make_optimizer, in_run):
    expected = _model()
    expected.compile(make_optimizer(), _loss(), metrics=["accuracy"])
    logs = expected.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history

    model, optimizer, accuracy, losses = _train(make_optimizer, in_run=in_run)
    optimizer.finalize_variable_values(model.trainable_variables)  # as fit does

    for value, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(value, other, rtol=2e-4, atol=1e-5)
    slots = [np.array(v) for v in optimizer.variables]
    for value, other in zip(slots, expected.optimizer.variables, strict=True):
        np.testing.assert_allclose(value, other, rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(np.mean(losses), logs["loss"][0], rtol=1e-4)
    np.testing.assert_allclose(accuracy.result(), logs["accuracy"][0], rtol=1e-6)


def test_variables_are_on_servers_and_slots_beside_them(tmp_path):
    model, optimizer, _, _ = _train(lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    servers = {v.path: v._value._place[0] for v in model.trainable_variables}
    assert set(servers.values()) == {0, 1}
    momenta = dict(zip(servers, optimizer.momentums, strict=True))
    assert {path: momentum._value._place[0] for path, momentum in momenta.items()} == servers

    predicted = model(X)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(X), predicted, rtol=1e-5)
    kernel = model.layers[0].kernel
    kernel.assign(2 * kernel)
    np.testing.assert_allclose(kernel.numpy(), 2 * loaded.layers[0].kernel.numpy(), rtol=1e-6)


@pytest.mark.parametrize("in_run", [True, False])
def test_an_update_that_no_server_can_compute_is_refused(in_run):
    with pytest.raises(UnsupportedError, match="Start one server"):
        _train(
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), in_run=in_run
        )
