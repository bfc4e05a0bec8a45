"""Steps that look at the replica's number, collectives of one's own, and values of all replicas."""

import distributary.compat.tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
R = strategy.num_replicas_in_sync
with strategy.scope():
    v = tf.Variable(
        1.0,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
    w = tf.Variable(2.0, aggregation=tf.VariableAggregation.MEAN)
    first = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)


@tf.function
def step():
    ctx = tf.distribute.get_replica_context()
    replica_id = ctx.replica_id_in_sync_group
    if replica_id == 0:
        value = tf.constant(10.0)
    else:
        value = tf.constant(1.0)
    v.assign_add(value)
    w.assign(value)
    first.assign(value)
    total = ctx.all_reduce(tf.distribute.ReduceOp.SUM, value)
    gathered = ctx.all_gather(tf.reshape(value, [1]), axis=0)
    return total, tf.reduce_max(gathered)


@tf.function
def run():
    return strategy.run(step)


totals, largest = run()
print("total", float(strategy.experimental_local_results(totals)[0]) - (R - 1))
print("largest", strategy.reduce("MEAN", largest, axis=None).numpy())
print("variables", v.read_value().numpy() - 2 * (R - 1), w.numpy() * R - (R - 1), first.numpy())

# Values of all replicas in one array, outside.
per_replica = strategy.run(lambda: tf.constant([1.0, 2.0]) * 2)
stacked = tf.stack(strategy.experimental_local_results(per_replica))
print("stacked", stacked.shape[1:], float(tf.reduce_sum(stacked)) / R)
print("summed", tf.add_n(list(strategy.experimental_local_results(per_replica))).numpy() / R)
print("gathered", float(tf.reduce_sum(strategy.gather(per_replica, axis=0))) / R)


def merge_fn(strategy, value):
    return strategy.extended.reduce_to(tf.distribute.ReduceOp.MEAN, value, value)


def step_with_merge(x):
    ctx = tf.distribute.get_replica_context()
    return ctx.merge_call(merge_fn, args=(x * 3.0,))


print(
    "merged",
    float(
        strategy.experimental_local_results(strategy.run(step_with_merge, (tf.constant(2.0),)))[0]
    ),
)


# A number of a replica in Python.
def names():
    ctx = tf.distribute.get_replica_context()
    number = int(ctx.replica_id_in_sync_group)
    table = ["even", "odd"]
    scale = {"even": 1.0, "odd": 1.0}[table[number % 2]]
    seed = [number, 7]
    return scale * len(seed) * tf.ones([2])


print("python", strategy.reduce("MEAN", strategy.run(names), axis=None).numpy())
