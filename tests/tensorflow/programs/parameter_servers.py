"""Asynchronous steps with parameter servers, as in TensorFlow's tutorial, with an own model."""

import os
import socket

import numpy as np

import distributary.compat.tensorflow as tf

NUM_PS = 2
NUM_WORKERS = 1


def pick_unused_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def create_in_process_cluster(num_workers, num_ps):
    """Creates and starts local servers and returns the cluster_resolver."""
    worker_ports = [pick_unused_port() for _ in range(num_workers)]
    ps_ports = [pick_unused_port() for _ in range(num_ps)]

    cluster_dict = {}
    cluster_dict["worker"] = ["localhost:%s" % port for port in worker_ports]
    if num_ps > 0:
        cluster_dict["ps"] = ["localhost:%s" % port for port in ps_ports]

    cluster_spec = tf.train.ClusterSpec(cluster_dict)

    worker_config = tf.compat.v1.ConfigProto()
    worker_config.inter_op_parallelism_threads = num_workers + 1

    for i in range(num_workers):
        tf.distribute.Server(
            cluster_spec, job_name="worker", task_index=i, config=worker_config, protocol="grpc"
        )
    for i in range(num_ps):
        tf.distribute.Server(cluster_spec, job_name="ps", task_index=i, protocol="grpc")

    return tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


os.environ["GRPC_FAIL_FAST"] = "use_caller"
cluster_resolver = create_in_process_cluster(NUM_WORKERS, NUM_PS)

variable_partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=(64), max_shards=NUM_PS
)
strategy = tf.distribute.ParameterServerStrategy(
    cluster_resolver, variable_partitioner=variable_partitioner
)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

random = np.random.default_rng(0)
initial_table = random.normal(0, 0.1, (20, 4)).astype(np.float32)
initial_dense = random.normal(0, 0.5, (4, 1)).astype(np.float32)

with strategy.scope():
    table = tf.Variable(initial_table, name="table")
    dense = tf.Variable(initial_dense, name="dense")
    bias = tf.Variable(tf.zeros([1]), name="bias")
    seen = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.SUM)
    print("shards:", [shard.shape[0] for shard in table.variables])


def dataset_fn(input_context):
    data = np.random.default_rng(input_context.input_pipeline_id)
    ids = data.integers(0, 20, (64, 3)).astype(np.int32)
    labels = (ids.sum(1, keepdims=True) > 28).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((ids, labels)).repeat()
    dataset = dataset.batch(input_context.get_per_replica_batch_size(16))
    return dataset.prefetch(2)


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


@tf.function
def step_fn(iterator):
    def replica_fn(ids, labels):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, ids)
            logits = tf.matmul(tf.reduce_mean(rows, axis=1), dense) + bias
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.nn.compute_average_loss(tf.squeeze(losses, axis=1))
        sources = [*table.variables, dense, bias]
        for variable, gradient in zip(sources, tape.gradient(loss, sources)):
            if isinstance(gradient, tf.IndexedSlices):
                rate = tf.IndexedSlices(0.5 * gradient.values, gradient.indices)
                variable.scatter_sub(rate)
            else:
                variable.assign_sub(0.5 * gradient)
        seen.assign_add(tf.cast(tf.shape(ids)[0], tf.int64))
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)

num_epochs = 3
steps_per_epoch = 4
for epoch in range(num_epochs):
    losses = []
    for _ in range(steps_per_epoch):
        losses.append(coordinator.schedule(step_fn, args=(per_worker_iterator,)))
        coordinator.join()  # in order, so that the numbers can be compared
    print("Finished epoch %d, loss is %f." % (epoch, sum(loss.fetch() for loss in losses)))

loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
print("Final loss is %f" % loss.fetch(), coordinator.done())
print("seen", int(seen.numpy()), "bias %f" % bias.numpy()[0])
whole = tf.concat([shard.read_value() for shard in table.variables], axis=0)
print("table %f" % float(tf.reduce_sum(whole * whole)))
