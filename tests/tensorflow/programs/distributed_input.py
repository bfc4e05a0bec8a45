"""Distributed datasets, as in TensorFlow's tutorial of distributed input."""

import os
import tempfile

import numpy as np

import distributary.compat.tensorflow as tf

global_batch_size = 16
mirrored_strategy = tf.distribute.MirroredStrategy()

dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
print(mirrored_strategy.reduce("SUM", next(iter(dist_dataset))[0], axis=0).numpy())
print("cardinality", dataset.cardinality().numpy(), int(dist_dataset.cardinality))

# From a function.
batch_size_per_replica = 4


def dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(64).batch(16)
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    dataset = dataset.batch(batch_size)
    dataset = dataset.prefetch(2)
    return dataset


from_function = mirrored_strategy.distribute_datasets_from_function(dataset_fn)
print(len(list(from_function)) > 0)

# Options.
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = tf.data.Dataset.range(64).batch(16).with_options(options)
print(
    mirrored_strategy.reduce(
        "SUM", next(iter(mirrored_strategy.experimental_distribute_dataset(dataset))), axis=0
    ).numpy()
)

# for x in dist_dataset, in a function.
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)


@tf.function
def train_step(inputs):
    features, labels = inputs
    return labels - 0.3 * features


total = 0.0
for x in dist_dataset:
    loss = mirrored_strategy.run(train_step, args=(x,))
    total += mirrored_strategy.reduce("SUM", loss, axis=0)
print("total", np.asarray(total))

# An explicit iterator, and its end.
num_epochs = 2
steps_per_epoch = 3
for epoch in range(num_epochs):
    dist_iterator = iter(dist_dataset)
    for step in range(steps_per_epoch):
        mirrored_strategy.run(train_step, args=(next(dist_iterator),))

dist_iterator = iter(dist_dataset)
steps = 0
try:
    while True:
        mirrored_strategy.run(train_step, args=(next(dist_iterator),))
        steps += 1
except (StopIteration, tf.errors.OutOfRangeError):
    print("out of range after", steps)
dist_iterator = iter(dist_dataset)
steps = 0
try:
    for _ in range(100):
        next(dist_iterator)
        steps += 1
except StopIteration:
    print("stopped after", steps)


@tf.function
def train_fn(distributed_iterator):
    total = 0.0
    for _ in tf.range(5):
        optional_data = distributed_iterator.get_next_as_optional()
        if not optional_data.has_value():
            break
        per_replica_results = mirrored_strategy.run(
            lambda x: tf.reduce_sum(x[0]), args=(optional_data.get_value(),)
        )
        total += mirrored_strategy.reduce("SUM", per_replica_results, axis=None)
    return total


print("optional", train_fn(iter(dist_dataset)).numpy())


# element_spec as the signature of a function.
@tf.function(input_signature=[dist_dataset.element_spec])
def signed_step(per_replica_inputs):
    def step_fn(inputs):
        return 2 * inputs[0]

    return mirrored_strategy.run(step_fn, args=(per_replica_inputs,))


for x in dist_dataset:
    result = signed_step(x)
print("signed", mirrored_strategy.reduce("SUM", result, axis=0).numpy())


# Values from a function.
def value_fn(ctx):
    return tf.constant(float(ctx.replica_id_in_sync_group + 1))


distributed_values = mirrored_strategy.experimental_distribute_values_from_function(value_fn)
result = mirrored_strategy.run(lambda v: v * 10, args=(distributed_values,))
print("values", [v.numpy() for v in mirrored_strategy.experimental_local_results(result)][0])


# From a generator.
def input_gen():
    yield np.ones(4, np.float32)
    yield np.full(4, 2.0, np.float32)


dataset = tf.data.Dataset.from_generator(
    input_gen, output_types=tf.float32, output_shapes=tf.TensorShape([4])
).batch(2)
for x in mirrored_strategy.experimental_distribute_dataset(dataset):
    print("generated", mirrored_strategy.reduce("SUM", x, axis=0).numpy())

# Files.
folder = tempfile.mkdtemp()
for i in range(4):
    path = os.path.join(folder, f"part-{i}.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for j in range(4):
            writer.write(b"%d" % (10 * i + j))
files = tf.data.Dataset.list_files(os.path.join(folder, "*.tfrecord"), shuffle=False)
records = tf.data.TFRecordDataset(files).map(lambda x: tf.strings.to_number(x)).batch(4)
sums = []
for x in mirrored_strategy.experimental_distribute_dataset(records):
    sums.append(float(mirrored_strategy.reduce("SUM", x, axis=0)))
print("records", sums)
