"""Ways to bring data to replicas: datasets, functions that make them, values, and their options.

A program for tf.distribute; only its import is another one.
"""

from pathlib import Path

import numpy as np

import distributary.compat.tensorflow as tf

# Without GPUs, the CPU acts as two devices.
if not tf.config.list_physical_devices("GPU"):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
strategy = tf.distribute.MirroredStrategy()
num_replicas = strategy.num_replicas_in_sync
global_batch_size = 8 * num_replicas

digits = np.load(Path(__file__).parents[1] / "digits.npz")
images, labels = digits["images"].reshape(-1, 64), digits["labels"]


@tf.function
def pixel_sum(batch):
    def step(inputs):
        images, labels = inputs
        return tf.reduce_sum(images), tf.size(labels)

    return strategy.run(step, args=(batch,))


# A dataset has global batches; every replica gets its rows of each.
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(global_batch_size)
distributed = strategy.experimental_distribute_dataset(dataset)
total = 0.0
for batch in distributed:
    per_replica_sum, _ = pixel_sum(batch)
    total += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_sum, axis=None)
np.testing.assert_allclose(total.numpy(), images.sum(), rtol=1e-5)
print(f"All pixels, by batches: {total.numpy():.0f}")
print("Elements:", distributed.element_spec)

# Or iterate over it in a compiled function, a number of steps at once.
iterator = iter(distributed)


@tf.function
def sum_of_steps(iterator, num_steps):
    total = 0.0
    for _ in tf.range(num_steps):
        per_replica_sum, _ = strategy.run(
            lambda inputs: (tf.reduce_sum(inputs[0]), inputs[1]), args=(next(iterator),)
        )
        total += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_sum, axis=None)
    return total


first = sum_of_steps(iterator, tf.constant(5))
np.testing.assert_allclose(first.numpy(), images[: 5 * global_batch_size].sum(), rtol=1e-5)

# The end shows when there is no element left.
num_batches = 5
while iterator.get_next_as_optional().has_value():
    num_batches += 1
print(f"{num_batches} batches of {global_batch_size}")


# A function makes the dataset of each input pipeline, with batches for one replica.
def dataset_fn(context):
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    dataset = dataset.shuffle(100, seed=0).repeat()
    return dataset.batch(context.get_per_replica_batch_size(global_batch_size)).prefetch(2)


options = tf.distribute.InputOptions(experimental_fetch_to_device=True)
from_function = iter(strategy.distribute_datasets_from_function(dataset_fn, options))
images_of_replicas, labels_of_replicas = next(from_function)
rows = [part.shape[0] for part in strategy.experimental_local_results(labels_of_replicas)]
print("Rows of the replicas:", rows)


# Values need not come from a dataset.
def value_fn(context):
    return tf.constant(10.0 * context.replica_id_in_sync_group)


values = strategy.experimental_distribute_values_from_function(value_fn)
summed = strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None)
print(f"Sum of the values of all replicas: {summed.numpy():.0f}")
gathered = strategy.gather(
    strategy.run(lambda value: tf.reshape(value, [1]), args=(values,)), axis=0
)
print("One after the other:", gathered.numpy().tolist())
