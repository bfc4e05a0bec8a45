"""Closures on workers: values that stay there, per-worker values, errors, one after the other."""

import os
import socket

import distributary.compat.tensorflow as tf

NUM_PS = 1
NUM_WORKERS = 2


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


strategy = tf.distribute.experimental.ParameterServerStrategy(cluster_resolver)
coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
print(coordinator.strategy is strategy, strategy.num_replicas_in_sync)

with strategy.scope():
    total = tf.Variable(0.0, name="total")
    counts = tf.Variable(tf.zeros([4]), name="counts")


@tf.function
def add(x):
    total.assign_add(x)
    return x * 2


# Additions commute: the result does not depend on who comes first.
remote_values = [coordinator.schedule(add, args=(tf.constant(float(i)),)) for i in range(10)]
coordinator.join()
print("total", total.numpy(), "done", coordinator.done())
print("fetched", [float(value) for value in coordinator.fetch(remote_values)])


@tf.function
def square(x):
    return {"x": x, "squared": x * x}


remote = coordinator.schedule(square, args=(tf.constant([1.0, 2.0]),))
result = remote.fetch()
print({name: value.tolist() for name, value in sorted(result.items())})
local = {"a": remote, "b": [remote_values[1], 3]}
fetched = coordinator.fetch(local)
print(fetched["a"]["x"].tolist(), float(fetched["b"][0]), fetched["b"][1])


def dataset_fn():
    return tf.data.Dataset.range(1, 5).map(lambda x: tf.cast(x, tf.float32)).repeat().batch(2)


iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))


@tf.function
def consume(iterator):
    batch = next(iterator)
    total.assign_add(0.0 * tf.reduce_sum(batch))
    return tf.reduce_sum(batch)


sums = [coordinator.schedule(consume, args=(iterator,)) for _ in range(8)]
coordinator.join()
print("sums are of batches", {float(value.fetch()) for value in sums} <= {3.0, 7.0})


@tf.function
def count(index):
    counts.scatter_add(tf.IndexedSlices(tf.constant([1.0]), tf.reshape(index, [1])))


for i in range(12):
    coordinator.schedule(count, args=(tf.constant(i % 3),))
coordinator.join()
print("counts", counts.numpy().tolist())

value = coordinator.schedule(add, args=(tf.constant(1.0),))
coordinator.join()
print("goes on", float(value.fetch()), float(value.get()), total.numpy())
