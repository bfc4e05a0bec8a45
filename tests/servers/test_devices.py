"""Workers with several devices, against one device."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.coordinator import ClusterCoordinator
from distributary.errors import DeviceError, InvalidTypeError, InvalidValueError, UnsupportedError
from distributary.experimental import local_cluster
from distributary.experimental.partitioners import FixedShardsPartitioner
from tests.servers.message_faults import spy

RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 3.0], np.float32)).astype(np.float32)
# 8, 8, 8 and 6 examples; of the last ones 3 for each device. 7 are not divisible.
BATCHES = [(X[:8], Y[:8]), (X[8:15], Y[8:15]), (X[15:16], Y[15:16]), (X[16:], Y[16:])]


def _strategy(workers, partitioner=None):
    cluster = local_cluster(workers, ps=2, devices_per_worker=2)
    return dist.ParameterServerStrategy(cluster, partitioner)


def _scheduled(strategy, batches, closure):
    """What the closure returns for every batch, one after the other."""
    coordinator = ClusterCoordinator(strategy)
    source = strategy.experimental_distribute_dataset(batches)
    iterator = iter(coordinator.create_per_worker_dataset(source))
    return [coordinator.schedule(closure, args=(iterator,)).fetch() for _ in batches]


def _linear(strategy):
    with strategy.scope():
        w = dist.Variable(np.zeros(3, np.float32), name="w")
        total = dist.Variable(0.0, aggregation=dist.VariableAggregation.SUM)
        mean = dist.Variable(
            0.0,
            aggregation=dist.VariableAggregation.MEAN,
            synchronization=dist.VariableSynchronization.ON_READ,
        )
        steps = dist.Variable(0)
        metric = keras.metrics.Mean()

    def step(batch):
        x, y = batch
        context = dist.get_replica_context()
        size = context.all_reduce("SUM", jnp.float32(len(x)))
        with dist.GradientTape() as tape:
            errors = (x @ w.value() - y) ** 2
            loss = errors.sum() / size
        (gradient,) = context.all_reduce("SUM", tape.gradient(loss, [w]))
        w.assign_sub(0.1 * gradient)
        total.assign_add(jnp.float32(len(x)))
        mean.assign(jnp.float32(len(x)))
        steps.assign_add(1)
        metric.update_state(errors)
        return loss, x

    return w, total, mean, steps, metric, step


@pytest.mark.skipif(
    jax.__version__.startswith("0.11."),
    reason="XLA of JAX 0.11 crashes in a step that returns an empty array and another",
)
def test_devices_share_even_and_uneven_batches():
    strategy = _strategy(1)
    assert strategy.num_replicas_in_sync == 2
    w, total, mean, steps, metric, step = _linear(strategy)

    def closure(iterator):
        losses, rows = strategy.run(step, args=(next(iterator),))
        return strategy.reduce("SUM", losses, axis=None), strategy.gather(rows, axis=0), losses

    results = _scheduled(strategy, BATCHES, closure)

    expected, errors = np.zeros(3), []
    for (x, y), (loss, rows, losses) in zip(BATCHES, results, strict=True):
        error = x @ expected - y
        errors.extend(error**2)
        np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-4)
        np.testing.assert_array_equal(rows, x)
        assert len(strategy.experimental_local_results(losses)) == 2
        # On the coordinator, too.
        np.testing.assert_allclose(strategy.reduce("SUM", losses, axis=None), loss, rtol=1e-6)
        expected = expected - 0.1 * 2 * (error[:, None] * x).mean(0)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-4)
    assert total.numpy() == 30
    assert mean.numpy() == 7
    assert steps.numpy() == 4
    np.testing.assert_allclose(metric.result(), np.mean(errors), rtol=1e-4)


def _embeddings():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(60, 4),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    loss = "sparse_categorical_crossentropy"
    model.compile("adagrad", loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def test_keras_fits_as_one_device_does():
    ids = RNG.integers(0, 60, (15, 2)).astype("int32")
    ids[::3] = 3, 59  # both devices look them up
    # Of int64 labels, Keras warns when JAX is 0.11 or newer, with and without a strategy.
    labels, weights = RNG.integers(0, 3, 15, "int32"), RNG.uniform(0.5, 2, 15)
    strategy = _strategy(1, partitioner=FixedShardsPartitioner(2))
    sizes = spy(strategy.cluster_resolver)
    with strategy.scope():
        model = _embeddings()
    expected = _embeddings()
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}

    def used(model):
        # Batches of 8 and 7.
        logs = model.fit(ids, labels, sample_weight=weights, **options).history
        results = model.evaluate(ids[:8], labels[:8], verbose=0)
        return logs, results, model.predict(ids[:8], verbose=0)

    found_logs, found_results, found_predictions = used(model)
    logs, results, predictions = used(expected)

    for name, values in logs.items():
        np.testing.assert_allclose(found_logs[name], values, rtol=1e-4, err_msg=name)
    for own, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found_results, results, rtol=1e-4)
    np.testing.assert_allclose(found_predictions, predictions, rtol=1e-4)
    assert 0 < max(sizes) <= 16

    coordinator = ClusterCoordinator(strategy)
    batch = ids[:8], labels[:8], weights[:8]
    source = strategy.experimental_distribute_dataset(lambda: [batch] * 9)
    model.fit(coordinator.create_per_worker_dataset(source), steps_per_epoch=2, verbose=0)
    model.fit(source, steps_per_epoch=1, verbose=0)
    expected.fit(*batch[:2], sample_weight=batch[2], epochs=3, verbose=0)
    np.testing.assert_allclose(model.get_weights()[-1], expected.get_weights()[-1], rtol=1e-3)


def test_devices_and_steps_draw_other_numbers():
    strategy = _strategy(1)
    with strategy.scope():
        seeds = keras.random.SeedGenerator(0)
    coordinator = ClusterCoordinator(strategy)

    def closure():
        return strategy.run(lambda: keras.random.uniform((), seed=seeds))

    drawn = [coordinator.schedule(closure).fetch() for _ in range(3)]
    numbers = [float(x) for own in drawn for x in strategy.experimental_local_results(own)]
    assert len(set(numbers)) == 6


def test_what_cannot_be_distributed_is_named():
    strategy = _strategy(1)
    source = strategy.experimental_distribute_dataset(BATCHES)
    assert len(source.element_spec[0].value_specs) == 2
    with pytest.raises(InvalidTypeError, match=r"distributed already\. Give it to create_per_wor"):
        strategy.experimental_distribute_dataset(source)
    with pytest.raises(InvalidTypeError, match="dataset_fn is 3, expected a function"):
        strategy.distribute_datasets_from_function(3)
    options = dist.InputOptions(experimental_replication_mode=dist.InputReplicationMode.PER_REPLICA)
    with pytest.raises(UnsupportedError, match=r"of 2 replicas\. Use PER_WORKER"):
        strategy.distribute_datasets_from_function(lambda context: [], options)


def test_too_few_devices_are_named():
    with pytest.raises(DeviceError, match="devices_per_worker is 9, but this process has 8"):
        local_cluster(workers=2, ps=1, devices_per_worker=9)
    with pytest.raises(InvalidValueError, match="devices_per_worker is 0, expected 1 or more"):
        local_cluster(devices_per_worker=0)
