"""Values made per replica, gathered, reduced and updated: the calls of `strategy.extended`."""

import numpy as np

import distributary.compat.tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
R = strategy.num_replicas_in_sync
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def value_fn(ctx):
    return tf.constant([ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync], tf.float32)


distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
local = strategy.experimental_local_results(distributed_values)
print("first", local[0].numpy()[0], len(local) == R)
per_replica = strategy.experimental_distribute_values_from_function(
    lambda ctx: tf.fill([ctx.replica_id_in_sync_group + 1, 2], 1.0)
)
gathered = strategy.gather(per_replica, axis=0)
print("gathered", gathered.shape[0] - R * (R + 1) // 2, float(tf.reduce_mean(gathered)))


@tf.function
def use(values):
    return strategy.run(lambda v: v[1] + 0.0 * v[0], args=(values,))


print("run", strategy.reduce(MEAN, use(distributed_values), axis=None).numpy() / R)
array = np.array([3.0, 1.0]).astype(np.float32)
result = strategy.experimental_distribute_values_from_function(
    lambda ctx: array[min(ctx.replica_id_in_sync_group, 1)]
)
print("chosen", strategy.experimental_local_results(result)[0])

with strategy.scope():
    v = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.SUM)
    counter = tf.Variable(
        0,
        dtype=tf.int64,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
    created_in = [strategy.extended.variable_created_in_scope(x) for x in (v, counter)]
outside = tf.Variable(0.0)
print(created_in, strategy.extended.variable_created_in_scope(outside))
print(len(strategy.extended.worker_devices) == R, len(strategy.extended.parameter_devices) == R)
print(strategy.extended.experimental_require_static_shapes)


def scale(var, factor):
    return var.assign(var * factor)


strategy.extended.update(v, scale, args=(3.0,))
print("updated", v.numpy())
with strategy.scope(), strategy.extended.colocate_vars_with(v):
    slot = tf.Variable(tf.zeros_like(v), name="slot")
strategy.extended.update(slot, lambda var, value: var.assign_add(value), args=(v,))
print("slot", slot.numpy())


def merge_fn(strategy, a, b):
    extended = strategy.extended
    total = extended.reduce_to(SUM, a, destinations=v)
    both = extended.batch_reduce_to(MEAN, [(a, v), (b, v)])
    extended.update(v, lambda var, x: var.assign_sub(0.1 * x), args=(both[0],))
    return total, both[1]


@tf.function
def step(x):
    ctx = tf.distribute.get_replica_context()
    counter.assign_add(1)
    total, mean = ctx.merge_call(merge_fn, args=(x, 2.0 * x))
    return total, mean


ones = strategy.experimental_distribute_values_from_function(lambda ctx: tf.ones([2]))
total, mean = strategy.run(step, args=(ones,))
print("total", strategy.experimental_local_results(total)[0].numpy() / R)
print("mean", strategy.experimental_local_results(mean)[0].numpy(), v.numpy())
print("counted", counter.numpy() / R, counter.read_value().numpy() / R)
print(strategy.extended.read_var(v).numpy())
print("local", len(strategy.experimental_local_results(v)) == R)


class Counter(tf.Module):
    def __init__(self):
        super().__init__()
        self.total = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    @tf.function
    def __call__(self, batch):
        def count(rows):
            ctx = tf.distribute.get_replica_context()
            assert not tf.distribute.in_cross_replica_context()
            if ctx.num_replicas_in_sync > 100:
                raise ValueError("too many")
            self.total.assign_add(tf.reduce_sum(rows))
            everything = ctx.all_gather(rows, axis=0)
            sums, sizes = ctx.all_reduce(
                SUM, [tf.reduce_sum(rows), tf.cast(tf.size(rows), tf.float32)]
            )
            return sums / sizes + 0.0 * tf.reduce_sum(everything)

        return strategy.run(count, args=(batch,))


with strategy.scope():
    module = Counter()
options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
dataset = tf.data.Dataset.range(12).map(lambda i: tf.cast(i, tf.float32)).batch(4)
dataset = strategy.experimental_distribute_dataset(dataset, options)
for batch in dataset:
    means = module(batch)
    print("mean of the batch", strategy.reduce(MEAN, means, axis=None).numpy())
print("total", module.total.numpy())
