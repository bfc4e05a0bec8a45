"""Keras under `CentralStorageStrategy`."""

import gc
from collections import Counter

import jax
import keras
import numpy as np
import pytest

import distributary as dist

UNITS = 37
COMPUTE = ["CPU:1", "CPU:2"]
_random = np.random.default_rng(0)
X = _random.normal(size=(18, 5)).astype(np.float32)
Y = _random.normal(size=(18, 1)).astype(np.float32)


def _build():
    hidden = [keras.layers.Dense(UNITS, activation="tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input((5,)), *hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return model


class _Copies(keras.callbacks.Callback):
    """Counts arrays of the size of the second kernel on each device, and what steps fetch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        shards = [shard for array in jax.live_arrays() for shard in array.addressable_shards]
        kernels = [shard.device.id for shard in shards if shard.data.shape == (UNITS, UNITS)]
        self.seen.append(Counter(kernels))


@pytest.mark.parametrize(
    ("compute", "memory"),
    [(COMPUTE, "device"), (["CPU:1"], "pinned_host")],
    ids=["2 replicas", "1 replica, host memory"],
)
def test_training_equals_one_device_with_one_copy(
    compute, memory, train, assert_same_training, assert_same_evaluation, monkeypatch, tmp_path
):
    fetched = []
    real = jax.device_put
    compute_devices = {jax.devices()[int(name[-1])] for name in compute}

    def device_put(x, device=None, **kwargs):
        if isinstance(x, list) and getattr(device, "device_set", None) == compute_devices:
            fetched.append(Counter(np.shape(leaf) for leaf in x)[UNITS, UNITS])
        return real(x, device, **kwargs)

    alone = train(_build, X, Y, epochs=2)
    expected = Counter({0: 3})  # kernel, momentum, velocity
    home = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
    strategy = dist.CentralStorageStrategy(compute, home)
    copies = _Copies()
    gc.collect()
    monkeypatch.setattr(jax, "device_put", device_put)
    central = train(_build, X, Y, strategy=strategy, epochs=2, callbacks=[copies])

    assert_same_training(alone, central)
    if memory == "device":
        assert_same_evaluation(alone, central, X, Y, batch_size=7)  # which does not divide
    before = Counter({0: 3})  # of the model without a strategy
    # Batches of 8, 8 and 2 rows, the optimizer is built in the first.
    assert [seen - before for seen in copies.seen] == [expected] * 6
    assert fetched.count(1) >= 6, "the kernel was not fetched"
    assert max(fetched) == 1, "a slot was fetched"
    stored = [v._value for v in central.model.optimizer.variables]
    assert {(d.id, x.sharding.memory_kind) for x in stored for d in x.devices()} == {(0, memory)}
    assert {v.value.sharding.memory_kind for v in central.model.variables} == {"device"}

    central.model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        loaded.predict(X, verbose=0), alone.model.predict(X, verbose=0), rtol=1e-4, atol=1e-5
    )
