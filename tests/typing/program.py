"""A program that uses the public API, for type checkers in strict mode. It never runs."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import distributary as dist

# Strategies and contexts.
dist.config.set_logical_cpu_devices(2)
two_packs = dist.NcclAllReduce(num_packs=2)
strategy = dist.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=two_packs)
strategies: list[dist.Strategy] = [
    strategy,
    dist.OneDeviceStrategy("CPU:0"),
    dist.CentralStorageStrategy(["CPU:0", "CPU:1"], parameter_device="CPU:0"),
    dist.MultiWorkerMirroredStrategy(
        dist.cluster_resolver.TFConfigClusterResolver(),
        communication_options=dist.experimental.CommunicationOptions(bytes_per_pack=1 << 20),
    ),
    dist.TPUStrategy(),
    dist.ParameterServerStrategy(dist.experimental.local_cluster(workers=2, ps=2)),
]
assert_type(strategy.num_replicas_in_sync, int)
assert_type(strategy.extended, dist.StrategyExtended)
assert_type(strategy.extended.should_checkpoint, bool)
assert_type(strategy.step_statistics, dist.StepStatistics)
assert_type(strategy.cluster_resolver, dist.cluster_resolver.ClusterResolver | None)
assert_type(dist.get_strategy(), dist.Strategy)
assert_type(dist.has_strategy(), bool)
assert_type(dist.get_replica_context(), dist.ReplicaContext | None)

# Variables.
with strategy.scope() as in_scope:
    assert_type(in_scope, dist.MirroredStrategy)
    weights = dist.Variable(np.zeros(3, np.float32), name="weights")
    total = dist.Variable(
        0.0,
        trainable=False,
        synchronization=dist.VariableSynchronization.ON_READ,
        aggregation=dist.VariableAggregation.SUM,
    )
assert_type(weights, dist.Variable)
assert_type(2 * weights - weights / 2, Any)
assert_type(weights[0] < weights.mean(), Any)


def product(x: jax.Array) -> jax.Array:
    assert_type(x @ weights, Any)
    return x @ weights + 2.0 * weights


assert_type(weights.value(), jax.Array)
assert_type(weights.name, str)
assert_type(weights.shape, tuple[int, ...])
assert_type(weights.trainable, bool)


# A step, in both ways to differentiate.
def step(x: jax.Array, y: jax.Array) -> jax.Array:
    def loss() -> jax.Array:
        return jnp.sum((x @ weights.value() - y) ** 2)

    context = dist.get_replica_context()
    assert context is not None
    assert_type(context.num_replicas_in_sync, int)
    value, gradient = dist.value_and_grad(loss, weights)()
    gradient = context.all_reduce(dist.ReduceOp.SUM, gradient)
    weights.assign_sub(0.1 * gradient)
    with dist.GradientTape(persistent=True) as tape:
        again = loss()
    tape.gradient(again, weights)
    total.assign_add(again)
    return value


@dist.function
def two_steps(batch: tuple[jax.Array, jax.Array]) -> Any:
    strategy.run(step, args=batch)
    return strategy.run(step, args=batch)


# Data.
def scaled(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x / 255, y


arrays = (np.zeros((64, 3), np.float32), np.zeros(64, np.float32))
dataset = dist.data.Dataset.from_tensor_slices(arrays).shuffle(64, seed=1).batch(16)
dataset = dataset.map(scaled, num_parallel_calls=dist.data.AUTOTUNE).prefetch(2)
options = dist.data.Options()
options.experimental_distribute.auto_shard_policy = dist.data.AutoShardPolicy.DATA
dataset = dataset.with_options(options)
assert_type(dataset, dist.data.Dataset)
distributed = strategy.experimental_distribute_dataset(dataset)
assert_type(distributed, dist.DistributedDataset)
assert_type(iter(distributed), dist.DistributedIterator)
for batch in distributed:
    result = strategy.run(step, args=batch)
    mean = strategy.reduce(dist.ReduceOp.MEAN, result, axis=None)
    parts = strategy.experimental_local_results(result)
    two_steps(batch)


def dataset_fn(context: dist.InputContext) -> dist.data.Dataset:
    return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)


strategy.distribute_datasets_from_function(dataset_fn)


def value_fn(context: dist.ValueContext) -> int:
    return context.replica_id_in_sync_group


strategy.experimental_distribute_values_from_function(value_fn)

# Saving.
checkpoint = dist.checkpoint.Checkpoint(weights=weights, epoch=0)
manager = dist.checkpoint.CheckpointManager(checkpoint, "checkpoints", max_to_keep=3)
manager.restore_or_initialize()
manager.save()
assert_type(dist.checkpoint.latest_checkpoint("checkpoints"), str | None)

# Clusters.
cluster = dist.cluster_resolver.ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
assert_type(cluster.num_tasks("worker"), int)
resolver = dist.cluster_resolver.SimpleClusterResolver(cluster, task_type="ps", task_id=0)
server = dist.Server(resolver)
server.join()
coordinator = dist.coordinator.ClusterCoordinator(strategies[-1])
remote = coordinator.schedule(step, args=arrays)
assert_type(remote, dist.coordinator.RemoteValue)
coordinator.join()
statistics = coordinator.statistics()
assert_type(statistics, dist.coordinator.CoordinatorStatistics)

# Errors are also the builtins that tf.distribute raises.
try:
    weights.assign(np.zeros(4))
except dist.errors.ReplicaDivergenceError as error:
    as_value_error: ValueError = error
except dist.errors.DistributaryError as error:
    as_exception: Exception = error
