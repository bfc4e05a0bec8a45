"""TPUStrategy on several hosts, whose replicas have several logical devices."""

import keras
import numpy as np


def test_hosts_train_on_their_logical_devices(job):
    hosts = job(2)
    for host in range(2):
        hosts.start("tpu", host, 2, devices=4)
    model = _trained_alone()
    ended = hosts.wait()

    assert [one.code for one in ended] == [0, 0], "\n\n".join(one.output for one in ended)
    w, last = _by_hand()
    for one in ended:
        got = one.result
        assert (got["num_replicas"], got["local replicas"], got["tasks"]) == (4, 2, 2)
        assert got["copies"] == [0, 2]
        assert "replica 0 has cores on the hosts [0, 1]" in got["refused"][0]
        assert "the replicas lie on the hosts [0], expected as many on each" in got["refused"][1]
        np.testing.assert_allclose(got["w"], w, rtol=1e-4)
        np.testing.assert_allclose(got["last"], last, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got["losses"], model.history.history["loss"], rtol=1e-5)
        expected = model.predict(_examples()[:16], batch_size=8, verbose=0)
        np.testing.assert_allclose(got["predictions"], expected, rtol=1e-4, atol=1e-5)


def _examples():
    return np.random.default_rng(0).normal(size=(23, 8)).astype(np.float32)


def _by_hand():
    """The weights, and the last outputs, of the loop in programs/tpu.py."""
    x, w = _examples().astype(np.float64), np.full((8, 4), 0.5)
    for start in range(0, 23, 8):
        batch = x[start : start + 8]
        outputs = batch @ w
        w = w - 0.01 * batch.T @ (outputs - 1)
    return w, outputs


def _trained_alone():
    """The model of programs/tpu.py, without a strategy."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    x = _examples()[:16]
    model.fit(x, x[:, :2], batch_size=8, shuffle=False, verbose=0)
    return model
