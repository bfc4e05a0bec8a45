"""Keras models whose layers are split over the logical devices of a TPUStrategy."""

import jax
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.tpu.experimental import DeviceAssignment, Topology


class _Split(keras.layers.Layer):
    """Splits its input over the logical devices, if there are any."""

    def call(self, inputs):
        strategy = dist.get_strategy()
        if not isinstance(strategy, dist.TPUStrategy):
            return inputs
        parts = [1, strategy.extended.num_logical_devices]
        return strategy.experimental_split_to_logical_devices(inputs, parts)


def _trained(steps_per_execution):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "relu"), _Split(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse", steps_per_execution=steps_per_execution)
    x = np.random.default_rng(0).normal(size=(21, 4)).astype(np.float32)  # the last batch is odd
    losses = model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0).history["loss"]
    return model, losses, model.predict(x, batch_size=8, verbose=0)


# A single replica of four cores, and several steps in one program.
@pytest.mark.parametrize(("num_replicas", "num_cores", "steps"), [(1, 4, 1), (2, 2, 2)])
def test_a_split_model_trains_as_on_one_device(num_replicas, num_cores, steps):
    topology = Topology.of_devices(jax.devices()[:4], [num_replicas, 1, 1, num_cores])
    shape = [1, 1, 1, num_cores]
    assignment = DeviceAssignment.build(topology, shape, num_replicas=num_replicas)
    strategy = dist.TPUStrategy(experimental_device_assignment=assignment)
    alone, expected_losses, expected = _trained(1)

    with strategy.scope():
        model, losses, predictions = _trained(steps)

    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    np.testing.assert_allclose(predictions, expected, rtol=1e-4, atol=1e-5)
    for found, weight in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, weight, rtol=1e-4, atol=1e-5)
    for variable in (*model.weights, *model.optimizer.variables):
        assert len(variable.value.devices()) == 4
        assert variable.value.sharding.is_fully_replicated
