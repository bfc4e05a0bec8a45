"""Small steps; the first argument says which one is run."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import distributary as dist

DEVICES = {
    "a_cpu": lambda: ["CPU:0", "CPU:1"],
    "another_kind": lambda: ["GPU:0"],
    "devices_of_jax": jax.devices,
}

name = sys.argv[1]
if name in DEVICES:
    dist.MirroredStrategy(DEVICES[name]())
if name == "no_step":
    sys.exit()
STRATEGIES = {
    "one_device": lambda: dist.OneDeviceStrategy("TPU:3"),
    "all_hosts": dist.TPUStrategy,
    "central": dist.CentralStorageStrategy,
}
strategy = STRATEGIES.get(name, dist.MirroredStrategy)()
with strategy.scope():
    w = dist.Variable(jnp.eye(64), name="w")
    seen = dist.Variable(
        0.0,
        synchronization=dist.VariableSynchronization.ON_READ,
        aggregation=dist.VariableAggregation.SUM,
    )
rows = np.arange(8.0 * 64 * 64, dtype=np.float32).reshape(8 * 64, 64)


def total(x):
    return dist.get_replica_context().all_reduce("sum", x)


def one_device(x):
    w.assign_sub(x[:64])


def all_hosts(x):
    w.assign_sub(total(x.T @ x))


def loop(x):
    w.assign(jax.lax.scan(lambda c, _: (c + total(x[:64] @ c), None), w.value(), length=7)[0])


def two_reductions(x):
    size = total(jnp.sum(jnp.square(x)))
    w.assign_sub(total(x / size))


def memory(x):
    w.assign_sub(total(jnp.sort(jnp.tile(x @ w, (16_000, 10_000)), axis=0)[:64, :64]))


def unsupported(x):
    w.assign_sub(total(x * jnp.linalg.eigvals(x @ w).real))


def functional(weights, x):
    return weights - total(x)


def watched(x):
    """Updates no trainable variable: runs here."""
    seen.assign_add(x.shape[0])
    return jnp.sum(x @ w), total(x[0, 0])


batch = next(iter(strategy.experimental_distribute_dataset([rows])))
if name == "functional":
    results = strategy.run(functional, args=(jnp.eye(64), batch))
    each = strategy.experimental_local_results(results)
    expected = np.eye(64) - rows.reshape(8, 64, 64).sum(0)
    assert len(each) == 8
    for result in each:
        np.testing.assert_allclose(result, expected)
    print("ran here")
elif name == "watched":
    sums, firsts = strategy.run(watched, args=(batch,))
    np.testing.assert_allclose(
        strategy.experimental_local_results(sums), rows.reshape(8, -1).sum(1), rtol=1e-5
    )
    np.testing.assert_allclose(strategy.reduce("sum", sums, axis=None), rows.sum(), rtol=1e-5)
    np.testing.assert_allclose(
        strategy.experimental_local_results(firsts), [rows[::64, 0].sum()] * 8
    )
    np.testing.assert_allclose(seen.value(), 8 * 64)
    print("ran here")
    strategy.run(two_reductions, args=(batch,))
else:
    strategy.run(globals()[name], args=(batch,))
