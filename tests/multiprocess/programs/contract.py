"""What every synchronous strategy does, printed as JSON: the same for any number of workers.

contract.py [training]
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

import distributary as dist
from distributary.data import Dataset
from distributary.tools.compilation import collectives_of

strategy = dist.MultiWorkerMirroredStrategy()
extended = strategy.extended
np.random.seed(extended.worker_number)  # workers differ, unless the strategy makes them agree
NUM = strategy.num_replicas_in_sync
result = {"num_replicas": NUM, "worker": extended.worker_number}
result["writes"] = extended.should_checkpoint
result["local_devices"] = len(extended.worker_devices)


def plain(value):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), value)


def local(value):
    return [plain(part) for part in strategy.experimental_local_results(value)]


start = np.random.default_rng(1).normal(size=(4096, 8)).astype(np.float32)
with strategy.scope():
    first = np.float32(extended.worker_number)
    w = dist.Variable(np.arange(3, dtype=np.float32) + 100 * first, name="w")
    table = dist.Variable(np.zeros((6, 2), np.float32), name="table")
    total = dist.Variable(
        0.0,
        synchronization=dist.VariableSynchronization.ON_READ,
        aggregation=dist.VariableAggregation.SUM,
    )
    mean = dist.Variable(1.0 + first, aggregation=dist.VariableAggregation.MEAN)
    large_table = dist.Variable(start, name="large_table")
    slot = dist.Variable(np.full_like(start, 0.1), name="slot")
result["initial"] = [w.numpy().tolist(), float(mean.value())]
result["eager"] = plain([w.value() * 2, w + jnp.ones(3)])

# Values of the replicas, and what combines them.
ids = strategy.run(lambda: dist.get_replica_context().replica_id_in_sync_group)
result["local ids"] = local(ids)
own = strategy.experimental_distribute_values_from_function(
    lambda context: np.full((2,), 1.0 + context.replica_id_in_sync_group, np.float32)
)
result["local values"] = local(own)
result["sum"] = plain(strategy.reduce("SUM", own, axis=None))
result["mean over rows"] = plain(strategy.reduce("MEAN", own, axis=0))
result["gathered"] = plain(strategy.gather(own, axis=0))
result["reduced to"] = local(extended.reduce_to("SUM", own, destinations=own))[0]


def collectives(x):
    context = dist.get_replica_context()
    nest = {"a": x, "b": (x * 2, jnp.int32(1))}
    return context.all_reduce("SUM", nest), context.all_gather(x, axis=0)


summed, gathered = strategy.run(collectives, (own,))
result["all_reduce"] = local(summed)[0]
result["all_gather"] = local(gathered)[0]


def of_two_levels(x):
    nest = [jnp.arange(5.0) * x.sum(), x, jnp.int32(2)]
    options = dist.experimental.CommunicationOptions(hierarchical=True)
    return dist.get_replica_context().all_reduce("MEAN", nest, options)


result["two levels"] = local(strategy.run(of_two_levels, (own,)))[0]
program = extended.lower(of_two_levels, (own,)).compile().as_text()
result["collectives"] = [(found.kind, found.groups) for found in collectives_of(program)]


def of_many(x):
    """More than is exchanged in pairs by more than two replicas; and sums inside of a loop."""
    context = dist.get_replica_context()
    large = context.all_reduce("SUM", jnp.arange(200_000.0) + x[0])
    looped = jax.lax.fori_loop(0, 3, lambda i, y: y + context.all_reduce("MEAN", x * y), x**0)
    return large[-2:], looped, context.all_reduce("SUM", x.astype(jnp.complex64) * 1j).imag


result["of many"] = local(strategy.run(of_many, (own,)))[0]
kinds = set(
    re.findall(
        r" (all-reduce|collective-permute)\(", extended.lower(of_many, (own,)).compile().as_text()
    )
)
result["kinds of many"] = sorted(kinds)
outside = dist.HierarchicalCopyAllReduce().reduce("SUM", own, destinations=own)
result["two levels outside"] = plain(outside.value())


def train():
    """Steps with large and sparse gradients, uneven batches, and what stands around steps."""

    def of_a_table(x):
        """Adagrad with a gradient of which a replica has few rows, some of them those of others."""
        ids = jnp.int32(x[0]) * jnp.arange(4, dtype=jnp.int32)
        gradient = jax.grad(lambda t: jnp.sum(jnp.take(t, ids, axis=0) ** 2))(large_table.value())
        gradient, size = dist.get_replica_context().all_reduce("SUM", (gradient, x.sum()))
        slot.assign_add(gradient**2)
        large_table.assign_sub(0.1 * gradient / jnp.sqrt(slot.value()))
        return size

    strategy.run(of_a_table, (own,))
    result["large table"] = large_table.numpy()[:16].tolist() + slot.numpy()[:16].tolist()
    program = extended.lower(of_a_table, (own,)).compile().as_text()
    result["largest of a table"] = max(found.num_bytes for found in collectives_of(program)) // 1024

    def merged(x):
        def update(strategy, x):
            both = strategy.extended.reduce_to("MEAN", x, destinations=mean)
            strategy.extended.update(mean, lambda v, new: v.assign(v + new.sum()), args=(both,))

        dist.get_replica_context().merge_call(update, args=(x,))

    strategy.run(merged, (own,))
    result["merge_call"] = float(mean.value())

    # Training, with uneven batches, sparse gradients and a shuffle without a seed.
    x = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
    y = (np.arange(23) % 6).astype(np.int32)
    losses, rows_seen = [], []

    def step(x, rows, number):
        def loss():
            embedded = table.sparse_read(rows)
            return (((x @ w) - 1.0) ** 2).sum() + ((embedded - 1.0) ** 2).sum()

        value, (dense, sparse) = dist.value_and_grad(loss, (w, table))()
        context = dist.get_replica_context()
        value, dense, sparse = context.all_reduce("SUM", (value, dense, sparse))
        w.assign_sub(0.01 * dense)
        slices = dist.IndexedSlices(-0.1 * sparse.values, sparse.indices, sparse.dense_shape)
        table.scatter_add(slices)
        total.assign_add(jnp.float32(x.shape[0]))
        return value

    data = Dataset.from_tensor_slices((x, y, np.arange(23))).shuffle(23).batch(5)
    in_order = Dataset.from_tensor_slices((x, y, np.arange(23))).batch(5)
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(in_order):
            value = strategy.run(step, batch)
            losses.append(float(local(value)[0]))
    result["losses"] = losses
    result["w"] = w.numpy().tolist()
    result["table"] = table.numpy().tolist()
    result["examples"] = float(total.value())
    for batch in strategy.experimental_distribute_dataset(data):
        rows_seen += plain(strategy.gather(batch[2], axis=0))
    result["all rows once"] = sorted(rows_seen) == list(range(23))
    result["shuffled alike"] = (
        plain(strategy.reduce("SUM", strategy.run(lambda: jnp.float32(rows_seen[0])), None))
        == rows_seen[0] * NUM
    )

    # Assigning outside, and a compiled function around several steps.
    with strategy.scope():
        w.assign([1.0, 2.0, 3.0])
        w.assign_add(w.value())
    result["assigned"] = w.numpy().tolist()

    @dist.function
    def two_steps(batch):
        strategy.run(lambda x: w.assign_add(jnp.ones(3)), args=(batch,))
        return strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(batch,)), axis=None)

    result["function"] = [plain(two_steps(own)), w.numpy().tolist()]


def of_uneven():
    """What is computed of values that replica by replica have a row more."""

    def rows(context):
        number = context.replica_id_in_sync_group
        x = np.arange(2 * (number + 1), dtype=np.float32).reshape(number + 1, 2) + 10 * number
        return {"x": x, "same": np.float32(number)}

    def step(x):
        context = dist.get_replica_context()
        return context.all_gather(x, 0).sum(), context.all_reduce("SUM", x.sum())

    def message(function, *args):
        try:
            function(*args)
        except ValueError as error:
            return str(error)

    distribute = strategy.experimental_distribute_values_from_function
    dtype = np.int32 if extended.worker_number else np.float32
    values = distribute(rows)
    x = values["x"]
    gathered, summed = strategy.run(step, args=(x,))
    return {
        "gather": plain(strategy.gather(x, axis=0)),
        "all_gather": local(gathered),
        "all_reduce": local(summed),
        "sum": plain(strategy.reduce("SUM", x, axis=0)),
        "mean": plain(strategy.reduce("MEAN", x, axis=0)),
        "local": local(x),
        "same": plain(strategy.reduce("SUM", values["same"], axis=None)),
        "no axis": message(strategy.reduce, "SUM", x, None),
        "dtypes": message(distribute, lambda c: np.ones(1 + extended.worker_number, dtype)),
    }


if "training" in sys.argv:
    train()
if extended.num_workers > 1:
    import reading

    result["reading"] = reading.results(strategy)
    result["uneven"] = of_uneven()
print(json.dumps(result))
