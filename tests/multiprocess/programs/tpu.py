"""Trains on the logical devices of several processes, as a script for TPUs would; prints JSON."""

import json
import os
import sys

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

import distributary as dist

config = json.loads(os.environ["TF_CONFIG"])
num_cores = int(sys.argv[1])
resolver = dist.cluster_resolver.TPUClusterResolver(config["cluster"]["worker"])
resolver.task_id = config["task"]["index"]
dist.config.experimental_connect_to_cluster(resolver)
dist.MirroredStrategy()  # accepted, as something connects the workers
experimental = dist.tpu.experimental
num_devices = len(jax.devices())
topology = experimental.Topology.of_devices(
    jax.devices(), mesh_shape=[num_devices // num_cores, 1, 1, num_cores]
)
places = topology.device_coordinates.reshape(-1, 4)
refused = []
for cores in (places[1:-1], places[:1]):  # of several hosts, and of the first alone
    try:
        dist.TPUStrategy(resolver, experimental.DeviceAssignment(topology, cores[None]))
    except dist.errors.DistributaryError as error:
        refused.append(str(error))
assignment = experimental.DeviceAssignment.build(
    topology, computation_shape=[1, 1, 1, num_cores], num_replicas=num_devices // num_cores
)
strategy = dist.TPUStrategy(resolver, experimental_device_assignment=assignment)
result = {
    "num_replicas": strategy.num_replicas_in_sync,
    "tasks": topology.num_tasks,
    "refused": refused,
    "local replicas": len(strategy.extended.worker_devices),
}

x = np.random.default_rng(0).normal(size=(23, 8)).astype(np.float32)
with strategy.scope():
    w = dist.Variable(np.full((8, 4), 0.5 + strategy.extended.worker_number, np.float32))


def step(x):
    weights = strategy.experimental_split_to_logical_devices(w.value(), [1, num_cores])
    y = x @ weights
    w.assign_sub(0.01 * dist.get_replica_context().all_reduce("SUM", x.T @ (y - 1)))
    return y


batches = dist.data.Dataset.from_tensor_slices(x).batch(8)
for batch in strategy.experimental_distribute_dataset(batches):
    outputs = strategy.run(step, (batch,))
result["w"] = w.numpy().tolist()
copies = strategy.experimental_local_results(w)
result["copies"] = [jax.local_devices().index(copy.device) for copy in copies]
result["last"] = np.asarray(strategy.gather(outputs, axis=0)).tolist()


class Split(keras.layers.Layer):
    """Splits its input over the cores."""

    def call(self, inputs):
        return strategy.experimental_split_to_logical_devices(inputs, [1, num_cores])


keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(4, "relu"), Split(), keras.layers.Dense(2)]
    )
    model.compile("sgd", "mse")
history = model.fit(x[:16], x[:16, :2], batch_size=8, shuffle=False, verbose=0)
result["losses"] = history.history["loss"]
result["predictions"] = model.predict(x[:16], batch_size=8, verbose=0).tolist()
print(json.dumps(result))
